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
