// The largest elements of rows, sorted. A block streams a row past a buffer: it takes up elements that may be among the
// largest and, when it is full, is sorted and cut.

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

// The sum of the counts of earlier threads, and of all.
__device__ inline int sum_before(int count, int& total)
{
    __shared__ int of_warps[32];
    const int warp = threadIdx.x / 32;
    int sum = count, earlier = 0;
    for (int other = 1; other < 32; other *= 2) {
        const int theirs = __shfl_xor_sync(0xffffffffu, sum, other);
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

// S: size of the buffer, at least k more than the threads load at a time; or n.
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
