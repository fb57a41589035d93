// Reading and writing at positions that an array of indices has.
#include "strided.h"

namespace ISA {
namespace {

enum { FUNCTION = 1, SIZE, STRIDE };  // in `plan`: the function that runs; size and stride of the axis that is indexed

// The elements that are read or written: plain[i..., p..., j...] and indexed[i..., indices[p...], j...].
struct Access {
    Array &plain, &indices, &indexed;

    // Give the arrays the shape of all accesses, in which `axis` of `indexed` is replaced by the axes of the indices. One
    // more axis of `indexed` has the positions, so that the array covers the memory that it covered before.
    const char* align(Record& r, bool is_read) const {
        REQUIRE(plain && indices && indexed, "an array is absent");
        REQUIRE(indices.type == INT32 || indices.type == INT64, "the indices are not int32 or int64");
        REQUIRE(plain.type == indexed.type && plain.type != OTHER, "the dtypes differ or are not supported");
        REQUIRE(r.integers[0] >= 0 && r.integers[0] < indexed.ndim, "there is no such axis");
        const int axis = static_cast<int>(r.integers[0]), axes = indices.ndim;
        Array all = indexed, given = indices, base = indexed;
        all.ndim = indexed.ndim - 1 + axes;
        REQUIRE(all.ndim < MAX_DIMS, "there are too many axes");
        for (int i = 0; i < all.ndim; i++) {
            const bool is_position = i >= axis && i < axis + axes;
            const int of_indexed = i < axis ? i : i - axes + 1;
            const int64_t along = is_position ? indices.shape[i - axis] : 1;
            const int64_t size = is_position ? 1 : indexed.shape[of_indexed];
            REQUIRE(size == along || size == 1 || along == 1, "the shapes of the indices and the array do not match");
            all.shape[i] = given.shape[i] = base.shape[i] = size == 1 ? along : size;
            given.strides[i] = along == 1 ? 0 : indices.strides[i - axis];
            base.strides[i] = size == 1 ? 0 : indexed.strides[of_indexed];
        }
        REQUIRE(!is_read || plain.has_shape(all), "the output has another shape");
        if (const char* error = broadcast(plain, all)) return error;
        const int64_t size = indexed.shape[axis], stride = indexed.strides[axis];
        indices = given, indexed = base;
        indices.ndim = indexed.ndim = all.ndim;
        const Together together{{&indices, &indexed, &plain}, 3};
        if (plain.size()) together.merge();
        together.pad(1);
        indexed.shape[indexed.ndim] = r.plan[SIZE] = size;
        indexed.strides[indexed.ndim++] = r.plan[STRIDE] = stride;
        r.parts = 0;
        return nullptr;
    }
    int64_t columns() const { return plain.shape[plain.ndim - 1]; }
    int64_t rows() const { return plain.size() / columns(); }
};

struct Range { int64_t first, end; };

// Call F::apply(plain, indexed) for the elements of some rows and columns.
template <class F, class T, class I>
INLINE void visit(const Record& r, const Array& plain, const Array& indices, const Array& indexed, Range rows, Range columns) {
    const int last = plain.ndim - 1;
    const int64_t steps[] = {plain.strides[last], indices.strides[last], indexed.strides[last]};
    auto find = [&](const char* at, int64_t& offset) {
        const int64_t index = *reinterpret_cast<const I*>(at), size = r.plan[SIZE];
        if (index < -size || index >= size) return report_index(r), false;
        offset = (index < 0 ? index + size : index) * r.plan[STRIDE];
        return true;
    };
    for (int64_t row = rows.first; row < rows.end; row++) {
        int64_t rest = row, offset = 0;
        char *x = plain.data, *y = indexed.data;
        const char* index = indices.data;
        for (int axis = last - 1; axis >= 0; rest /= plain.shape[axis--]) {
            const int64_t i = rest % plain.shape[axis];
            x += i * plain.strides[axis], index += i * indices.strides[axis], y += i * indexed.strides[axis];
        }
        x += columns.first * steps[0], index += columns.first * steps[1], y += columns.first * steps[2];
        const int64_t count = columns.end - columns.first;
        if (steps[1]) {
            for (int64_t j = 0; j < count; j++)
                if (find(index + j * steps[1], offset)) F::apply((T*)(x + j * steps[0]), (T*)(y + j * steps[2] + offset));
        } else if (!find(index, offset)) {
        } else if (steps[0] == sizeof(T) && steps[2] == sizeof(T)) {
            T *a = (T*)x, *b = (T*)(y + offset);
            INDEPENDENT
            for (int64_t j = 0; j < count; j++) F::apply(a + j, b + j);
        } else {
            for (int64_t j = 0; j < count; j++) F::apply((T*)(x + j * steps[0]), (T*)(y + j * steps[2] + offset));
        }
    }
}

struct Take { template <class T> static void apply(T* plain, T* indexed) { *plain = *indexed; } };
struct Put { template <class T> static void apply(T* plain, T* indexed) { *indexed = *plain; } };

template <class T, class I> void take(const Record& r, int part) {
    const Array& out = r.arrays[2];
    const int64_t columns = out.shape[out.ndim - 1], rows = out.size() / columns, first = part * r.plan[STEP];
    visit<Take, T, I>(r, out, r.arrays[1], r.arrays[0], {first, std::min(rows, first + r.plan[STEP])}, {0, columns});
}

constexpr int64_t TILE = 16;  // columns

// All rows of some columns, in order: the last value of an element remains.
template <class T, class I> void put(const Record& r, int part) {
    const Array& values = r.arrays[0];
    const int64_t columns = values.shape[values.ndim - 1], rows = values.size() / columns, step = r.plan[STEP] * TILE;
    visit<Put, T, I>(r, values, r.arrays[1], r.arrays[2], {0, rows}, {part * step, std::min(columns, (part + 1) * step)});
}

using Run = void (*)(const Record&, int part);
void run_planned(const Record& r, int part) { reinterpret_cast<Run>(r.plan[FUNCTION])(r, part); }

// Call visit(T()) with an integer of the size of an element.
template <class Visit> void with_size(const Array& x, Visit visit) {
    const int64_t itemsize = x.itemsize();
    if (itemsize == 4) visit(int32_t());
    else if (itemsize == 8) visit(int64_t());
    else if (itemsize == 2) visit(int16_t());
    else visit(int8_t());
}

// take(x, indices, out), i0: axis
const char* check_take(Record& r) {
    Access access{r.arrays[2], r.arrays[1], r.arrays[0]};
    if (const char* error = access.align(r, true)) return error;
    const bool is_short = access.indices.type == INT32;
    with_size(access.plain, [&](auto t) {
        using T = decltype(t);
        r.plan[FUNCTION] = reinterpret_cast<int64_t>(static_cast<Run>(is_short ? take<T, int32_t> : take<T, int64_t>));
    });
    if (access.plain.size()) split(r, access.rows(), access.columns() + 8);
    return nullptr;
}

// put(values, indices, out), i0: axis
const char* check_put(Record& r) {
    Access access{r.arrays[0], r.arrays[1], r.arrays[2]};
    if (const char* error = access.align(r, false)) return error;
    const bool is_short = access.indices.type == INT32;
    with_size(access.plain, [&](auto t) {
        using T = decltype(t);
        r.plan[FUNCTION] = reinterpret_cast<int64_t>(static_cast<Run>(is_short ? put<T, int32_t> : put<T, int64_t>));
    });
    if (access.plain.size() == 0) return nullptr;
    // Columns at different positions may be the same element.
    const int last = access.plain.ndim - 1;
    const int64_t tiles = (access.columns() + TILE - 1) / TILE;
    const bool has_own_columns = !access.indices.strides[last] && access.indexed.strides[last];
    split(r, tiles, access.rows() * TILE, 60000, has_own_columns ? 64 : 1);
    return nullptr;
}

// check_range(x), i0: the smallest allowed value, i1: the first one above
const char* check_check_range(Record& r) {
    const Array& x = r.arrays[0];
    REQUIRE((x.type == INT64 || x.type == INT32) && x.is_contiguous(), "expected contiguous integers");
    return nullptr;
}
void run_check_range(const Record& r, int) {
    const Array& x = r.arrays[0];
    auto check = [&](const auto* values) {
        for (int64_t i = 0; i < x.size(); i++)
            if (values[i] < r.integers[0] || values[i] >= r.integers[1]) r.status = 1;
    };
    if (x.type == INT32) check(x.as<int32_t>());
    else check(x.as<int64_t>());
}

const Operation operations[] = {
    {"check_range", 0, check_check_range, run_check_range},
    {"take", 1 << 2, check_take, run_planned},
    {"put", 1 << 2, check_put, run_planned},
};

}  // namespace

extern const Family indexing_family = {operations, sizeof operations / sizeof *operations};

}  // namespace ISA
