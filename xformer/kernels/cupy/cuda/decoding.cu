// Decoding without the host: the choice of tokens. Ids are exact in float below 2^24.

// Choose the largest logit of each row among tokens that are not masked, the first of equal ones, and compute its
// log-probability: NaN in rows without a finite logit. Row r of step counts[r] is stored as (id, log-probability) in
// found, (slots, rows, 2), whose slots steps take in turn. The order of sums depends on n only.
template <typename T, typename F>
__global__ void choose(const T* logits, const bool* mask, F* found, long long* tokens, long long* counts,
                       long long rows, long long n, long long slots)
{
    typedef Wide<T> W;
    const int V = 4;
    const bool is_full = aligned<V>(logits, n);
    FOR_ROWS(row, rows) {
        const auto read = [&](long long i, W (&v)[V]) {
            load(logits + row * n + i, n - i, is_full, v);
            for (int k = 0; k < V; ++k)
                if (i + k >= n || (mask && mask[i + k])) v[k] = -infinity();
        };
        W v[V], own = -infinity(), place = -n;
        FOR_COLUMNS(i, n) {
            read(i, v);
            for (int k = 0; k < V; ++k)
                if (v[k] > own) {
                    own = v[k];
                    place = -(i + k);
                }
        }
        const W top = reduced<Max>(own), best = -reduced<Max>(own == top ? place : W(-n));
        W sum = 0;
        FOR_COLUMNS(i, n) {
            read(i, v);
            for (int k = 0; k < V; ++k) sum += exponential(v[k] - top);
        }
        sum = reduced<Sum>(sum);
        if (threadIdx.x == 0) {
            const long long step = counts ? counts[row]++ : 0, id = best < n ? (long long)best : 0;
            F* to = found + (step % slots * rows + row) * 2;
            to[0] = id;
            to[1] = 0 - logarithm(sum);
            if (tokens) tokens[row] = id;
        }
    }
}

// An array broadcast to (rows, heads, queries, keys), or none.
template <typename P> struct Broadcast {
    const P* first;
    long long row, head, query, key;

    __device__ const P& at(long long r, long long h, long long q, long long k) const
    {
        return first[r * row + h * head + q * query + k * key];
    }
};

// Attention of few queries. A block computes M queries of a row that share a head of keys and values; `lanes` threads
// together read a key, and their groups take keys in turn, so that the order of sums depends on no other row and on no
// later key. Masked keys are not read. With `starts`, new keys and values of a row belong at its position there: they
// take part, and the block with the first queries stores them.
template <typename T, int M>
__global__ void __launch_bounds__(256)
    attend(const T* query, T* keys, T* values, const T* new_keys, const T* new_values, const long long* starts,
           const bool* mask, const T* bias, T* output, long long heads, long long kv_heads, long long queries,
           long long size, long long num_new, long long features, double scale, long long lanes, long long query_row,
           long long query_head, long long query_query, long long key_row, long long key_head, long long key_key,
           long long new_row, long long new_head, long long new_key, long long new_value_row, long long new_value_head,
           long long new_value_key, long long mask_row, long long mask_head, long long mask_query, long long mask_key,
           long long bias_row, long long bias_head, long long bias_query, long long bias_key)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value, U = M == 1 ? 4 : 2;
    const Broadcast<bool> allowed = {mask, mask_row, mask_head, mask_query, mask_key};
    const Broadcast<T> added = {bias, bias_row, bias_head, bias_query, bias_key};
    const long long all = heads / kv_heads * queries, chunks = (all + M - 1) / M, block = blockIdx.x;
    const long long row = block / chunks / kv_heads, kv_head = block / chunks % kv_heads, first = block % chunks * M;
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = blockDim.x / lanes, from = lane * V;
    const long long left = features - from, start = starts ? starts[row] : size;
    const bool is_full = left >= V && aligned<V>(query, query_row | query_head | query_query) &&
                         aligned<V>(keys, key_row | key_head | key_key) && aligned<V>(values, 0) &&
                         aligned<V>(new_keys, new_row | new_head | new_key) &&
                         aligned<V>(new_values, new_value_row | new_value_head | new_value_key);
    keys += row * key_row + kv_head * key_head + from;
    values += row * key_row + kv_head * key_head + from;
    new_keys += row * new_row + kv_head * new_head + from;
    new_values += row * new_value_row + kv_head * new_value_head + from;
    long long head[M], place[M];  // of the queries
    W q[M][V], top[M], sum[M], total[M][V];
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const long long index = first + m < all ? first + m : all - 1;
        head[m] = kv_head * (heads / kv_heads) + index / queries;
        place[m] = index % queries;
        load(query + row * query_row + head[m] * query_head + place[m] * query_query + from, left, is_full, q[m]);
        top[m] = -infinity();
        sum[m] = 0;
        for (int k = 0; k < V; ++k) total[m][k] = 0;
    }
    for (long long begin = group; begin - group < size; begin += groups * U) {  // the threads of a warp get on together
        Vector<T, V> key[U], value[U];
        unsigned seen[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const long long j = begin + u * groups;
            seen[u] = 0;
            for (int m = 0; m < M; ++m)
                if (j < size && (!mask || allowed.at(row, head[m], place[m], j))) seen[u] |= 1 << m;
            const bool is_new = j >= start && j < start + num_new && j < size;
            if (seen[u] || is_new) {
                key[u] = load<V>(is_new ? new_keys + (j - start) * new_key : keys + j * key_key, left, is_full);
                value[u] = load<V>(is_new ? new_values + (j - start) * new_value_key : values + j * key_key, left, is_full);
            }
            if (is_new && first == 0)
                for (int k = 0; k < V; ++k)
                    if (k < left) {
                        keys[j * key_key + k] = key[u].element[k];
                        values[j * key_key + k] = value[u].element[k];
                    }
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const long long j = begin + u * groups;
            W k_wide[V], v_wide[V];
            upcast(key[u], k_wide);
            upcast(value[u], v_wide);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                const bool is_seen = seen[u] >> m & 1;
                W score = 0;
                if (is_seen)
                    for (int k = 0; k < V; ++k) score += q[m][k] * k_wide[k];
                for (int other = lanes / 2; other; other /= 2) score += __shfl_xor_sync(0xffffffffu, score, other);
                if (!is_seen) continue;
                score *= (W)scale;
                if (bias) score += upcast(added.at(row, head[m], place[m], j));
                if (score == -infinity()) continue;
                const W before = top[m];
                top[m] = maximum(before, score);
                const W factor = before == -infinity() ? W(0) : exponential(before - top[m]);
                const W weight = exponential(score - top[m]);
                sum[m] = sum[m] * factor + weight;
                for (int k = 0; k < V; ++k) total[m][k] = total[m][k] * factor + weight * v_wide[k];
            }
        }
    }
    __shared__ W partial[256 * V];
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const W highest = reduced<Max>(top[m]);
        const W factor = top[m] == -infinity() && sum[m] == 0 ? W(0) : exponential(top[m] - highest);
        const W denominator = reduced<Sum>(lane == 0 ? sum[m] * factor : W(0));
        for (int k = 0; k < V; ++k) partial[threadIdx.x * V + k] = total[m][k] * factor;
        __syncthreads();
        if (first + m < all)
            for (int i = threadIdx.x; i < features; i += blockDim.x) {
                W y = 0;
                for (int other = 0; other < groups; ++other) y += partial[other * (int)lanes * V + i];
                y = denominator == 0 ? W(0) : y / denominator;
                downcast(y, output[((row * heads + head[m]) * queries + place[m]) * features + i]);
            }
        __syncthreads();
    }
}
