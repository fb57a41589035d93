// Vectors of 16 floats: one register of AVX-512, two of AVX2, four of SSE or NEON.
//
// Sums are made in 16 lanes and then in one fixed tree, so AVX2, AVX-512 and NEON give the same bits. Each file that
// includes this one is compiled once for each instruction set, with -DISA=name.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include "record.h"
#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE_METHOD inline __attribute__((always_inline))
#define INLINE static INLINE_METHOD

namespace ISA {

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int REGISTERS = LANES / WIDTH;
// GCC keeps vectors that are longer than a register in memory, so a vector is a struct of registers.
typedef float Register __attribute__((vector_size(4 * WIDTH)));
typedef float UnalignedRegister __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t IntRegister __attribute__((vector_size(4 * WIDTH)));
struct Vector { Register r[REGISTERS]; };
struct Mask { IntRegister r[REGISTERS]; };

#define EACH_REGISTER for (int i = 0; i < REGISTERS; i++)
INLINE Vector splat(float x) { Vector v; EACH_REGISTER v.r[i] = x - Register{}; return v; }
#define VECTOR_OPERATOR(op) \
    INLINE Vector operator op(Vector a, Vector b) { EACH_REGISTER a.r[i] = a.r[i] op b.r[i]; return a; } \
    INLINE Vector operator op(Vector a, float b) { return a op splat(b); } \
    INLINE Vector operator op(float a, Vector b) { return splat(a) op b; }
VECTOR_OPERATOR(+) VECTOR_OPERATOR(-) VECTOR_OPERATOR(*) VECTOR_OPERATOR(/)
INLINE Vector operator-(Vector a) { EACH_REGISTER a.r[i] = -a.r[i]; return a; }
INLINE Vector& operator+=(Vector& a, Vector b) { return a = a + b; }
INLINE Mask operator<(Vector a, Vector b) { Mask m; EACH_REGISTER m.r[i] = a.r[i] < b.r[i]; return m; }
INLINE Mask operator>(Vector a, Vector b) { return b < a; }
INLINE Mask operator==(Vector a, Vector b) { Mask m; EACH_REGISTER m.r[i] = a.r[i] == b.r[i]; return m; }
INLINE Vector select(Mask m, Vector a, Vector b) { EACH_REGISTER a.r[i] = m.r[i] ? a.r[i] : b.r[i]; return a; }
// The second argument where they are unordered: max(x, limit) replaces NaN, max(limit, x) keeps it.
INLINE Vector max(Vector a, Vector b) { return select(a > b, a, b); }
INLINE Vector min(Vector a, Vector b) { return select(a < b, a, b); }
INLINE void fma(Vector& total, float a, Vector b) { EACH_REGISTER total.r[i] += a * b.r[i]; }
INLINE void fma(Vector& total, Vector a, Vector b) { EACH_REGISTER total.r[i] += a.r[i] * b.r[i]; }

INLINE Vector load(const float* x) { Vector v; EACH_REGISTER v.r[i] = *(const UnalignedRegister*)(x + i * WIDTH); return v; }
INLINE void store(float* x, Vector v) { EACH_REGISTER *(UnalignedRegister*)(x + i * WIDTH) = v.r[i]; }
#if defined(__AVX512F__)
INLINE __mmask16 first_lanes(int64_t count) { return count > 0 ? (1u << count) - 1 : 0; }
#elif defined(__AVX2__)
INLINE __m256i first_lanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif
// The first `count` elements; the other lanes are `fill`. Memory beyond them is not touched.
INLINE Vector load(const float* x, int64_t count, float fill = 0.0f) {
    if (count >= LANES) return load(x);
#if defined(__AVX512F__)
    return {{(Register)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), first_lanes(count), x)}};
#elif defined(__AVX2__)
    Vector v;
    EACH_REGISTER {
        const __m256i mask = first_lanes(count - i * WIDTH);
        const __m256 some = _mm256_maskload_ps(x + i * WIDTH, mask);
        v.r[i] = (Register)_mm256_blendv_ps(_mm256_set1_ps(fill), some, (__m256)mask);
    }
    return v;
#else
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = i < count ? x[i] : fill;
    return load(lanes);
#endif
}
INLINE void store(float* x, Vector v, int64_t count) {
    if (count >= LANES) return store(x, v);
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(x, first_lanes(count), (__m512)v.r[0]);
#elif defined(__AVX2__)
    EACH_REGISTER _mm256_maskstore_ps(x + i * WIDTH, first_lanes(count - i * WIDTH), (__m256)v.r[i]);
#else
    float lanes[LANES];
    store(lanes, v);
    std::memcpy(x, lanes, count * sizeof(float));
#endif
}

// GCC 12 converts vectors of int8 one lane at a time, so this is written with intrinsics.
#if defined(__AVX512F__)
INLINE Vector widen(const int8_t* x) {
    return {{(Register)_mm512_maskz_cvtepi32_ps(-1, _mm512_maskz_cvtepi8_epi32(-1, _mm_loadu_si128((const __m128i*)x)))}};
}
#elif defined(__AVX2__)
INLINE Vector widen(const int8_t* x) {
    return {{(Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x))),
             (Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(x + 8))))}};
}
#else
INLINE Vector widen(const int8_t* x) {
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = x[i];
    return load(lanes);
}
#endif
INLINE Vector widen(const float* x) { return load(x); }
INLINE Vector widen(const uint16_t* x) {  // bfloat16
    uint32_t bits[LANES];
    for (int i = 0; i < LANES; i++) bits[i] = (uint32_t)x[i] << 16;
    Vector v;
    std::memcpy(&v, bits, sizeof v);
    return v;
}

