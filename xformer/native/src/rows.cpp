// Operations on rows and on single elements: activations, norms, softmax, losses, rotation, dropout, Adam.
#include <functional>
#include <vector>
#include "strided.h"

namespace ISA {
namespace {

bool is_packed(const Array& x, Type type, int64_t size) {
    return x && x.type == type && x.is_contiguous() && x.size() == size;
}
#define REQUIRE_FLOATS(x, size) \
    REQUIRE(is_packed(x, FLOAT32, size), "expected contiguous arrays of float32 with sizes that match")
#define REQUIRE_ABSENT_OR_FLOATS(x, size) do { if (x) REQUIRE_FLOATS(x, size); } while (0)

// Split elements into parts of whole vectors.
void split_elements(Record& r, int64_t count, int64_t work_per_element, int64_t grain = 60000) {
    split(r, (count + LANES - 1) / LANES, LANES * work_per_element, grain);
    r.plan[0] *= LANES;
}

struct Range { int64_t first, end; };
INLINE Range range_of(const Record& r, int part, int64_t count) {
    return {part * r.plan[0], std::min((part + 1) * r.plan[0], count)};
}

// Call f(i, count) for the vectors of a range; the last one may have fewer than 16 elements.
template <class F> INLINE void for_vectors(Range range, F f) {
    int64_t i = range.first;
    for (; i + LANES <= range.end; i += LANES) f(i, int64_t(LANES));
    if (i < range.end) f(i, range.end - i);
}

// Combine f(i, count) of all vectors of a row. Four results at a time hide the latency of an addition.
template <class F, class G> INLINE Vector combine(int64_t n, Vector start, F f, G both) {
    Vector totals[4] = {start, start, start, start};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int k = 0; k < 4; k++) totals[k] = both(totals[k], f(i + k * LANES, int64_t(LANES)));
    for_vectors({i, n}, [&](int64_t j, int64_t count) { totals[0] = both(totals[0], f(j, count)); });
    return both(both(totals[0], totals[2]), both(totals[1], totals[3]));
}
// Return the sum of f(i, count) over a row, where lanes beyond the row are zero.
template <class F> INLINE float sum_row(int64_t n, F f) {
    return sum(combine(n, Vector{}, f, [](Vector a, Vector b) { return a + b; }));
}
// Return the sum of numbers from 0 to 1. Adding and subtracting a number rounds to multiples of 2^-40, whose sums are exact
// up to 2^13: zeros, such as those of padding, may be anywhere in the row.
INLINE float sum_fractions(const float* x, int64_t n) {
    typedef double Doubles __attribute__((vector_size(4 * WIDTH)));
    typedef float Floats __attribute__((vector_size(2 * WIDTH), aligned(4), may_alias));
    constexpr double ROUNDING = 6144.0;
    constexpr int COUNT = WIDTH / 2;
    Doubles totals[LANES / COUNT] = {};
    double lanes[LANES], total = 0.0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES / COUNT; k++) {
            const Floats part = *(const Floats*)(x + i + k * COUNT);
            totals[k] += (__builtin_convertvector(part, Doubles) + ROUNDING) - ROUNDING;
        }
    std::memcpy(lanes, totals, sizeof(lanes));
    for (int k = 0; i + k < n; k++) lanes[k] += (x[i + k] + ROUNDING) - ROUNDING;
    for (double each : lanes) total += each;
    return (float)total;
}
// Return the largest element that is not NaN, or -inf.
template <class F> INLINE float largest_of_row(int64_t n, F f) {
    return largest(combine(n, splat(-INFINITY), f, [](Vector a, Vector b) { return max(b, a); }));
}

INLINE float largest_of_row(const float* x, int64_t n) {
    return largest_of_row(n, [&](int64_t i, int64_t c) { return load(x + i, c, -INFINITY); });
}

INLINE Vector abs(Vector v) {
    EACH_REGISTER v.r[i] = (Register)((IntRegister)v.r[i] & 0x7fffffff);
    return v;
}
INLINE Vector sqrt(Vector v) {
    EACH_REGISTER for (int lane = 0; lane < WIDTH; lane++) v.r[i][lane] = std::sqrt(v.r[i][lane]);
    return v;
}

// a b + c with one rounding, if there is such an instruction. The compiler fuses products with sums, too, but of
// a b + c d either one, and none across the branches of a partial load, so that levels would have different bits.
INLINE Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    EACH_REGISTER c.r[i] = (Register)_mm512_fmadd_ps(a.r[i], b.r[i], c.r[i]);
#elif defined(__AVX2__)
    EACH_REGISTER c.r[i] = (Register)_mm256_fmadd_ps(a.r[i], b.r[i], c.r[i]);
#elif defined(__aarch64__)
    EACH_REGISTER c.r[i] = (Register)vfmaq_f32((float32x4_t)c.r[i], (float32x4_t)a.r[i], (float32x4_t)b.r[i]);
#else
    EACH_REGISTER c.r[i] += a.r[i] * b.r[i];
#endif
    return c;
}

