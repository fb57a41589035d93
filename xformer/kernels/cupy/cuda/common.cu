// The common part of all sources: number types named as dtypes, vector loads and stores, reductions over a block. It
// needs no header. Arithmetic is in float, or in double for float64. No source adds in an order that depends on timing:
// the same arrays give the same bits.

typedef float float32;
typedef double float64;
typedef signed char int8;
struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };

// The compute type.
template <typename T> struct WideType { typedef float type; };
template <> struct WideType<float64> { typedef double type; };
template <typename T> struct is_bfloat16 { static const bool value = false; };
template <> struct is_bfloat16<bfloat16> { static const bool value = true; };
template <typename T> using Wide = typename WideType<T>::type;

#ifndef CUDA_ON_HOST
__device__ inline float half_to_float(unsigned short bits)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ inline unsigned short float_to_half(float x)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif

__device__ inline float upcast(float x) { return x; }
__device__ inline double upcast(double x) { return x; }
__device__ inline float upcast(float16 x) { return half_to_float(x.bits); }
__device__ inline float upcast(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float upcast(bool x) { return x ? 1.0f : 0.0f; }
__device__ inline float upcast(int8 x) { return x; }

// Round to nearest, ties to even.
__device__ inline void downcast(float x, float& to) { to = x; }
__device__ inline void downcast(float x, double& to) { to = x; }
__device__ inline void downcast(double x, float& to) { to = (float)x; }
__device__ inline void downcast(double x, double& to) { to = x; }
__device__ inline void downcast(float x, float16& to) { to.bits = float_to_half(x); }
__device__ inline void downcast(float x, bfloat16& to)
{
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
    unsigned bits = __float_as_uint(x);
    // Rounding could turn a NaN into infinity.
    to.bits = x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
// exp(x) for results of type T; if that has 16 bits, with a relative error up to 1e-7 (|x| + 2).
template <typename T> __device__ inline Wide<T> exponential_for(Wide<T> x)
{
    if constexpr (sizeof(T) == 2)
        return exp2f(x * 1.4426950408889634f);
    else
        return exponential(x);
}
// 1 / x; in float, an error of one unit in the last place.
__device__ inline float reciprocal(float x) { return __fdividef(1.0f, x); }
__device__ inline double reciprocal(double x) { return 1 / x; }
__device__ inline float maximum(float a, float b) { return fmaxf(a, b); }  // ignores NaN
__device__ inline double maximum(double a, double b) { return fmax(a, b); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }
__device__ inline float infinity() { return __uint_as_float(0x7f800000); }
__device__ inline float not_a_number() { return __uint_as_float(0x7fc00000); }

// --- memory ---------------------------------------------------------------------------------------------------------

// The number of elements that a thread loads at a time: 16 bytes.
template <typename T> struct VectorSize { static const int value = 16 / sizeof(T); };

template <typename T, int V> struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Vector { T element[V]; };

// Whether vectors of V elements can be loaded from rows of `length`, here of several arrays.
template <int V, typename... T> __device__ inline bool aligned(long long length, const T*... rows)
{
    return length % V == 0 && (((unsigned long long)rows % alignof(Vector<T, V>)) + ...) == 0;
}
template <int V, typename T> __device__ inline bool aligned(const T* rows, long long n) { return aligned<V>(n, rows); }

// Load V elements, of which `left` exist; the others are zero. `is_full`: all exist and are aligned.
template <int V, typename T> __device__ inline Vector<T, V> load(const T* from, long long left, bool is_full)
{
    if (is_full) return *reinterpret_cast<const Vector<T, V>*>(from);
    Vector<T, V> chunk;
    for (int k = 0; k < V; ++k) chunk.element[k] = k < left ? from[k] : T();
    return chunk;
}

template <int V, typename T, typename W> __device__ inline void upcast(const Vector<T, V>& from, W (&to)[V])
{
    for (int k = 0; k < V; ++k) to[k] = upcast(from.element[k]);
}

// The bits of a vector, which take fewer registers than its elements.
template <int BYTES> struct alignas(BYTES < 16 ? BYTES : 16) Bits { unsigned word[BYTES / 4]; };
template <> struct Bits<2> { unsigned short word; };
template <> struct Bits<1> { unsigned char word; };

template <typename T, int V> struct Packed {
    Bits<sizeof(T) * V> bits;

    // Load V elements, which are aligned.
    __device__ void load(const T* from) { bits = *reinterpret_cast<const Bits<sizeof(T) * V>*>(from); }

    __device__ void set(const Vector<T, V>& from) { bits = *reinterpret_cast<const Bits<sizeof(T) * V>*>(&from); }

    template <typename W> __device__ void upcast(W (&to)[V]) const
    {
        if constexpr (is_bfloat16<T>::value && V > 1)  // one instruction per element
            for (int k = 0; k < V; ++k)
                to[k] = __uint_as_float(k % 2 ? bits.word[k / 2] & 0xffff0000 : bits.word[k / 2] << 16);
        else
            ::upcast(*reinterpret_cast<const Vector<T, V>*>(&bits), to);
    }
};

template <int V, typename T, typename W>
__device__ inline void load(const T* from, long long left, bool is_full, W (&to)[V])
{
    if (is_full) {
        Packed<T, V> packed;
        packed.load(from);
        packed.upcast(to);
    } else {
        for (int k = 0; k < V; ++k) to[k] = k < left ? upcast(from[k]) : W(0);
    }
}

template <int V, typename T, typename W>
__device__ inline void store(const W (&from)[V], long long left, bool is_full, T* to)
{
    if (is_full) {
        Vector<T, V> chunk;
        for (int k = 0; k < V; ++k) downcast(from[k], chunk.element[k]);
        *reinterpret_cast<Vector<T, V>*>(to) = chunk;
    } else {
        for (int k = 0; k < V; ++k)
            if (k < left) downcast(from[k], to[k]);
    }
}

// Loop over the columns of a row at which this thread loads vectors.
#define FOR_COLUMNS(i, length) \
    for (long long i = (long long)threadIdx.x * V; i < (length); i += (long long)blockDim.x * V)

// Loop over the rows of this block.
#define FOR_ROWS(row, rows) for (long long row = blockIdx.x; row < (rows); row += gridDim.x)

// Rows that each have `threads` threads: all of the block, or a power of two up to 32 of them. The threads of a block get
// on together, so that all of them take part in reductions: its last rows may not exist.
struct SharedRows {
    int threads, lane;  // of a row; the lane of this thread
    long long first, step;
    int place;  // of the row of this thread among those of the block

    __device__ explicit SharedRows(int threads) : threads(threads)
    {
        const int shift = threads == blockDim.x ? 31 : __ffs(threads) - 1;  // faster than a division
        const unsigned rows = threads == blockDim.x ? 1 : blockDim.x >> shift;
        place = threadIdx.x >> shift;
        lane = threadIdx.x - place * threads;
        first = (long long)blockIdx.x * rows + place;
        step = (long long)gridDim.x * rows;
    }
};

#define FOR_SHARED_ROWS(row, rows, shared) \
    for (long long row = shared.first; row - shared.place < (rows); row += shared.step)

// At most as many threads per block as in grid.py, and enough blocks on a multiprocessor to hide the latency of memory.
#define BOUNDS(blocks) __launch_bounds__(512, blocks)

// --- reductions -----------------------------------------------------------------------------------------------------

struct Sum {
    template <typename W> __device__ static W of(W a, W b) { return a + b; }
};
struct Max {
    template <typename W> __device__ static W of(W a, W b) { return maximum(a, b); }
};

// Reduce K numbers over the threads of a row; all of them get the results. A row has all threads of the block, which
// are a multiple of 32, or a power of two up to 32 of them.
template <typename Op, int K, typename W> __device__ inline void reduce(W (&value)[K], int row_threads = blockDim.x)
{
    __shared__ W partial[K][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int k = 0; k < K; ++k)
        for (int other = 16; other; other /= 2)
            if (other < row_threads) value[k] = Op::of(value[k], __shfl_xor_sync(0xffffffffu, value[k], other));
    if (row_threads <= 32) return;
    __syncthreads();  // all threads have read the results of an earlier call
    if (lane == 0)
        for (int k = 0; k < K; ++k) partial[k][warp] = value[k];
    __syncthreads();
    for (int k = 0; k < K; ++k) {
        value[k] = partial[k][0];
        for (int other = 1; other < warps; ++other) value[k] = Op::of(value[k], partial[k][other]);
    }
}

// Reduce one number per thread.
template <typename Op, typename W> __device__ inline W reduced(W value, int row_threads = blockDim.x)
{
    W values[1] = {value};
    reduce<Op>(values, row_threads);
    return values[0];
}

// Write a row of n elements: `factor` times another one plus a bias, of which each may be null. Without it, of `absent`.
template <typename T>
__device__ inline void copy_row(const T* from, T* to, long long n, bool is_full, Wide<T> absent, Wide<T> factor = 1,
                                const T* bias = 0)
{
    const int V = VectorSize<T>::value;
    Wide<T> v[V], b[V] = {};
    FOR_COLUMNS(i, n) {
        if (from) load(from + i, n - i, is_full, v);
        if (from && bias) load(bias + i, n - i, aligned<V>(n, bias), b);
        for (int k = 0; k < V; ++k) v[k] = from ? v[k] * factor + b[k] : absent;
        store(v, n - i, is_full, to + i);
    }
}
