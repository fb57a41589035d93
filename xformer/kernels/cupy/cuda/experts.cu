// Linear maps of several experts. Rows are sorted by expert, and those of an expert fill whole tiles of `tile` rows, the rest
// of which is zero: one product of a batch for each tile. Values decide which rows a tile has, never how many tiles there are.

const int MAX_EXPERTS = 448;  // so that arguments take less than 4 KiB

struct Addresses { unsigned long long of[MAX_EXPERTS]; };

// The expert e has the rows from starts[e] to starts[e + 1] and the tiles from begins[e] on; a tile without rows has the
// owner `experts`.
struct Layout {
    long long *starts, *begins, *owners;
    __device__ Layout(long long* memory, long long experts)
        : starts(memory), begins(starts + experts + 1), owners(begins + experts + 1) {}
};

// Find the layout, and the addresses (3, tiles) of x, weight and y of each product; one block.
template <typename T>
__global__ void route(const long long* indices, const Addresses weights, const T* x, const T* y, long long* layout,
                      unsigned long long* operands, long long rows, long long experts, long long tile, long long tiles,
                      long long depth, long long columns)
{
    const Layout found(layout, experts);
    for (long long e = threadIdx.x; e <= experts; e += blockDim.x) {
        long long low = 0, high = rows;
        while (low < high) {
            const long long middle = (low + high) / 2;
            (indices[middle] < e ? low : high) = indices[middle] < e ? middle + 1 : middle;
        }
        found.starts[e] = low;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        found.begins[0] = 0;
        for (long long e = 0; e < experts; ++e) {  // rows that are not sorted must not write beyond the memory
            if (found.starts[e + 1] < found.starts[e]) found.starts[e + 1] = found.starts[e];
            found.begins[e + 1] = found.begins[e] + (found.starts[e + 1] - found.starts[e] + tile - 1) / tile;
        }
    }
    __syncthreads();
    for (long long e = threadIdx.x; e <= experts; e += blockDim.x)
        for (long long t = found.begins[e]; t < (e < experts ? found.begins[e + 1] : tiles); ++t) {
            found.owners[t] = e;
            operands[t] = (unsigned long long)(x + t * tile * depth);
            operands[tiles + t] = weights.of[e < experts ? e : 0];
            operands[2 * tiles + t] = (unsigned long long)(y + t * tile * columns);
        }
}

// Copy rows of x (rows, n) to their tiles.
template <typename T>
__global__ void fill_tiles(const T* x, long long* layout, T* padded, long long places, long long experts, long long tile, long long n)
{
    const Layout found(layout, experts);
    const bool is_full = aligned<VectorSize<T>::value>(n, x, padded);
    FOR_ROWS(place, places) {
        const long long t = place / tile, e = found.owners[t], row = found.starts[e] + place - found.begins[e] * tile;
        const T* from = e < experts && row < found.starts[e + 1] ? x + row * n : nullptr;
        copy_row(from, padded + place * n, n, is_full, Wide<T>(0));
    }
}

// y[row] = its row of the tiles + bias: zero without an expert, and NaN if the row is not sorted.
template <typename T>
__global__ void collect(const T* padded, const long long* indices, long long* layout, const Addresses biases, T* y, long long rows,
                        long long experts, long long tile, long long n)
{
    const Layout found(layout, experts);
    const bool is_full = aligned<VectorSize<T>::value>(n, padded, y);
    FOR_ROWS(row, rows) {
        const long long e = indices[row];
        const bool exists = e >= 0 && e < experts, is_sorted = exists && row >= found.starts[e] && row < found.starts[e + 1];
        const T* from = is_sorted ? padded + (found.begins[e] * tile + row - found.starts[e]) * n : nullptr;
        const T* bias = is_sorted ? reinterpret_cast<const T*>(biases.of[e]) : nullptr;
        copy_row(from, y + row * n, n, is_full, exists ? Wide<T>(not_a_number()) : Wide<T>(0), Wide<T>(1), bias);
    }
}

// Add the matrices (height, n) of the tiles of each expert in their order.
template <typename P, typename T>
__global__ void sum_tiles(const P* parts, long long* layout, T* sums, long long experts, long long height, long long n)
{
    const Layout found(layout, experts);
    const int V = VectorSize<P>::value;
    const bool is_full = aligned<V>(n, parts, sums);
    FOR_ROWS(row, experts * height) {
        const long long e = row / height;
        FOR_COLUMNS(i, n) {
            P v[V], total[V] = {};
            for (long long t = found.begins[e]; t < found.begins[e + 1]; ++t) {
                load(parts + (t * height + row % height) * n + i, n - i, is_full, v);
                for (int k = 0; k < V; ++k) total[k] += v[k];
            }
            store(total, n - i, is_full, sums + row * n + i);
        }
    }
}
