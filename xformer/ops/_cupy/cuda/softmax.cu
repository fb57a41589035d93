// Softmax and cross-entropy. A row of softmax has `row_threads`, a block several rows if they are short; a row of
// cross-entropy has one block.

// The maximum of some numbers, and the sum of exp(number - maximum), where -inf does not count.
template <typename W> struct OnlineSoftmax {
    W top = -infinity(), sum = 0;

    template <int V> __device__ void add(const W (&v)[V])
    {
        W new_top = top;
        for (int k = 0; k < V; ++k) new_top = Max::of(v[k], new_top);  // ignores NaN, which propagates through the sum
        const W base = new_top == -infinity() ? W(0) : new_top;
        sum *= exponential(top - base);
        for (int k = 0; k < V; ++k) sum += exponential(v[k] - base);
        top = new_top;
    }

    // Combine the totals of the threads of a row.
    __device__ void join(int row_threads = blockDim.x)
    {
        const W new_top = reduced<Max>(top, row_threads);
        sum = reduced<Sum>(sum == 0 ? W(0) : sum * exponential(top - new_top), row_threads);
        top = new_top;
    }
};

// A mask broadcast to (outer, middle, inner, n), with strides in bytes.
struct Mask {
    const bool* first;
    long long middle, inner, strides[4];

    __device__ const bool* row(long long row) const
    {
        return first + row / inner / middle * strides[0] + row / inner % middle * strides[1] + row % inner * strides[2];
    }
};

// Loop over the rows of this thread, which it shares with others. The threads of a block get on together, so that all of
// them take part in reductions: its last rows may not exist.
#define FOR_SHARED_ROWS(row, rows, row_threads)                                         \
    for (long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / (row_threads); \
         row - threadIdx.x / (row_threads) < (rows); row += (long long)gridDim.x * (blockDim.x / (row_threads)))

// Loop over the columns of a row at which this thread loads vectors.
#define FOR_SHARED_COLUMNS(i, length, row_threads) \
    for (long long i = threadIdx.x % (row_threads) * V; i < (length); i += (row_threads) * V)

// Masked elements have probability zero, also in fully masked rows.
template <typename T>
__global__ void softmax(const T* x, const bool* mask, T* y, long long rows, long long n, long long middle,
                        long long inner, long long stride0, long long stride1, long long stride2, long long stride3,
                        long long threads)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value, row_threads = threads;
    const bool is_full = aligned<V>(x, n) && aligned<V>(y, n);
    const Mask masks = {mask, middle, inner, {stride0, stride1, stride2, stride3}};
    FOR_SHARED_ROWS(row, rows, row_threads) {
        const long long length = row < rows ? n : 0;
        const bool* allowed = mask ? masks.row(row) : 0;
        W v[V];
        OnlineSoftmax<W> total;
        FOR_SHARED_COLUMNS(i, length, row_threads) {
            load(x + row * n + i, n - i, is_full, v);
            for (int k = 0; k < V; ++k)
                if (k >= n - i || (allowed && !allowed[(i + k) * stride3])) v[k] = -infinity();
            total.add(v);
        }
        total.join(row_threads);
        FOR_SHARED_COLUMNS(i, length, row_threads) {
            load(x + row * n + i, n - i, is_full, v);
            for (int k = 0; k < V; ++k) {
                const bool is_visible = k < n - i && v[k] != -infinity() && (!allowed || allowed[(i + k) * stride3]);
                v[k] = is_visible ? exponential(v[k] - total.top) / total.sum : W(0);
            }
            store(v, n - i, is_full, y + row * n + i);
        }
    }
}

// dx = y (g - sum(g y))
template <typename T>
__global__ void softmax_vjp(const T* g, const T* y, T* dx, long long rows, long long n, long long threads)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value, row_threads = threads;
    const bool is_full = aligned<V>(g, n) && aligned<V>(y, n) && aligned<V>(dx, n);
    FOR_SHARED_ROWS(row, rows, row_threads) {
        const long long length = row < rows ? n : 0;
        W a[V], p[V], total = 0;
        FOR_SHARED_COLUMNS(i, length, row_threads) {
            load(g + row * n + i, n - i, is_full, a);
            load(y + row * n + i, n - i, is_full, p);
            for (int k = 0; k < V; ++k) total += a[k] * p[k];
        }
        total = reduced<Sum>(total, row_threads);
        FOR_SHARED_COLUMNS(i, length, row_threads) {
            load(g + row * n + i, n - i, is_full, a);
            load(y + row * n + i, n - i, is_full, p);
            for (int k = 0; k < V; ++k) a[k] = p[k] * (a[k] - total);
            store(a, n - i, is_full, dx + row * n + i);
        }
    }
}

// Compute the loss of each row, its largest logit, and log(sum(exp(logit - largest))). A label out of range gives NaN;
// a padded row is not read.
template <typename T>
__global__ void cross_entropy(const T* logits, const long long* labels, Wide<T>* losses, Wide<T>* tops,
                              Wide<T>* log_totals, long long rows, long long n, long long pad, double smoothing,
                              double z_loss)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(logits, n);
    FOR_ROWS(row, rows) {
        const T* from = logits + row * n;
        const long long label = labels[row];
        const bool is_valid = label >= 0 && label < n;
        if (label == pad || !is_valid) {
            if (threadIdx.x == 0) {
                losses[row] = label == pad ? 0.0f : not_a_number();
                tops[row] = 0;
                log_totals[row] = not_a_number();
            }
            continue;
        }
        W v[V], sum = 0;
        OnlineSoftmax<W> total;
        FOR_COLUMNS(i, n) {
            load(from + i, n - i, is_full, v);
            for (int k = 0; k < V; ++k) {
                sum += v[k];
                if (k >= n - i) v[k] = -infinity();
            }
            total.add(v);
        }
        total.join();
        sum = reduced<Sum>(sum);
        if (threadIdx.x == 0) {
            const W log_total = logarithm(total.sum), log_partition = log_total + total.top;
            W loss = (1 - (W)smoothing) * (log_total + (total.top - upcast(from[label])));
            if (smoothing != 0) loss += (W)smoothing * (log_total + (total.top - sum / n));
            if (z_loss != 0) loss += (W)z_loss * (log_partition * log_partition);
            losses[row] = loss;
            tops[row] = total.top;
            log_totals[row] = log_total;
        }
    }
}

// dlogits = g (p - q + 2 z log(Z) p), with q the smoothed one-hot distribution and Z the partition function.
template <typename T>
__global__ void cross_entropy_vjp(const Wide<T>* g, const T* logits, const long long* labels, const Wide<T>* tops,
                                  const Wide<T>* log_totals, T* dlogits, long long rows, long long n, long long pad,
                                  double smoothing, double z_loss)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(logits, n) && aligned<V>(dlogits, n);
    const W low = (W)(smoothing / n), high = (W)(1 - smoothing + smoothing / n);
    FOR_ROWS(row, rows) {
        const long long label = labels[row];
        const W weight = g[row], top = tops[row], log_total = log_totals[row];
        const W factor = 1 + 2 * (W)z_loss * (log_total + top);
        W v[V];
        FOR_COLUMNS(i, n) {
            load(logits + row * n + i, label == pad ? 0 : n - i, is_full && label != pad, v);
            for (int k = 0; k < V; ++k) {
                const W p = exponential((v[k] - top) - log_total);
                v[k] = label == pad ? W(0) : weight * (p * factor - (i + k == label ? high : low));
            }
            store(v, n - i, is_full, dlogits + row * n + i);
        }
    }
}
