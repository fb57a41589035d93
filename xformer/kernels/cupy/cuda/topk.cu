// The largest elements of rows, and the choice of a token among them.

// Integers in the order of numbers: NaN is the largest, and the zeros are equal. Subnormal numbers stay apart.
__device__ inline int key_of(float x)
{
    const int bits = __float_as_uint(x);
    return x != x ? 0x7fffffff : bits >= 0 ? bits : bits == -0x7fffffff - 1 ? 0 : bits ^ 0x7fffffff;
}

__device__ inline long long key_of(double x)
{
    const long long bits = __double_as_longlong(x), most = 0x7fffffffffffffff;
    return x != x ? most : bits >= 0 ? bits : bits == -most - 1 ? 0 : bits ^ most;
}

template <typename T> struct Item {
    decltype(key_of(Wide<T>())) key;
    int index;
};

// Whether a comes first: of equal keys the lower index does.
template <typename T> __device__ inline bool before(Item<T> a, Item<T> b)
{
    return a.key > b.key || (a.key == b.key && a.index < b.index);
}

// After all others.
template <typename T> __device__ inline Item<T> none() { return {key_of(Wide<T>(-infinity())), 0x7fffffff}; }

// Sort by a bitonic network, which takes a power of two.
template <typename T> __device__ inline void sort(Item<T>* items, int count)
{
    int size = 1;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += blockDim.x) items[i] = none<T>();
    __syncthreads();
    for (int length = 2; length <= size; length *= 2)
        for (int step = length / 2; step; step /= 2) {
            for (int i = threadIdx.x; i < size / 2; i += blockDim.x) {
                const int low = 2 * i - (i & (step - 1));
                const Item<T> a = items[low], b = items[low + step];
                if (before(b, a) == !(low & length)) {
                    items[low] = b;
                    items[low + step] = a;
                }
            }
            __syncthreads();
        }
}

// The sum of the values of earlier threads, and of all.
template <typename N> __device__ inline N sum_before(N value, N& total)
{
    __shared__ N of_warps[32];
    const int warp = threadIdx.x / 32;
    N sum = value, earlier = 0;
    for (int other = 1; other < 32; other *= 2) {
        const N theirs = __shfl_xor_sync(0xffffffffu, sum, other);
        if (threadIdx.x & other) earlier += theirs;
        sum += theirs;
    }
    if (threadIdx.x % 32 == 0) of_warps[warp] = sum;
    __syncthreads();
    total = 0;
    for (int i = 0; i < blockDim.x / 32; ++i) {
        if (i == warp) earlier += total;
        total += of_warps[i];
    }
    __syncthreads();  // before another call overwrites them
    return earlier;
}

// Sorted. A block streams a row past a buffer: it takes up elements that may be among the largest and, when it is full,
// is sorted and cut. S: size of the buffer, at least k more than the threads load at a time; or n.
template <typename T, int S>
__global__ void BOUNDS(1)
    top_k(const T* x, T* values, long long* indices, long long rows, long long n, long long k)
{
    const int V = VectorSize<T>::value, R = 4, step = V * blockDim.x;
    __shared__ Item<T> items[S];
    const bool is_full = aligned<V>(x, n);
    FOR_ROWS(row, rows) {
        const T* from = x + row * n;
        int count = 0, total;
        Item<T> last = none<T>();
        for (long long start = 0; start < n; start += R * step) {
            Vector<T, V> loaded[R];
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const long long i = start + r * step + threadIdx.x * V;
                loaded[r] = load<V>(from + i, n - i, is_full && i < n);
            }
#pragma unroll
            for (int r = 0; r < R; ++r) {
                if (start + r * step >= n) break;
                if (count > S - step) {
                    sort(items, count);
                    count = k;
                    last = items[k - 1];
                }
                Item<T> own[V];
                int found = 0;
                for (int j = 0; j < V; ++j) {
                    const long long i = start + r * step + threadIdx.x * V + j;
                    own[j] = i < n ? Item<T>{key_of(upcast(loaded[r].element[j])), (int)i} : none<T>();
                    found += before(own[j], last);
                }
                int place = count + sum_before(found, total);
                for (int j = 0; j < V; ++j)
                    if (before(own[j], last)) items[place++] = own[j];
                count += total;
            }
        }
        sort(items, count);
        for (int j = threadIdx.x; j < k; j += blockDim.x) {
            values[row * k + j] = from[items[j].index];
            indices[row * k + j] = items[j].index;
        }
        __syncthreads();
    }
}

