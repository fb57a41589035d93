// Bias addition, and its gradient, a sum over rows.

// sums: (chunks, n), the sums of each chunk of rows of x.
template <typename T, typename P>
__global__ void column_sums(const T* x, P* sums, long long rows, long long n, long long chunk_rows)
{
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(x, n);
    const Tile<V> tile(n);
    Wide<T> v[V], totals[V] = {};
    FOR_CHUNK_ROWS(row, tile, chunk_rows, rows) {
        if (tile.first >= n) break;
        load(x + row * n + tile.first, n - tile.first, is_full, v);
        for (int k = 0; k < V; ++k) totals[k] += v[k];
    }
    tile.write(totals, n, sums);
}

// Add a bias to y in place; `size` is the number of elements of y.
template <typename T> __global__ void add_bias(T* y, const T* bias, long long size, long long n)
{
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(y, n) && aligned<V>(bias, n);
    Wide<T> v[V], b[V];
    for (long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * V; i < size;
         i += (long long)gridDim.x * blockDim.x * V) {
        load(y + i, size - i, is_full, v);
        if (is_full) {
            load(bias + i % n, V, true, b);
        } else {
            for (int k = 0; k < V; ++k) b[k] = upcast(bias[(i + k) % n]);
        }
        for (int k = 0; k < V; ++k) v[k] += b[k];
        store(v, size - i, is_full, y + i);
    }
}