// exp(x) for x <= 0, in half as many instructions as exp: zero below -87.3, NaN for NaN. The polynomial has the least
// relative error over |r| <= log(2) / 2, which is 3e-9.
INLINE Vector exp_of_negative(Vector x) {
    const float shift = 12582912.0f + 127.0f;  // 1.5 * 2^23 + 127: the last bits of the sum are the exponent of 2^n
    const Vector shifted = x * 1.44269504f + shift, n = shifted - shift;
    const Vector r = x - n * 0.693359375f - n * -2.12194440e-4f;
    Vector p = splat(1.381454008e-3f), power;
    p = p * r + 8.368745213e-3f;
    p = p * r + 4.166839079e-2f;
    p = p * r + 1.66665204e-1f;
    p = p * r + 4.999999343e-1f;
    p = (p * r + 1.0f) * r + 1.0f;
    EACH_REGISTER power.r[i] = (Register)((IntRegister)shifted.r[i] << 23);
    return select(x < splat(-87.3f), Vector{}, p * power);
}

// Whether elements of a mask are false; lanes beyond `count` are.
INLINE Mask is_false(const int8_t* mask, int64_t stride, int64_t count) {
    if (stride == 1 && count >= LANES) return widen(mask) == Vector{};
    int8_t bytes[LANES] = {};
    for (int64_t i = 0; i < std::min<int64_t>(count, LANES); i++) bytes[i] = mask[i * stride];
    return widen(bytes) == Vector{};
}

// --- activations -----------------------------------------------------------------------------------------------------

// arrays: x, y; y = max(x, 0), which keeps NaN
const char* check_relu(Record& r) {
    const int64_t size = r.arrays[0].size();
    for (int i : {0, 1}) REQUIRE_FLOATS(r.arrays[i], size);
    split_elements(r, size, 1);
    return nullptr;
}
void run_relu(const Record& r, int part) {
    const float* x = r.arrays[0].as<float>();
    float* y = r.arrays[1].as<float>();
    for_vectors(range_of(r, part, r.arrays[0].size()), [&](int64_t i, int64_t count) {
        const Vector v = load(x + i, count);
        store(y + i, select(v < Vector{}, Vector{}, v), count);
    });
}

// arrays: g, y, dx; dx = g where y > 0, else 0
const char* check_relu_vjp(Record& r) {
    const int64_t size = r.arrays[0].size();
    for (int i : {0, 1, 2}) REQUIRE_FLOATS(r.arrays[i], size);
    split_elements(r, size, 1);
    return nullptr;
}
void run_relu_vjp(const Record& r, int part) {
    const float *g = r.arrays[0].as<float>(), *y = r.arrays[1].as<float>();
    float* dx = r.arrays[2].as<float>();
    for_vectors(range_of(r, part, r.arrays[0].size()), [&](int64_t i, int64_t count) {
        store(dx + i, select(load(y + i, count) > Vector{}, load(g + i, count), Vector{}), count);
    });
}

// arrays: x, coefficients (8), y, slope or null; numbers: p. The formula is in kernels/native.py, and
// the slope is for its derivative
const char* check_gelu(Record& r) {
    const int64_t size = r.arrays[0].size();
    for (int i : {0, 2}) REQUIRE_FLOATS(r.arrays[i], size);
    REQUIRE_FLOATS(r.arrays[1], 8);
    REQUIRE_ABSENT_OR_FLOATS(r.arrays[3], size);
    split_elements(r, size, 16);
    return nullptr;
}
void run_gelu(const Record& r, int part) {
    const float *x = r.arrays[0].as<float>(), p = r.numbers[0];
    float c[8], *y = r.arrays[2].as<float>(), *slope = r.arrays[3].as<float>();
    std::copy_n(r.arrays[1].as<float>(), 8, c);  // y might share memory with the array
    for_vectors(range_of(r, part, r.arrays[0].size()), [&](int64_t i, int64_t count) {
        const Vector v = load(x + i, count), a = min(splat(30.0f), abs(v));  // keeps NaN
        const Vector power = exp_of_negative(-0.5f * a * a), t = 1.0f / (1.0f + p * a);
        Vector s = splat(c[7]);
        for (int j = 6; j >= 0; j--) s = s * t + c[j];
        s = s * t * power;
        store(y + i, max(Vector{}, v) - a * s, count);
        if (!slope) return;
        s = s - 0.398942280f * a * power;
        store(slope + i, select(v < Vector{}, s, 1.0f - s), count);
    });
}

// arrays: x, y, slope or null; numbers: scale, cubic. y = x s(z) with the logistic function s and
// z = scale (x + cubic x^3)
const char* check_logistic_unit(Record& r) {
    const int64_t size = r.arrays[0].size();
    for (int i : {0, 1}) REQUIRE_FLOATS(r.arrays[i], size);
    REQUIRE_ABSENT_OR_FLOATS(r.arrays[2], size);
    split_elements(r, size, 16);
    return nullptr;
}
void run_logistic_unit(const Record& r, int part) {
    const float *x = r.arrays[0].as<float>(), scale = r.numbers[0], cubic = r.numbers[1];
    float *y = r.arrays[1].as<float>(), *slope = r.arrays[2].as<float>();
    for_vectors(range_of(r, part, r.arrays[0].size()), [&](int64_t i, int64_t count) {
        const Vector low = max(splat(-80.0f), load(x + i, count));  // minus infinity times zero would be NaN
        const Vector v = min(splat(80.0f), low), square = v * v, z = scale * v * (1.0f + cubic * square);
        const Vector e = exp_of_negative(-min(splat(80.0f), abs(z)));
        const Vector s = select(z > Vector{}, splat(1.0f), e) / (1.0f + e);
        store(y + i, low * s, count);
        if (slope) store(slope + i, s + v * s * (1.0f - s) * scale * (1.0f + 3.0f * cubic * square), count);
    });
}