INLINE float sum(Vector v) {  // lanes i and i + 8, then i and i + 4, and so on
    typedef float Quarter __attribute__((vector_size(16)));
    Quarter q[4];
    std::memcpy(q, &v, sizeof q);
    Quarter total = (q[0] + q[2]) + (q[1] + q[3]);
    return (total[0] + total[2]) + (total[1] + total[3]);
}
INLINE float largest(Vector v) {
    float lanes[LANES];
    store(lanes, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntRegister{__VA_ARGS__})
#endif
// The same shuffle of each four lanes, and two shuffles of whole fours: all of them are single instructions.
#if defined(__AVX512F__)
#define SHUFFLE_FOURS(a, b, i, j, k, l) SHUFFLE(a, b, i, j, k, l, (i) + 4, (j) + 4, (k) + 4, (l) + 4, \
                                                (i) + 8, (j) + 8, (k) + 8, (l) + 8, (i) + 12, (j) + 12, (k) + 12, (l) + 12)
INLINE Register even_fours(Register a, Register b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
}
INLINE Register odd_fours(Register a, Register b) {
    return SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#elif defined(__AVX2__)
#define SHUFFLE_FOURS(a, b, i, j, k, l) SHUFFLE(a, b, i, j, k, l, (i) + 4, (j) + 4, (k) + 4, (l) + 4)
INLINE Register even_fours(Register a, Register b) { return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11); }
INLINE Register odd_fours(Register a, Register b) { return SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15); }
#else
#define SHUFFLE_FOURS(a, b, i, j, k, l) SHUFFLE(a, b, i, j, k, l)
INLINE Register even_fours(Register a, Register) { return a; }
INLINE Register odd_fours(Register, Register b) { return b; }
#endif

// Unrolled early, as GCC would otherwise keep arrays of registers in memory.
#define UNROLLED _Pragma("GCC unroll 16") for

INLINE void transpose(Register (&rows)[WIDTH]) {
    Register t[WIDTH];
    UNROLLED (int n = 0; n < WIDTH; n += 4) {  // four rows: register n + e gets their columns e, e + 4, ...
        const Register *r = rows + n, a = SHUFFLE_FOURS(r[0], r[1], 0, WIDTH, 1, WIDTH + 1);
        const Register b = SHUFFLE_FOURS(r[0], r[1], 2, WIDTH + 2, 3, WIDTH + 3);
        const Register c = SHUFFLE_FOURS(r[2], r[3], 0, WIDTH, 1, WIDTH + 1);
        const Register d = SHUFFLE_FOURS(r[2], r[3], 2, WIDTH + 2, 3, WIDTH + 3);
        t[n] = SHUFFLE_FOURS(a, c, 0, 1, WIDTH, WIDTH + 1), t[n + 1] = SHUFFLE_FOURS(a, c, 2, 3, WIDTH + 2, WIDTH + 3);
        t[n + 2] = SHUFFLE_FOURS(b, d, 0, 1, WIDTH, WIDTH + 1), t[n + 3] = SHUFFLE_FOURS(b, d, 2, 3, WIDTH + 2, WIDTH + 3);
    }
    UNROLLED (int e = 0; e < 4; e++) {
        if constexpr (WIDTH == 4) rows[e] = t[e];
        if constexpr (WIDTH == 8) rows[e] = even_fours(t[e], t[e + 4]), rows[e + 4] = odd_fours(t[e], t[e + 4]);
        if constexpr (WIDTH == 16) {
            const Register a = even_fours(t[e], t[e + 4]), b = odd_fours(t[e], t[e + 4]);
            const Register c = even_fours(t[e + 8], t[e + 12]), d = odd_fours(t[e + 8], t[e + 12]);
            rows[e] = even_fours(a, c), rows[e + 4] = even_fours(b, d), rows[e + 8] = odd_fours(a, c), rows[e + 12] = odd_fours(b, d);
        }
    }
}
INLINE void transpose(Vector (&rows)[LANES]) {
    Vector columns[LANES];
    UNROLLED (int i = 0; i < REGISTERS; i++)
        UNROLLED (int j = 0; j < REGISTERS; j++) {
            Register square[WIDTH];
            UNROLLED (int n = 0; n < WIDTH; n++) square[n] = rows[i * WIDTH + n].r[j];
            transpose(square);
            UNROLLED (int n = 0; n < WIDTH; n++) columns[j * WIDTH + n].r[i] = square[n];
        }
    UNROLLED (int n = 0; n < LANES; n++) rows[n] = columns[n];
}

// exp(x) with a relative error of 2e-7: 2^n times a polynomial. Zero below -87.3, infinity above 88.7, NaN for NaN.
INLINE Vector exp(Vector x) {
    Vector clipped = min(splat(88.8f), max(splat(-87.3f), x));  // keeps NaN
    Vector n = clipped * 1.44269504f + 12582912.0f;
    Mask exponent;
    EACH_REGISTER exponent.r[i] = (IntRegister)n.r[i] << 23;
    n = n - 12582912.0f;
    Vector r = clipped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Vector p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    EACH_REGISTER p.r[i] = (Register)((IntRegister)p.r[i] + exponent.r[i]);
    p = select(x > splat(88.72283f), splat(INFINITY), p);
    p = select(x < splat(-87.3f), Vector{}, p);
    return select(x == x, p, x);
}

}  // namespace ISA
