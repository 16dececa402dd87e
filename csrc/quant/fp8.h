// FP8 weights (E4M3) in the blocks of batchgen/models/formats/fp8.py: an fp32 scale, then a byte a number, with a sign,
// four bits of exponent and three of mantissa. No block has a NaN (127, 255).
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "quant/block_shape.h"
#include "simd/target.h"

namespace batchgen {
namespace {

typedef uint32_t Fp8Bits __attribute__((vector_size(4 * W)));

// The FP8 number in the lowest byte of each word. The exponent bias is 7 in FP8 and 127 in floats. Subnormal numbers
// come from a subtraction: subnormal floats are slow on some CPUs.
inline vf from_e4m3(vi code) {
    const Fp8Bits sign = ((Fp8Bits)code & 0x80) << 24, rest = (Fp8Bits)code & 0x7f;
    const Fp8Bits normal = (rest << 20) + (120u << 23);
    const Fp8Bits small = (Fp8Bits)as_int(sub(as_float((vi)((rest << 20) + (121u << 23))), set1(0x1p-6f)));
    const Fp8Bits is_small = (Fp8Bits)(rest < 8);
    return as_float((vi)((is_small & small) | (~is_small & normal) | sign));
}

// Blocks of so many FP8 numbers.
template <int Values>
struct Fp8 : PlainShape<Values, 4 + Values, 32, 4, 0> {
    static constexpr bool kFloats = true;
    static void run_scales(const uint8_t* block, float* scales, float*) {
        for (int i = 0; i < Values / 32; i++) memcpy(scales + i, block, 4);
    }
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        memcpy(quants, block + 4, Values);
    }
};

// Whether a format's values are FP8 numbers.
inline bool is_fp8(BlockType type) { return type == BlockType::FP8_G32 || type == BlockType::FP8_G128; }

}  // namespace
}  // namespace batchgen