// --- norms -----------------------------------------------------------------------------------------------------------

// arrays: x (rows, n), weight (n), bias (n) or null, y, statistics (2, rows); integers: whether rows are centered;
// numbers: epsilon. Statistics are the mean and the inverse standard deviation of each row
const char* check_norm(Record& r) {
    const Array& x = r.arrays[0];
    REQUIRE(x.ndim == 2, "expected a matrix");
    for (int i : {0, 3}) REQUIRE_FLOATS(r.arrays[i], x.size());
    REQUIRE_FLOATS(r.arrays[1], x.shape[1]);
    REQUIRE_ABSENT_OR_FLOATS(r.arrays[2], x.shape[1]);
    REQUIRE_FLOATS(r.arrays[4], 2 * x.shape[0]);
    split(r, x.shape[0], 4 * x.shape[1]);
    return nullptr;
}
void run_norm(const Record& r, int part) {
    const int64_t rows = r.arrays[0].shape[0], n = r.arrays[0].shape[1];
    const float *weight = r.arrays[1].as<float>(), *bias = r.arrays[2].as<float>(), epsilon = r.numbers[0];
    float* statistics = r.arrays[4].as<float>();
    const Range range = range_of(r, part, rows);
    for (int64_t row = range.first; row < range.end; row++) {
        const float* x = r.arrays[0].as<float>() + row * n;
        float* y = r.arrays[3].as<float>() + row * n;
        const float mean = r.integers[0] ? sum_row(n, [&](int64_t i, int64_t c) { return load(x + i, c); }) / n : 0.0f;
        const float squares = sum_row(n, [&](int64_t i, int64_t c) {
            const Vector d = load(x + i, c, mean) - mean;
            return d * d;
        });
        const float inverse = 1.0f / std::sqrt(squares / n + epsilon);
        statistics[row] = mean;
        statistics[rows + row] = inverse;
        for_vectors({0, n}, [&](int64_t i, int64_t c) {
            const Vector x_hat = (load(x + i, c) - mean) * inverse, w = load(weight + i, c);
            store(y + i, bias ? fused(x_hat, w, load(bias + i, c)) : x_hat * w, c);
        });
    }
}

// arrays: g (rows, n), x, weight (n), statistics (2, rows), dx, sums (parts, 2, n); integers: whether rows are
// centered. With x^ the normalized rows and h = g weight: dx = (h - mean(h) - x^ mean(h x^)) / sigma. Each part of the
// rows writes the sums of g x^ and of g, for the derivatives of weight and bias
const char* check_norm_vjp(Record& r) {
    const Array &g = r.arrays[0], &sums = r.arrays[5];
    REQUIRE(g.ndim == 2 && sums.ndim == 3 && sums.shape[0] > 0, "expected a matrix, and sums of parts");
    for (int i : {0, 1, 4}) REQUIRE_FLOATS(r.arrays[i], g.size());
    REQUIRE_FLOATS(r.arrays[2], g.shape[1]);
    REQUIRE_FLOATS(r.arrays[3], 2 * g.shape[0]);
    REQUIRE_FLOATS(sums, sums.shape[0] * 2 * g.shape[1]);
    r.parts = sums.shape[0];
    r.plan[0] = (g.shape[0] + r.parts - 1) / r.parts;
    return nullptr;
}
void run_norm_vjp(const Record& r, int part) {
    const int64_t rows = r.arrays[0].shape[0], n = r.arrays[0].shape[1];
    const float *weight = r.arrays[2].as<float>(), *statistics = r.arrays[3].as<float>();
    float *dweight = r.arrays[5].as<float>() + part * 2 * n, *dbias = dweight + n;
    std::fill(dweight, dweight + 2 * n, 0.0f);
    const Range range = range_of(r, part, rows);
    for (int64_t row = range.first; row < range.end; row++) {
        const float *g = r.arrays[0].as<float>() + row * n, *x = r.arrays[1].as<float>() + row * n;
        float* dx = r.arrays[4].as<float>() + row * n;
        const float mean = statistics[row], inverse = statistics[rows + row];
        Vector sum_h = {}, sum_product = {};
        for_vectors({0, n}, [&](int64_t i, int64_t c) {
            const Vector x_hat = (load(x + i, c, mean) - mean) * inverse, gradient = load(g + i, c);
            const Vector h = gradient * load(weight + i, c);
            sum_h += h;
            sum_product = fused(h, x_hat, sum_product);
            store(dweight + i, fused(gradient, x_hat, load(dweight + i, c)), c);
            store(dbias + i, load(dbias + i, c) + gradient, c);
        });
        const float mean_h = r.integers[0] ? sum(sum_h) / n : 0.0f, mean_product = sum(sum_product) / n;
        for_vectors({0, n}, [&](int64_t i, int64_t c) {
            const Vector x_hat = (load(x + i, c) - mean) * inverse;
            const Vector h = fused(load(g + i, c), load(weight + i, c), splat(-mean_h));
            store(dx + i, fused(x_hat, splat(-mean_product), h) * inverse, c);
        });
    }
}

