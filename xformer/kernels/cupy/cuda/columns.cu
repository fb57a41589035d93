// Sums over rows, the gradient of a bias, and rows times numbers.

const int WARPS = 8;  // of a block, which take rows in turn

// sums: (chunks, n), the sums of each chunk of rows of x. A block has a tile of columns, and a lane V of them.
template <typename T, typename P>
__global__ void column_sums(const T* x, P* sums, long long rows, long long n, long long chunk_rows)
{
    const int V = VectorSize<T>::value, lane = threadIdx.x % 32;
    const bool is_full = aligned<V>(n, x);
    const long long tiles = (n + 32 * V - 1) / (32 * V), chunk = blockIdx.x / tiles;
    const long long first = blockIdx.x % tiles * 32 * V, column = first + lane * V;
    const long long end = (chunk + 1) * chunk_rows < rows ? (chunk + 1) * chunk_rows : rows;
    __shared__ Wide<T> partial[WARPS][32 * V];
    Wide<T> v[V], totals[V] = {};
    for (long long row = chunk * chunk_rows + threadIdx.x / 32; row < end && column < n; row += WARPS) {
        load(x + row * n + column, n - column, is_full, v);
        for (int k = 0; k < V; ++k) totals[k] += v[k];
    }
    for (int k = 0; k < V; ++k) partial[threadIdx.x / 32][lane * V + k] = totals[k];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * V && first + i < n; i += blockDim.x) {
        Wide<T> total = 0;
        for (int warp = 0; warp < WARPS; ++warp) total += partial[warp][i];
        downcast(total, sums[chunk * n + first + i]);
    }
}

// to[i, j] = from[i, j] scales[i]; in place, a row whose scale is 1, as that of a sum of losses is, is not read.
template <typename Q, typename S, typename T>
__global__ void scale_rows(const Q* from, const S* scales, T* to, long long rows, long long n)
{
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(n, from, to);
    Wide<T> v[V];
    FOR_ROWS(row, rows) {
        const Wide<T> scale = upcast(scales[row]);
        if (scale == 1 && (const void*)from == to) continue;
        FOR_COLUMNS(i, n) {
            load(from + row * n + i, n - i, is_full, v);
            for (int k = 0; k < V; ++k) v[k] *= scale;
            store(v, n - i, is_full, to + row * n + i);
        }
    }
}
