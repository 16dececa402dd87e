// Weights of 4 bits in groups, as GPTQ, AWQ and compressed-tensors have them, in the blocks that
// batchgen/models/formats/group_matrix.py makes: four bytes, of which the first is the zero point and the others are
// the upper ones of the scale, an fp32; then the codes, nibbles as in Q4_0, 32 values after the other. A value is (code
// - zero point) * scale, and so is code * scale - zero point * scale: a scale has 16 bits, so that nothing is rounded.
#pragma once

#include <stdint.h>
#include <string.h>

#include "quant/block_shape.h"

namespace batchgen {
namespace {

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
