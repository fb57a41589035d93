// Attention without scores in memory (FlashAttention-2: Dao, 2023), in float32 on CUDA cores, always in the same order:
// what is computed for a row depends neither on other rows nor on the size of the batch. First by tiles: a block has a
// tile of N rows of one head, and reads the other rows tile by tile.

const int THREADS = 128, LANES = 16;  // a row of scores has 16 lanes; N / 8 rows share them

// Sizes, and the strides in elements of arrays (batch, heads, length, features) and (batch, heads, queries, keys).
struct Layout {
    int heads, shared_heads, queries, keys, features, width;
    int before, after;  // keys that a query sees in each direction; the last query is at the last key
    long long query[3], key[3], value[3], g[3], new_key[3], new_value[3], mask[4], bias[4], dropout_mask[4];
};

// Rows of a tile, padded so that lanes read them from different banks.
template <int N, int D> struct alignas(16) Rows {
    float row[N][D + 4];
    __device__ float* operator[](int i) { return row[i]; }
    __device__ const float* operator[](int i) const { return row[i]; }
};

template <int D> struct TileSize {
    static const int N = D > 64 ? 16 : 32, R = N / 8, C = N / LANES, E = D / LANES, W = E < 4 ? E : 4;
};

__device__ inline int lane() { return threadIdx.x % LANES; }
__device__ inline int row_group() { return threadIdx.x / LANES; }

// The place of element e of a thread in a row of features: W neighbors at a time.
template <int W> __device__ inline int column(int e) { return e / W * LANES * W + lane() * W + e % W; }

__device__ inline int least(int a, int b) { return a < b ? a : b; }

// The start of the tile that has a row, or of the first one.
template <int N> __device__ inline int first_tile(int row) { return row < 0 ? 0 : row / N * N; }

// The first element of a head.
template <typename T>
__device__ inline T* head_of(T* array, const long long* strides, long long batch, long long head)
{
    return array ? array + batch * strides[0] + head * strides[1] : array;
}

// Load the rows from `first` on; rows and columns that do not exist are zero.
template <int N, int D, typename T>
__device__ inline void load_rows(Rows<N, D>& rows, const T* head, long long stride, int first, int count, int features)
{
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(stride, head) && features % V == 0;
#pragma unroll
    for (int i = threadIdx.x * V; i < N * D; i += THREADS * V) {
        const int row = i / D, start = i % D;
        const int left = first + row < count ? features - start : 0;
        float v[V];
        load(head + (first + row) * stride + start, left, is_full && left > 0, v);
        for (int k = 0; k < V; k += 4)
            store(*reinterpret_cast<const float(*)[4]>(v + k), 4, true, &rows[row][start + k]);
    }
}

// Add a row of a, times rows of b, to the scores of a thread: those of its R rows, and every 16th of the others.
template <int N, int D, int R, int C>
__device__ inline void add_dots(const Rows<N, D>& a, const Rows<N, D>& b, float (&sums)[R][C])
{
    typedef Vector<float, 4> Four;
#pragma unroll 2
    for (int d = 0; d < D; d += 4) {
        Four left[R], right[C];
        for (int r = 0; r < R; ++r) left[r] = *reinterpret_cast<const Four*>(&a[row_group() * R + r][d]);
        for (int c = 0; c < C; ++c) right[c] = *reinterpret_cast<const Four*>(&b[lane() + c * LANES][d]);
        for (int k = 0; k < 4; ++k)
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c) sums[r][c] += left[r].element[k] * right[c].element[k];
    }
}

// Add the rows of b, weighted by the rows of `weights` that the thread has.
template <int N, int D, int R, int E>
__device__ inline void add_weighted(const Rows<N, N>& weights, const Rows<N, D>& b, float (&sums)[R][E])
{
    const int W = TileSize<D>::W;
#pragma unroll 2
    for (int i = 0; i < N; ++i)
        for (int e = 0; e < E; e += W) {
            const Vector<float, W> some = *reinterpret_cast<const Vector<float, W>*>(&b[i][column<W>(e)]);
            for (int r = 0; r < R; ++r)
                for (int k = 0; k < W; ++k) sums[r][e + k] += weights[row_group() * R + r][i] * some.element[k];
        }
}

