// Linear maps with weights in int8 or bfloat16: `values` (columns, depth), and a scale for each column.

// y = x values.T scales + bias, for at most R rows. A warp computes C columns. Its lanes load 16 bytes of x, as many values,
// and UNROLL of them at a time to hide the latency of memory. The order of a sum depends on the depth alone.
// The rows of x and of values are aligned.
template <typename T, typename Q, int R, int C>
__global__ void __launch_bounds__(128, 3) few_rows(const T* x, const Q* values, const T* scales, const T* bias, T* y, long long rows,
                         long long depth, long long columns)
{
    const int V = VectorSize<T>::value, UNROLL = R < 2 ? 8 : R < 8 ? 4 : 2, STEP = 32 * V;
    const long long first = (blockIdx.x * (long long)(blockDim.x / 32) + threadIdx.x / 32) * C;
    const int lane = threadIdx.x % 32;
    if (first >= columns) return;
    const Q* of_column[C];
    for (int c = 0; c < C; ++c) of_column[c] = values + (first + c < columns ? first + c : first) * depth;
    float total[R][C] = {}, v[C][V], w[V];
    Packed<Q, V> packed[UNROLL][C];
    for (long long start = lane * V; start < depth; start += UNROLL * STEP) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            for (int c = 0; c < C; ++c)
                if (start + u * STEP < depth) packed[u][c].load(of_column[c] + start + u * STEP);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const long long i = start + u * STEP;
            if (i >= depth) break;
            for (int c = 0; c < C; ++c) packed[u][c].upcast(v[c]);
#pragma unroll
            for (int r = 0; r < R; ++r) {
                load(x + (r < rows ? r : 0) * depth + i, V, true, w);
                for (int c = 0; c < C; ++c)
                    for (int k = 0; k < V; ++k) total[r][c] = fmaf(w[k], v[c][k], total[r][c]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
        reduce<Sum>(total[r], 32);
        for (int c = 0; c < C; ++c) {
            if (lane != (r * C + c) % 32 || r >= rows || first + c >= columns) continue;
            const float addend = bias ? upcast(bias[first + c]) : 0.0f;
            downcast(fmaf(total[r][c], upcast(scales[first + c]), addend), y[r * columns + first + c]);
        }
    }
}
