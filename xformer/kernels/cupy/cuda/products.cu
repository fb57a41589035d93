// Products of matrices whose bits depend on the operands alone: an element is one chain of fused products in the order of
// the depth, as in the native library. cuBLAS is faster, and chooses its order of sums by the number of rows.

__device__ inline float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double fused(double a, double b, double c) { return fma(a, b, c); }

// Copy a tile that begins at (i, k), or the zeros beyond the matrix, to shared memory: its depth first.
template <int SIDE, int DEPTH, typename T, typename W>
__device__ inline void copy_tile(const T* x, long long row, long long column, long long rows, long long depth, W (&to)[DEPTH][SIDE])
{
    for (int n = threadIdx.x; n < SIDE * DEPTH; n += blockDim.x) {
        const int i = column == 1 ? n / DEPTH : n % SIDE, k = column == 1 ? n % DEPTH : n / SIDE;
        to[k][i] = i < rows && k < depth ? upcast(x[i * row + k * column]) : W(0);
    }
}

// out = alpha x w, plus out before if `accumulate`; a block of 256 threads computes 64 x 64 elements.
template <typename T, typename P>
__global__ void matmul(const T* x, long long x_row, long long x_column, long long x_step, const T* w, long long w_row,
                       long long w_column, long long w_step, P* out, long long rows, long long depth, long long columns,
                       double alpha, long long accumulate)
{
    typedef Wide<T> W;
    const int SIDE = 64, DEPTH = 16, EACH = 4;
    __shared__ W xs[DEPTH][SIDE], ws[DEPTH][SIDE];
    const long long tiles = (columns + SIDE - 1) / SIDE, per_matrix = (rows + SIDE - 1) / SIDE * tiles;
    const long long item = blockIdx.x / per_matrix, tile = blockIdx.x % per_matrix;
    const long long i = tile / tiles * SIDE, j = tile % tiles * SIDE;
    const int row = threadIdx.x / 16 * EACH, column = threadIdx.x % 16 * EACH;
    P* to = out + (item * rows + i + row) * columns + j + column;
    W total[EACH][EACH] = {};
    if (accumulate)
        for (int m = 0; m < EACH; ++m)
            for (int n = 0; n < EACH; ++n)
                if (i + row + m < rows && j + column + n < columns) total[m][n] = upcast(to[m * columns + n]);
    for (long long k = 0; k < depth; k += DEPTH) {
        copy_tile(x + item * x_step + i * x_row + k * x_column, x_row, x_column, rows - i, depth - k, xs);
        copy_tile(w + item * w_step + j * w_column + k * w_row, w_column, w_row, columns - j, depth - k, ws);
        __syncthreads();
        const int count = depth - k < DEPTH ? depth - k : DEPTH;
        for (int each = 0; each < count; ++each)
            for (int m = 0; m < EACH; ++m)
                for (int n = 0; n < EACH; ++n) total[m][n] = fused(xs[each][row + m], ws[each][column + n], total[m][n]);
        __syncthreads();
    }
    for (int m = 0; m < EACH; ++m)
        for (int n = 0; n < EACH; ++n)
            if (i + row + m < rows && j + column + n < columns) downcast(W(alpha) * total[m][n], to[m * columns + n]);
}
