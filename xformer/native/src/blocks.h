// Formats of the quantized blocks of GGUF files, with the bits of the package gguf: all products here are exact.
//
// A format is the type of a block. `read` makes the 32 values of a group, of which a block has one or eight.
#pragma once
#include "vector.h"

namespace ISA {

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
INLINE Bytes bytes(const uint8_t* x) {
    Bytes b;
    std::memcpy(&b, x, sizeof b);
    return b;
}
INLINE Vector widen(Bytes x) { return widen(reinterpret_cast<const int8_t*>(&x)); }


INLINE float half(const uint8_t* bytes) {
    uint16_t bits;
    std::memcpy(&bits, bytes, 2);
    return halves[bits];
}

// Return f of the low BITS bits of 16 bytes, for 4 or 5 bits. AVX-512 looks up the results for all numbers.
#if defined(__AVX512F__)
template <int BITS, class F> INLINE Vector map(Bytes x, F f) {
    const Vector numbers{{Register{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}};
    const __m512i indices = _mm512_cvtepu8_epi32((__m128i)x);
    const __m512 low = (__m512)f(numbers).r[0];
    if (BITS == 4) return {{(Register)_mm512_permutexvar_ps(indices, low)}};
    return {{(Register)_mm512_permutex2var_ps(low, indices, (__m512)f(numbers + 16.0f).r[0])}};
}
#else
template <int BITS, class F> INLINE Vector map(Bytes x, F f) { return f(widen(x & (uint8_t)((1 << BITS) - 1))); }
#endif

// Shift all bytes right; other bits than the low 8 - count of a byte are undefined.
INLINE Bytes shift(Bytes x, int count) {
    typedef uint16_t Words __attribute__((vector_size(LANES)));
    return (Bytes)((Words)x >> (uint16_t)count);
}
// Bytes that are 16 where a bit of two bytes is set.
INLINE Bytes fifth_bits(const uint8_t* x) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    uint16_t bits;
    std::memcpy(&bits, x, 2);
    return (Bytes)_mm_maskz_set1_epi8(bits, 16);
#endif
    typedef uint64_t Pair __attribute__((vector_size(LANES)));
    const Bytes copies = (Bytes)Pair{x[0] * 0x0101010101010101u, x[1] * 0x0101010101010101u};
    return (Bytes)((copies & (Bytes)(Pair{} + 0x8040201008040201u)) != 0) & 16;
}

// 32 values of 4 bits and, if BITS is 5, one more each: scale * (value - ZERO) + minimum.
template <int BITS, int ZERO> struct Legacy {
    static constexpr int VALUES = 32, START = ZERO ? 2 : 4;
    uint8_t data[START + (BITS == 5 ? 4 : 0) + 16];

    INLINE_METHOD void read(int, Vector* out) const {
        const float scale = half(data), minimum = ZERO ? 0.0f : half(data + 2);
        auto value = [&](Vector x) __attribute__((always_inline)) {
            return ZERO ? scale * (x - (float)ZERO) : scale * x + minimum;
        };
        const Bytes both = bytes(data + sizeof data - 16);
        Bytes values[] = {both, shift(both, 4)};
        for (int i = 0; i < 2; i++) {
            if (BITS == 5) values[i] = (values[i] & 15) | fifth_bits(data + START + 2 * i);
            out[i] = map<BITS>(values[i], value);
        }
    }
};

struct Q8_0 {
    static constexpr int VALUES = 32;
    uint8_t data[34];

    INLINE_METHOD void read(int, Vector* out) const {
        for (int i = 0; i < 2; i++) out[i] = half(data) * widen(bytes(data + 2 + i * LANES));
    }
};

// 8 groups of 32 values, whose scales and minima have 6 bits.
template <int BITS> struct KQuants {
    static constexpr int VALUES = 256;
    uint8_t data[BITS == 5 ? 176 : 144];

    INLINE_METHOD void read(int group, Vector* out) const {
        const uint8_t *s = data + 4, *high = data + 16, *values = high + (BITS == 5 ? 32 : 0) + group / 2 * 32;
        const int a = group < 4 ? s[group] & 63 : (s[group + 4] & 15) | (s[group - 4] >> 2 & 48);
        const int b = group < 4 ? s[group + 4] & 63 : s[group + 4] >> 4 | (s[group] >> 2 & 48);
        const float scale = half(data) * a, minimum = half(data + 2) * b;
        for (int i = 0; i < 2; i++) {
            Bytes x = shift(bytes(values + i * LANES), group % 2 * 4);
            if (BITS == 5) x = (x & 15) | (shift(bytes(high + i * LANES), group) & 1) << 4;
            out[i] = map<BITS>(x, [&](Vector x) __attribute__((always_inline)) { return scale * x - minimum; });
        }
    }
};

struct Q6_K {
    static constexpr int VALUES = 256;
    uint8_t data[210];

    INLINE_METHOD void read(int group, Vector* out) const {
        const uint8_t *low = data + group / 4 * 64 + group % 2 * 32, *high = data + 128 + group / 4 * 32;
        for (int i = 0; i < 2; i++) {
            const Bytes x = shift(bytes(low + i * LANES), group % 4 / 2 * 4) & 15;
            const Bytes up = shift(bytes(high + i * LANES), group % 4 * 2) & 3;
            const float scale = half(data + 208) * (int8_t)data[192 + group * 2 + i];
            out[i] = scale * widen((x | up << 4) - (uint8_t)32);
        }
    }
};

// Return f(block) for the format whose blocks have so many bytes, or else 0. Each has another number.
template <class F> static int64_t with_format(int64_t size, F f) {
    switch (size) {
        case sizeof(Legacy<4, 8>): return f(Legacy<4, 8>());
        case sizeof(Legacy<4, 0>): return f(Legacy<4, 0>());
        case sizeof(Legacy<5, 16>): return f(Legacy<5, 16>());
        case sizeof(Legacy<5, 0>): return f(Legacy<5, 0>());
        case sizeof(Q8_0): return f(Q8_0());
        case sizeof(KQuants<4>): return f(KQuants<4>());
        case sizeof(KQuants<5>): return f(KQuants<5>());
        case sizeof(Q6_K): return f(Q6_K());
    }
    return 0;
}

}  // namespace ISA
