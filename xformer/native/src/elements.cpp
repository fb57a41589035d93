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

template <class F> void unary_vector(char* out, const char* const* inputs, unsigned, int64_t count) {
    const float* x = reinterpret_cast<const float*>(inputs[0]);
    float* y = reinterpret_cast<float*>(out);
    for (int64_t i = 0; i < count; i += LANES) store(y + i, F()(load(x + i, count - i)), count - i);
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
BINARY(Power, std::pow(a, b))

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
UNARY(Floor, std::floor(x))
UNARY(Ceil, std::ceil(x))
UNARY(Trunc, std::trunc(x))
UNARY(Round, std::nearbyint(x))
UNARY(IsFinite, std::abs(x) <= std::numeric_limits<T>::max())
UNARY(IsInf, std::abs(x) > std::numeric_limits<T>::max())
UNARY(IsNan, x != x)
UNARY(Not, !x)
UNARY(Exp, std::exp(x))
UNARY(Log, std::log(x))
UNARY(Tanh, std::tanh(x))
UNARY(Sin, std::sin(x))
UNARY(Cos, std::cos(x))
UNARY(Expm1, std::expm1(x))
UNARY(Log1p, std::log1p(x))
UNARY(Erf, std::erf(x))
struct Abs {
    template <class T> T operator()(T x) const {
        if constexpr (std::is_floating_point_v<T>) return std::abs(x);
        else return x < 0 ? T(-Wrapping<T>(x)) : x;
    }
};

// NumPy makes products, roots and reciprocals of powers whose exponent is one of these numbers.
template <class T> void power(char* out, const char* const* inputs, unsigned scalars, int64_t count) {
    const T exponent = *reinterpret_cast<const T*>(inputs[1]);
    if (scalars != 2) binary<Power, T>(out, inputs, scalars, count);
    else if (exponent == T(2)) unary<Square, T>(out, inputs, 0, count);
    else if (exponent == T(0.5)) unary<Sqrt, T>(out, inputs, 0, count);
    else if (exponent == T(-1)) unary<Reciprocal, T>(out, inputs, 0, count);
    else binary<Power, T>(out, inputs, scalars, count);
}

// --- float32 functions of 16 lanes, with errors of at most two units in the last place ----------------------------------

// 2^n (1 + p) = e^x for |x| <= 104: the argument is reduced to |r| <= log(2) / 2.
struct Exponential {
    Vector p;
    Mask n;
    explicit Exponential(Vector x) {
        const Vector shifted = x * 1.44269504f + 12582912.0f, whole = shifted - 12582912.0f;
        Vector r = x - whole * 0.693359375f;
        r = r - whole * -2.12194440e-4f;
        p = splat(1.9875691500e-4f);
        p = p * r + 1.3981999507e-3f;
        p = p * r + 8.3334519073e-3f;
        p = p * r + 4.1665795894e-2f;
        p = p * r + 1.6666665459e-1f;
        p = p * r + 5.0000001201e-1f;
        p = p * r * r + r;
        EACH_REGISTER n.r[i] = (IntRegister)shifted.r[i] - 0x4b400000;
    }
};
INLINE Vector power_of_two(Mask n) {  // for -126 <= n <= 127
    Vector y;
    EACH_REGISTER y.r[i] = (Register)((n.r[i] + 127) << 23);
    return y;
}
INLINE Vector sign_of(Vector x) { EACH_REGISTER x.r[i] = (Register)((IntRegister)x.r[i] & INT32_MIN); return x; }
INLINE Vector operator|(Vector a, Vector b) {
    EACH_REGISTER a.r[i] = (Register)((IntRegister)a.r[i] | (IntRegister)b.r[i]);
    return a;
}
INLINE Vector abs(Vector x) { EACH_REGISTER x.r[i] = (Register)((IntRegister)x.r[i] & INT32_MAX); return x; }

struct VectorExp {  // results below the smallest normal number are not zero
    Vector operator()(Vector x) const {
        const Exponential e(min(splat(89.0f), max(splat(-104.0f), x)));
        Mask half, rest;  // 2^n as two factors, each of which is a normal number
        EACH_REGISTER half.r[i] = e.n.r[i] >> 1, rest.r[i] = e.n.r[i] - half.r[i];
        return select(x == x, (e.p + 1.0f) * power_of_two(half) * power_of_two(rest), x);
    }
};

struct VectorExpm1 {  // 2^n (1 + p) - 1 = 2 (2^(n - 1) p + (2^(n - 1) - 1/2))
    Vector operator()(Vector x) const {
        Exponential e(min(splat(89.0f), max(splat(-20.0f), x)));
        EACH_REGISTER e.n.r[i] -= 1;
        const Vector scale = power_of_two(e.n), y = 2.0f * (scale * e.p + (scale - 0.5f));
        return select(abs(x) > splat(1e-8f), y, x);  // also NaN, and zero with its sign
    }
};

struct VectorTanh {  // a polynomial near zero, 1 - 2 / (exp(2 |x|) + 1) elsewhere
    Vector operator()(Vector x) const {
        const Vector size = abs(x), square = x * x;
        Vector near = splat(-5.70498872745e-3f);
        near = near * square + 2.06390887954e-2f;
        near = near * square - 5.37397155531e-2f;
        near = near * square + 1.33314422036e-1f;
        near = near * square - 3.33332819422e-1f;
        near = near * square * size + size;
        const Exponential e(min(splat(20.0f), size + size));
        const Vector far = 1.0f - 2.0f / (e.p * power_of_two(e.n) + power_of_two(e.n) + 1.0f);
        return select(x == x, select(size < splat(0.625f), near, far) | sign_of(x), x);
    }
};

// log(x) for normal numbers, by a mantissa in [sqrt(1/2), sqrt(2)) and a polynomial of Cephes; `extra` is added to the
// exponent.
INLINE Vector log_of_normal(Vector x, Vector extra) {
    typedef uint32_t Unsigned __attribute__((vector_size(4 * WIDTH)));  // wraps for numbers that are not normal
    Vector f, n;
    EACH_REGISTER {
        const IntRegister bits = (IntRegister)((Unsigned)x.r[i] - 0x3f3504f3u);
        n.r[i] = __builtin_convertvector(bits >> 23, Register);
        f.r[i] = (Register)((bits & 0x007fffff) + 0x3f3504f3);
    }
    n = n + extra;
    f = f - 1.0f;
    const Vector square = f * f;
    Vector p = splat(7.0376836292e-2f);
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    p = p * f * square + n * -2.12194440e-4f;
    p = p - square * 0.5f;
    return (f + p) + n * 0.693359375f;
}

struct VectorLog {
    Vector operator()(Vector x) const {
        const Mask is_small = x < splat(1.17549435e-38f);
        Vector y = log_of_normal(select(is_small, x * 8388608.0f, x), select(is_small, splat(-23.0f), Vector{}));
        y = select(x == Vector{}, splat(-INFINITY), select(x < Vector{}, splat(NAN), y));
        return select(x < splat(INFINITY), y, x);
    }
};

struct VectorLog1p {  // log(u) and a correction for the rounding of u = 1 + x
    Vector operator()(Vector x) const {
        const Vector u = 1.0f + x;
        Vector y = log_of_normal(u, Vector{}) + (x - (u - 1.0f)) / u;
        y = select(u == Vector{}, splat(-INFINITY), select(u < Vector{}, splat(NAN), y));
        y = select(abs(x) > splat(1e-8f), y, x);  // also NaN, and zero with its sign
        return select(x < splat(INFINITY), y, x);
    }
};

// sin(x + quarters pi / 2), reduced to [-pi / 4, pi / 4] in double precision.
template <int QUARTERS> INLINE float sine(float x) {
    const double n = std::nearbyint(x * 0.6366197723675814);
    const float r = static_cast<float>((x - n * 1.5707963267341256) - n * 6.077100506506192e-11), square = r * r;
    const int quarter = static_cast<int>(n) + QUARTERS;
    const float odd = ((-1.9515295891e-4f * square + 8.3321608736e-3f) * square - 1.6666654611e-1f) * square * r + r;
    const float even = ((2.443315711809948e-5f * square - 1.388731625493765e-3f) * square + 4.166664568298827e-2f) *
                       square * square - 0.5f * square + 1.0f;
    const float y = quarter & 1 ? even : odd;
    return QUARTERS == 0 && x == 0.0f ? x : quarter & 2 ? -y : y;  // zero keeps its sign
}
template <int QUARTERS> void sines(char* out, const char* const* inputs, unsigned, int64_t count) {
    const float* x = reinterpret_cast<const float*>(inputs[0]);
    float* y = reinterpret_cast<float*>(out);
    constexpr int BLOCK = 64;
    for (int64_t i = 0; i < count; i += BLOCK) {  // the input may be the output
        float given[BLOCK] = {}, found[BLOCK];
        const int n = static_cast<int>(std::min<int64_t>(BLOCK, count - i));
        std::copy_n(x + i, n, given);
        int far = 0;
        for (int k = 0; k < BLOCK; k++) {
            found[k] = sine<QUARTERS>(given[k]);
            far |= !(std::abs(given[k]) < 1e6f);
        }
        for (int k = 0; far && k < n; k++)
            if (!(std::abs(given[k]) < 1e6f)) found[k] = QUARTERS ? std::cos(given[k]) : std::sin(given[k]);
        std::copy_n(found, n, y + i);
    }
}

// --- operations -------------------------------------------------------------------------------------------------------

template <class F> constexpr Kernel vector_kernel() {
    if constexpr (std::is_same_v<F, Exp>) return unary_vector<VectorExp>;
    if constexpr (std::is_same_v<F, Expm1>) return unary_vector<VectorExpm1>;
    if constexpr (std::is_same_v<F, Log>) return unary_vector<VectorLog>;
    if constexpr (std::is_same_v<F, Log1p>) return unary_vector<VectorLog1p>;
    if constexpr (std::is_same_v<F, Tanh>) return unary_vector<VectorTanh>;
    if constexpr (std::is_same_v<F, Sin>) return sines<0>;
    if constexpr (std::is_same_v<F, Cos>) return sines<1>;
    return nullptr;
}

template <class F, class List, int COST> const char* check_unary(Record& r) {
    const Array &x = r.arrays[0], &out = r.arrays[1];
    REQUIRE(x && out, "an array is absent");
    Kernel kernel = nullptr;
    Type result = OTHER;
    const bool is_known = with_type(List(), x.type, [&](auto t) {
        using T = decltype(t);
        result = type_of<Result<F, T>>;
        kernel = unary<F, T>;
        if constexpr (std::is_same_v<T, float>) if (const Kernel faster = vector_kernel<F>()) kernel = faster;
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
        if constexpr (std::is_same_v<F, Power>) kernel = power<T>;
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
    TWO("pow", Power, Floats, 30),
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
    ONE("floor", Floor, Floats, 1),
    ONE("ceil", Ceil, Floats, 1),
    ONE("trunc", Trunc, Floats, 1),
    ONE("round", Round, Floats, 1),
    ONE("isfinite", IsFinite, Floats, 1),
    ONE("isinf", IsInf, Floats, 1),
    ONE("isnan", IsNan, Floats, 1),
    ONE("logical_not", Not, Bools, 1),
    ONE("exp", Exp, Floats, 5),
    ONE("log", Log, Floats, 5),
    ONE("tanh", Tanh, Floats, 8),
    ONE("sin", Sin, Floats, 20),
    ONE("cos", Cos, Floats, 20),
    ONE("expm1", Expm1, Floats, 20),
    ONE("log1p", Log1p, Floats, 20),
    ONE("erf", Erf, Floats, 20),
    {"where", 1 << 3, check_where, run_elements<3>},
    {"copy", 1 << 1, check_copy, run_copy},
    {"fill", 1 << 0, check_fill, run_fill},
};
}  // namespace

extern const Family elements_family = {operations, sizeof operations / sizeof *operations};

}  // namespace ISA
