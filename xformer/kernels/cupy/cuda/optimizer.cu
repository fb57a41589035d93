// Many arrays per launch, in tables of addresses and sizes that are passed by value. Each array has its own blocks of
// `share` elements; `ends` are the cumulative numbers of blocks.

const int MAX_ROWS = 64, MAX_ARRAYS = 128, MAX_PAIRS = 112;

struct Rows {
    unsigned long long parameters[MAX_ROWS], gradients[MAX_ROWS], firsts[MAX_ROWS], seconds[MAX_ROWS];
    long long sizes[MAX_ROWS];
    double keeps[MAX_ROWS];
    long long ends[MAX_ROWS];
};

struct Arrays {
    unsigned long long at[MAX_ARRAYS];
    long long sizes[MAX_ARRAYS], ends[MAX_ARRAYS];
};

struct Pairs {
    unsigned long long from[MAX_PAIRS], to[MAX_PAIRS];
    long long sizes[MAX_PAIRS], ends[MAX_PAIRS];
};

// The array of this block, and its elements from `start` to `stop`.
struct Share {
    int array = 0;
    long long start, stop;
    __device__ Share(const long long* ends, const long long* sizes, long long share)
    {
        while (ends[array] <= blockIdx.x) ++array;
        start = (blockIdx.x - (array ? ends[array - 1] : 0)) * share;
        stop = start + share < sizes[array] ? start + share : sizes[array];
    }
};

// Gradients are multiplied by `factor`, unless null; if it is NaN nothing changes.
template <typename T, typename G>
__global__ void adam(const Rows rows, long long share, double step_size, double beta1, double beta2,
                     double second_scale, double epsilon, const Wide<T>* factor)
{
    typedef Wide<T> W;
    const W grad_scale = factor ? *factor : W(1);
    if (grad_scale != grad_scale) return;
    const int V = VectorSize<W>::value;
    const Share part(rows.ends, rows.sizes, share);
    T* parameter = reinterpret_cast<T*>(rows.parameters[part.array]);
    const G* gradient = reinterpret_cast<const G*>(rows.gradients[part.array]);
    W* first = reinterpret_cast<W*>(rows.firsts[part.array]);
    W* second = reinterpret_cast<W*>(rows.seconds[part.array]);
    const W keep = (W)rows.keeps[part.array], b1 = (W)beta1, b2 = (W)beta2, c1 = (W)(1 - beta1), c2 = (W)(1 - beta2);
    const bool is_aligned =
        aligned<V>(parameter, 0) && aligned<V>(gradient, 0) && aligned<V>(first, 0) && aligned<V>(second, 0);
    for (long long i = part.start + (long long)threadIdx.x * V; i < part.stop; i += (long long)blockDim.x * V) {
        const long long left = part.stop - i;
        const bool whole = is_aligned && left >= V;
        W p[V], g[V], m[V], v[V];
        load(parameter + i, left, whole, p);
        load(gradient + i, left, whole, g);
        load(first + i, left, whole, m);
        load(second + i, left, whole, v);
        for (int k = 0; k < V; ++k) {
            g[k] *= grad_scale;
            m[k] = b1 * m[k] + c1 * g[k];
            v[k] = b2 * v[k] + c2 * (g[k] * g[k]);
            p[k] = keep * p[k] - (W)step_size * m[k] / (square_root(v[k] * (W)second_scale) + (W)epsilon);
        }
        store(p, left, whole, parameter + i);
        store(m, left, whole, first + i);
        store(v, left, whole, second + i);
    }
}

// Sum the squares of the elements of each block.
template <typename T> __global__ void squares(const Arrays arrays, Wide<T>* sums, long long share)
{
    const int V = VectorSize<T>::value;
    const Share part(arrays.ends, arrays.sizes, share);
    const T* x = reinterpret_cast<const T*>(arrays.at[part.array]);
    const bool is_aligned = aligned<V>(x, 0);
    Wide<T> v[V], sum = 0;
    for (long long i = part.start + (long long)threadIdx.x * V; i < part.stop; i += (long long)blockDim.x * V) {
        load(x + i, part.stop - i, is_aligned && part.stop - i >= V, v);
        for (int k = 0; k < V; ++k) sum += v[k] * v[k];
    }
    sum = reduced<Sum>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Sum all elements, in one block.
template <typename W> __global__ void total(const W* x, W* sum, long long size)
{
    W own = 0;
    for (long long i = threadIdx.x; i < size; i += blockDim.x) own += x[i];
    own = reduced<Sum>(own);
    if (threadIdx.x == 0) *sum = own;
}

template <typename T, typename U> __global__ void cast(const Pairs pairs, long long share)
{
    const int V = VectorSize<Wide<T>>::value;
    const Share part(pairs.ends, pairs.sizes, share);
    const T* x = reinterpret_cast<const T*>(pairs.from[part.array]);
    U* y = reinterpret_cast<U*>(pairs.to[part.array]);
    const bool is_aligned = aligned<V>(x, 0) && aligned<V>(y, 0);
    for (long long i = part.start + (long long)threadIdx.x * V; i < part.stop; i += (long long)blockDim.x * V) {
        const bool whole = is_aligned && part.stop - i >= V;
        Wide<T> v[V];
        load(x + i, part.stop - i, whole, v);
        store(v, part.stop - i, whole, y + i);
    }
}
