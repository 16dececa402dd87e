// 4-bit weights in groups (GPTQ, AWQ, compressed-tensors), in the blocks of batchgen/models/formats/group_matrix.py:
// four bytes, the first the zero point and the others the upper three of an fp32 scale; then nibbles as in Q4_0, 32
// values after the other. A number is (value - zero point) * scale = value * scale - zero point * scale. The scale has
// 16 bits, so nothing is rounded.
#pragma once

#include <stdint.h>
#include <string.h>

#include "quant/block_shape.h"

namespace batchgen {
namespace {

// Blocks of so many values.
template <int Values>
struct Int4Group : PlainShape<Values, 4 + Values / 2, 32, 4, 16> {
    static void run_scales(const uint8_t* block, float* scales, float* minimums) {
        uint32_t head;
        memcpy(&head, block, 4);
        const uint32_t bits = head & 0xffffff00u;
        float scale;
        memcpy(&scale, &bits, 4);
        for (int i = 0; i < Values / 32; i++) scales[i] = scale, minimums[i] = -(scale * float(head & 255));
    }
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        for (int i = 0; i < Values / 32; i++) nibble_halves(block + 4 + 16 * i, quants + 32 * i);
    }
};

}  // namespace
}  // namespace batchgen
