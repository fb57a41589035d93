// Quantized blocks of GGUF files as float32.
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

const Operation operations[] = {{"dequantize", 1 << 1, check_dequantize, run_dequantize}};
}  // namespace

extern const Family blocks_family = {operations, sizeof operations / sizeof *operations};

}  // namespace ISA
