// What cuDNN's attention needs beside queries, keys and values: a bias that masks keys, lengths, and rows of zeros.

const int NONE = 1 << 30;  // the first key of a row that may attend to none
const float MASKED = -65504;  // the lowest float16: -inf in a whole row would give NaN
const float NO_KEYS = 1e30f;  // the logarithm of a sum for which all weights are zero, also in the derivative

// A mask and a bias, broadcast to (batch, heads, queries, keys); strides in elements.
struct Masks {
    int batch, heads, rows, queries, keys, row_stride;
    long long mask[4], bias[4];
};

// A block writes a row of (batch, heads, rows) of the sum, with `row_stride` elements, and its first key. Lengths are
// those of all queries and keys or, if `padded`, the last key that a mask allows, at least 1: cuDNN would not write the
// output of a row without keys. A row without keys gets zeros, so that its logsumexp stays finite.
template <typename T>
__global__ void inputs(const Masks sizes, const bool* mask, const T* bias, T* sum, int* firsts, int* query_lengths,
                       int* key_lengths, long long sentences, long long causal, long long padded)
{
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; key_lengths && i < sentences;
         i += (long long)gridDim.x * blockDim.x) {
        query_lengths[i] = sizes.queries;
        if (!padded) key_lengths[i] = sizes.keys;
    }
    FOR_ROWS(row, (long long)sizes.batch * sizes.heads * sizes.rows) {
        const long long place[3] = {row / sizes.rows / sizes.heads, row / sizes.rows % sizes.heads, row % sizes.rows};
        long long of_mask = 0, of_bias = 0;
        for (int axis = 0; axis < 3; ++axis) {
            of_mask += place[axis] * sizes.mask[axis];
            of_bias += place[axis] * sizes.bias[axis];
        }
        const auto bias_of = [&](int key) { return upcast(bias[of_bias + key * sizes.bias[3]]); };
        const auto is_kept = [&](int key) { return !mask || mask[of_mask + key * sizes.mask[3]]; };
        const auto allows = [&](int key) { return is_kept(key) && (!bias || bias_of(key) != -infinity()); };
        float ends[2] = {-NONE, 1};  // the first key, negative, and the last one of the mask plus 1
        for (int key = threadIdx.x; key < sizes.keys; key += blockDim.x) {
            if (allows(key)) ends[0] = maximum(ends[0], (float)-key);
            if (is_kept(key)) ends[1] = key + 1;
        }
        reduce<Max>(ends);
        const int first = -(int)ends[0];
        const int last = causal && sizes.rows > 1 ? (int)place[2] + sizes.keys - sizes.queries : NONE - 1;
        for (int key = threadIdx.x; key < sizes.keys; key += blockDim.x) {
            const float value = !allows(key) ? MASKED : bias ? bias_of(key) : 0.0f;
            downcast(first > last ? 0.0f : value, sum[row * sizes.row_stride + key]);
        }
        if (threadIdx.x == 0) {
            firsts[row] = first;
            if (padded && place[1] + place[2] == 0)
                for (long long i = place[0]; i < sentences; i += sizes.batch) key_lengths[i] = (int)ends[1];
        }
    }
}

// Zero the rows of (batch, queries, heads, features) without keys, of which there are few, and set their `log_sums`. The
// strides are those of `firsts`, of an axis of size 1 zero.
template <typename T>
__global__ void clear_rows(T* output, float* log_sums, const int* firsts, long long rows, long long heads,
                           long long queries, long long features, long long batch_stride, long long head_stride,
                           long long query_stride, long long last)
{
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < rows; i += step) {
        const long long batch = i / queries / heads, head = i / queries % heads, query = i % queries;
        if (firsts[batch * batch_stride + head * head_stride + query * query_stride] <= query + last) continue;
        T* row = output + ((batch * queries + query) * heads + head) * features;
        for (int k = 0; k < features; ++k) row[k] = T();
        if (log_sums) log_sums[i] = NO_KEYS;
    }
}

// Zero the rows of two arrays (sentences, keys, size) beyond lengths, which cuDNN does not write.
template <typename T>
__global__ void clear_beyond(T* first, T* second, const int* lengths, long long keys, long long size,
                             long long second_size, long long blocks)
{
    const int V = VectorSize<T>::value;
    const long long sentence = blockIdx.x / blocks, part = blockIdx.x % blocks * blockDim.x + threadIdx.x;
    T* const arrays[2] = {first, second};
    const long long sizes[2] = {size, second_size};
    for (int a = 0; a < 2; ++a)
        for (long long i = lengths[sentence] * sizes[a] + part * V; i < keys * sizes[a]; i += blocks * blockDim.x * V)
            *reinterpret_cast<Vector<T, V>*>(arrays[a] + sentence * keys * sizes[a] + i) = Vector<T, V>();
}
