// Quantized blocks of GGUF files as float32, with the bits of the package gguf: all products here are exact.
#include "vector.h"

namespace ISA {
namespace {

float half(const uint8_t* bytes) {
    uint16_t h;
    std::memcpy(&h, bytes, 2);
    uint32_t bits = (h & 0x7fffu) << 13;
    float x;
    if (bits >= 0x0f800000u) bits += 0x70000000u;  // infinity and NaN
    std::memcpy(&x, &bits, 4);
    if (bits < 0x0f800000u) x *= 0x1p112f;  // also of subnormal numbers
    return h & 0x8000 ? -x : x;
}

// 32 values of 4 bits and, if BITS is 5, one more each: scale * (value - ZERO) + minimum.
template <int BITS, int ZERO> void legacy(const uint8_t* block, float* out) {
    const float scale = half(block), minimum = ZERO ? 0.0f : half(block + 2);
    const uint8_t* values = block + (ZERO ? 2 : 4);
    uint32_t high = 0;
    if (BITS == 5) std::memcpy(&high, values, 4), values += 4;
    for (int i = 0; i < 16; i++) {
        const int low = (values[i] & 15) | (high >> i & 1) << 4, up = values[i] >> 4 | (high >> (i + 16) & 1) << 4;
        out[i] = ZERO ? scale * (low - ZERO) : scale * low + minimum;
        out[i + 16] = ZERO ? scale * (up - ZERO) : scale * up + minimum;
    }
}

void q8_0(const uint8_t* block, float* out) {
    const float scale = half(block);
    for (int i = 0; i < 32; i++) out[i] = scale * (int8_t)block[i + 2];
}

// 8 groups of 32 values, whose scales and minima have 6 bits.
template <int BITS> void k_quants(const uint8_t* block, float* out) {
    const float scale = half(block), minimum = half(block + 2);
    const uint8_t *s = block + 4, *high = block + 16, *values = high + (BITS == 5 ? 32 : 0);
    for (int g = 0; g < 8; g++) {
        const int a = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 2 & 48);
        const int b = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 2 & 48);
        const float scale_of_group = scale * a, minimum_of_group = minimum * b;
        for (int i = 0; i < 32; i++) {
            int value = values[g / 2 * 32 + i] >> g % 2 * 4 & 15;
            if (BITS == 5) value |= (high[i] >> g & 1) << 4;
            out[g * 32 + i] = scale_of_group * value - minimum_of_group;
        }
    }
}

void q6_k(const uint8_t* block, float* out) {
    const uint8_t *low = block, *high = block + 128;
    const float scale = half(block + 208);
    for (int n = 0; n < 256; n++) {
        const int half_of_block = n / 128, i = n % 128, up = high[half_of_block * 32 + i % 32] >> i / 32 * 2 & 3;
        const int value = low[half_of_block * 64 + i % 64] >> i / 64 * 4 & 15;
        out[n] = scale * (int8_t)block[192 + n / 16] * ((value | up << 4) - 32);
    }
}

// Each type has another number of bytes.
struct Format { int64_t bytes, values; void (*dequantize)(const uint8_t*, float*); };
constexpr Format formats[] = {
    {18, 32, legacy<4, 8>}, {20, 32, legacy<4, 0>}, {22, 32, legacy<5, 16>}, {24, 32, legacy<5, 0>}, {34, 32, q8_0},
    {144, 256, k_quants<4>}, {176, 256, k_quants<5>}, {210, 256, q6_k},
};

// Arrays: blocks (count, bytes) uint8, out (count, values) float32.
const char* check_dequantize(Record& r) {
    const Array &blocks = r.arrays[0], &out = r.arrays[1];
    REQUIRE(blocks && out && blocks.type == UINT8 && out.type == FLOAT32, "expected uint8 blocks and float32 values");
    REQUIRE(blocks.ndim == 2 && out.ndim == 2 && blocks.shape[0] == out.shape[0], "expected as many rows as blocks");
    REQUIRE(blocks.is_contiguous() && out.is_contiguous(), "expected contiguous arrays");
    for (const Format& format : formats)
        if (format.bytes == blocks.shape[1] && format.values == out.shape[1]) {
            r.plan[1] = &format - formats;
            split(r, blocks.shape[0], format.values);
            return nullptr;
        }
    return "no format has blocks of this size";
}
void run_dequantize(const Record& r, int part) {
    const Format& format = formats[r.plan[1]];
    const int64_t first = part * r.plan[0], end = std::min(first + r.plan[0], r.arrays[0].shape[0]);
    for (int64_t i = first; i < end; i++)
        format.dequantize(r.arrays[0].as<uint8_t>() + i * format.bytes, r.arrays[1].as<float>() + i * format.values);
}

const Operation operations[] = {{"dequantize", 1 << 1, check_dequantize, run_dequantize}};
}  // namespace

extern const Family blocks_family = {operations, sizeof operations / sizeof *operations};

}  // namespace ISA
