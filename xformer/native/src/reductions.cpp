// Sums and other reductions over any axes, and cumulative sums of integers.
#include "strided.h"

namespace ISA {
namespace {

// --- functions --------------------------------------------------------------------------------------------------------

// `start` is the neutral element of `combine`; inputs of type T are combined as `Total<T>`, which the output has, too.
struct Sum {
    using Inputs = NumbersAndBools;
    template <class T> using Total = std::conditional_t<std::is_integral_v<T>, int64_t, T>;
    template <class T> static constexpr T start = T(0);
    template <class T> static T combine(T a, T b) { return T(Wrapping<T>(a) + Wrapping<T>(b)); }
};
struct Any {
    using Inputs = NumbersAndBools;
    template <class T> using Total = bool;
    template <class T> static constexpr T start = false;
    template <class T> static T combine(T a, T b) { return a | b; }
};
struct Every : Any {
    template <class T> static constexpr T start = true;
    template <class T> static T combine(T a, T b) { return a & b; }
};

// --- contiguous elements -------------------------------------------------------------------------------------------------

constexpr int64_t BLOCK = 1024;

template <class F, int WAYS, class T> T combine_in(const T* x, int64_t count) {
    T totals[WAYS];
    std::copy_n(x, WAYS, totals);
    int64_t i = WAYS;
    for (; i + WAYS <= count; i += WAYS)
        for (int k = 0; k < WAYS; k++) totals[k] = F::combine(totals[k], x[i + k]);
    for (int64_t k = 0; k < count - i; k++) totals[k] = F::combine(totals[k], x[i + k]);
    for (int width = WAYS / 2; width; width /= 2)
        for (int k = 0; k < width; k++) totals[k] = F::combine(totals[k], totals[k + width]);
    return totals[0];
}
// Combine 1 to BLOCK elements.
template <class F, class T> T combine_block(const T* x, int64_t count) {
    return count >= 64 ? combine_in<F, 64>(x, count) : count >= 8 ? combine_in<F, 8>(x, count) : combine_in<F, 1>(x, count);
}

// Combines results of blocks pairwise, as a binary counter carries: rounding errors grow as the logarithm of the number.
template <class F, class T> struct Pairwise {
    T results[40];
    int64_t count = 0;
    int depth = 0;

    void append(T x) {
        for (int64_t rest = count++; rest & 1; rest >>= 1) x = F::combine(results[--depth], x);
        results[depth++] = x;
    }
    T total() const {
        if (!depth) return F::template start<T>;
        T x = results[depth - 1];
        for (int i = depth - 2; i >= 0; i--) x = F::combine(results[i], x);
        return x;
    }
};

// --- layout -------------------------------------------------------------------------------------------------------------

enum { FUNCTION = 1, KEPT, COUNT };  // in `plan`: the function that runs, axes that are kept, elements that become one
constexpr int64_t TILE = 128;  // columns

// Move the axes of array 0 that bit mask i0 has to its end, and merge the axes of either kind. The output, array 1, may
// have these axes with one element, or not at all.
const char* separate_axes(Record& r) {
    Array &x = r.arrays[0], &out = r.arrays[1];
    REQUIRE(x && out, "an array is absent");
    const uint64_t mask = r.integers[0];
    REQUIRE(mask >> x.ndim == 0, "there is no such axis");
    Array kept = x, kept_out = out, reduced = x;
    kept.ndim = reduced.ndim = 0;
    const bool has_ones = out.ndim == x.ndim;
    for (int i = 0, j = 0; i < x.ndim; i++) {
        const bool is_reduced = mask >> i & 1;
        if (!is_reduced || has_ones) {
            REQUIRE(j < out.ndim && out.shape[j] == (is_reduced ? 1 : x.shape[i]), "the output has another shape");
            if (!is_reduced) kept_out.shape[kept.ndim] = out.shape[j], kept_out.strides[kept.ndim] = out.strides[j];
            j++;
        }
        Array& part = is_reduced ? reduced : kept;
        part.shape[part.ndim] = x.shape[i], part.strides[part.ndim++] = x.strides[i];
        if (i == x.ndim - 1) REQUIRE(j == out.ndim, "the output has another shape");
    }
    REQUIRE(x.ndim || !out.ndim, "the output has another shape");
    kept_out.ndim = kept.ndim;
    r.plan[COUNT] = reduced.size();
    const bool is_empty = kept.size() == 0;
    if (!is_empty && r.plan[COUNT]) {
        const Together both{{&kept_out, &kept}, 2}, one{{&reduced}, 1};
        both.sort();
        both.merge();
        one.sort();
        one.merge();
    }
    x.ndim = kept.ndim + reduced.ndim;
    std::copy_n(kept.shape, kept.ndim, x.shape);
    std::copy_n(kept.strides, kept.ndim, x.strides);
    std::copy_n(reduced.shape, reduced.ndim, x.shape + kept.ndim);
    std::copy_n(reduced.strides, reduced.ndim, x.strides + kept.ndim);
    out = kept_out;
    r.plan[KEPT] = kept.ndim;
    r.parts = 0;
    return nullptr;
}

struct Offsets { int64_t x, out; };

// Return the offsets of one element of the output, by its number among the first `axes` axes.
INLINE Offsets offsets_of(const Record& r, int64_t number, int axes) {
    const Array &x = r.arrays[0], &out = r.arrays[1];
    Offsets at{0, 0};
    for (int i = axes - 1; i >= 0; number /= out.shape[i--])
        at.x += number % out.shape[i] * x.strides[i], at.out += number % out.shape[i] * out.strides[i];
    return at;
}

// Call visit(elements, count) for the elements that are combined into one, in blocks of type T.
template <class From, class T, class Visit> INLINE void each_block(const Record& r, const char* start, Visit visit) {
    const Array& x = r.arrays[0];
    const int kept = static_cast<int>(r.plan[KEPT]), last = x.ndim - 1;
    const int64_t count = r.plan[COUNT];
    if (count == 0) return;
    if (last < kept) {  // one element
        const T value = cast<From, T>(*reinterpret_cast<const From*>(start));
        return visit(&value, int64_t(1));
    }
    const int64_t stride = x.strides[last], row = x.shape[last];
    if (std::is_same_v<From, T> && last == kept && stride == sizeof(T)) {
        for (int64_t i = 0; i < count; i += BLOCK)
            visit(reinterpret_cast<const T*>(start) + i, std::min(BLOCK, count - i));
        return;
    }
    T block[BLOCK];
    for (int64_t i = 0; i < count; i += BLOCK) {
        const int64_t n = std::min(BLOCK, count - i);
        for (int64_t k = 0; k < n;) {  // the part of a row that fits
            int64_t number = (i + k) / row, first = (i + k) % row;
            const char* at = start + first * stride;
            for (int axis = last - 1; axis >= kept; number /= x.shape[axis--])
                at += number % x.shape[axis] * x.strides[axis];
            const int64_t length = std::min(n - k, row - first);
            for (int64_t j = 0; j < length; j++) block[k + j] = cast<From, T>(*reinterpret_cast<const From*>(at + j * stride));
            k += length;
        }
        visit(static_cast<const T*>(block), n);
    }
}

// --- reductions ---------------------------------------------------------------------------------------------------------

using Run = void (*)(const Record&, int part);
void run_planned(const Record& r, int part) { reinterpret_cast<Run>(r.plan[FUNCTION])(r, part); }

template <class F, class From> void reduce_rows(const Record& r, int part) {
    using T = typename F::template Total<From>;
    const int64_t first = part * r.plan[STEP], end = std::min(r.arrays[1].size(), first + r.plan[STEP]);
    for (int64_t i = first; i < end; i++) {
        const Offsets at = offsets_of(r, i, static_cast<int>(r.plan[KEPT]));
        Pairwise<F, T> results;
        each_block<From, T>(r, r.arrays[0].data + at.x,
                            [&](const T* x, int64_t n) { results.append(combine_block<F>(x, n)); });
        *reinterpret_cast<T*>(r.arrays[1].data + at.out) = results.total();
    }
}

// If the last kept axis is contiguous: combine rows of up to TILE columns.
template <class F, class From> void reduce_columns(const Record& r, int part) {
    using T = typename F::template Total<From>;
    const Array &x = r.arrays[0], &out = r.arrays[1];
    const int column = static_cast<int>(r.plan[KEPT]) - 1, last = x.ndim - 1;
    const int64_t columns = out.shape[column], tiles = (columns + TILE - 1) / TILE, count = r.plan[COUNT];
    const int64_t first = part * r.plan[STEP], end = std::min(out.size() / columns * tiles, first + r.plan[STEP]);
    constexpr int64_t ROWS_OF_BLOCK = 64;
    for (int64_t tile = first; tile < end; tile++) {
        const int64_t j = tile % tiles * TILE, n = std::min(TILE, columns - j);
        const Offsets at = offsets_of(r, tile / tiles, column);
        auto row = [&](int64_t number) {
            const char* address = x.data + at.x + j * sizeof(From);
            for (int axis = last; axis > column; number /= x.shape[axis--])
                address += number % x.shape[axis] * x.strides[axis];
            return reinterpret_cast<const From*>(address);
        };
        T total[TILE], block[TILE];
        for (int64_t i = 0; i < count; i += ROWS_OF_BLOCK) {
            const From* start = row(i);
            for (int64_t m = 0; m < n; m++) block[m] = cast<From, T>(start[m]);
            int64_t k = i + 1;
            const int64_t rows = std::min(count, i + ROWS_OF_BLOCK);
            for (; k + 4 <= rows; k += 4) {
                const From *a = row(k), *b = row(k + 1), *c = row(k + 2), *d = row(k + 3);
                INDEPENDENT
                for (int64_t m = 0; m < n; m++)
                    block[m] = F::combine(block[m], F::combine(F::combine(cast<From, T>(a[m]), cast<From, T>(b[m])),
                                                               F::combine(cast<From, T>(c[m]), cast<From, T>(d[m]))));
            }
            for (; k < rows; k++) {
                const From* a = row(k);
                for (int64_t m = 0; m < n; m++) block[m] = F::combine(block[m], cast<From, T>(a[m]));
            }
            for (int64_t m = 0; m < n; m++) total[m] = i ? F::combine(total[m], block[m]) : block[m];
        }
        for (int64_t m = 0; m < n; m++)
            *reinterpret_cast<T*>(out.data + at.out + (j + m) * out.strides[column]) = total[m];
    }
}

// name(x, out), i0: bit mask of axes
template <class F> const char* check_reduce(Record& r) {
    if (const char* error = separate_axes(r)) return error;
    const Array &x = r.arrays[0], &out = r.arrays[1];
    const int64_t count = r.plan[COUNT], size = out.size();
    const int last_kept = static_cast<int>(r.plan[KEPT]) - 1;
    const bool by_columns = count && size && last_kept >= 0 && x.strides[last_kept] == x.itemsize() &&
                            !(x.ndim - 1 > last_kept && x.strides[x.ndim - 1] == x.itemsize());
    const char* error = "the function takes no such dtype";
    with_type(typename F::Inputs(), x.type, [&](auto t) {
        using From = decltype(t);
        error = out.type == type_of<typename F::template Total<From>> ? nullptr : "the output has another dtype";
        r.plan[FUNCTION] = reinterpret_cast<int64_t>(by_columns ? reduce_columns<F, From> : reduce_rows<F, From>);
    });
    if (error || !size) return error;
    if (by_columns) split(r, size / x.shape[last_kept] * ((x.shape[last_kept] + TILE - 1) / TILE), count * TILE);
    else split(r, size, std::max<int64_t>(count, 8));
    return nullptr;
}

// --- cumulative sums of integers -----------------------------------------------------------------------------------------------------

constexpr int64_t LINES = 16;  // that are summed together

template <class From> void accumulate(const Record& r, int part) {
    using T = Sum::Total<From>;
    const Array &x = r.arrays[0], &out = r.arrays[1];
    const int axis = x.ndim - 1, line = axis - 1;  // the axes before are `kept`
    const int64_t tiles = (out.shape[line] + LINES - 1) / LINES, count = x.shape[axis];
    const int64_t first = part * r.plan[STEP], end = std::min(out.size() / count / out.shape[line] * tiles, first + r.plan[STEP]);
    for (int64_t tile = first; tile < end; tile++) {
        const int64_t j = tile % tiles * LINES, n = std::min(LINES, out.shape[line] - j);
        const Offsets at = offsets_of(r, tile / tiles, line);
        const char* from = x.data + at.x + j * x.strides[line];
        char* to = out.data + at.out + j * out.strides[line];
        T total[LINES];
        for (int64_t i = 0; i < count; i++, from += x.strides[axis], to += out.strides[axis])
            for (int64_t k = 0; k < n; k++) {
                const T value = static_cast<T>(*reinterpret_cast<const From*>(from + k * x.strides[line]));
                total[k] = i ? Sum::combine(total[k], value) : value;
                *reinterpret_cast<T*>(to + k * out.strides[line]) = total[k];
            }
    }
}

// cumulative_sum(x, out), i0: axis
const char* check_cumulative_sum(Record& r) {
    Array &x = r.arrays[0], &out = r.arrays[1];
    REQUIRE(x && out, "an array is absent");
    const int axis = static_cast<int>(r.integers[0]);
    REQUIRE(r.integers[0] >= 0 && r.integers[0] < x.ndim, "there is no such axis");
    REQUIRE(x.has_shape(out), "the output has another shape");
    const char* error = "the function takes no such dtype";
    with_type(Types<int64_t, bool>(), x.type, [&](auto t) {
        using From = decltype(t);
        error = out.type == type_of<Sum::Total<From>> ? nullptr : "the output has another dtype";
        r.plan[FUNCTION] = reinterpret_cast<int64_t>(static_cast<Run>(accumulate<From>));
    });
    r.parts = 0;
    if (error || out.size() == 0) return error;
    const int64_t count = x.shape[axis], step_x = x.strides[axis], step_out = out.strides[axis];
    const Together both{{&x, &out}, 2};
    for (Array* array : {&x, &out}) {
        array->ndim--;
        std::copy(array->shape + axis + 1, array->shape + array->ndim + 1, array->shape + axis);
        std::copy(array->strides + axis + 1, array->strides + array->ndim + 1, array->strides + axis);
    }
    both.sort();
    both.merge();
    both.pad(1);
    x.shape[x.ndim] = out.shape[out.ndim] = count;
    x.strides[x.ndim++] = step_x, out.strides[out.ndim++] = step_out;
    split(r, out.size() / count / out.shape[out.ndim - 2] * ((out.shape[out.ndim - 2] + LINES - 1) / LINES), count * LINES);
    return nullptr;
}

const Operation operations[] = {
    {"sum", 1 << 1, check_reduce<Sum>, run_planned},
    {"any", 1 << 1, check_reduce<Any>, run_planned},
    {"all", 1 << 1, check_reduce<Every>, run_planned},
    {"cumulative_sum", 1 << 1, check_cumulative_sum, run_planned},
};
}  // namespace

extern const Family reductions_family = {operations, sizeof operations / sizeof *operations};

}  // namespace ISA
