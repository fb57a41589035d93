// Many arrays per launch, in tables of addresses and sizes that are passed by value. Each array has its own blocks of
// `block_size` elements; `ends` are the cumulative numbers of blocks.

const int MAX_SLOTS = 64, MAX_ARRAYS = 128, MAX_PAIRS = 112;

struct Slots {
    unsigned long long parameters[MAX_SLOTS], gradients[MAX_SLOTS], exp_avgs[MAX_SLOTS], exp_avg_sqs[MAX_SLOTS];
    long long sizes[MAX_SLOTS];
    double weight_decays[MAX_SLOTS];
    long long ends[MAX_SLOTS];
};

struct Arrays {
    unsigned long long addresses[MAX_ARRAYS];
    long long sizes[MAX_ARRAYS], ends[MAX_ARRAYS];
};

struct Pairs {
    unsigned long long from[MAX_PAIRS], to[MAX_PAIRS];
    long long sizes[MAX_PAIRS], ends[MAX_PAIRS];
};

// The array of this block, and the range of its elements, from `start` to `stop`.
struct BlockRange {
    int array = 0;
    long long start, stop;
    __device__ BlockRange(const long long* ends, const long long* sizes, long long block_size)
    {
        while (ends[array] <= blockIdx.x) ++array;
        start = (blockIdx.x - (array ? ends[array - 1] : 0)) * block_size;
        stop = start + block_size < sizes[array] ? start + block_size : sizes[array];
    }
};

// Multiply the gradients by `grad_scale`, unless it is null; if it is NaN, change nothing. A schedule that is not null
// has the step size, the bias correction and the learning rate, which a captured graph reads anew in every replay.
template <typename T, typename G>
__global__ void adam(const Slots slots, long long block_size, double step_size, double beta1, double beta2,
                     double bias_correction2, double epsilon, double learning_rate, const Wide<T>* grad_scale,
                     const double* schedule)
{
    if (schedule) {
        step_size = schedule[0];
        bias_correction2 = schedule[1];
        learning_rate = schedule[2];
    }
    typedef Wide<T> W;
    const W scale = grad_scale ? *grad_scale : W(1);
    if (scale != scale) return;
    const int V = VectorSize<W>::value;
    const BlockRange range(slots.ends, slots.sizes, block_size);
    T* parameter = reinterpret_cast<T*>(slots.parameters[range.array]);
    const G* gradient = reinterpret_cast<const G*>(slots.gradients[range.array]);
    W* exp_avg = reinterpret_cast<W*>(slots.exp_avgs[range.array]);
    W* exp_avg_sq = reinterpret_cast<W*>(slots.exp_avg_sqs[range.array]);
    const W b1 = (W)beta1, b2 = (W)beta2, c1 = (W)(1 - beta1), c2 = (W)(1 - beta2);
    const W decay = (W)(1 - learning_rate * slots.weight_decays[range.array]);
    const bool is_aligned =
        aligned<V>(parameter, 0) && aligned<V>(gradient, 0) && aligned<V>(exp_avg, 0) && aligned<V>(exp_avg_sq, 0);
    for (long long i = range.start + (long long)threadIdx.x * V; i < range.stop; i += (long long)blockDim.x * V) {
        const long long left = range.stop - i;
        const bool is_full = is_aligned && left >= V;
        W p[V], g[V], m[V], v[V];
        load(parameter + i, left, is_full, p);
        load(gradient + i, left, is_full, g);
        load(exp_avg + i, left, is_full, m);
        load(exp_avg_sq + i, left, is_full, v);
        for (int k = 0; k < V; ++k) {
            g[k] *= scale;
            m[k] = b1 * m[k] + c1 * g[k];
            v[k] = b2 * v[k] + c2 * (g[k] * g[k]);
            p[k] = decay * p[k] - (W)step_size * m[k] / (square_root(v[k] * (W)bias_correction2) + (W)epsilon);
        }
        store(p, left, is_full, parameter + i);
        store(m, left, is_full, exp_avg + i);
        store(v, left, is_full, exp_avg_sq + i);
    }
}

// Sum the squares of the elements of each block.
template <typename T> __global__ void squares(const Arrays arrays, Wide<T>* sums, long long block_size)
{
    const int V = VectorSize<T>::value;
    const BlockRange range(arrays.ends, arrays.sizes, block_size);
    const T* x = reinterpret_cast<const T*>(arrays.addresses[range.array]);
    const bool is_aligned = aligned<V>(x, 0);
    Wide<T> v[V], sum = 0;
    for (long long i = range.start + (long long)threadIdx.x * V; i < range.stop; i += (long long)blockDim.x * V) {
        load(x + i, range.stop - i, is_aligned && range.stop - i >= V, v);
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

template <typename T, typename U> __global__ void cast(const Pairs pairs, long long block_size)
{
    const int V = VectorSize<Wide<T>>::value;
    const BlockRange range(pairs.ends, pairs.sizes, block_size);
    const T* x = reinterpret_cast<const T*>(pairs.from[range.array]);
    U* y = reinterpret_cast<U*>(pairs.to[range.array]);
    const bool is_aligned = aligned<V>(x, 0) && aligned<V>(y, 0);
    for (long long i = range.start + (long long)threadIdx.x * V; i < range.stop; i += (long long)blockDim.x * V) {
        const bool is_full = is_aligned && range.stop - i >= V;
        Wide<T> v[V];
        load(x + i, range.stop - i, is_full, v);
        store(v, range.stop - i, is_full, y + i);
    }
}