// Write the R rows of a thread, which are side by side with those of other heads.
template <int D, typename T, int R, int E>
__device__ inline void store_rows(const float (&sums)[R][E], T* to, long long batch, int head, int heads, int first,
                                  int count, int features)
{
    const int W = TileSize<D>::W;
    for (int r = 0; r < R; ++r) {
        const int row = first + row_group() * R + r;
        T* place = to + ((batch * count + row) * heads + head) * features;
        for (int e = 0; e < E && row < count; e += W) {
            const int start = column<W>(e);
            store(*reinterpret_cast<const float(*)[W]>(sums[r] + e), features - start,
                  start < features && aligned<W>(features, to), place + start);
        }
    }
}

template <typename Op> __device__ inline float over_lanes(float value)
{
    for (int other = LANES / 2; other; other /= 2) value = Op::of(value, __shfl_xor_sync(0xffffffffu, value, other));
    return value;
}

// What changes the scores and weights of a head.
template <typename T> struct Edits {
    const bool *mask, *keep;
    const T* bias;
    const Layout& layout;
    int offset;  // the key at which the first query is

    __device__ Edits(const Layout& layout, const bool* mask, const T* bias, const bool* keep, long long batch,
                     long long head)
        : mask(head_of(mask, layout.mask, batch, head)), keep(head_of(keep, layout.dropout_mask, batch, head)),
          bias(head_of(bias, layout.bias, batch, head)), layout(layout),
          offset(layout.keys - layout.queries)
    {
    }
    __device__ bool allows(int query, int key) const
    {
        const int distance = key - query - offset;
        return query < layout.queries && key < layout.keys && -distance <= layout.before && distance <= layout.after &&
               (!mask || mask[query * layout.mask[2] + key * layout.mask[3]]);
    }
    // Bits of the R x C pairs of a thread, of rows from `first` and others from `start` on; rows are queries, or keys.
    template <int R, int C, bool OF_KEYS> __device__ unsigned allowed(int first, int start) const
    {
        unsigned bits = 0;
        for (int i = 0; i < R * C; ++i) {
            const int row = first + row_group() * R + i / C, at = start + lane() + i % C * LANES;
            if (OF_KEYS ? allows(at, row) : allows(row, at)) bits |= 1u << i;
        }
        return bits;
    }
    __device__ float score(float product, float scale, int query, int key) const
    {
        return product * scale + (bias ? upcast(bias[query * layout.bias[2] + key * layout.bias[3]]) : 0.0f);
    }
    // The factor of a weight, given that of weights that are kept.
    __device__ float factor(float kept, int query, int key) const
    {
        return !keep ? 1.0f : keep[query * layout.dropout_mask[2] + key * layout.dropout_mask[3]] ? kept : 0.0f;
    }
};

