// Layer norm (`centered`) and RMS norm, with one block per row.

// Rows with larger elements are scaled first, so that squares do not overflow.
const float MAX_UNSCALED = 1e15f;

// y = (x - mean) / sigma * weight + bias; the means and inverses (1 / sigma) of rows are saved unless null.
template <typename T, typename P>
__global__ void normalize(const T* x, const P* weight, const P* bias, T* y, Wide<T>* means, Wide<T>* inverses,
                          long long rows, long long n, long long centered, double epsilon)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(x, n) && aligned<V>(y, n) && aligned<V>(weight, n) && aligned<V>(bias, n);
    FOR_ROWS(row, rows) {
        const T* from = x + row * n;
        W v[V], w[V], b[V], largest = 0, total = 0, scale = 1, squares = 0;
        FOR_COLUMNS(i, n) {
            load(from + i, n - i, is_full, v);
            for (int k = 0; k < V; ++k) {
                largest = Max::of(largest, magnitude(v[k]));
                total += v[k];
            }
        }
        largest = reduced<Max>(largest);
        if (largest > MAX_UNSCALED) {
            scale = 1 / largest;
            total = 0;
            FOR_COLUMNS(i, n) {
                load(from + i, n - i, is_full, v);
                for (int k = 0; k < V; ++k) total += v[k] * scale;
            }
        }
        const W mean = centered ? reduced<Sum>(total) / n : W(0);
        FOR_COLUMNS(i, n) {
            load(from + i, n - i, is_full, v);
            for (int k = 0; k < V; ++k) {
                const W deviation = v[k] * scale - mean;
                if (k < n - i) squares += deviation * deviation;
            }
        }
        const W inverse = 1 / square_root(reduced<Sum>(squares) / n + (W)epsilon * scale * scale);
        FOR_COLUMNS(i, n) {
            load(from + i, n - i, is_full, v);
            load(weight + i, n - i, is_full, w);
            if (bias) load(bias + i, n - i, is_full, b);
            for (int k = 0; k < V; ++k) {
                v[k] = (v[k] * scale - mean) * inverse * w[k];
                if (bias) v[k] += b[k];
            }
            store(v, n - i, is_full, y + row * n + i);
        }
        if (means && threadIdx.x == 0) {
            means[row] = mean / scale;
            inverses[row] = inverse * scale;
        }
    }
}

// With x^ the normalized rows and h = g weight: dx = (h - mean(h) - x^ mean(h x^)) / sigma.
template <typename T, typename P>
__global__ void normalize_vjp(const T* g, const T* x, const P* weight, const Wide<T>* means, const Wide<T>* inverses,
                              T* dx, long long rows, long long n, long long centered)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(g, n) && aligned<V>(x, n) && aligned<V>(weight, n) && aligned<V>(dx, n);
    FOR_ROWS(row, rows) {
        const W mean = means[row], inverse = inverses[row];
        W h[V], hat[V], w[V], totals[2] = {0, 0};
        const auto read = [&](long long i) {
            load(g + row * n + i, n - i, is_full, h);
            load(x + row * n + i, n - i, is_full, hat);
            load(weight + i, n - i, is_full, w);
            for (int k = 0; k < V; ++k) {
                h[k] *= w[k];
                hat[k] = (hat[k] - mean) * inverse;
            }
        };
        FOR_COLUMNS(i, n) {
            read(i);
            for (int k = 0; k < V; ++k) {
                totals[0] += h[k];
                totals[1] += h[k] * hat[k];  // h is zero beyond the row
            }
        }
        reduce<Sum>(totals);
        const W mean_h = centered ? totals[0] / n : W(0), mean_product = totals[1] / n;
        FOR_COLUMNS(i, n) {
            read(i);
            for (int k = 0; k < V; ++k) h[k] = inverse * (h[k] - mean_h - hat[k] * mean_product);
            store(h, n - i, is_full, dx + row * n + i);
        }
    }
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