// arrays: sums (float64), then at most 11 arrays. A sum is that of the squares of a block of an array
constexpr int64_t SQUARES = 16384;  // elements of a block; kernels/native.py has the same number

int64_t num_blocks(const Array& x) { return (x.size() + SQUARES - 1) / SQUARES; }

const char* check_sums_of_squares(Record& r) {
    int64_t blocks = 0, elements = 0;
    for (int i = 1; i < MAX_ARRAYS && r.arrays[i]; i++) {
        REQUIRE_FLOATS(r.arrays[i], r.arrays[i].size());
        blocks += num_blocks(r.arrays[i]);
        elements += r.arrays[i].size();
    }
    REQUIRE(is_packed(r.arrays[0], FLOAT64, blocks), "expected a float64 for each block of the arrays");
    split(r, blocks, blocks ? elements / blocks : 0);
    return nullptr;
}
void run_sums_of_squares(const Record& r, int part) {
    double* sums = r.arrays[0].as<double>();
    const Range range = range_of(r, part, r.arrays[0].size());
    int64_t first = 0;  // block of an array
    for (int i = 1; i < MAX_ARRAYS && r.arrays[i]; first += num_blocks(r.arrays[i++]))
        for (int64_t block = std::max(first, range.first); block < std::min(first + num_blocks(r.arrays[i]), range.end);
             block++) {
            const int64_t start = (block - first) * SQUARES;
            const float* x = r.arrays[i].as<float>() + start;
            sums[block] = sum_row(std::min(SQUARES, r.arrays[i].size() - start), [&](int64_t j, int64_t c) {
                const Vector v = load(x + j, c);
                return v * v;
            });
        }
}

// --- softmax and losses ----------------------------------------------------------------------------------------------

int64_t num_columns(const Array& x) { return x.ndim ? x.shape[x.ndim - 1] : 1; }

void split_rows(Record& r, int64_t work_per_element) {
    const Array& x = r.arrays[0];
    split(r, x.size() ? x.size() / num_columns(x) : 0, work_per_element * num_columns(x));
}

// Write exp(x - top) divided by its sum over a row.
INLINE void exponentials(const float* x, float* y, int64_t n, float top) {
    const float subtracted = top == -INFINITY ? 0.0f : top;  // of a row without any key
    for_vectors({0, n}, [&](int64_t i, int64_t c) {
        store(y + i, exp_of_negative(load(x + i, c, -INFINITY) - subtracted), c);
    });
    const float total = sum_fractions(y, n);
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    for_vectors({0, n}, [&](int64_t i, int64_t c) { store(y + i, load(y + i, c) * inverse, c); });
}

// arrays: x (..., n), mask of the same shape with any strides or null, y
const char* check_softmax(Record& r) {
    const Array &x = r.arrays[0], &mask = r.arrays[1];
    for (int i : {0, 2}) REQUIRE_FLOATS(r.arrays[i], x.size());
    REQUIRE(x.ndim > 0, "expected at least one axis");
    REQUIRE(!mask || (mask.type == BOOL && mask.has_shape(x)), "expected a mask of the same shape");
    split_rows(r, 8);
    return nullptr;
}
void run_softmax(const Record& r, int part) {
    const Array &x = r.arrays[0], &mask = r.arrays[1];
    const int64_t n = num_columns(x), stride = mask ? mask.strides[x.ndim - 1] : 0;
    const Range range = range_of(r, part, x.size() / n);
    for (int64_t row = range.first; row < range.end; row++) {
        const float* in = x.as<float>() + row * n;
        float* y = r.arrays[2].as<float>() + row * n;
        const int8_t* keep = mask.as<int8_t>();
        for (int64_t axis = x.ndim - 2, rest = row; mask && axis >= 0; rest /= x.shape[axis--])
            keep += rest % x.shape[axis] * mask.strides[axis];
        const float top = largest_of_row(n, [&](int64_t i, int64_t c) {
            Vector v = load(in + i, c, -INFINITY);
            if (mask) {
                v = select(is_false(keep + i * stride, stride, c), splat(-INFINITY), v);
                store(y + i, v, c);
            }
            return v;
        });
        if (mask) in = y;
        exponentials(in, y, n, top);
    }
}

// arrays: g (..., n), y, dx; dx = y (g - sum(g y))
const char* check_softmax_vjp(Record& r) {
    for (int i : {0, 1, 2}) REQUIRE_FLOATS(r.arrays[i], r.arrays[0].size());
    REQUIRE(r.arrays[0].ndim > 0, "expected at least one axis");
    split_rows(r, 4);
    return nullptr;
}
void run_softmax_vjp(const Record& r, int part) {
    const int64_t n = num_columns(r.arrays[0]);
    const Range range = range_of(r, part, r.arrays[0].size() / n);
    for (int64_t row = range.first; row < range.end; row++) {
        const float *g = r.arrays[0].as<float>() + row * n, *y = r.arrays[1].as<float>() + row * n;
        float* dx = r.arrays[2].as<float>() + row * n;
        const float total = sum_row(n, [&](int64_t i, int64_t c) { return load(g + i, c) * load(y + i, c); });
        for_vectors({0, n}, [&](int64_t i, int64_t c) {
            const Vector probability = load(y + i, c);
            store(dx + i, fused(load(g + i, c), probability, -(probability * total)), c);
        });
    }
}

