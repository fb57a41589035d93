// Layer norm (`centered`) and RMS norm, with a warp per row, or a block if rows are long.

// A row, or the sum of two unless `other` is null. Threads keep R vectors in registers, or read them again if R is 0.
template <typename T, int R> struct Row {
    static const int V = VectorSize<T>::value;
    typedef Wide<T> W;
    const T *from, *other;
    const int n;
    const SharedRows& shared;
    const bool is_full;
    Packed<T, V> kept[R ? R : 1];

    __device__ Row(const T* from, const T* other, long long n, const SharedRows& shared, bool is_full)
        : from(from), other(other), n(n), shared(shared), is_full(is_full)
    {
        if (R) each([&](int r, int i) { kept[r].set(read(i)); });
    }

    __device__ Vector<T, V> read(int i) const
    {
        Vector<T, V> loaded = ::load<V>(from + i, n - i, is_full);
        if (!other) return loaded;
        W a[V], b[V];
        ::upcast(loaded, a);
        ::load(other + i, n - i, is_full, b);
        for (int k = 0; k < V; ++k) downcast(a[k] + b[k], loaded.element[k]);
        return loaded;
    }

    // Call f(r, i) for each vector of this thread, its number and its column.
    template <typename F> __device__ void each(F f) const
    {
#pragma unroll
        for (int r = 0; r < (R ? R : (n - 1) / (shared.threads * V) + 1); ++r) {
            const int i = (r * shared.threads + shared.lane) * V;
            if (i < n) f(r, i);
        }
    }

    __device__ void load(int r, int i, W (&to)[V]) const
    {
        if (R)
            kept[r].upcast(to);
        else
            ::upcast(read(i), to);
    }
};

template <int R, typename T, typename P>
__device__ inline void normalize_rows(const T* x, const T* other, const P* weight, const P* bias, T* total, T* y,
                                      Wide<T>* means, Wide<T>* inverses, long long rows, long long n, bool centered,
                                      Wide<T> epsilon, const SharedRows& shared, bool is_full)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value;
    FOR_SHARED_ROWS(row, rows, shared) {
        const long long start = row * n;
        const Row<T, R> values(x + start, other ? other + start : 0, row < rows ? n : 0, shared, is_full);
        W v[V], scale = 1, mean, squares;
        for (bool is_scaled = false;; is_scaled = true) {
            W sum = 0;
            squares = 0;
            values.each([&](int r, int i) {
                values.load(r, i, v);
                for (int k = 0; k < V; ++k) sum += v[k] * scale;
            });
            mean = centered ? reduced<Sum>(sum, shared.threads) / n : W(0);
            values.each([&](int r, int i) {
                values.load(r, i, v);
                for (int k = 0; k < V; ++k) {
                    const W deviation = v[k] * scale - mean;
                    if (is_full || k < n - i) squares += deviation * deviation;
                }
            });
            squares = reduced<Sum>(squares, shared.threads);
            if (squares < infinity() || is_scaled) break;
            W largest = 0;  // the squares overflow, unless the row has NaN or infinity: scale it, and do that again
            values.each([&](int r, int i) {
                values.load(r, i, v);
                for (int k = 0; k < V; ++k) largest = maximum(largest, fabs(v[k]));
            });
            scale = 1 / reduced<Max>(largest, shared.threads);
        }
        const W inverse = 1 / sqrt(squares / n + epsilon * scale * scale);
        values.each([&](int r, int i) {
            W w[V], b[V];
            values.load(r, i, v);
            if (total) store(v, n - i, is_full, total + start + i);
            load(weight + i, n - i, is_full, w);
            if (bias) load(bias + i, n - i, is_full, b);
            for (int k = 0; k < V; ++k) {
                v[k] = (v[k] * scale - mean) * inverse * w[k];
                if (bias) v[k] += b[k];
            }
            store(v, n - i, is_full, y + start + i);
        });
        if (means && shared.lane == 0 && row < rows) {
            means[row] = mean / scale;
            inverses[row] = inverse * scale;
        }
    }
}

