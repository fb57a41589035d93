// Many arrays per launch, in tables of addresses and sizes that are passed by value. Each array has its own blocks of
// `block_size` elements; `ends` are the cumulative numbers of blocks.

const int MAX_SLOTS = 64, MAX_ARRAYS = 128, MAX_PAIRS = 112;

template <int COLUMNS, int MOST> struct Table {
    unsigned long long addresses[COLUMNS][MOST];
    long long sizes[MOST], ends[MOST];
};

struct Slots : Table<4, MAX_SLOTS> {  // parameters, gradients, first and second moments
    double weight_decays[MAX_SLOTS];
};

// The array of this block in all columns, and the range of its elements, from `start` to `stop`.
template <int COLUMNS, int MOST> struct BlockRange {
    const Table<COLUMNS, MOST>& table;
    int array = 0;
    long long start, stop;
    __device__ BlockRange(const Table<COLUMNS, MOST>& table, long long block_size) : table(table)
    {
        while (table.ends[array] <= blockIdx.x) ++array;
        start = (blockIdx.x - (array ? table.ends[array - 1] : 0)) * block_size;
        stop = start + block_size < table.sizes[array] ? start + block_size : table.sizes[array];
    }
    template <typename T> __device__ T* at(int column) const
    {
        return reinterpret_cast<T*>(table.addresses[column][array]);
    }
};

#define FOR_RANGE(i, range) \
    for (long long i = range.start + (long long)threadIdx.x * V; i < range.stop; i += (long long)blockDim.x * V)

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
    const BlockRange<4, MAX_SLOTS> range(slots, block_size);
    T* parameter = range.template at<T>(0);
    const G* gradient = range.template at<G>(1);
    W *exp_avg = range.template at<W>(2), *exp_avg_sq = range.template at<W>(3);
    const W b1 = (W)beta1, b2 = (W)beta2, c1 = (W)(1 - beta1), c2 = (W)(1 - beta2);
    const W decay = (W)(1 - learning_rate * slots.weight_decays[range.array]);
    const bool is_aligned = aligned<V>(0, parameter, gradient, exp_avg, exp_avg_sq);
    FOR_RANGE(i, range) {
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
            p[k] = decay * p[k] - (W)step_size * m[k] / (sqrt(v[k] * (W)bias_correction2) + (W)epsilon);
        }
        store(p, left, is_full, parameter + i);
        store(m, left, is_full, exp_avg + i);
        store(v, left, is_full, exp_avg_sq + i);
    }
}

// Sum the squares of the elements of each block.
template <typename T> __global__ void squares(const Table<1, MAX_ARRAYS> arrays, Wide<T>* sums, long long block_size)
{
    const int V = VectorSize<T>::value;
    const BlockRange<1, MAX_ARRAYS> range(arrays, block_size);
    const T* x = range.template at<T>(0);
    const bool is_aligned = aligned<V>(0, x);
    Wide<T> v[V], sum = 0;
    FOR_RANGE(i, range) {
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

template <typename T, typename U> __global__ void cast(const Table<2, MAX_PAIRS> pairs, long long block_size)
{
    const int V = VectorSize<Wide<T>>::value;
    const BlockRange<2, MAX_PAIRS> range(pairs, block_size);
    const T* x = range.template at<T>(0);
    U* y = range.template at<U>(1);
    const bool is_aligned = aligned<V>(0, x, y);
    FOR_RANGE(i, range) {
        const bool is_full = is_aligned && range.stop - i >= V;
        Wide<T> v[V];
        load(x + i, range.stop - i, is_full, v);
        store(v, range.stop - i, is_full, y + i);
    }
}
