// Rotation of the pairs of features (i, i + half); features from 2 half on are copied.

// x and y: (batch, heads, length, size), with the steps of the first three axes; cosine and sine: (length, half). A block
// takes the rows of all heads at a position. sign: -1 rotates back.
template <typename T>
__global__ void rotate(const T* x, const T* cosine, const T* sine, T* y, long long batch, long long heads,
                       long long length, long long size, long long half, long long x_batch, long long x_head,
                       long long x_row, long long y_batch, long long y_head, long long y_row, double sign)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(x, x_batch | x_head | x_row) && aligned<V>(y, y_batch | y_head | y_row)
        && aligned<V>(cosine, half) && aligned<V>(sine, half);
    const unsigned pairs = (half + V - 1) / V, vectors = pairs + (size - 2 * half + V - 1) / V;
    FOR_ROWS(row, batch * length) {
        const long long sentence = row / length, place = row - sentence * length;
        for (unsigned item = threadIdx.x; item < heads * vectors; item += blockDim.x) {
            const unsigned head = item / vectors, vector = item - head * vectors;
            const T* from = x + sentence * x_batch + head * x_head + place * x_row;
            T* to = y + sentence * y_batch + head * y_head + place * y_row;
            W first[V], second[V], c[V], s[V];
            if (vector >= pairs) {
                const long long i = 2 * half + (long long)(vector - pairs) * V;
                const bool is_whole = is_full && size % V == 0;
                load(from + i, size - i, is_whole, first);
                store(first, size - i, is_whole, to + i);
                continue;
            }
            const long long i = (long long)vector * V, left = half - i;
            load(from + i, left, is_full, first);
            load(from + half + i, left, is_full, second);
            load(cosine + place * half + i, left, is_full, c);
            load(sine + place * half + i, left, is_full, s);
            for (int k = 0; k < V; ++k) {
                const W a = first[k], b = second[k], t = s[k] * (W)sign;
                first[k] = a * c[k] - b * t;
                second[k] = b * c[k] + a * t;
            }
            store(first, left, is_full, to + i);
            store(second, left, is_full, to + half + i);
        }
    }
}
