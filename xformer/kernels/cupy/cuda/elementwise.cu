// Elementwise functions of arrays of `size` elements.

// Loop over the elements at which this thread loads vectors.
#define FOR_VECTORS(i, size)                                                              \
    for (long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * V; i < (size); \
         i += (long long)gridDim.x * blockDim.x * V)

// y = f(x, other), where `other` is repeated if it has a period.
template <typename T, typename S, typename F>
__device__ inline void map(const T* x, const S* other, T* y, long long size, F f, long long period = 0)
{
    const int V = VectorSize<T>::value;
    const bool is_aligned = aligned<V>(period, x, other, y);
    Wide<T> a[V], b[V];
    FOR_VECTORS(i, size) {
        const bool is_full = is_aligned && size - i >= V;
        load(x + i, size - i, is_full, a);
        if (is_full || !period) load(other + (period ? i % period : i), size - i, is_full, b);
        for (int k = 0; k < V; ++k) a[k] = f(a[k], is_full || !period ? b[k] : upcast(other[(i + k) % period]));
        store(a, size - i, is_full, y + i);
    }
}

template <typename T> __global__ void add(const T* x, const T* other, T* y, long long size, long long period)
{
    typedef Wide<T> W;
    map(x, other, y, size, [](W a, W b) { return a + b; }, period);
}

// --- Activations: their values, and their cotangents of g, at x; for relu, x may also be relu(x). NaN propagates. --------

template <typename T> struct relu {
    typedef Wide<T> W;
    __device__ static W value(W x) { return x < 0 ? W(0) : x; }
    __device__ static W vjp(W g, W x) { return x > 0 ? g : W(0); }
};

template <typename T> struct relu_squared {
    typedef Wide<T> W;
    __device__ static W value(W x) { return x < 0 ? W(0) : x * x; }
    __device__ static W vjp(W g, W x) { return 2 * g * (x < 0 ? W(0) : x); }
};

// Beyond MAX_ABS the tail of the normal distribution is zero; infinity times zero would be NaN.
#define MAX_ABS 40

template <typename W> __device__ inline W clipped(W x, int limit)
{
    return x > limit ? W(limit) : x < -limit ? W(-limit) : x;
}

template <typename T> struct gelu {
    typedef Wide<T> W;
    W density, tail;  // of the normal distribution at u >= 0, the tail from there on, for results of type T

    __device__ explicit gelu(W u)
    {
        const W at_zero = W(0.39894228040143267794);
        if constexpr (sizeof(T) == 2) {  // Abramowitz and Stegun, 26.2.17, times at_zero: the error is below 3e-7
            const W t = reciprocal(1 + 0.2316419f * u), power = exp2f(-0.72134752f * u * u);
            density = at_zero * power;
            tail = power * t * (0.12741479f + t * (-0.14224836f + t * (0.71070688f + t * (-0.72657603f + t * 0.53070271f))));
        } else {
            density = at_zero * exponential(W(-0.5) * u * u);
            tail = W(0.5) * (1 - erf(u * W(0.70710678118654752440)));
        }
    }

    __device__ static W value(W x)
    {
        const W u = -maximum(-fabs(x), W(-MAX_ABS));
        return (x < 0 ? W(0) : x) - u * gelu(u).tail;
    }

    __device__ static W vjp(W g, W x)
    {
        const W u = fabs(clipped(x, MAX_ABS));
        const gelu at(u);
        const W slope = at.tail - u * at.density;  // at -u
        return g * (x < 0 ? slope : 1 - slope);
    }
};

// Beyond this, the logistic function is 0 or 1, and its derivative 0; infinity times zero would be NaN.
#define LOGISTIC_LIMIT 80

// x s(z) with s the logistic function and z = scale (x + cubic x^3), where Z has the two constants.
template <typename T, typename Z> struct LogisticUnit {
    typedef Wide<T> W;

    __device__ static W logistic(W x)
    {
        return reciprocal(1 + exponential_for<T>(-W(Z::scale()) * (x + W(Z::cubic()) * x * x * x)));
    }

    __device__ static W value(W x)
    {
        return (x < -LOGISTIC_LIMIT ? W(0) : x) * logistic(clipped(x, LOGISTIC_LIMIT));
    }

    __device__ static W vjp(W g, W x)
    {
        x = clipped(x, LOGISTIC_LIMIT);
        const W s = logistic(x);
        return g * (s + s * (1 - s) * (W(Z::scale()) * (x + 3 * W(Z::cubic()) * x * x * x)));
    }
};

#define LOGISTIC_UNIT(name, scale_, cubic_)                                     \
    struct name##_constants {                                                   \
        __device__ static constexpr double scale() { return scale_; }           \
        __device__ static constexpr double cubic() { return cubic_; }           \
    };                                                                          \
    template <typename T> struct name : LogisticUnit<T, name##_constants> {};

LOGISTIC_UNIT(silu, 1, 0)
LOGISTIC_UNIT(quick_gelu, 1.702, 0)
LOGISTIC_UNIT(gelu_tanh, 1.5957691216057307118, 0.044715)

template <typename T, template <typename> class F> __global__ void activation(const T* x, T* y, long long size)
{
    typedef Wide<T> W;
    map(x, x, y, size, [](W v, W) { return F<T>::value(v); });
}

template <typename T, template <typename> class F>
__global__ void activation_vjp(const T* g, const T* x, T* dx, long long size)
{
    map(g, x, dx, size, F<T>::vjp);
}

// y = f(gate) up
template <typename T, template <typename> class F>
__global__ void gated(const T* gate, const T* up, T* y, long long size)
{
    typedef Wide<T> W;
    map(gate, up, y, size, [](W a, W b) { return F<T>::value(a) * b; });
}

template <typename T, template <typename> class F>
__global__ void gated_vjp(const T* g, const T* gate, const T* up, T* dgate, T* dup, long long size)
{
    const int V = VectorSize<T>::value;
    const bool is_aligned = aligned<V>(0, g, gate, up, dgate, dup);
    Wide<T> v[V], a[V], b[V];
    FOR_VECTORS(i, size) {
        const long long left = size - i;
        const bool is_full = is_aligned && left >= V;
        load(g + i, left, is_full, v);
        load(gate + i, left, is_full, a);
        load(up + i, left, is_full, b);
        for (int k = 0; k < V; ++k) {
            b[k] = F<T>::vjp(v[k] * b[k], a[k]);
            a[k] = v[k] * F<T>::value(a[k]);
        }
        store(b, left, is_full, dgate + i);
        store(a, left, is_full, dup + i);
    }
}

template <typename T> __global__ void dropout(const T* x, const bool* mask, T* y, long long size, double scale)
{
    typedef Wide<T> W;
    const W factor = (W)scale;
    map(x, mask, y, size, [factor](W v, W keep) { return keep != 0 ? v * factor : W(0); });
}
