// Elementwise functions of arrays of `size` elements.

// y = f(x, other)
template <typename T, typename S, typename F>
__device__ inline void map(const T* x, const S* other, T* y, long long size, F f)
{
    const int V = VectorSize<T>::value;
    const bool is_aligned = aligned<V>(x, 0) && aligned<V>(other, 0) && aligned<V>(y, 0);
    Wide<T> a[V], b[V];
    for (long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * V; i < size;
         i += (long long)gridDim.x * blockDim.x * V) {
        const bool is_full = is_aligned && size - i >= V;
        load(x + i, size - i, is_full, a);
        load(other + i, size - i, is_full, b);
        for (int k = 0; k < V; ++k) a[k] = f(a[k], b[k]);
        store(a, size - i, is_full, y + i);
    }
}

template <typename T> __global__ void add(const T* x, const T* other, T* y, long long size)
{
    typedef Wide<T> W;
    map(x, other, y, size, [](W a, W b) { return a + b; });
}

// NaN propagates.
template <typename T> __global__ void relu(const T* x, T* y, long long size)
{
    typedef Wide<T> W;
    map(x, x, y, size, [](W v, W) { return v < 0 ? W(0) : v; });
}

template <typename T> __global__ void relu_vjp(const T* g, const T* y, T* dx, long long size)
{
    typedef Wide<T> W;
    map(g, y, dx, size, [](W v, W result) { return result > 0 ? v : W(0); });
}

// Beyond MAX_ABS the tail of the normal distribution is zero; infinity times zero would be NaN.
#define MAX_ABS 40
#define ROOT_HALF 0.70710678118654752440
#define DENSITY_AT_ZERO 0.39894228040143267794

template <typename T> __global__ void gelu(const T* x, T* y, long long size)
{
    typedef Wide<T> W;
    map(x, x, y, size, [](W v, W) {
        return v < -MAX_ABS ? W(0) : W(0.5) * v * (1 + error_function(v * W(ROOT_HALF)));
    });
}

template <typename T> __global__ void gelu_vjp(const T* g, const T* x, T* dx, long long size)
{
    typedef Wide<T> W;
    map(g, x, dx, size, [](W v, W u) {
        u = u < -MAX_ABS ? W(-MAX_ABS) : u > MAX_ABS ? W(MAX_ABS) : u;
        const W density = exponential(W(-0.5) * u * u) * W(DENSITY_AT_ZERO);
        return v * (W(0.5) * (1 + error_function(u * W(ROOT_HALF))) + u * density);
    });
}

template <typename T> __global__ void dropout(const T* x, const bool* mask, T* y, long long size, double scale)
{
    typedef Wide<T> W;
    const W factor = (W)scale;
    map(x, mask, y, size, [factor](W v, W keep) { return keep != 0 ? v * factor : W(0); });
}

// y = 2 g x, where g is one number.
template <typename T> __global__ void multiply_by_2g(const T* x, const Wide<T>* g, T* y, long long size)
{
    typedef Wide<T> W;
    const W factor = 2 * *g;
    map(x, x, y, size, [factor](W v, W) { return v * factor; });
}