// log_sums: the logarithms of the sums of exponentials, infinity where a query sees no key; or null.
template <typename T, int D>
__global__ void __launch_bounds__(THREADS, 3)
    attention(const Layout layout, const T* query, const T* key, const T* value, const bool* mask, const T* bias,
              const bool* keep, T* output, float* log_sums, double scale, double kept)
{
    typedef TileSize<D> Size;
    const int N = Size::N, R = Size::R, C = Size::C, E = Size::E;
    __shared__ Rows<N, D> queries, keys, values;
    __shared__ Rows<N, N> weights;
    const int tiles = (layout.queries + N - 1) / N, first = blockIdx.x % tiles * N;
    const int head = blockIdx.x / tiles % layout.heads, shared = head / (layout.heads / layout.shared_heads);
    const long long batch = blockIdx.x / tiles / layout.heads;
    const Edits<T> edits(layout, mask, bias, keep, batch, head);
    query = head_of(query, layout.query, batch, head);
    key = head_of(key, layout.key, batch, shared);
    value = head_of(value, layout.value, batch, shared);
    load_rows<N, D>(queries, query, layout.query[2], first, layout.queries, layout.features);
    float sums[R][E] = {}, tops[R], totals[R] = {};
    for (int r = 0; r < R; ++r) tops[r] = -infinity();
    for (int start = first_tile<N>(first + edits.offset - layout.before),
             end = least(first + N + edits.offset + layout.after, layout.keys);
         start < end; start += N) {
        const unsigned allowed = edits.template allowed<R, C, false>(first, start);
        if (!__syncthreads_or(allowed)) continue;  // and all threads have read the tiles
        load_rows<N, D>(keys, key, layout.key[2], start, layout.keys, layout.features);
        load_rows<N, D>(values, value, layout.value[2], start, layout.keys, layout.width);
        __syncthreads();
        float scores[R][C] = {};
        add_dots<N, D>(queries, keys, scores);
        for (int r = 0; r < R; ++r) {
            const int row = first + row_group() * R + r;
            float top = tops[r];
            for (int c = 0; c < C; ++c) {
                const int at = start + lane() + c * LANES;
                const bool is_allowed = allowed >> (r * C + c) & 1;
                scores[r][c] = is_allowed ? edits.score(scores[r][c], (float)scale, row, at) : -infinity();
                top = maximum(top, scores[r][c]);
            }
            top = over_lanes<Max>(top);
            const float base = top == -infinity() ? 0.0f : top, change = exponential_for<T>(tops[r] - base);
            tops[r] = top;
            totals[r] *= change;
            for (int e = 0; e < E; ++e) sums[r][e] *= change;
            for (int c = 0; c < C; ++c) {
                const int at = start + lane() + c * LANES;
                const float weight = exponential_for<T>(scores[r][c] - base);
                totals[r] += weight;
                weights[row_group() * R + r][lane() + c * LANES] =
                    weight == 0 ? 0.0f : weight * edits.factor((float)kept, row, at);
            }
        }
        __syncthreads();
        add_weighted<N, D>(weights, values, sums);
    }
    for (int r = 0; r < R; ++r) {
        const int row = first + row_group() * R + r;
        const float total = over_lanes<Sum>(totals[r]);
        for (int e = 0; e < E; ++e) sums[r][e] *= total == 0 ? 0.0f : 1.0f / total;
        if (log_sums && lane() == 0 && row < layout.queries)
            log_sums[(batch * layout.heads + head) * layout.queries + row] =
                total == 0 ? infinity() : tops[r] + logarithm(total);
    }
    store_rows<D>(sums, output, batch, head, layout.heads, first, layout.queries, layout.width);
}

