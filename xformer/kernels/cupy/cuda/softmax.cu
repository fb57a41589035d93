// Softmax and cross-entropy. A thread loads R vectors of V elements of a row at a time; if that is all it has to load, the
// row is read once. V is 1 if vectors are not aligned.

// The maximum of some numbers, and the sum of exp(number - maximum), where -inf does not count.
template <typename T> struct OnlineSoftmax {
    typedef Wide<T> W;
    W top = -infinity(), sum = 0;

    // The maximum to subtract: -inf - -inf would be NaN.
    __device__ W base() const { return top == -infinity() ? W(0) : top; }

    // Take some numbers into the maximum.
    template <int R, int V> __device__ void raise(const W (&v)[R][V])
    {
        const W old_top = top;
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < V; ++k) top = maximum(v[r][k], top);  // ignores NaN, which propagates through the sum
        if (sum != 0) sum *= exponential_for<T>(old_top - base());
    }

    // Add some numbers, of which none is above the maximum, and replace them by exp(number - base()).
    template <int R, int V> __device__ void add(W (&v)[R][V])
    {
        const W low = base();
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < V; ++k) sum += v[r][k] = exponential_for<T>(v[r][k] - low);
    }

    // Combine the totals of the threads of a row, and add up their numbers `other`.
    __device__ void join(int row_threads, W& other)
    {
        const W own_top = top;
        top = reduced<Max>(top, row_threads);
        W sums[2] = {sum == 0 ? W(0) : sum * exponential(own_top - top), other};
        reduce<Sum>(sums, row_threads);
        sum = sums[0];
        other = sums[1];
    }
};

// Load the vectors of this thread from a chunk of a row, and call f(v, i) with each of them and its place in the chunk.
// Numbers beyond the row, of which `left` are left, are -inf.
template <int R, int V, typename T, typename W, typename F>
__device__ inline void read(const T* chunk, long long left, int threads, int lane, W (&v)[R][V], F f)
{
    const int size = left < R * V * threads ? left : R * V * threads;
    Packed<T, V> loaded[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int i = (r * threads + lane) * V;
        if (i < size) loaded[r].load(chunk + i);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int i = (r * threads + lane) * V;
        if (i < size) {
            loaded[r].upcast(v[r]);
            f(v[r], i);
        } else {
            for (int k = 0; k < V; ++k) v[r][k] = -infinity();
        }
    }
}

// A mask broadcast to (outer, middle, inner, n), with strides in bytes.
struct Mask {
    const bool* first;
    long long middle, inner, strides[4];

    __device__ const bool* row(long long row) const
    {
        return first + row / inner / middle * strides[0] + row / inner % middle * strides[1] + row % inner * strides[2];
    }
};

// `FITS`: all elements of a row fit into registers.
template <int R, int V, bool FITS, typename T>
__device__ inline void softmax_rows(const T* x, const Mask& mask, T* y, long long rows, long long n, int threads)
{
    typedef Wide<T> W;
    const int chunk = R * V * threads;
    const SharedRows shared(threads);
    FOR_SHARED_ROWS(row, rows, shared) {
        const bool* allowed = mask.first ? mask.row(row) : 0;
        const long long length = row < rows ? n : 0;
        W v[R][V];
        const auto read_at = [&](long long start) {
            read(x + row * n + start, length - start, threads, shared.lane, v, [&](W (&some)[V], int i) {
                if (!allowed) return;
                const Vector<bool, V> keep = load<V>(allowed + (start + i) * (V == 1 ? mask.strides[3] : 1), V, true);
                for (int k = 0; k < V; ++k)
                    if (!keep.element[k]) some[k] = -infinity();
            });
        };
        OnlineSoftmax<T> total;
        if (FITS) {
            read_at(0);
            total.raise(v);
            total.top = reduced<Max>(total.top, threads);
            total.add(v);
            total.sum = reduced<Sum>(total.sum, threads);
        } else {
            for (long long start = 0; start < n; start += chunk) {
                read_at(start);
                total.raise(v);
                total.add(v);
            }
            W none = 0;
            total.join(threads, none);
        }
        const W inverse = total.sum == 0 ? W(0) : reciprocal(total.sum);
        for (long long start = 0; FITS ? start == 0 : start < n; start += chunk) {
            if (!FITS) {
                read_at(start);
                total.add(v);
            }
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const int i = (r * threads + shared.lane) * V;
                for (int k = 0; k < V; ++k) v[r][k] *= inverse;
                if (i < length - start) store(v[r], V, true, y + row * n + start + i);
            }
        }
    }
}

// Masked elements have probability zero, also in fully masked rows.
template <typename T, int R>
__global__ void BOUNDS((sizeof(T) == 8 ? 1 : R == 1 ? 3 : 2))
    softmax(const T* x, const bool* mask, T* y, long long rows, long long n, long long middle, long long inner,
            long long stride0, long long stride1, long long stride2, long long stride3, long long threads)
{
    const int V = VectorSize<T>::value;
    const Mask masks = {mask, middle, inner, {stride0, stride1, stride2, stride3}};
    const bool is_mask_aligned = !mask || (stride3 == 1 && aligned<V>(stride0 | stride1 | stride2, mask));
    if (is_mask_aligned && aligned<V>(n, x, y) && n <= R * V * threads)
        softmax_rows<R, V, true>(x, masks, y, rows, n, threads);
    else
        softmax_rows<V / 2, 1, false>(x, masks, y, rows, n, threads);
}