// arrays: logits (rows, classes), labels (rows), losses (rows), statistics (2, rows), for the largest logit and the sum
// of exp(logit - largest); integers: pad_id; numbers: label_smoothing, z_loss
const char* check_cross_entropy(Record& r) {
    const Array& logits = r.arrays[0];
    REQUIRE(logits.ndim == 2 && is_packed(r.arrays[1], INT64, logits.shape[0]), "expected a label for each row");
    REQUIRE_FLOATS(logits, logits.size());
    REQUIRE_FLOATS(r.arrays[2], logits.shape[0]);
    REQUIRE_FLOATS(r.arrays[3], 2 * logits.shape[0]);
    split_rows(r, 8);
    return nullptr;
}
// Return the label of a row, or -1 for padding; a label out of range is reported and treated as padding.
INLINE int64_t label_of(const Record& r, int64_t row) {
    const int64_t label = r.arrays[1].as<int64_t>()[row];
    if (label == r.integers[0]) return -1;
    if (label >= 0 && label < r.arrays[0].shape[1]) return label;
    report_index(r);
    return -1;
}
void run_cross_entropy(const Record& r, int part) {
    const int64_t rows = r.arrays[0].shape[0], classes = r.arrays[0].shape[1];
    const float smoothing = r.numbers[0], z_loss = r.numbers[1];
    float *losses = r.arrays[2].as<float>(), *statistics = r.arrays[3].as<float>();
    const Range range = range_of(r, part, rows);
    for (int64_t row = range.first; row < range.end; row++) {
        const float* logits = r.arrays[0].as<float>() + row * classes;
        const int64_t label = label_of(r, row);
        losses[row] = 0.0f;
        if (label < 0) continue;
        const float top = largest_of_row(logits, classes);
        Vector sums = {};
        const float total = sum_row(classes, [&](int64_t i, int64_t c) {
            sums += load(logits + i, c, top) - top;
            return exp_of_negative(load(logits + i, c, -INFINITY) - top);
        });
        statistics[row] = top;
        statistics[rows + row] = total;
        // Relative to the largest logit, which would round the others away.
        const float log_total = std::log(total), log_z = top + log_total;
        float loss = (1.0f - smoothing) * (log_total + (top - logits[label]));
        if (z_loss > 0.0f) loss += z_loss * log_z * log_z;  // the square may overflow
        if (smoothing > 0.0f) loss += smoothing * (log_total - sum(sums) / classes);
        losses[row] = loss;
    }
}

// arrays: logits, labels, g (rows), statistics (2, rows), dlogits; integers and numbers as above.
// dlogits = g (p - q + 2 z log(Z) p), with q the smoothed target distribution and Z the partition function
const char* check_cross_entropy_vjp(Record& r) {
    REQUIRE_FLOATS(r.arrays[4], r.arrays[0].size());
    return check_cross_entropy(r);
}
void run_cross_entropy_vjp(const Record& r, int part) {
    const int64_t rows = r.arrays[0].shape[0], classes = r.arrays[0].shape[1];
    const float smoothing = r.numbers[0], z_loss = r.numbers[1];
    const float *gradients = r.arrays[2].as<float>(), *statistics = r.arrays[3].as<float>();
    const Range range = range_of(r, part, rows);
    for (int64_t row = range.first; row < range.end; row++) {
        const float *logits = r.arrays[0].as<float>() + row * classes, g = gradients[row];
        float* out = r.arrays[4].as<float>() + row * classes;
        const int64_t label = label_of(r, row);
        if (label < 0) {
            std::fill(out, out + classes, 0.0f);
            continue;
        }
        const float top = statistics[row], total = statistics[rows + row], low = g * smoothing / classes;
        const float factor = g * (1.0f + 2.0f * z_loss * (top + std::log(total))) / total;
        for_vectors({0, classes}, [&](int64_t i, int64_t c) {
            store(out + i, exp_of_negative(load(logits + i, c) - top) * factor - low, c);
        });
        out[label] -= (1.0f - smoothing) * g;
    }
}

// --- largest elements ------------------------------------------------------------------------------------------------

// NaN is larger than any number.
INLINE bool is_larger(float a, float b) { return a > b || (a != a && b == b); }
constexpr int64_t MAX_INSERTED = 256;  // elements of a row that are sorted by insertion

