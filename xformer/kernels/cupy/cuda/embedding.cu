// Rows of a table by id, and their gradient: ids are sorted, and the rows of one id summed in the order in which they
// came, a piece of at most `piece` sorted places at a time. Places are numbers 0 .. count - 1 of sorted ids.

// An id that is no row gives NaN.
template <typename T>
__global__ void gather(const T* table, const long long* ids, T* y, long long count, long long rows, long long n)
{
    const int V = Pack<T>::size;
    const bool whole = aligned<V>(table, n) && aligned<V>(y, n);
    ROWS(place, count) {
        const long long id = ids[place];
        const bool known = id >= 0 && id < rows;
        PLACES(i, n) {
            Wide<T> v[V];
            if (known) {
                load(table + id * n + i, n - i, whole, v);
            } else {
                for (int k = 0; k < V; ++k) v[k] = not_a_number();
            }
            store(v, n - i, whole, y + place * n + i);
        }
    }
}

// A block sums the rows of one id that stand in one piece, from `place` on, where such rows begin. Rows that are all
// of their id go to dtable; of the others, those that begin in an earlier piece go to heads, those that end in a later
// one to tails, both (pieces, n).
template <typename T>
__global__ void scatter_pieces(const T* g, const long long* order, const long long* sorted, T* dtable,
                               Wide<T>* heads, Wide<T>* tails, long long count, long long rows, long long n,
                               long long piece)
{
    const int V = Pack<T>::size;
    const bool whole = aligned<V>(g, n) && aligned<V>(dtable, n) && aligned<V>(heads, n) && aligned<V>(tails, n);
    ROWS(place, count) {
        const long long id = sorted[place], of = place / piece;
        const bool follows = place > 0 && sorted[place - 1] == id;
        if ((follows && place % piece) || id < 0 || id >= rows) continue;
        long long end = (of + 1) * piece;
        if (end > count) end = count;
        const bool goes_on = end < count && sorted[end] == id;
        PLACES(i, n) {
            Wide<T> v[V], total[V] = {};
            for (long long at = place; at < end && sorted[at] == id; ++at) {
                load(g + order[at] * n + i, n - i, whole, v);
                for (int k = 0; k < V; ++k) total[k] += v[k];
            }
            if (follows)
                store(total, n - i, whole, heads + of * n + i);
            else if (goes_on)
                store(total, n - i, whole, tails + of * n + i);
            else
                store(total, n - i, whole, dtable + id * n + i);
        }
    }
}

// A block brings together the sums of the id that begins in its piece and goes on in the next.
template <typename T>
__global__ void scatter_join(const long long* sorted, const Wide<T>* heads, const Wide<T>* tails, T* dtable,
                             long long count, long long rows, long long n, long long piece)
{
    const int V = Pack<T>::size;
    const bool whole = aligned<V>(dtable, n) && aligned<V>(heads, n) && aligned<V>(tails, n);
    ROWS(of, (count - 1) / piece) {
        const long long first = of * piece, next = first + piece, id = sorted[next - 1];
        const bool begins = sorted[first] != id || first == 0 || sorted[first - 1] != id;
        if (sorted[next] != id || !begins || id < 0 || id >= rows) continue;
        PLACES(i, n) {
            Wide<T> v[V], total[V];
            load(tails + of * n + i, n - i, whole, total);
            for (long long at = next; at < count && sorted[at] == id; at += piece) {
                load(heads + at / piece * n + i, n - i, whole, v);
                for (int k = 0; k < V; ++k) total[k] += v[k];
            }
            store(total, n - i, whole, dtable + id * n + i);
        }
    }
}
