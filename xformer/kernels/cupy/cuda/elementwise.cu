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

// The density of the normal distribution at u >= 0, and its tail from there on, for results of type T.
template <typename T> struct Normal {
    typedef Wide<T> W;
    W density, tail;

    __device__ explicit Normal(W u)
    {
        const W at_zero = W(0.39894228040143267794);
        if constexpr (sizeof(T) == 2) {  // Abramowitz and Stegun, 26.2.17, times at_zero: the error is below 3e-7
            const W t = reciprocal(1 + 0.2316419f * u), power = exp2f(-0.72134752f * u * u);
            density = at_zero * power;
            tail = power * t * (0.12741479f + t * (-0.14224836f + t * (0.71070688f + t * (-0.72657603f + t * 0.53070271f))));
        } else {
            density = at_zero * exponential(W(-0.5) * u * u);
            tail = W(0.5) * (1 - error_function(u * W(0.70710678118654752440)));
        }
    }
};

template <typename T> __global__ void gelu(const T* x, T* y, long long size)
{
    typedef Wide<T> W;
    map(x, x, y, size, [](W v, W) {
        const W u = -maximum(-magnitude(v), W(-MAX_ABS));
        return (v < 0 ? W(0) : v) - u * Normal<T>(u).tail;
    });
}

template <typename T> __global__ void gelu_vjp(const T* g, const T* x, T* dx, long long size)
{
    typedef Wide<T> W;
    map(g, x, dx, size, [](W v, W x) {
        const W u = magnitude(x) > MAX_ABS ? W(MAX_ABS) : magnitude(x);
        const Normal<T> at(u);
        const W slope = at.tail - u * at.density;  // at -u
        return v * (x < 0 ? slope : 1 - slope);
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