// arrays: x (rows, n), values (rows, k), indices (rows, k), int64; the k largest elements of each row, in descending
// order: NaN first, and equal ones in the order of their indices
const char* check_top_k(Record& r) {
    const Array &x = r.arrays[0], &values = r.arrays[1];
    REQUIRE(x.ndim == 2 && values.ndim == 2 && values.shape[0] == x.shape[0] && values.shape[1] <= x.shape[1],
            "expected (rows, n) and (rows, k) with k of at most n");
    REQUIRE_FLOATS(x, x.size());
    REQUIRE_FLOATS(values, values.size());
    REQUIRE(is_packed(r.arrays[2], INT64, values.size()), "expected contiguous indices of int64");
    if (values.size()) split(r, x.shape[0], x.shape[1]);
    return nullptr;
}
void top_k_of_row(const float* x, int64_t n, int64_t k, float* values, int64_t* indices) {
    constexpr int64_t BLOCK = 4 * LANES;
    int64_t count = 0, i = 0;
    auto insert = [&](int64_t index) {
        const float v = x[index];
        if (count == k && !is_larger(v, values[k - 1])) return;
        int64_t at = count < k ? count++ : k - 1;
        for (; at > 0 && is_larger(v, values[at - 1]); at--) values[at] = values[at - 1], indices[at] = indices[at - 1];
        values[at] = v, indices[at] = index;
    };
    while (i < k) insert(i++);
    for (; i + BLOCK <= n; i += BLOCK) {  // most blocks have no element larger than the smallest of the k
        const Vector least = splat(values[k - 1]);
        IntRegister is_any = {};
        for (int64_t j = 0; j < BLOCK; j += LANES) {
            const Vector v = load(x + i + j);
            for (const Register lanes : v.r) is_any |= ~(lanes <= least.r[0]);  // all of `least` is equal
        }
        uint64_t words[sizeof is_any / 8], all = 0;
        std::memcpy(words, &is_any, sizeof is_any);
        for (uint64_t word : words) all |= word;
        if (all) for (int64_t j = 0; j < BLOCK; j++) insert(i + j);
    }
    while (i < n) insert(i++);
}
void run_top_k(const Record& r, int part) {
    const int64_t n = r.arrays[0].shape[1], k = r.arrays[1].shape[1];
    const Range range = range_of(r, part, r.arrays[0].shape[0]);
    for (int64_t row = range.first; row < range.end; row++)
        top_k_of_row(r.arrays[0].as<float>() + row * n, n, k, r.arrays[1].as<float>() + row * k, r.arrays[2].as<int64_t>() + row * k);
}

// --- the choice of a token -------------------------------------------------------------------------------------------

// Keep the elements of a row that are at least `limit`.
void keep_from(float* x, int64_t n, float limit) {
    for (int64_t i = 0; i < n; i++) x[i] = x[i] >= limit ? x[i] : -INFINITY;
}
// Return draw(truncate(x), u) of ops/decoding.py, with the same order of sums; x and two other rows are overwritten.
int64_t draw(float* x, float* p, float* sorted, int64_t n, const double* settings, float u) {
    const double temperature = settings[0], top_p = settings[2], min_p = settings[3];
    const int64_t k = std::min(static_cast<int64_t>(settings[1]), n);
    if (temperature != 1.0) for (int64_t i = 0; i < n; i++) x[i] /= static_cast<float>(temperature);
    if (k && k <= MAX_INSERTED) {
        int64_t indices[MAX_INSERTED];
        top_k_of_row(x, n, k, sorted, indices);
        keep_from(x, n, sorted[k - 1]);
    } else if (k) {
        std::copy_n(x, n, sorted);
        std::nth_element(sorted, sorted + k - 1, sorted + n, std::greater<float>());
        keep_from(x, n, sorted[k - 1]);
    }
    const float top = largest_of_row(x, n);
    if (top_p < 1.0) {
        exponentials(x, p, n, top);
        std::copy_n(p, n, sorted);
        std::make_heap(sorted, sorted + n);
        float total = 0.0f, smallest = sorted[0];
        for (int64_t rest = n; rest; rest--) {
            std::pop_heap(sorted, sorted + rest);
            total += sorted[rest - 1];
            if (total - sorted[rest - 1] < static_cast<float>(top_p)) smallest = sorted[rest - 1];
            else if (total > top_p + 1e-5) break;  // further differences are no smaller, but for rounding
        }
        for (int64_t i = 0; i < n; i++) x[i] = p[i] >= smallest ? x[i] : -INFINITY;
    }
    if (min_p > -INFINITY) keep_from(x, n, top + static_cast<float>(min_p));
    exponentials(x, p, n, top);
    float all = 0.0f, total = 0.0f;
    for (int64_t i = 0; i < n; i++) all += p[i];
    const float threshold = std::min(u, 0.99999994f) * all;
    for (int64_t i = 0; i < n; i++) if ((total += p[i]) > threshold && p[i] > 0.0f) return i;
    return 0;
}