// The cotangents of queries, or of keys and values (`OF_KEYS`), whose blocks read the queries of all heads that share
// them. Those of queries write `corrections`, the sums of each row of g times the output; the others read them.
template <typename T, int D, bool OF_KEYS>
__global__ void __launch_bounds__(THREADS, 3)
    attention_vjp(const Layout layout, const T* query, const T* key, const T* value, const bool* mask, const T* bias,
                  const bool* keep, const T* output, const T* g, const float* log_sums, float* corrections, T* dfirst,
                  T* dsecond, double scale, double kept)
{
    typedef TileSize<D> Size;
    const int N = Size::N, R = Size::R, C = Size::C, E = Size::E;
    __shared__ Rows<N, D> own[2], others[2];
    __shared__ Rows<N, N> weights[OF_KEYS ? 2 : 1];
    const int rows = OF_KEYS ? layout.keys : layout.queries, tiles = (rows + N - 1) / N;
    const int heads = OF_KEYS ? layout.shared_heads : layout.heads, group = layout.heads / layout.shared_heads;
    const int first = blockIdx.x % tiles * N, own_head = blockIdx.x / tiles % heads;
    const int shared = OF_KEYS ? own_head : own_head / group;
    const long long batch = blockIdx.x / tiles / heads;
    const T* of_keys[2] = {head_of(key, layout.key, batch, shared), head_of(value, layout.value, batch, shared)};
    float sums[2][R][E] = {};
    for (int head = OF_KEYS ? shared * group : own_head, stop = OF_KEYS ? head + group : head + 1; head < stop; ++head) {
        const Edits<T> edits(layout, mask, bias, keep, batch, head);
        const T* of_queries[2] = {head_of(query, layout.query, batch, head), head_of(g, layout.g, batch, head)};
        const long long strides[2][2] = {{layout.query[2], layout.g[2]}, {layout.key[2], layout.value[2]}};
        const long long row_0 = (batch * layout.heads + head) * layout.queries;
        const auto read = [&](Rows<N, D>(&to)[2], bool from_keys, int start) {
            for (int i = 0; i < 2; ++i)
                load_rows<N, D>(to[i], from_keys ? of_keys[i] : of_queries[i], strides[from_keys][i], start,
                                from_keys ? layout.keys : layout.queries, i ? layout.width : layout.features);
        };
        float log_sum[OF_KEYS ? C : R], correction[OF_KEYS ? C : R];
        if (!OF_KEYS || head == shared * group) read(own, OF_KEYS, first);
        if constexpr (!OF_KEYS) {
            __syncthreads();
            for (int r = 0; r < R; ++r) {
                const int row = first + row_group() * R + r;
                float sum = 0;
                for (int d = lane(); d < layout.width && row < rows; d += LANES)
                    sum += own[1][row - first][d] *
                           upcast(output[((batch * rows + row) * layout.heads + head) * layout.width + d]);
                correction[r] = over_lanes<Sum>(sum);
                log_sum[r] = row < rows ? log_sums[row_0 + row] : infinity();
                if (lane() == 0 && row < rows) corrections[row_0 + row] = correction[r];
            }
        }
        const int near = OF_KEYS ? first - edits.offset : first + edits.offset;
        int start = first_tile<N>(near - (OF_KEYS ? layout.after : layout.before));
        const int end = least(near + N + (OF_KEYS ? layout.before : layout.after), OF_KEYS ? layout.queries : layout.keys);
        for (; start < end; start += N) {
            const unsigned allowed = edits.template allowed<R, C, OF_KEYS>(first, start);
            if (!__syncthreads_or(allowed)) continue;  // and all threads have read the tiles
            read(others, !OF_KEYS, start);
            if constexpr (OF_KEYS)
                for (int c = 0; c < C; ++c) {
                    const int at = start + lane() + c * LANES;
                    log_sum[c] = at < layout.queries ? log_sums[row_0 + at] : infinity();
                    correction[c] = at < layout.queries ? corrections[row_0 + at] : 0.0f;
                }
            __syncthreads();
            float scores[R][C] = {}, dweights[R][C] = {};
            add_dots<N, D>(own[0], others[0], scores);
            add_dots<N, D>(own[1], others[1], dweights);
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c) {
                    const int i = row_group() * R + r, j = lane() + c * LANES, of_query = OF_KEYS ? c : r;
                    const int at = OF_KEYS ? start + j : first + i, to = OF_KEYS ? first + i : start + j;
                    float weight = 0, factor = 0;
                    if (allowed >> (r * C + c) & 1) {
                        const float score = edits.score(scores[r][c], (float)scale, at, to);
                        weight = exponential_for<T>(score - log_sum[of_query]);
                        factor = edits.factor((float)kept, at, to);
                    }
                    weights[0][i][j] = weight * (dweights[r][c] * factor - correction[of_query]) * (float)scale;
                    if constexpr (OF_KEYS) weights[1][i][j] = weight * factor;
                }
            __syncthreads();
            add_weighted<N, D>(weights[0], others[0], sums[0]);
            if constexpr (OF_KEYS) add_weighted<N, D>(weights[1], others[1], sums[1]);
        }
    }
    store_rows<D>(sums[0], dfirst, batch, own_head, heads, first, rows, layout.features);
    if constexpr (OF_KEYS) store_rows<D>(sums[1], dsecond, batch, own_head, heads, first, rows, layout.width);
}

