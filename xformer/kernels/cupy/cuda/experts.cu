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
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(x, n) && aligned<V>(padded, n);
    FOR_ROWS(place, places) {
        const long long t = place / tile, e = found.owners[t], offset = place - found.begins[e] * tile;
        const bool exists = e < experts && found.starts[e] + offset < found.starts[e + 1];
        FOR_COLUMNS(i, n) {
            Wide<T> v[V];
            load(x + (exists ? found.starts[e] + offset : 0) * n + i, exists ? n - i : 0, is_full && exists, v);
            store(v, n - i, is_full, padded + place * n + i);
        }
    }
}

// y[row] = its row of the tiles + bias: zero without an expert, and NaN if the row is not sorted.
template <typename T>
__global__ void collect(const T* padded, const long long* indices, long long* layout, const Addresses biases, T* y, long long rows,
                        long long experts, long long tile, long long n)
{
    const Layout found(layout, experts);
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(padded, n) && aligned<V>(y, n);
    FOR_ROWS(row, rows) {
        const long long e = indices[row];
        const bool exists = e >= 0 && e < experts, is_sorted = exists && row >= found.starts[e] && row < found.starts[e + 1];
        const T* from = padded + (is_sorted ? found.begins[e] * tile + row - found.starts[e] : 0) * n;
        const T* bias = is_sorted ? reinterpret_cast<const T*>(biases.of[e]) : nullptr;
        FOR_COLUMNS(i, n) {
            Wide<T> v[V], b[V] = {};
            load(from + i, is_sorted ? n - i : 0, is_full && is_sorted, v);
            if (bias) load(bias + i, n - i, aligned<V>(bias, n), b);
            for (int k = 0; k < V; ++k) v[k] = exists && !is_sorted ? not_a_number() : v[k] + b[k];
            store(v, n - i, is_full, y + row * n + i);
        }
    }
}

// Add the matrices (height, n) of the tiles of each expert in their order.
template <typename P, typename T>
__global__ void sum_tiles(const P* parts, long long* layout, T* sums, long long experts, long long height, long long n)
{
    const Layout found(layout, experts);
    const int V = VectorSize<P>::value;
    const bool is_full = aligned<V>(parts, n) && aligned<V>(sums, n);
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
