// Layer norm (`centered`) and RMS norm, with one block per row.

// Rows with larger elements are scaled first, so that squares do not overflow.
const float MAX_UNSCALED = 1e15f;

// A row whose vectors the threads keep in registers, R each, or read again whenever they need them, if R is 0.
template <typename T, int R> struct Row {
    static const int V = VectorSize<T>::value;
    const T* from;
    const int n;
    const bool is_full;
    Vector<T, V> kept[R ? R : 1];

    __device__ Row(const T* from, long long n, bool is_full) : from(from), n(n), is_full(is_full)
    {
        if (R) each([&](int r, int i) { kept[r] = ::load<V>(this->from + i, this->n - i, this->is_full); });
    }

    // Call f(r, i) for each vector of this thread, its number and its column.
    template <typename F> __device__ void each(F f) const
    {
        if (R) {
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const int i = (r * blockDim.x + threadIdx.x) * V;
                if (i < n) f(r, i);
            }
        } else {
            for (int i = threadIdx.x * V; i < n; i += blockDim.x * V) f(0, i);
        }
    }

    template <typename W> __device__ void load(int r, int i, W (&to)[V]) const
    {
        if (R)
            upcast(kept[r], to);
        else
            ::load(from + i, n - i, is_full, to);
    }
};

template <int R, typename T, typename P>
__device__ inline void normalize_rows(const T* x, const P* weight, const P* bias, T* y, Wide<T>* means,
                                      Wide<T>* inverses, long long rows, long long n, bool centered, Wide<T> epsilon,
                                      bool is_full)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value;
    FOR_ROWS(row, rows) {
        const Row<T, R> values(x + row * n, n, is_full);
        W v[V], totals[2] = {0, 0}, scale = 1, squares = 0;  // totals: the sum, the largest magnitude
        values.each([&](int r, int i) {
            values.load(r, i, v);
            for (int k = 0; k < V; ++k) {
                totals[0] += v[k];
                totals[1] = Max::of(totals[1], magnitude(v[k]));
            }
        });
        reduce<SumAndMax>(totals);
        if (totals[1] > MAX_UNSCALED) {
            scale = 1 / totals[1];
            W total = 0;
            values.each([&](int r, int i) {
                values.load(r, i, v);
                for (int k = 0; k < V; ++k) total += v[k] * scale;
            });
            totals[0] = reduced<Sum>(total);
        }
        const W mean = centered ? totals[0] / n : W(0);
        values.each([&](int r, int i) {
            values.load(r, i, v);
            for (int k = 0; k < V; ++k) {
                const W deviation = v[k] * scale - mean;
                if (k < n - i) squares += deviation * deviation;
            }
        });
        const W inverse = 1 / square_root(reduced<Sum>(squares) / n + epsilon * scale * scale);
        values.each([&](int r, int i) {
            W w[V], b[V];
            values.load(r, i, v);
            load(weight + i, n - i, is_full, w);
            if (bias) load(bias + i, n - i, is_full, b);
            for (int k = 0; k < V; ++k) {
                v[k] = (v[k] * scale - mean) * inverse * w[k];
                if (bias) v[k] += b[k];
            }
            store(v, n - i, is_full, y + row * n + i);
        });
        if (means && threadIdx.x == 0) {
            means[row] = mean / scale;
            inverses[row] = inverse * scale;
        }
    }
}

// y = (x - mean) / sigma * weight + bias; the means and inverses (1 / sigma) of rows are saved unless null.
template <typename T, typename P>
__global__ void BOUNDS(2)
    normalize(const T* x, const P* weight, const P* bias, T* y, Wide<T>* means, Wide<T>* inverses, long long rows,
              long long n, long long centered, double epsilon)
{
    const int V = VectorSize<T>::value, R = 4;
    const bool is_full = aligned<V>(x, n) && aligned<V>(y, n) && aligned<V>(weight, n) && aligned<V>(bias, n);
    if (is_full && n <= R * V * blockDim.x)
        normalize_rows<R>(x, weight, bias, y, means, inverses, rows, n, centered, (Wide<T>)epsilon, true);
    else
        normalize_rows<0>(x, weight, bias, y, means, inverses, rows, n, centered, (Wide<T>)epsilon, is_full);
}

template <int R, typename T, typename P>
__device__ inline void normalize_rows_vjp(const T* g, const T* x, const P* weight, const Wide<T>* means,
                                          const Wide<T>* inverses, T* dx, long long rows, long long n, bool centered,
                                          bool is_full)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value;
    FOR_ROWS(row, rows) {
        const Row<T, R> cotangents(g + row * n, n, is_full), values(x + row * n, n, is_full);
        const W mean = means[row], inverse = inverses[row];
        W h[V], hat[V], w[V], totals[2] = {0, 0};
        const auto read = [&](int r, int i) {
            cotangents.load(r, i, h);
            values.load(r, i, hat);
            load(weight + i, n - i, is_full, w);
            for (int k = 0; k < V; ++k) {
                h[k] *= w[k];
                hat[k] = (hat[k] - mean) * inverse;
            }
        };
        values.each([&](int r, int i) {
            read(r, i);
            for (int k = 0; k < V; ++k) {
                totals[0] += h[k];
                totals[1] += h[k] * hat[k];  // h is zero beyond the row
            }
        });
        reduce<Sum>(totals);
        const W mean_h = centered ? totals[0] / n : W(0), mean_product = totals[1] / n;
        values.each([&](int r, int i) {
            read(r, i);
            for (int k = 0; k < V; ++k) h[k] = inverse * (h[k] - mean_h - hat[k] * mean_product);
            store(h, n - i, is_full, dx + row * n + i);
        });
    }
}

// With x^ the normalized rows and h = g weight: dx = (h - mean(h) - x^ mean(h x^)) / sigma.
template <typename T, typename P>
__global__ void BOUNDS(2)
    normalize_vjp(const T* g, const T* x, const P* weight, const Wide<T>* means, const Wide<T>* inverses, T* dx,
                  long long rows, long long n, long long centered)
{
    const int V = VectorSize<T>::value, R = 2;
    const bool is_full = aligned<V>(g, n) && aligned<V>(x, n) && aligned<V>(weight, n) && aligned<V>(dx, n);
    if (is_full && n <= R * V * blockDim.x)
        normalize_rows_vjp<R>(g, x, weight, means, inverses, dx, rows, n, centered, true);
    else
        normalize_rows_vjp<0>(g, x, weight, means, inverses, dx, rows, n, centered, is_full);
}

// Sum g x^ and, unless dbias is null, g over chunks of rows; dweight and dbias: (chunks, n).
template <typename T>
__global__ void normalize_parameters_vjp(const T* g, const T* x, const Wide<T>* means, const Wide<T>* inverses,
                                         Wide<T>* dweight, Wide<T>* dbias, long long rows, long long n,
                                         long long chunk_rows)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(g, n) && aligned<V>(x, n);
    const Tile<V> tile(n);
    W a[V], b[V], weight_sums[V] = {}, bias_sums[V] = {};
    FOR_CHUNK_ROWS(row, tile, chunk_rows, rows) {
        if (tile.first >= n) break;
        load(g + row * n + tile.first, n - tile.first, is_full, a);
        load(x + row * n + tile.first, n - tile.first, is_full, b);
        for (int k = 0; k < V; ++k) {
            weight_sums[k] += a[k] * ((b[k] - means[row]) * inverses[row]);
            bias_sums[k] += a[k];
        }
    }
    tile.write(weight_sums, n, dweight);
    if (dbias) tile.write(bias_sums, n, dbias);
}
