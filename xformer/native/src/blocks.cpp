// Quantized blocks of GGUF files as float32, and products of integers by strips of them.
#include "blocks.h"

namespace ISA {
namespace {

// Arrays: blocks (count, bytes) uint8, out (count, values) float32.
const char* check_dequantize(Record& r) {
    const Array &blocks = r.arrays[0], &out = r.arrays[1];
    REQUIRE(blocks && out && blocks.type == UINT8 && out.type == FLOAT32, "expected uint8 blocks and float32 values");
    REQUIRE(blocks.ndim == 2 && out.ndim == 2 && blocks.shape[0] == out.shape[0], "expected as many rows as blocks");
    REQUIRE(blocks.is_contiguous() && out.is_contiguous(), "expected contiguous arrays");
    const int64_t values = with_format(blocks.shape[1], [](auto block) { return block.VALUES; });
    REQUIRE(values > 0 && values == out.shape[1], "no format has blocks of this size");
    split(r, blocks.shape[0], values);
    return nullptr;
}
void run_dequantize(const Record& r, int part) {
    const Array &blocks = r.arrays[0], &out = r.arrays[1];
    const int64_t first = part * r.plan[0], end = std::min(first + r.plan[0], blocks.shape[0]);
    with_format(blocks.shape[1], [&](auto block) {
        const auto* from = blocks.as<const decltype(block)>();
        for (int64_t i = first; i < end; i++)
            for (int group = 0; group < block.VALUES / 32; group++) {
                Vector values[2];
                from[i].read(group, values);
                for (int v = 0; v < 2; v++) store(out.as<float>() + i * block.VALUES + group * 32 + v * LANES, values[v]);
            }
        return 0;
    });
}

// --- 16 columns side by side --------------------------------------------------------------------------------------------
//
// A strip has one block of each of 16 columns: a unit of all columns, then the next one. Units are float16 numbers and
// groups of four bytes. So the unit at byte i of a block is at byte 16 * i of the strip, and its lanes are the columns.

typedef uint32_t Unsigned __attribute__((vector_size(4 * WIDTH)));
struct Quads { Unsigned r[REGISTERS]; };
INLINE Quads quads(const uint8_t* strip, int at) {
    Quads q;
    std::memcpy(&q, strip + LANES * at, sizeof q);
    return q;
}
#define QUADS_OPERATOR(op) INLINE Quads operator op(Quads a, uint32_t b) { EACH_REGISTER a.r[i] = a.r[i] op b; return a; }
QUADS_OPERATOR(&) QUADS_OPERATOR(^) QUADS_OPERATOR(*) QUADS_OPERATOR(<<) QUADS_OPERATOR(>>)
INLINE Quads operator|(Quads a, Quads b) { EACH_REGISTER a.r[i] |= b.r[i]; return a; }
INLINE Vector widen(Quads x) {  // of int32
    Vector v;
    EACH_REGISTER v.r[i] = __builtin_convertvector((IntRegister)x.r[i], Register);
    return v;
}
INLINE Vector halves_of(const uint8_t* strip, int at) {
    const uint8_t* x = strip + LANES * at;
#if defined(__AVX512F__)
    return {{(Register)_mm512_maskz_cvtph_ps(-1, _mm256_loadu_si256((const __m256i*)x))}};
#elif defined(__F16C__)
    const __m128i* parts = (const __m128i*)x;
    return {{(Register)_mm256_cvtph_ps(_mm_loadu_si128(parts)), (Register)_mm256_cvtph_ps(_mm_loadu_si128(parts + 1))}};
#else
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = half(x + 2 * i);
    return load(lanes);
#endif
}

// Numbers are bytes without a sign, as the instructions expect them, except those of Q8_0 without VNNI.
#if defined(__AVX512VNNI__)
constexpr bool IS_SIGNED = false;
#else
constexpr bool IS_SIGNED = true;
#endif

constexpr int GROUP = 32;  // elements of a row of x with one scale

// Rows of x in a tile; the last tile may have fewer. All tiles of a few rows are about as tall.
constexpr int64_t TALLEST = REGISTERS == 1 ? 12 : 2;
INLINE int64_t rows_of_tile(int64_t rows) {
    const int64_t tiles = (rows + TALLEST - 1) / TALLEST;
    return rows ? (rows + tiles - 1) / tiles : 1;
}

// --- formats ------------------------------------------------------------------------------------------------------------
//
// Of the strips of a format T, `numbers` are those of four rows from row 4 * i of a group on. A value is
// scale * (number - OFFSET) + minimum; the halves of a group have scales of their own if PARTS is 2.

template <class T> struct Strips;

template <int BITS, int ZERO> struct Strips<Legacy<BITS, ZERO>> {
    static constexpr int SIZE = sizeof(Legacy<BITS, ZERO>), OFFSET = ZERO, PARTS = 1;
    static constexpr bool HAS_MINIMA = ZERO == 0;
    INLINE_METHOD static Quads numbers(const uint8_t* strip, int, int i) {
        const Quads x = quads(strip, SIZE - 16 + i % 4 * 4) >> i / 4 * 4 & 0x0f0f0f0f;
        if (BITS == 4) return x;
        return x | (quads(strip, SIZE - 20) >> 4 * i & 15) * 0x00204081 << 4 & 0x10101010;  // a bit for each byte
    }
    INLINE_METHOD static Vector scales(const uint8_t* strip, int, int) { return halves_of(strip, 0); }
    INLINE_METHOD static Vector minima(const uint8_t* strip, int) { return halves_of(strip, 2); }
};

template <> struct Strips<Q8_0> {
    static constexpr int OFFSET = IS_SIGNED ? 0 : 128, PARTS = 1;
    static constexpr bool HAS_MINIMA = false;
    INLINE_METHOD static Quads numbers(const uint8_t* strip, int, int i) {
        return quads(strip, 2 + 4 * i) ^ (IS_SIGNED ? 0 : 0x80808080);
    }
    INLINE_METHOD static Vector scales(const uint8_t* strip, int, int) { return halves_of(strip, 0); }
};

template <int BITS> struct Strips<KQuants<BITS>> {
    static constexpr int OFFSET = 0, PARTS = 1;
    static constexpr bool HAS_MINIMA = true;
    INLINE_METHOD static Quads numbers(const uint8_t* strip, int group, int i) {
        const Quads x = quads(strip, (BITS == 5 ? 48 : 16) + group / 2 * 32 + 4 * i) >> group % 2 * 4 & 0x0f0f0f0f;
        return BITS == 4 ? x : x | (quads(strip, 16 + 4 * i) >> group & 0x01010101) << 4;
    }
    // Of the scales at 4, or of the minima at 8, the six bits of a group; the last four groups have four of them at 12.
    INLINE_METHOD static Vector six_bits(const uint8_t* strip, int group, int at) {
        const Quads x = quads(strip, at) >> group % 4 * 8;
        return widen(group < 4 ? x & 63 : (quads(strip, 12) >> (group % 4 * 8 + at - 4) & 15) | (x & 192) >> 2);
    }
    INLINE_METHOD static Vector scales(const uint8_t* strip, int group, int) { return halves_of(strip, 0) * six_bits(strip, group, 4); }
    INLINE_METHOD static Vector minima(const uint8_t* strip, int group) { return -(halves_of(strip, 2) * six_bits(strip, group, 8)); }
};

template <> struct Strips<Q6_K> {
    static constexpr int OFFSET = 32, PARTS = 2;
    static constexpr bool HAS_MINIMA = false;
    INLINE_METHOD static Quads numbers(const uint8_t* strip, int group, int i) {
        const Quads low = quads(strip, group / 4 * 64 + group % 2 * 32 + 4 * i) >> group % 4 / 2 * 4 & 0x0f0f0f0f;
        return low | (quads(strip, 128 + group / 4 * 32 + 4 * i) >> group % 4 * 2 & 0x03030303) << 4;
    }
    INLINE_METHOD static Vector scales(const uint8_t* strip, int group, int part) {
        Quads x = quads(strip, 192 + group / 2 * 4) << (24 - 8 * (group % 2 * 2 + part));
        EACH_REGISTER x.r[i] = (Unsigned)((IntRegister)x.r[i] >> 24);
        return halves_of(strip, 208) * widen(x);
    }
};

// --- products with rounded rows -----------------------------------------------------------------------------------------
//
// `round_groups` rounds x to int8, with a scale for 32 elements of a row. Sums of products of integers are exact; then
// they are scaled and added up in the order of the depth: results have the same bits at all levels with fused products,
// for any number of rows.

constexpr float SMALLEST = 1.17549435e-38f;  // of a scale: of subnormal ones, quotients may be larger than 127
constexpr int64_t ROWS_OF_PART = 96;

#if defined(__AVX512VNNI__)
template <bool> INLINE void add(Quads& sum, const int8_t* x, Quads w) {
    struct Four { int8_t bytes[4]; };
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.r[0]) : "v"(w.r[0]), "m"(*reinterpret_cast<const Four*>(x)));
}
#elif defined(__AVX2__)
template <bool is_signed> INLINE void add(Quads& sum, const int8_t* x, Quads w) {
    int32_t four;
    std::memcpy(&four, x, 4);
    const __m256i factors = _mm256_set1_epi32(four);
    EACH_REGISTER {  // sums of two products fit into int16; of negative numbers, x has the sign
        const __m256i numbers = (__m256i)w.r[i];
        const __m256i pairs = is_signed ? _mm256_maddubs_epi16(_mm256_abs_epi8(numbers), _mm256_sign_epi8(factors, numbers))
                                        : _mm256_maddubs_epi16(numbers, factors);
        sum.r[i] += (Unsigned)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
}
#elif defined(__ARM_FEATURE_DOTPROD)
template <bool> INLINE void add(Quads& sum, const int8_t* x, Quads w) {
    const int8x16_t factors = vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(x)));
    EACH_REGISTER sum.r[i] = (Unsigned)vdotq_s32((int32x4_t)sum.r[i], (int8x16_t)w.r[i], factors);
}
#else
template <bool> INLINE void add(Quads& sum, const int8_t* x, Quads w) {
    for (int e = 0; e < 4; e++)
        EACH_REGISTER sum.r[i] += (Unsigned)((IntRegister)(w.r[i] << (24 - 8 * e)) >> 24) * (uint32_t)(int32_t)x[e];
}
#endif