// dx = y (g - sum(g y))
template <typename T>
__global__ void softmax_vjp(const T* g, const T* y, T* dx, long long rows, long long n, long long threads)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(n, g, y, dx);
    const SharedRows shared(threads);
    FOR_SHARED_ROWS(row, rows, shared) {
        const long long length = row < rows ? n : 0;
        W a[V], p[V], total = 0;
        for (long long i = shared.lane * V; i < length; i += shared.threads * V) {
            load(g + row * n + i, n - i, is_full, a);
            load(y + row * n + i, n - i, is_full, p);
            for (int k = 0; k < V; ++k) total += a[k] * p[k];
        }
        total = reduced<Sum>(total, shared.threads);
        for (long long i = shared.lane * V; i < length; i += shared.threads * V) {
            load(g + row * n + i, n - i, is_full, a);
            load(y + row * n + i, n - i, is_full, p);
            for (int k = 0; k < V; ++k) a[k] = p[k] * (a[k] - total);
            store(a, n - i, is_full, dx + row * n + i);
        }
    }
}

// The total of the elements of this thread, each of which f gets, too.
template <int R, int V, typename T, typename F>
__device__ inline OnlineSoftmax<T> total_of_logits(const T* from, long long n, F f)
{
    OnlineSoftmax<T> total;
    Wide<T> v[R][V];
    for (long long start = 0; start < n; start += R * V * blockDim.x) {
        read(from + start, n - start, blockDim.x, threadIdx.x, v, [&](Wide<T> (&some)[V], int) {
            for (int k = 0; k < V; ++k) f(some[k]);
        });
        total.raise(v);
        total.add(v);
    }
    return total;
}

// The largest element of each row, and log(sum(exp(x - largest))), which is NaN if there is no finite one or a NaN.
template <typename T>
__global__ void BOUNDS((sizeof(T) == 8 ? 1 : 2))
    logsumexp(const T* x, T* tops, T* log_totals, long long rows, long long n)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value, R = 2;
    const bool is_aligned = aligned<V>(n, x);
    FOR_ROWS(row, rows) {
        W nans = 0;
        const auto count = [&](W v) { nans += v != v; };
        OnlineSoftmax<T> total = is_aligned ? total_of_logits<R, V>(x + row * n, n, count)
                                            : total_of_logits<V / 2, 1>(x + row * n, n, count);
        total.join(blockDim.x, nans);
        const W top = nans != 0 ? W(not_a_number()) : total.top;
        if (threadIdx.x == 0) {
            downcast(top, tops[row]);
            downcast(top - top == 0 ? logarithm(total.sum) : W(not_a_number()), log_totals[row]);
        }
    }
}

// Compute the loss of each row and, unless `dlogits` is null, g (p - q + 2 z log(Z) p), with q the smoothed one-hot
// distribution, Z the partition function, and g 1 if it is null. A label out of range gives NaN; a padded row is not read.
template <typename T>
__global__ void BOUNDS((sizeof(T) == 8 ? 1 : 2))
    cross_entropy(const T* logits, const long long* labels, const Wide<T>* g, Wide<T>* losses, T* dlogits, long long rows,
                  long long n, long long pad, double smoothing, double z_loss)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value, R = 2;
    const bool is_aligned = aligned<V>(n, logits), is_full = is_aligned && aligned<V>(n, dlogits);
    const W low = (W)(smoothing / n), high = 1 - (W)smoothing;
    FOR_ROWS(row, rows) {
        const T* from = logits + row * n;
        T* to = dlogits + row * n;
        const long long label = labels[row];
        if (label == pad || label < 0 || label >= n) {
            const W value = label == pad ? W(0) : W(not_a_number());
            if (threadIdx.x == 0) losses[row] = value;
            for (long long i = threadIdx.x; dlogits && i < n; i += blockDim.x) downcast(value, to[i]);
            continue;
        }
        const W own = upcast(from[label]), origin = own == -infinity() ? W(0) : own;  // large numbers would round the sum
        W sum = 0;
        const auto add = [&](W v) { sum += smoothing != 0 ? v - origin : W(0); };
        OnlineSoftmax<T> total =
            is_aligned ? total_of_logits<R, V>(from, n, add) : total_of_logits<V / 2, 1>(from, n, add);
        total.join(blockDim.x, sum);
        const W log_total = logarithm(total.sum), log_partition = log_total + total.top;
        if (threadIdx.x == 0) {
            W loss = high * (log_total + (total.top - own));
            if (smoothing != 0) loss += (W)smoothing * (log_total + (total.top - origin - sum / n));
            if (z_loss != 0) loss += (W)z_loss * (log_partition * log_partition);
            losses[row] = loss;
        }
        if (!dlogits) continue;
        const W weight = g ? g[row] : W(1), factor = 1 + 2 * (W)z_loss * log_partition;
        W v[V];
        FOR_COLUMNS(i, n) {  // the row is in the cache
            load(from + i, n - i, is_full, v);
            for (int k = 0; k < V; ++k) {
                v[k] = exponential_for<T>((v[k] - total.top) - log_total) * factor - low;
                v[k] = (v[k] - (i + k == label ? high : W(0))) * weight;
            }
            store(v, n - i, is_full, to + i);
        }
    }
}
