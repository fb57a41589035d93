// Embedding and its gradient, for which the ids are sorted and the rows of g of each id are summed in their order. The
// sorted positions are cut into segments; the rows of one id may be spread over several.

// y = scale * table[ids]; an id out of range gives NaN.
template <typename T>
__global__ void gather(const T* table, const long long* ids, T* y, long long count, long long rows, long long n,
                       double scale)
{
    const Wide<T> factor = (Wide<T>)scale;
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(table, n) && aligned<V>(y, n);
    FOR_ROWS(position, count) {
        const long long id = ids[position];
        const bool is_valid = id >= 0 && id < rows;
        FOR_COLUMNS(i, n) {
            Wide<T> v[V];
            if (is_valid) {
                load(table + id * n + i, n - i, is_full, v);
                for (int k = 0; k < V; ++k) v[k] *= factor;
            } else {
                for (int k = 0; k < V; ++k) v[k] = not_a_number();
            }
            store(v, n - i, is_full, y + position * n + i);
        }
    }
}

const int GROUP = 4;  // rows that a thread loads at a time

// A block sums the scaled rows of one id in one segment, if they begin at its position. If it has all rows of the id,
// the sum goes to dtable; else, if the id begins in an earlier segment, to heads, and otherwise to tails, both of shape
// (segments, n).
template <typename T>
__global__ void scatter_segments(const T* g, const long long* order, const long long* sorted, T* dtable,
                               Wide<T>* heads, Wide<T>* tails, long long count, long long rows, long long n,
                               long long segment_size, double scale)
{
    const Wide<T> factor = (Wide<T>)scale;
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(g, n) && aligned<V>(dtable, n) && aligned<V>(heads, n) && aligned<V>(tails, n);
    FOR_ROWS(position, count) {
        const long long id = sorted[position], segment = position / segment_size;
        const bool follows = position > 0 && sorted[position - 1] == id;
        if ((follows && position % segment_size) || id < 0 || id >= rows) continue;
        long long end = (segment + 1) * segment_size;
        if (end > count) end = count;
        const bool continues = end < count && sorted[end] == id;
        FOR_COLUMNS(i, n) {
            Wide<T> v[V], total[V] = {};
            for (long long at = position; at < end && sorted[at] == id; at += GROUP) {
                Vector<T, V> loaded[GROUP];
                bool is_more[GROUP];
                const long long first = order[at];
                for (int r = 0; r < GROUP; ++r) {
                    const long long place = at + r < end ? at + r : at, next = order[place];
                    is_more[r] = at + r < end && sorted[place] == id;
                    loaded[r] = load<V>(g + (is_more[r] ? next : first) * n + i, n - i, is_full);
                }
                for (int r = 0; r < GROUP; ++r) {
                    upcast(loaded[r], v);
                    for (int k = 0; k < V; ++k)
                        if (is_more[r]) total[k] += factor * v[k];
                }
            }
            if (follows)
                store(total, n - i, is_full, heads + segment * n + i);
            else if (continues)
                store(total, n - i, is_full, tails + segment * n + i);
            else
                store(total, n - i, is_full, dtable + id * n + i);
        }
    }
}

// A block adds the sums of the id that begins in its segment and continues in the next.
template <typename T>
__global__ void scatter_join(const long long* sorted, const Wide<T>* heads, const Wide<T>* tails, T* dtable,
                             long long count, long long rows, long long n, long long segment_size)
{
    const int V = VectorSize<T>::value;
    const bool is_full = aligned<V>(dtable, n) && aligned<V>(heads, n) && aligned<V>(tails, n);
    FOR_ROWS(segment, (count - 1) / segment_size) {
        const long long first = segment * segment_size, next = first + segment_size, id = sorted[next - 1];
        const bool begins = sorted[first] != id || first == 0 || sorted[first - 1] != id;
        if (sorted[next] != id || !begins || id < 0 || id >= rows) continue;
        FOR_COLUMNS(i, n) {
            Wide<T> v[V], total[V];
            load(tails + segment * n + i, n - i, is_full, total);
            for (long long at = next; at < count && sorted[at] == id; at += segment_size) {
                load(heads + at / segment_size * n + i, n - i, is_full, v);
                for (int k = 0; k < V; ++k) total[k] += v[k];
            }
            store(total, n - i, is_full, dtable + id * n + i);
        }
    }
}