// A tile of x, with its rows side by side: four bytes of each row, then the next four; in the same way scales and sums.
struct Tile {
    const int8_t* x;
    const float *scales, *sums;  // a scale and two sums of 16 for each group
    const uint8_t* strips;
    const float* bias;
    float* out;
    int64_t groups, step_out, columns;
};

template <class T, int M> void multiply(const Tile& t) {
    using S = Strips<T>;
    constexpr int PARTS = S::PARTS, QUADS = GROUP / 4 / PARTS;
    Vector total[M] = {};
    for (int64_t g = 0; g < t.groups; g++) {
        const int group = g % (T::VALUES / GROUP);
        const uint8_t* strip = t.strips + g / (T::VALUES / GROUP) * LANES * sizeof(T);
        const float *scales = t.scales + g * M, *sums = t.sums + 2 * g * M;
        UNROLLED (int part = 0; part < PARTS; part++) {
            Quads sum[M];
            UNROLLED (int m = 0; m < M; m++) {
                const float rows = PARTS == 2 ? sums[2 * m + part] : sums[2 * m] + sums[2 * m + 1];
                EACH_REGISTER sum[m].r[i] = Unsigned{} + (uint32_t)(-S::OFFSET * (int32_t)rows);
            }
            UNROLLED (int q = part * QUADS; q < (part + 1) * QUADS; q++) {
                const Quads numbers = S::numbers(strip, group, q);
                UNROLLED (int m = 0; m < M; m++) add<sizeof(T) == sizeof(Q8_0)>(sum[m], t.x + (g * GROUP / 4 + q) * M * 4 + m * 4, numbers);
            }
            const Vector scale = S::scales(strip, group, part);
            UNROLLED (int m = 0; m < M; m++) fma(total[m], scales[m], scale * widen(sum[m]));
        }
        if constexpr (S::HAS_MINIMA) {
            const Vector minimum = S::minima(strip, group);
            UNROLLED (int m = 0; m < M; m++) fma(total[m], scales[m] * (sums[2 * m] + sums[2 * m + 1]), minimum);
        }
    }
    for (int m = 0; m < M; m++)
        store(t.out + m * t.step_out, t.bias ? total[m] + load(t.bias, t.columns) : total[m], t.columns);
}
template <class T, int M = TALLEST> auto tile_for(int64_t m) -> void (*)(const Tile&) {
    if constexpr (M > 1) if (m < M) return tile_for<T, M - 1>(m);
    return multiply<T, M>;
}

