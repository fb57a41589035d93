// Rotation of the pairs of features (i, i + half); features from 2 half on are copied.

// x: (batch, heads, length, size), with the steps of the first three axes; cosine and sine: (length, half); y: (batch,
// length, heads, size). A block takes the rows of all heads at a position. sign: -1 rotates back.
template <typename T>
__global__ void rotate(const T* x, const T* cosine, const T* sine, T* y, long long batch, long long heads,
                       long long length, long long size, long long half, long long x_batch, long long x_head,
                       long long x_row, double sign)
{
    typedef Wide<T> W;
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(x_batch | x_head | x_row, x) && aligned<V>(size, y) && aligned<V>(half, cosine, sine);
    const unsigned pairs = (half + V - 1) / V, vectors = pairs + (size - 2 * half + V - 1) / V;
    FOR_ROWS(row, batch * length) {
        const long long sentence = row / length, place = row - sentence * length;
        for (unsigned item = threadIdx.x; item < heads * vectors; item += blockDim.x) {
            const unsigned head = item / vectors, vector = item - head * vectors;
            const T* from = x + sentence * x_batch + head * x_head + place * x_row;
            T* to = y + (row * heads + head) * size;
            W first[V], second[V], c[V], s[V];
            if (vector >= pairs) {
                const long long i = 2 * half + (long long)(vector - pairs) * V;
                load(from + i, size - i, is_full, first);
                store(first, size - i, is_full, to + i);
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