// Attention of few queries. A block computes M queries of a row that share a head of keys and values; `lanes` threads
// together read a key, and their groups take keys in turn, so that the order of sums depends on no later key. Masked
// keys are not read. With `starts`, num_new keys and values of a row belong at its position there: they take part, and
// the block with the first queries stores them.
template <typename T, int M>
__global__ void __launch_bounds__(256)
    attend(const Layout layout, const T* query, T* keys, T* values, const bool* mask, const T* bias, const T* new_keys,
           const T* new_values, const long long* starts, T* output, double scale, long long num_new, long long lanes)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value, U = M == 1 && sizeof(T) > 2 ? 4 : 2;  // more keys at once would spill
    const int per_head = layout.heads / layout.shared_heads, all = per_head * layout.queries, chunks = (all + M - 1) / M;
    const long long row = blockIdx.x / chunks / layout.shared_heads;
    const int shared = blockIdx.x / chunks % layout.shared_heads, first_query = blockIdx.x % chunks * M;
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = blockDim.x / lanes, from = lane * V;
    const int left = layout.features - from;
    const long long start = starts ? starts[row] : layout.keys;
    const auto is_aligned = [](const T* array, const long long* strides) {
        return aligned<V>(array, strides[0] | strides[1] | strides[2]);
    };
    const bool is_full = left >= V && is_aligned(query, layout.query) && is_aligned(keys, layout.key) &&
                         is_aligned(values, layout.value) && is_aligned(new_keys, layout.new_key) &&
                         is_aligned(new_values, layout.new_value);
    keys = head_of(keys, layout.key, row, shared) + from;
    values = head_of(values, layout.value, row, shared) + from;
    new_keys = head_of(new_keys, layout.new_key, row, shared) + from;
    new_values = head_of(new_values, layout.new_value, row, shared) + from;
    int head[M], place[M];  // of the queries
    W q[M][V], top[M], sum[M], total[M][V];
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const int index = least(first_query + m, all - 1);
        head[m] = shared * per_head + index / layout.queries;
        place[m] = index % layout.queries;
        load(head_of(query, layout.query, row, head[m]) + place[m] * layout.query[2] + from, left, is_full, q[m]);
        top[m] = -infinity();
        sum[m] = 0;
        for (int k = 0; k < V; ++k) total[m][k] = 0;
    }
    const auto edits = [&](int m) { return Edits<T>(layout, mask, bias, nullptr, row, head[m]); };
    for (int begin = group; begin - group < layout.keys; begin += groups * U) {  // a warp's threads get on together
        Vector<T, V> key[U], value[U];
        unsigned seen[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const int j = begin + u * groups;
            seen[u] = 0;
            for (int m = 0; m < M; ++m)
                if (edits(m).allows(place[m], j)) seen[u] |= 1 << m;
            const bool is_new = j >= start && j < start + num_new && j < layout.keys;
            if (seen[u] || is_new) {
                const long long i = j - start;
                key[u] = load<V>(is_new ? new_keys + i * layout.new_key[2] : keys + j * layout.key[2], left, is_full);
                value[u] =
                    load<V>(is_new ? new_values + i * layout.new_value[2] : values + j * layout.value[2], left, is_full);
            }
            if (is_new && first_query == 0)
                for (int k = 0; k < V; ++k)
                    if (k < left) {
                        keys[j * layout.key[2] + k] = key[u].element[k];
                        values[j * layout.value[2] + k] = value[u].element[k];
                    }
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const int j = begin + u * groups;
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
                score = edits(m).score(score, (float)scale, place[m], j);
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
        if (first_query + m < all)
            for (int i = threadIdx.x; i < layout.features; i += blockDim.x) {
                W y = 0;
                for (int other = 0; other < groups; ++other) y += partial[other * (int)lanes * V + i];
                y = denominator == 0 ? W(0) : y / denominator;
                downcast(y, output[((row * layout.heads + head[m]) * layout.queries + place[m]) * layout.features + i]);
            }
        __syncthreads();
    }
}