// arrays: logits (rows, n); tokens (rows), int64; steps of the rows (rows), int64, which are counted, or null for 0; mask
// (n) or null; uniforms (steps, rows); settings (4): temperature, top_k, top_p, log(min_p); found (steps, rows, 2): token
// and log-probability, which is NaN without a finite sum. Masked tokens are not chosen
const char* check_choose(Record& r) {
    const Array &logits = r.arrays[0], &index = r.arrays[2], &mask = r.arrays[3], &uniforms = r.arrays[4], &found = r.arrays[6];
    REQUIRE(logits.ndim == 2 && logits.shape[1] > 0, "expected logits (rows, n)");
    const int64_t rows = logits.shape[0], n = logits.shape[1], steps = index && rows ? uniforms.size() / rows : 1;
    REQUIRE_FLOATS(logits, rows * n);
    REQUIRE(is_packed(r.arrays[1], INT64, rows), "expected a token of int64 for each row");
    REQUIRE(!index || is_packed(index, INT64, rows), "expected a step of int64 for each row");
    REQUIRE(!mask || is_packed(mask, BOOL, n), "expected a boolean for each column");
    REQUIRE(is_packed(uniforms, FLOAT64, steps * rows) && is_packed(found, FLOAT64, 2 * steps * rows) &&
            is_packed(r.arrays[5], FLOAT64, 4), "expected contiguous arrays of float64 with sizes that match");
    r.plan[1] = steps;
    split(r, rows, 32 * n);
    return nullptr;
}
void run_choose(const Record& r, int part) {
    const int64_t rows = r.arrays[0].shape[0], n = r.arrays[0].shape[1];
    int64_t *tokens = r.arrays[1].as<int64_t>(), *index = r.arrays[2].as<int64_t>();
    const int8_t* mask = r.arrays[3].as<int8_t>();
    const double *uniforms = r.arrays[4].as<double>(), *settings = r.arrays[5].as<double>();
    thread_local std::vector<float> memory;
    memory.resize(3 * n);
    float *x = memory.data();
    const Range range = range_of(r, part, rows);
    for (int64_t row = range.first; row < range.end; row++) {
        const float* logits = r.arrays[0].as<float>() + row * n;
        const int64_t at = (index ? index[row]++ : 0) * rows + row;
        if (at < 0 || at >= r.plan[1] * rows) {
            report_index(r);
            continue;
        }
        for (int64_t i = 0; i < n; i++) x[i] = mask && mask[i] ? -INFINITY : logits[i];
        const float top = largest_of_row(x, n), u = static_cast<float>(uniforms[at]);
        const float log_total = std::log(sum_row(n, [&](int64_t i, int64_t c) {
            return exp_of_negative(load(x + i, c, -INFINITY) - top);
        }));
        // No number and all but the largest logits excluded: the first of them.
        const bool is_greedy = u == 0.0f && settings[0] == 1.0 && settings[3] == 0.0;
        int64_t token = 0;
        double* pair = r.arrays[6].as<double>() + 2 * at;
        pair[1] = NAN;
        if (!std::isnan(log_total)) {
            token = std::find(x, x + n, top) - x;
            const float score = is_greedy ? top : (token = draw(x, x + n, x + 2 * n, n, settings, u), logits[token]);
            pair[1] = (score - top) - log_total;
        }
        pair[0] = tokens[row] = token;
    }
}

// --- rotation, dropout, rows by id -----------------------------------------------------------------------------------

// arrays: x (heads, length, n), cosine (length, half), sine (length, half), y; integers: whether to rotate back
const char* check_rotate(Record& r) {
    const Array &x = r.arrays[0], &cosine = r.arrays[1];
    REQUIRE(x.ndim == 3 && cosine.ndim == 2 && cosine.shape[0] == x.shape[1] && 2 * cosine.shape[1] <= x.shape[2],
            "expected (heads, length, features) and angles (length, half)");
    for (int i : {0, 3}) REQUIRE_FLOATS(r.arrays[i], x.size());
    for (int i : {1, 2}) REQUIRE_FLOATS(r.arrays[i], cosine.size());
    split(r, x.shape[0] * x.shape[1], x.shape[2]);
    return nullptr;
}
void run_rotate(const Record& r, int part) {
    const int64_t length = r.arrays[0].shape[1], n = r.arrays[0].shape[2], half = r.arrays[1].shape[1];
    const float sign = r.integers[0] ? -1.0f : 1.0f;
    const Range range = range_of(r, part, r.arrays[0].shape[0] * length);
    for (int64_t row = range.first; row < range.end; row++) {
        const float* x = r.arrays[0].as<float>() + row * n;
        const float* cosine = r.arrays[1].as<float>() + row % length * half;
        const float* sine = r.arrays[2].as<float>() + row % length * half;
        float* y = r.arrays[3].as<float>() + row * n;
        for_vectors({0, half}, [&](int64_t i, int64_t c) {
            const Vector a = load(x + i, c), b = load(x + half + i, c), cos = load(cosine + i, c);
            const Vector sin = sign * load(sine + i, c);
            store(y + i, fused(a, cos, -(b * sin)), c);
            store(y + half + i, fused(b, cos, a * sin), c);
        });
        std::copy(x + 2 * half, x + n, y + 2 * half);
    }
}

// arrays: x, mask, y; numbers: scale. y = scale x where the mask is true, else 0
const char* check_dropout(Record& r) {
    const int64_t size = r.arrays[0].size();
    for (int i : {0, 2}) REQUIRE_FLOATS(r.arrays[i], size);
    REQUIRE(is_packed(r.arrays[1], BOOL, size), "expected a contiguous mask of the same size");
    split_elements(r, size, 1);
    return nullptr;
}
void run_dropout(const Record& r, int part) {
    const float *x = r.arrays[0].as<float>(), scale = r.numbers[0];
    const int8_t* mask = r.arrays[1].as<int8_t>();
    float* y = r.arrays[2].as<float>();
    for_vectors(range_of(r, part, r.arrays[0].size()), [&](int64_t i, int64_t count) {
        store(y + i, select(is_false(mask + i, 1, count), Vector{}, scale * load(x + i, count)), count);
    });
}

