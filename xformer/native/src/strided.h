// Arrays of any strides: broadcasting, merging of axes, and loops over tiles for functions of contiguous elements.
#pragma once
#include <type_traits>
#include "vector.h"

namespace ISA {

template <class T> inline constexpr Type type_of = OTHER;
template <> inline constexpr Type type_of<bool> = BOOL;
template <> inline constexpr Type type_of<int8_t> = INT8;
template <> inline constexpr Type type_of<uint8_t> = UINT8;
template <> inline constexpr Type type_of<int32_t> = INT32;
template <> inline constexpr Type type_of<int64_t> = INT64;
template <> inline constexpr Type type_of<float> = FLOAT32;
template <> inline constexpr Type type_of<double> = FLOAT64;

// Integers wrap around, as those of NumPy do.
template <class T, bool = std::is_integral_v<T> && !std::is_same_v<T, bool>> struct WrappingOf { using type = T; };
template <class T> struct WrappingOf<T, true> { using type = std::make_unsigned_t<T>; };
template <class T> using Wrapping = typename WrappingOf<T>::type;

template <class... T> struct Types {};
using Floats = Types<float, double>;
using Integers = Types<int64_t>;
using Numbers = Types<float, double, int64_t>;
using Bools = Types<bool>;
using NumbersAndBools = Types<float, double, int64_t, bool>;

// Call visit(T()) with the type of a dtype; return whether it is one of the list.
template <class... T, class Visit> static bool with_type(Types<T...>, int32_t type, Visit visit) {
    return ((type == type_of<T> && (visit(T()), true)) || ...);
}

template <class From, class To> INLINE To cast(From x) {
    if constexpr (std::is_same_v<To, bool>) return x != 0;
    // Integers of 8 bits are the last bits of wider ones.
    else if constexpr (std::is_floating_point_v<From> && sizeof(To) == 1) return static_cast<To>(static_cast<int32_t>(x));
    else return static_cast<To>(x);
}

// Before a loop over elements: those with the same index may share memory, others do not.
#define INDEPENDENT _Pragma("GCC ivdep")

INLINE void report_index(const Record& r) { __atomic_store_n(&r.status, 1, __ATOMIC_RELAXED); }

// --- axes -------------------------------------------------------------------------------------------------------------

// Give an input the shape of the output; an axis of one element is repeated by a stride of zero.
static inline const char* broadcast(Array& x, const Array& to) {
    REQUIRE(x.ndim <= to.ndim, "an input has more axes than the output");
    const int missing = to.ndim - x.ndim;
    for (int i = to.ndim - 1; i >= 0; i--) {
        const int64_t size = i < missing ? 1 : x.shape[i - missing];
        REQUIRE(size == 1 || size == to.shape[i], "the shapes do not match");
        x.strides[i] = size == 1 ? 0 : x.strides[i - missing];
        x.shape[i] = to.shape[i];
    }
    x.ndim = to.ndim;
    return nullptr;
}

// Arrays of one shape whose elements are visited together.
struct Together {
    Array* arrays[MAX_ARRAYS];
    int count;