// y = (x - mean) / sigma * weight + bias; the means and inverses (1 / sigma) of rows are saved unless null. Unless `other`
// is null, x + other takes the place of x, and is stored unless `total` is null.
template <typename T, typename P>
__global__ void BOUNDS((sizeof(T) == 8 ? 1 : 2))
    normalize(const T* x, const T* other, const P* weight, const P* bias, T* total, T* y, Wide<T>* means,
              Wide<T>* inverses, long long rows, long long n, long long centered, double epsilon, long long threads)
{
    const int V = VectorSize<T>::value, R = 4;
    const bool is_full = aligned<V>(n, x, other, total, y, weight, bias);
    const SharedRows shared(threads);
    const Wide<T> added = epsilon;
    if (is_full && n <= R * V * threads)
        normalize_rows<R>(x, other, weight, bias, total, y, means, inverses, rows, n, centered, added, shared, true);
    else
        normalize_rows<0>(x, other, weight, bias, total, y, means, inverses, rows, n, centered, added, shared, is_full);
}

// Store the sums over all rows of the block, of which this thread has R vectors of columns.
template <int R, int V, typename W>
__device__ inline void write_sums(const W (&sums)[R][V], const SharedRows& shared, long long n, W* to)
{
    __shared__ W partial[4][32 * R * V];  // of the rows of a block, if a warp has a row
    const int count = blockDim.x / shared.threads;
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < V; ++k) {
            const int column = (r * shared.threads + shared.lane) * V + k;
            if (count == 1 && column < n) to[column] = sums[r][k];
            if (count > 1) partial[shared.place][column] = sums[r][k];
        }
    if (count == 1) return;
    __syncthreads();
    for (int column = threadIdx.x; column < n; column += blockDim.x) {
        W total = 0;
        for (int place = 0; place < count; ++place) total += partial[place][column];
        to[column] = total;
    }
    __syncthreads();  // before another call overwrites it
}

// With x^ the normalized rows and h = g weight: dx = (h - mean(h) - x^ mean(h x^)) / sigma, plus `addend` unless null, and
// the sums of g x^ and, with `has_bias`, of g over the rows of each block: (blocks, n) or (blocks, 2 n).
template <typename T, typename P>
__global__ void BOUNDS(1)
    normalize_vjp(const T* g, const T* x, const P* weight, const Wide<T>* means, const Wide<T>* inverses,
                  const T* addend, T* dx, Wide<T>* sums, long long rows, long long n, long long centered,
                  long long has_bias, long long threads)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value, R = 2;
    const bool is_full = aligned<V>(n, g, x, weight, addend, dx);
    const SharedRows shared(threads);
    W of_weight[R][V] = {}, of_bias[R][V] = {};
    FOR_SHARED_ROWS(row, rows, shared) {
        const long long length = row < rows ? n : 0;
        const Row<T, R> cotangents(g + row * n, 0, length, shared, is_full), values(x + row * n, 0, length, shared, is_full);
        const W mean = length ? means[row] : W(0), inverse = length ? inverses[row] : W(0);
        W h[V], hat[V], w[V], totals[2] = {0, 0};
        const auto read = [&](int r, int i) {
            cotangents.load(r, i, h);
            values.load(r, i, hat);
            load(weight + i, n - i, is_full, w);
            for (int k = 0; k < V; ++k) hat[k] = (hat[k] - mean) * inverse;
        };
        values.each([&](int r, int i) {
            read(r, i);
            for (int k = 0; k < V; ++k) {
                of_weight[r][k] += h[k] * hat[k];  // h is zero beyond the row
                of_bias[r][k] += h[k];
                totals[0] += h[k] * w[k];
                totals[1] += h[k] * w[k] * hat[k];
            }
        });
        reduce<Sum>(totals, shared.threads);
        const W mean_h = centered ? totals[0] / n : W(0), mean_product = totals[1] / n;
        values.each([&](int r, int i) {
            read(r, i);
            for (int k = 0; k < V; ++k) h[k] = inverse * (h[k] * w[k] - mean_h - hat[k] * mean_product);
            if (addend) {
                load(addend + row * n + i, n - i, is_full, w);
                for (int k = 0; k < V; ++k) h[k] += w[k];
            }
            store(h, n - i, is_full, dx + row * n + i);
        });
    }
    sums += blockIdx.x * n * (has_bias ? 2 : 1);
    write_sums(of_weight, shared, n, sums);
    if (has_bias) write_sums(of_bias, shared, n, sums + n);
}