// arrays: rows (count, n), ids (count), target (height, n); numbers: scale. target[ids] += scale rows, in the order of
// the ids; a part is a range of columns. An id out of range is reported and left out
const char* check_add_rows(Record& r) {
    const Array &rows = r.arrays[0], &ids = r.arrays[1], &target = r.arrays[2];
    REQUIRE(target.ndim == 2 && is_packed(ids, INT64, ids.size()), "expected a matrix, and contiguous ids of int64");
    REQUIRE_FLOATS(target, target.size());
    REQUIRE_FLOATS(rows, ids.size() * target.shape[1]);
    constexpr int64_t step = 4 * LANES;
    split(r, (target.shape[1] + step - 1) / step, 2 * step * ids.size());
    r.plan[0] *= step;
    return nullptr;
}
void run_add_rows(const Record& r, int part) {
    const Array &ids = r.arrays[1], &target = r.arrays[2];
    const int64_t n = target.shape[1];
    const float scale = r.numbers[0];
    const Range columns = range_of(r, part, n);
    for (int64_t i = 0; i < ids.size(); i++) {
        const int64_t id = ids.as<int64_t>()[i];
        if (id < 0 || id >= target.shape[0]) {
            report_index(r);
            continue;
        }
        const float* row = r.arrays[0].as<float>() + i * n;
        float* total = target.as<float>() + id * n;
        for_vectors(columns, [&](int64_t j, int64_t c) {
            store(total + j, fused(splat(scale), load(row + j, c), load(total + j, c)), c);
        });
    }
}

// --- optimizers ------------------------------------------------------------------------------------------------------

// arrays: parameter, gradient, exp_avg, exp_avg_sq, settings (float64: step_size, beta1, beta2, bias_correction2,
// epsilon, learning_rate, scale of the gradient, which is NaN for no update); numbers: weight decay. All but the gradient
// are updated in place
const char* check_adam(Record& r) {
    const int64_t size = r.arrays[0].size();
    for (int i : {0, 1, 2, 3}) REQUIRE_FLOATS(r.arrays[i], size);
    REQUIRE(is_packed(r.arrays[4], FLOAT64, 7), "expected 7 settings of float64");
    split_elements(r, size, 4, 100000);
    return nullptr;
}
void run_adam(const Record& r, int part) {
    const double* settings = r.arrays[4].as<double>();
    const float step_size = settings[0], beta1 = settings[1], beta2 = settings[2], correction = settings[3];
    const volatile double shrinkage = settings[5] * r.numbers[0];  // not fused: the baseline has no such instruction
    const float epsilon = settings[4], scale = settings[6], decay = 1.0 - shrinkage;
    if (std::isnan(scale)) return;
    const float rest1 = 1.0 - settings[1], rest2 = 1.0 - settings[2];
    float *p = r.arrays[0].as<float>(), *m = r.arrays[2].as<float>(), *v = r.arrays[3].as<float>();
    const float* g = r.arrays[1].as<float>();
    for_vectors(range_of(r, part, r.arrays[0].size()), [&](int64_t i, int64_t count) {
        const Vector gradient = scale * load(g + i, count);
        const Vector mean = fused(splat(beta1), load(m + i, count), rest1 * gradient);
        const Vector square = fused(splat(beta2), load(v + i, count), rest2 * (gradient * gradient));
        store(m + i, mean, count);
        store(v + i, square, count);
        const Vector change = step_size * mean / (sqrt(square * correction) + epsilon);
        store(p + i, fused(splat(decay), load(p + i, count), -change), count);
    });
}

const Operation operations[] = {
    {"relu", 1 << 1, check_relu, run_relu},
    {"relu_vjp", 1 << 2, check_relu_vjp, run_relu_vjp},
    {"gelu", 1 << 2 | 1 << 3, check_gelu, run_gelu},
    {"logistic_unit", 1 << 1 | 1 << 2, check_logistic_unit, run_logistic_unit},
    {"norm", 1 << 3 | 1 << 4, check_norm, run_norm},
    {"norm_vjp", 1 << 4 | 1 << 5, check_norm_vjp, run_norm_vjp},
    {"sums_of_squares", 1 << 0, check_sums_of_squares, run_sums_of_squares},
    {"softmax", 1 << 2, check_softmax, run_softmax},
    {"softmax_vjp", 1 << 2, check_softmax_vjp, run_softmax_vjp},
    {"cross_entropy", 1 << 2 | 1 << 3, check_cross_entropy, run_cross_entropy},
    {"cross_entropy_vjp", 1 << 4, check_cross_entropy_vjp, run_cross_entropy_vjp},
    {"top_k", 1 << 1 | 1 << 2, check_top_k, run_top_k},
    {"choose", 1 << 1 | 1 << 2 | 1 << 6, check_choose, run_choose},
    {"rotate", 1 << 3, check_rotate, run_rotate},
    {"dropout", 1 << 2, check_dropout, run_dropout},
    {"add_rows", 1 << 2, check_add_rows, run_add_rows},
    {"adam", 1 << 0 | 1 << 2 | 1 << 3, check_adam, run_adam},
};
}  // namespace
extern const Family rows_family = {operations, sizeof operations / sizeof *operations};

}  // namespace ISA