    Array& last() const { return *arrays[count - 1]; }
    // Axes with large strides first, by the last array, then by those before it.
    void sort() const {
        auto is_before = [&](int i, int j) {
            for (int k = count - 1; k >= 0; k--) {
                const int64_t a = std::abs(arrays[k]->strides[i]), b = std::abs(arrays[k]->strides[j]);
                if (a != b) return a > b;
            }
            return false;
        };
        for (int i = 1; i < last().ndim; i++)
            for (int j = i; j > 0 && is_before(j, j - 1); j--)
                for (int k = 0; k < count; k++) {
                    std::swap(arrays[k]->shape[j], arrays[k]->shape[j - 1]);
                    std::swap(arrays[k]->strides[j], arrays[k]->strides[j - 1]);
                }
    }
    // Drop axes of one element, and make one axis of neighbors through which all arrays step evenly.
    void merge() const {
        const int ndim = last().ndim;
        int kept = 0;
        for (int i = 0; i < ndim; i++) {
            const int64_t size = last().shape[i];
            if (size == 1) continue;
            bool is_even = kept > 0;
            for (int k = 0; k < count; k++)
                is_even = is_even && arrays[k]->strides[kept - 1] == arrays[k]->strides[i] * size;
            kept += !is_even;
            for (int k = 0; k < count; k++) {
                arrays[k]->shape[kept - 1] = is_even ? arrays[k]->shape[kept - 1] * size : size;
                arrays[k]->strides[kept - 1] = arrays[k]->strides[i];
            }
        }
        for (int k = 0; k < count; k++) arrays[k]->ndim = kept;
    }
    // Insert axes of one element in front, until there are `ndim`.
    void pad(int ndim) const {
        for (int k = 0; k < count; k++)
            for (Array& x = *arrays[k]; x.ndim < ndim; x.ndim++) {
                std::copy_backward(x.shape, x.shape + x.ndim, x.shape + x.ndim + 1);
                std::copy_backward(x.strides, x.strides + x.ndim, x.strides + x.ndim + 1);
                x.shape[0] = 1, x.strides[0] = 0;
            }
    }
};

// --- copies of rows and columns -----------------------------------------------------------------------------------------

struct Steps { int64_t row, column; };  // in bytes

template <class T> static void move_elements(char* to, Steps t, const char* from, Steps f, int64_t rows, int64_t columns) {
    constexpr int64_t one = sizeof(T);
    if (t.column == one && f.column == one) {
        for (int64_t i = 0; i < rows; i++) std::memcpy(to + i * t.row, from + i * f.row, columns * one);
    } else if (f.column == 0 && t.column == one) {
        for (int64_t i = 0; i < rows; i++) std::fill_n((T*)(to + i * t.row), columns, *(const T*)(from + i * f.row));
    } else if (std::abs(f.row) < std::abs(f.column) && rows > 1) {  // whole cache lines of a transposed array
        for (int64_t i = 0; i < rows; i += 16)
            for (int64_t j = 0, end = std::min<int64_t>(rows, i + 16); j < columns; j++) {
                __builtin_prefetch(from + i * f.row + (j + 16) * f.column);
                for (int64_t k = i; k < end; k++)
                    *(T*)(to + k * t.row + j * t.column) = *(const T*)(from + k * f.row + j * f.column);
            }
    } else {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++)
                *(T*)(to + i * t.row + j * t.column) = *(const T*)(from + i * f.row + j * f.column);
    }
}

static inline void move(char* to, Steps t, const char* from, Steps f, int64_t rows, int64_t columns, int64_t itemsize) {
    if (itemsize == 4) move_elements<int32_t>(to, t, from, f, rows, columns);
    else if (itemsize == 8) move_elements<int64_t>(to, t, from, f, rows, columns);
    else if (itemsize == 2) move_elements<int16_t>(to, t, from, f, rows, columns);
    else move_elements<int8_t>(to, t, from, f, rows, columns);
}

// --- elementwise functions ----------------------------------------------------------------------------------------------

// A function of contiguous inputs. If bit i of `scalars` is set, input i is one element for all `count` outputs.
using Kernel = void (*)(char* out, const char* const* inputs, unsigned scalars, int64_t count);

constexpr int64_t BUFFER = 1024;       // elements of a tile of which some arrays are copied to be contiguous
constexpr int64_t WHOLE = 8192;        // elements of a tile without copies
constexpr int64_t SHORT = 64;          // rows that are shorter are joined
enum { STEP, KERNEL, ROWS, COLUMNS, SCALARS, COPIED, IS_JOINED };  // what `plan` has

// Split the elements of the output, array `inputs`, into tiles, and those into parts.
// `cost` compares the time of an element with that of a sum; bit i of `vectors` is set if input i cannot be a scalar.
static inline const char* plan_elements(Record& r, int inputs, Kernel kernel, int cost, unsigned vectors = 0) {
    Together all{{}, inputs + 1};
    Array& out = r.arrays[inputs];
    for (int k = 0; k <= inputs; k++) {
        if (const char* error = broadcast(r.arrays[k], out)) return error;
        all.arrays[k] = &r.arrays[k];
    }
    r.parts = 0;
    if (out.size() == 0) return nullptr;
    all.sort();
    all.merge();
    all.pad(2);
    const int row = out.ndim - 2, column = out.ndim - 1;
    const int64_t rows = out.shape[row], columns = out.shape[column];
    const bool is_joined = columns < SHORT && rows > 1;
    unsigned scalars = 0, copied = 0;
    bool is_transposed = false;
    for (int k = 0; k <= inputs; k++) {
        const Array& x = r.arrays[k];
        const int64_t itemsize = x.itemsize(), *strides = x.strides;
        if (k < inputs && !strides[column] && !(is_joined && strides[row]) && !(vectors >> k & 1)) scalars |= 1u << k;
        else if (columns > 1 && (strides[column] != itemsize || (is_joined && strides[row] != columns * itemsize)))
            copied |= 1u << k, is_transposed |= strides[row] && std::abs(strides[row]) < std::abs(strides[column]);
    }
    if (inputs && scalars + 1 == 1u << inputs) {  // one element at least is not a scalar
        scalars &= ~1u;
        copied |= columns > 1;
    }
    const int64_t most = copied ? BUFFER : WHOLE;
    const int64_t width = is_joined ? columns : std::min(columns, is_transposed ? SHORT : most);
    const int64_t height = std::min(rows, std::max<int64_t>(1, most / width));
    const int64_t tiles = out.size() / (rows * columns) * ((rows + height - 1) / height) * ((columns + width - 1) / width);
    split(r, tiles, height * width * cost);
    r.plan[KERNEL] = reinterpret_cast<int64_t>(kernel);
    r.plan[ROWS] = height, r.plan[COLUMNS] = width, r.plan[SCALARS] = scalars, r.plan[COPIED] = copied;
    r.plan[IS_JOINED] = is_joined;
    return nullptr;
}

