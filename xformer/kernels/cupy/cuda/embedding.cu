// Embedding and its gradient, for which the ids are sorted and the rows of g of each id are summed in their order. The
// sorted positions are cut into segments; the rows of one id may be spread over several.

// y = scale * table[ids]; an id out of range gives NaN.
template <typename T>
__global__ void gather(const T* table, const long long* ids, T* y, long long count, long long rows, long long n,
                       double scale)
{
    const bool is_full = aligned<VectorSize<T>::value>(n, table, y);
    FOR_ROWS(position, count) {
        const T* from = ids[position] >= 0 && ids[position] < rows ? table + ids[position] * n : nullptr;
        copy_row(from, y + position * n, n, is_full, Wide<T>(not_a_number()), Wide<T>(scale));
    }
}

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
    const bool is_full = aligned<V>(n, g, dtable, heads, tails);
    FOR_ROWS(position, count) {
        const long long id = sorted[position], segment = position / segment_size;
        const bool follows = position > 0 && sorted[position - 1] == id;
        if ((follows && position % segment_size) || id < 0 || id >= rows) continue;
        long long end = (segment + 1) * segment_size;
        if (end > count) end = count;
        long long stop = position + 1, last = end;  // of the rows of the id, found by bisection
        while (stop < last) {
            const long long middle = (stop + last) / 2;
            (sorted[middle] == id ? stop : last) = sorted[middle] == id ? middle + 1 : middle;
        }
        const bool continues = end < count && sorted[end] == id;
        FOR_COLUMNS(i, n) {
            Wide<T> v[V], total[V] = {};
#pragma unroll 4
            for (long long at = position; at < stop; ++at) {
                load(g + order[at] * n + i, n - i, is_full, v);
                for (int k = 0; k < V; ++k) total[k] += factor * v[k];
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
    const bool is_full = aligned<V>(n, dtable, heads, tails);
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
