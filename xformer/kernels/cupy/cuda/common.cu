// What every source begins with: number types by the names that dtypes have, loads and stores of several numbers at
// once, reductions over a block. No header is needed. All arithmetic is in float, that of float64 in double. Nothing
// here or in the sources adds in an order that depends on timing: the same arrays give the same bits.

typedef float float32;
typedef double float64;
struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };

// The type to compute in.
template <typename T> struct WideType { typedef float type; };
template <> struct WideType<float64> { typedef double type; };
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

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(float16 x) { return half_to_float(x.bits); }
__device__ inline float widen(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float widen(bool x) { return x ? 1.0f : 0.0f; }

// Round to nearest, ties to even.
__device__ inline void narrow(float x, float& to) { to = x; }
__device__ inline void narrow(float x, double& to) { to = x; }
__device__ inline void narrow(double x, float& to) { to = (float)x; }
__device__ inline void narrow(double x, double& to) { to = x; }
__device__ inline void narrow(float x, float16& to) { to.bits = float_to_half(x); }
__device__ inline void narrow(float x, bfloat16& to)
{
    unsigned bits = __float_as_uint(x);
    // Rounding could carry a NaN's last bits into infinity.
    to.bits = x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }
__device__ inline float square_root(float x) { return sqrtf(x); }
__device__ inline double square_root(double x) { return sqrt(x); }
__device__ inline float error_function(float x) { return erff(x); }
__device__ inline double error_function(double x) { return erf(x); }
__device__ inline float magnitude(float x) { return fabsf(x); }
__device__ inline double magnitude(double x) { return fabs(x); }
__device__ inline float infinity() { return __uint_as_float(0x7f800000); }
__device__ inline float not_a_number() { return __uint_as_float(0x7fc00000); }

// --- memory ---------------------------------------------------------------------------------------------------------

// How many numbers a thread takes at once: 16 bytes of them.
template <typename T> struct Pack { static const int size = 16 / sizeof(T); };

template <typename T, int V> struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Chunk { T element[V]; };

// Whether V numbers can be read at once where rows of `length` begin.
template <int V, typename T> __device__ inline bool aligned(const T* rows, long long length)
{
    return length % V == 0 && (unsigned long long)rows % alignof(Chunk<T, V>) == 0;
}

// Read V numbers, of which `left` are there; beyond are zeros. `whole`: all are there, and aligned.
template <int V, typename T, typename W>
__device__ inline void load(const T* from, long long left, bool whole, W (&to)[V])
{
    if (whole) {
        Chunk<T, V> chunk = *reinterpret_cast<const Chunk<T, V>*>(from);
        for (int k = 0; k < V; ++k) to[k] = widen(chunk.element[k]);
    } else {
        for (int k = 0; k < V; ++k) to[k] = k < left ? (W)widen(from[k]) : W(0);
    }
}

template <int V, typename T, typename W>
__device__ inline void store(const W (&from)[V], long long left, bool whole, T* to)
{
    if (whole) {
        Chunk<T, V> chunk;
        for (int k = 0; k < V; ++k) narrow(from[k], chunk.element[k]);
        *reinterpret_cast<Chunk<T, V>*>(to) = chunk;
    } else {
        for (int k = 0; k < V; ++k)
            if (k < left) narrow(from[k], to[k]);
    }
}

// All places of a row at which this thread takes V numbers.
#define PLACES(i, length) \
    for (long long i = (long long)threadIdx.x * V; i < (length); i += (long long)blockDim.x * V)

// All rows of this block.
#define ROWS(row, rows) for (long long row = blockIdx.x; row < (rows); row += gridDim.x)

// --- reductions -----------------------------------------------------------------------------------------------------

struct Sum {
    template <typename W> __device__ static W of(W a, W b) { return a + b; }
};
struct Largest {
    template <typename W> __device__ static W of(W a, W b) { return a > b ? a : b; }
};

// Reduce K numbers over the threads of a block, of which there are a multiple of 32; all threads get the results.
template <typename Op, int K, typename W> __device__ inline void reduce(W (&value)[K])
{
    __shared__ W kept[K][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int k = 0; k < K; ++k)
        for (int other = 16; other; other /= 2)
            value[k] = Op::of(value[k], __shfl_xor_sync(0xffffffffu, value[k], other));
    if (warps == 1) return;
    __syncthreads();  // what an earlier call kept has been read by all
    if (lane == 0)
        for (int k = 0; k < K; ++k) kept[k][warp] = value[k];
    __syncthreads();
    for (int k = 0; k < K; ++k) {
        value[k] = kept[k][0];
        for (int other = 1; other < warps; ++other) value[k] = Op::of(value[k], kept[k][other]);
    }
}

// One number of each thread.
template <typename Op, typename W> __device__ inline W reduced(W value)
{
    W values[1] = {value};
    reduce<Op>(values);
    return values[0];
}

// --- sums over rows -------------------------------------------------------------------------------------------------

// A block of 8 warps sums a tile of columns over a chunk of rows: a lane has V columns, warps take rows in turn. `first`
// is the lane's first column; `add(row, first)` adds to what the lane has; `write` puts a tile's sums into its row.
enum { SUMMING_WARPS = 8 };

template <int V> struct Tile {
    long long chunk, first;
    __device__ explicit Tile(long long columns)
    {
        const long long tiles = (columns + 32 * V - 1) / (32 * V);
        chunk = blockIdx.x / tiles;
        first = (blockIdx.x % tiles * 32 + threadIdx.x % 32) * V;
    }

    template <typename W, typename P> __device__ void write(const W (&sums)[V], long long columns, P* to) const
    {
        __shared__ W kept[SUMMING_WARPS][32 * V];
        const int lane = threadIdx.x % 32;
        for (int k = 0; k < V; ++k) kept[threadIdx.x / 32][lane * V + k] = sums[k];
        __syncthreads();
        for (int place = threadIdx.x; place < 32 * V; place += blockDim.x) {
            const long long column = first - lane * V + place;
            W total = 0;
            for (int warp = 0; warp < SUMMING_WARPS; ++warp) total += kept[warp][place];
            if (column < columns) narrow(total, to[chunk * columns + column]);
        }
        __syncthreads();  // before another call writes there
    }
};

#define CHUNK_ROWS(row, tile, chunk_rows, rows)                                                      \
    for (long long row = tile.chunk * chunk_rows + threadIdx.x / 32;                                 \
         row < (rows) && row < (tile.chunk + 1) * chunk_rows; row += SUMMING_WARPS)