// Call visit(addresses, rows, columns) for each tile of a part.
template <int ARRAYS, class Visit> INLINE void each_tile(const Record& r, int part, Visit visit) {
    const Array& out = r.arrays[ARRAYS - 1];
    const int row = out.ndim - 2, column = out.ndim - 1;
    const int64_t height = r.plan[ROWS], width = r.plan[COLUMNS];
    const int64_t down = (out.shape[row] + height - 1) / height, across = (out.shape[column] + width - 1) / width;
    int64_t tiles = down * across;
    for (int i = 0; i < row; i++) tiles *= out.shape[i];
    for (int64_t tile = part * r.plan[STEP], end = std::min(tiles, tile + r.plan[STEP]); tile < end; tile++) {
        const int64_t j = tile % across * width, i = tile / across % down * height;
        char* at[ARRAYS];
        for (int k = 0; k < ARRAYS; k++)
            at[k] = r.arrays[k].data + i * r.arrays[k].strides[row] + j * r.arrays[k].strides[column];
        int64_t rest = tile / across / down;
        for (int axis = row - 1; axis >= 0; rest /= out.shape[axis--])
            for (int k = 0; k < ARRAYS; k++) at[k] += rest % out.shape[axis] * r.arrays[k].strides[axis];
        visit(at, std::min(height, out.shape[row] - i), std::min(width, out.shape[column] - j));
    }
}

template <int INPUTS> static void run_elements(const Record& r, int part) {
    const Kernel kernel = reinterpret_cast<Kernel>(r.plan[KERNEL]);
    const unsigned scalars = r.plan[SCALARS], copied = r.plan[COPIED];
    const int row = r.arrays[INPUTS].ndim - 2, column = row + 1;
    alignas(64) char buffers[INPUTS + 1][BUFFER * 8];
    each_tile<INPUTS + 1>(r, part, [&](char** at, int64_t rows, int64_t columns) {
        char* start[INPUTS + 1];
        int64_t step[INPUTS + 1];
        auto exchange = [&](int k, bool is_output) {
            const Array& x = r.arrays[k];
            const int64_t itemsize = x.itemsize();
            const Steps there{x.strides[row], x.strides[column]}, here{columns * itemsize, itemsize};
            if (is_output) move(at[k], there, buffers[k], here, rows, columns, itemsize);
            else move(buffers[k], here, at[k], there, rows, columns, itemsize);
        };
        for (int k = 0; k <= INPUTS; k++) {
            const bool is_copied = copied >> k & 1;
            if (is_copied && k < INPUTS) exchange(k, false);
            start[k] = is_copied ? buffers[k] : at[k];
            step[k] = is_copied ? columns * r.arrays[k].itemsize() : r.arrays[k].strides[row];
        }
        const int64_t runs = r.plan[IS_JOINED] ? 1 : rows, length = r.plan[IS_JOINED] ? rows * columns : columns;
        for (int64_t i = 0; i < runs; i++) {
            const char* inputs[INPUTS];
            for (int k = 0; k < INPUTS; k++) inputs[k] = start[k] + i * step[k];
            kernel(start[INPUTS] + i * step[INPUTS], inputs, scalars, length);
        }
        if (copied >> INPUTS & 1) exchange(INPUTS, true);
    });
}

}  // namespace ISA