// Arrays: x (rows, depth), out int8, scales (rows, depth / 32), sums of 16 numbers each (rows, depth / 16).
const char* check_round_groups(Record& r) {
    const Array &x = r.arrays[0], &out = r.arrays[1], &scales = r.arrays[2], &sums = r.arrays[3];
    REQUIRE(x && out && scales && sums, "expected x, out, scales and sums");
    REQUIRE(x.type == FLOAT32 && out.type == INT8 && scales.type == FLOAT32 && sums.type == FLOAT32,
            "expected float32, int8, float32 and float32");
    REQUIRE(x.ndim == 2 && out.has_shape(x) && scales.ndim == 2 && sums.ndim == 2, "expected matrices");
    REQUIRE(scales.shape[0] == x.shape[0] && sums.shape[0] == x.shape[0], "rows differ");
    REQUIRE(x.shape[1] == scales.shape[1] * GROUP && sums.shape[1] == scales.shape[1] * 2, "groups differ");
    REQUIRE(x.is_contiguous(1) && out.is_contiguous() && scales.is_contiguous() && sums.is_contiguous(), "expected contiguous rows");
    split(r, x.shape[0], x.shape[1]);
    return nullptr;
}
void run_round_groups(const Record& r, int part) {
    const Array& x = r.arrays[0];
    const int64_t rows = x.shape[0], groups = r.arrays[2].shape[1], tall = rows_of_tile(rows), from = part * r.plan[0];
    for (int64_t i = from; i < std::min(from + r.plan[0], rows); i++) {
        const float* row = reinterpret_cast<const float*>(x.data + i * x.strides[0]);
        const int64_t first = i / tall * tall, m = i - first, count = std::min(tall, rows - first);
        int8_t* out = r.arrays[1].as<int8_t>() + first * x.shape[1] + m * 4;
        float* scales = r.arrays[2].as<float>() + first * groups + m;
        float* sums = r.arrays[3].as<float>() + (first * groups + m) * 2;
        for (int64_t g = 0; g < groups; g++) {
            const Vector v[2] = {load(row + g * GROUP), load(row + g * GROUP + LANES)};
            const Vector size = max(max(v[0], -v[0]), max(v[1], -v[1])), invalid = (v[0] - v[0]) + (v[1] - v[1]);
            float scale = largest(size) / 127.0f;
            scale = scale >= SMALLEST ? scale : 1.0f;
            for (int n = 0; n < 2; n++) {
                float lanes[LANES];
                store(lanes, v[n] / scale + 12582912.0f);  // the low bits are those of the nearest integer
                int32_t bits[LANES], total = 0;
                std::memcpy(bits, lanes, sizeof bits);
                int8_t bytes[LANES];
                for (int e = 0; e < LANES; e++) total += bytes[e] = static_cast<int8_t>(bits[e]);
                for (int e = 0; e < LANES; e += 4) std::memcpy(out + (g * GROUP + n * LANES + e) * count, bytes + e, 4);
                sums[g * count * 2 + n] = static_cast<float>(total);
            }
            scales[g * count] = scale + sum(invalid);  // NaN if an element is NaN or infinite
        }
    }
}