// A row of logits; those with `mask` count as minus infinity.
template <typename T> struct Logits {
    static const int V = 4;
    const T* from;
    const bool* mask;
    long long n;
    bool is_full;

    // Use each logit, and its index, of vectors that are `step` apart.
    template <typename F> __device__ void visit(long long first, long long end, long long step, const F& use) const
    {
        for (long long i = first; i < end; i += step) {
            Wide<T> v[V];
            load(from + i, n - i, is_full, v);
            for (int k = 0; k < V; ++k)
                if (i + k < n) use(mask && mask[i + k] ? -infinity() : v[k], i + k);
        }
    }
    template <typename F> __device__ void all(const F& use) const { visit(threadIdx.x * V, n, blockDim.x * V, use); }

    // Return a key of at least `last` above which logits remain: as many as weigh less than a limit, and those equal to
    // the next one.
    template <typename Key, typename F>
    __device__ Key cut(Key last, Key high, Wide<T> limit, const F& weight) const
    {
        const int M = 3;
        while (last + 1 < high) {
            const Key start = last, quarter = high / (M + 1) - last / (M + 1), step = quarter > 1 ? quarter : 1;
            Wide<T> above[M] = {};
            all([&](Wide<T> x, long long) {
                const Key key = key_of(x);
                const Wide<T> own = weight(x);
                for (int m = 0; m < M; ++m) above[m] += key > start + (m + 1) * step ? own : 0;
            });
            reduce<Sum>(above);
            int m = 0;
            for (; m < M && above[m] >= limit; ++m) last += step;
            if (m < M && last + step < high) high = last + step;
        }
        return high - 1;
    }
};

// Choose a token of each row among those without `mask`. Of the logits, divided by the temperature, the top_k largest
// remain, of these the fewest with the probability top_p, and of these all within min_p, a logarithm, of the largest.
// The first one at which their cumulative probability exceeds a uniform number is chosen; without numbers, the first.
// Step counts[row] reads its number from uniforms, (steps, rows), and stores (id, log-probability) in found, (steps,
// rows, 2): NaN in rows without a finite logit. The order of sums depends on n only.
template <typename T, typename F>
__global__ void __launch_bounds__(sizeof(T) == 8 ? 512 : 1024)
    choose(const T* logits, long long* tokens, long long* counts, const bool* mask, const F* uniforms,
           const double* settings, F* found, long long rows, long long n, double temperature, double top_k,
           double top_p, double min_p)
{
    typedef Wide<T> W;
    const int V = Logits<T>::V;
    const W divisor = settings ? settings[0] : temperature, most = settings ? settings[1] : top_k;
    const W share = settings ? settings[2] : top_p, range = settings ? settings[3] : min_p;
    FOR_ROWS(row, rows) {
        const long long count = counts ? counts[row] : 0, place = count * rows + row;
        const Logits<T> own = {logits + row * n, mask, n, aligned<V>(logits, n)};
        W top = -infinity(), sum = 0, total = 0, least = -infinity(), mass = 0, id = -n;
        own.all([&](W x, long long) { top = maximum(top, x); });
        top = reduced<Max>(top);
        own.all([&](W x, long long) { sum += exponential(x - top); });
        sum = reduced<Sum>(sum);
        const auto high = key_of(top);
        auto last = key_of(W(-infinity())) - 1;  // those with larger keys remain
        const W best = top / divisor;
        const auto weight = [&](W x) {
            return key_of(x) > last && x / divisor >= least ? exponential(x / divisor - best) : W(0);
        };
        if (most > 0) last = own.cut(last, high, most, [](W) { return W(1); });
        if (share < 1) {
            own.all([&](W x, long long) { total += weight(x); });
            last = own.cut(last, high, share * reduced<Sum>(total), weight);
        }
        least = best + range;
        // A thread has neighbors, so that all earlier ones are those of earlier threads.
        const long long size = (n + blockDim.x * V - 1) / (blockDim.x * V) * V, first = threadIdx.x * size;
        const long long end = first + size < n ? first + size : n;
        own.visit(first, end, V, [&](W x, long long) { mass += weight(x); });
        W before = sum_before(mass, total);
        total = reduced<Max>(mass > 0 ? before + mass : W(0));
        const W goal = uniforms ? W(uniforms[place]) * total : W(0);
        mass = 0;
        own.visit(first, end, V, [&](W x, long long i) {
            const W added = weight(x);
            mass += added;
            if (added > 0 && id == -n && (before + mass > goal || before + mass >= total)) id = -i;
        });
        id = -reduced<Max>(id);
        if (threadIdx.x == 0) {
            const long long token = id < n ? (long long)id : 0;
            found[place * 2] = token;
            found[place * 2 + 1] = upcast(logits[row * n + token]) - top - logarithm(sum);
            if (tokens) tokens[row] = token;
            if (counts) counts[row] = count + 1;
        }
    }
}
