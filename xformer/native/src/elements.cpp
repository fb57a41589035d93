// Elementwise functions of the standard, copies with casts, and constants.
#include <limits>
#include "strided.h"

namespace ISA {
namespace {

// --- kernels of contiguous elements -----------------------------------------------------------------------------------

template <class F, class T> using Result = decltype(F()(T()));
template <class F, class T> using Result2 = decltype(F()(T(), T()));

template <class F, class T> void unary(char* out, const char* const* inputs, unsigned, int64_t count) {
    const T* x = reinterpret_cast<const T*>(inputs[0]);
    auto* y = reinterpret_cast<Result<F, T>*>(out);
    INDEPENDENT
    for (int64_t i = 0; i < count; i++) y[i] = F()(x[i]);
}

template <class F, class T> void binary(char* out, const char* const* inputs, unsigned scalars, int64_t count) {
    const T *a = reinterpret_cast<const T*>(inputs[0]), *b = reinterpret_cast<const T*>(inputs[1]);
    auto* y = reinterpret_cast<Result2<F, T>*>(out);
    if (scalars == 0) {
        INDEPENDENT
        for (int64_t i = 0; i < count; i++) y[i] = F()(a[i], b[i]);
    } else if (scalars == 1) {
        const T first = *a;
        INDEPENDENT
        for (int64_t i = 0; i < count; i++) y[i] = F()(first, b[i]);
    } else {
        const T second = *b;
        INDEPENDENT
        for (int64_t i = 0; i < count; i++) y[i] = F()(a[i], second);
    }
}

// Bits are selected by masks, as the compiler makes no vectors of conditions that are bytes.
template <class T, bool IS_A_SCALAR, bool IS_B_SCALAR>
void choose(T* y, const uint8_t* condition, const T* a, const T* b, int64_t count) {
    const T first = *a, second = *b;
    INDEPENDENT
    for (int64_t i = 0; i < count; i++) {
        const T mask = -static_cast<T>(condition[i]);
        y[i] = ((IS_A_SCALAR ? first : a[i]) & mask) | ((IS_B_SCALAR ? second : b[i]) & ~mask);
    }
}
template <class T> void choose(char* out, const char* const* inputs, unsigned scalars, int64_t count) {
    static constexpr decltype(&choose<T, 0, 0>) variants[] = {choose<T, 0, 0>, choose<T, 1, 0>, choose<T, 0, 1>,
                                                              choose<T, 1, 1>};
    variants[scalars >> 1]((T*)out, (const uint8_t*)inputs[0], (const T*)inputs[1], (const T*)inputs[2], count);
}

template <class From, class To> struct Cast { To operator()(From x) const { return cast<From, To>(x); } };

// --- functions --------------------------------------------------------------------------------------------------------

#define UNARY(Name, ...) struct Name { template <class T> auto operator()(T x) const { return __VA_ARGS__; } };
#define BINARY(Name, ...) struct Name { template <class T> auto operator()(T a, T b) const { return __VA_ARGS__; } };

BINARY(Add, T(Wrapping<T>(a) + Wrapping<T>(b)))
BINARY(Subtract, T(Wrapping<T>(a) - Wrapping<T>(b)))
BINARY(Multiply, T(Wrapping<T>(a) * Wrapping<T>(b)))
BINARY(Divide, a / b)
BINARY(Maximum, a > b ? a : b)
BINARY(Minimum, a < b ? a : b)
BINARY(Equal, a == b)
BINARY(NotEqual, a != b)
BINARY(Less, a < b)
BINARY(LessEqual, a <= b)
BINARY(Greater, a > b)
BINARY(GreaterEqual, a >= b)
BINARY(And, bool(a & b))
BINARY(Or, bool(a | b))
BINARY(Xor, bool(a ^ b))

// As in Python, rounded down; zero for a divisor of zero.
struct FloorDivide {
    template <class T> T operator()(T a, T b) const {
        if (b == 0) return 0;
        if (b == -1) return T(-Wrapping<T>(a));  // the quotient of the smallest integer overflows
        return a / b - (a % b != 0 && (a < 0) != (b < 0));
    }
};
struct Remainder {
    template <class T> T operator()(T a, T b) const {
        if (b == 0 || b == -1) return 0;
        const T rest = a % b;
        return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    }
};

UNARY(Negative, T(-Wrapping<T>(x)))
UNARY(Square, T(Wrapping<T>(x) * Wrapping<T>(x)))
UNARY(Reciprocal, T(1) / x)
UNARY(Sqrt, std::sqrt(x))
UNARY(Sign, x > 0 ? T(1) : x < 0 ? T(-1) : x == 0 ? T(0) : x)
UNARY(IsFinite, std::abs(x) <= std::numeric_limits<T>::max())
UNARY(IsInf, std::abs(x) > std::numeric_limits<T>::max())
UNARY(IsNan, x != x)
UNARY(Not, !x)
struct Abs {
    template <class T> T operator()(T x) const {
        if constexpr (std::is_floating_point_v<T>) return std::abs(x);
        else return x < 0 ? T(-Wrapping<T>(x)) : x;
    }
};

// --- operations -------------------------------------------------------------------------------------------------------

template <class F, class List, int COST> const char* check_unary(Record& r) {
    const Array &x = r.arrays[0], &out = r.arrays[1];
    REQUIRE(x && out, "an array is absent");
    Kernel kernel = nullptr;
    Type result = OTHER;
    const bool is_known = with_type(List(), x.type, [&](auto t) {
        using T = decltype(t);
        result = type_of<Result<F, T>>;
        kernel = unary<F, T>;
    });
    REQUIRE(is_known, "the function takes no such dtype");
    REQUIRE(out.type == result, "the output has another dtype than the result");
    return plan_elements(r, 1, kernel, COST);
}

template <class F, class List, int COST> const char* check_binary(Record& r) {
    const Array &a = r.arrays[0], &b = r.arrays[1], &out = r.arrays[2];
    REQUIRE(a && b && out, "an array is absent");
    REQUIRE(a.type == b.type, "the dtypes differ");
    Kernel kernel = nullptr;
    Type result = OTHER;
    const bool is_known = with_type(List(), a.type, [&](auto t) {
        using T = decltype(t);
        result = type_of<Result2<F, T>>;
        kernel = binary<F, T>;
    });
    REQUIRE(is_known, "the function takes no such dtype");
    REQUIRE(out.type == result, "the output has another dtype than the result");
    return plan_elements(r, 2, kernel, COST);
}

// where(condition, a, b, out)
const char* check_where(Record& r) {
    const Array &condition = r.arrays[0], &a = r.arrays[1], &b = r.arrays[2], &out = r.arrays[3];
    REQUIRE(condition && a && b && out, "an array is absent");
    REQUIRE(condition.type == BOOL, "the condition is not boolean");
    REQUIRE(a.type == b.type && a.type == out.type, "the dtypes differ");
    REQUIRE(a.type != OTHER, "the function takes no such dtype");
    const int64_t itemsize = a.itemsize();
    const Kernel kernel = itemsize == 4   ? choose<int32_t>
                          : itemsize == 8 ? choose<int64_t>
                          : itemsize == 2 ? choose<int16_t>
                                          : choose<int8_t>;
    return plan_elements(r, 3, kernel, 1, 1);
}

// copy(x, out), with a cast as that of `astype`
using Castable = Types<float, double, int32_t, int64_t, bool, int8_t, uint8_t>;

const char* check_copy(Record& r) {
    const Array &x = r.arrays[0], &out = r.arrays[1];
    REQUIRE(x && out, "an array is absent");
    Kernel kernel = nullptr;  // of a cast
    if (x.type != out.type)
        with_type(Castable(), x.type, [&](auto from) {
            with_type(Castable(), out.type, [&](auto to) { kernel = unary<Cast<decltype(from), decltype(to)>, decltype(from)>; });
        });
    REQUIRE(kernel || (x.type == out.type && x.type != OTHER), "there is no cast between the dtypes");
    return plan_elements(r, 1, kernel, 1);
}

void run_copy(const Record& r, int part) {
    if (r.plan[KERNEL]) return run_elements<1>(r, part);
    const int row = r.arrays[1].ndim - 2;
    auto steps = [&](const Array& x) { return Steps{x.strides[row], x.strides[row + 1]}; };
    each_tile<2>(r, part, [&](char** at, int64_t rows, int64_t columns) {
        move(at[1], steps(r.arrays[1]), at[0], steps(r.arrays[0]), rows, columns, r.arrays[1].itemsize());
    });
}

// fill(out): with n0 if the dtype is floating, else with i0
const char* check_fill(Record& r) {
    REQUIRE(r.arrays[0], "an array is absent");
    REQUIRE(with_type(Castable(), r.arrays[0].type, [](auto) {}), "the function takes no such dtype");
    return plan_elements(r, 0, nullptr, 1);
}

void run_fill(const Record& r, int part) {
    const Array& out = r.arrays[0];
    char value[8];
    with_type(Castable(), out.type, [&](auto t) {
        using T = decltype(t);
        const T x = std::is_floating_point_v<T> ? cast<double, T>(r.numbers[0]) : cast<int64_t, T>(r.integers[0]);
        std::memcpy(value, &x, sizeof x);
    });
    each_tile<1>(r, part, [&](char** at, int64_t rows, int64_t columns) {
        move(at[0], {out.strides[out.ndim - 2], out.strides[out.ndim - 1]}, value, {0, 0}, rows, columns, out.itemsize());
    });
}

#define ONE(name, F, List, COST) {name, 1 << 1, check_unary<F, List, COST>, run_elements<1>}
#define TWO(name, F, List, COST) {name, 1 << 2, check_binary<F, List, COST>, run_elements<2>}

const Operation operations[] = {
    TWO("add", Add, Numbers, 1),
    TWO("subtract", Subtract, Numbers, 1),
    TWO("multiply", Multiply, Numbers, 1),
    TWO("divide", Divide, Floats, 2),
    TWO("maximum", Maximum, Integers, 1),
    TWO("minimum", Minimum, Integers, 1),
    TWO("floor_divide", FloorDivide, Integers, 10),
    TWO("remainder", Remainder, Integers, 10),
    TWO("equal", Equal, NumbersAndBools, 1),
    TWO("not_equal", NotEqual, NumbersAndBools, 1),
    TWO("less", Less, NumbersAndBools, 1),
    TWO("less_equal", LessEqual, NumbersAndBools, 1),
    TWO("greater", Greater, NumbersAndBools, 1),
    TWO("greater_equal", GreaterEqual, NumbersAndBools, 1),
    TWO("logical_and", And, Bools, 1),
    TWO("logical_or", Or, Bools, 1),
    TWO("logical_xor", Xor, Bools, 1),
    ONE("negative", Negative, Numbers, 1),
    ONE("abs", Abs, Numbers, 1),
    ONE("square", Square, Numbers, 1),
    ONE("sign", Sign, Numbers, 1),
    ONE("reciprocal", Reciprocal, Floats, 2),
    ONE("sqrt", Sqrt, Floats, 3),
    ONE("isfinite", IsFinite, Floats, 1),
    ONE("isinf", IsInf, Floats, 1),
    ONE("isnan", IsNan, Floats, 1),
    ONE("logical_not", Not, Bools, 1),
    {"where", 1 << 3, check_where, run_elements<3>},
    {"copy", 1 << 1, check_copy, run_copy},
    {"fill", 1 << 0, check_fill, run_fill},
};
}  // namespace

extern const Family elements_family = {operations, sizeof operations / sizeof *operations};

}  // namespace ISA