// Arrays: x, scales and sums, as `round_groups` writes them, strips (strips, blocks, 16 * bytes), out, bias or absent.
const char* check_matmul_strips(Record& r) {
    const Array &x = r.arrays[0], &scales = r.arrays[1], &sums = r.arrays[2], &strips = r.arrays[3], &out = r.arrays[4], &bias = r.arrays[5];
    REQUIRE(x && scales && sums && strips && out, "expected rounded rows, strips and out");
    REQUIRE(x.type == INT8 && scales.type == FLOAT32 && sums.type == FLOAT32 && strips.type == UINT8 && out.type == FLOAT32,
            "expected int8, float32, float32, uint8 and float32");
    REQUIRE(x.ndim == 2 && scales.ndim == 2 && sums.ndim == 2 && strips.ndim == 3 && out.ndim == 2, "expected matrices and strips");
    const int64_t rows = x.shape[0], depth = x.shape[1], columns = out.shape[1], bytes = strips.shape[2];
    const int64_t values = bytes % LANES ? 0 : with_format(bytes / LANES, [](auto block) { return block.VALUES; });
    REQUIRE(values > 0, "no format has strips of this size");
    REQUIRE(depth == strips.shape[1] * values && strips.shape[0] == (columns + LANES - 1) / LANES, "the strips are of another matrix");
    REQUIRE(scales.shape[0] == rows && sums.shape[0] == rows && out.shape[0] == rows, "rows differ");
    REQUIRE(scales.shape[1] == depth / GROUP && sums.shape[1] == depth / GROUP * 2, "groups differ");
    REQUIRE(x.is_contiguous() && scales.is_contiguous() && sums.is_contiguous() && strips.is_contiguous() && out.is_contiguous(1),
            "expected contiguous rows");
    REQUIRE(!bias || (bias.type == FLOAT32 && bias.ndim == 1 && bias.shape[0] == columns && bias.is_contiguous()),
            "expected a contiguous float32 row for the columns of out");
    const int64_t tall = rows_of_tile(rows), row_step = std::max<int64_t>(1, ROWS_OF_PART / tall) * tall;
    const int64_t step = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, depth * LANES));
    r.plan[0] = row_step, r.plan[1] = step, r.plan[2] = (strips.shape[0] + step - 1) / step;
    r.parts = static_cast<int32_t>(r.plan[2] * ((rows + row_step - 1) / row_step));
    return nullptr;
}
void run_matmul_strips(const Record& r, int part) {
    const Array &x = r.arrays[0], &strips = r.arrays[3], &out = r.arrays[4], &bias = r.arrays[5];
    const int64_t rows = x.shape[0], depth = x.shape[1], groups = depth / GROUP, columns = out.shape[1], tall = rows_of_tile(rows);
    const int64_t first = part / r.plan[2] * r.plan[0], from = part % r.plan[2] * r.plan[1];
    const int64_t end = std::min(first + r.plan[0], rows), to = std::min(from + r.plan[1], strips.shape[0]);
    with_format(strips.shape[2] / LANES, [&](auto block) {
        for (int64_t i = first; i < end; i += tall)
            for (int64_t j = from; j < to; j++)
                tile_for<decltype(block)>(std::min(tall, rows - i))(
                    {x.as<const int8_t>() + i * depth, r.arrays[1].as<const float>() + i * groups, r.arrays[2].as<const float>() + i * groups * 2,
                     strips.as<const uint8_t>() + j * strips.shape[1] * strips.shape[2], bias ? bias.as<const float>() + j * LANES : nullptr,
                     reinterpret_cast<float*>(out.data + i * out.strides[0]) + j * LANES, groups, out.strides[0] / 4, columns - j * LANES});
        return 0;
    });
}

const Operation operations[] = {{"dequantize", 1 << 1, check_dequantize, run_dequantize},
                                {"round_groups", 1 << 1 | 1 << 2 | 1 << 3, check_round_groups, run_round_groups},
                                {"matmul_strips", 1 << 4, check_matmul_strips, run_matmul_strips}};
}  // namespace

extern const Family blocks_family = {operations, sizeof operations / sizeof *operations};

}  // namespace ISA
