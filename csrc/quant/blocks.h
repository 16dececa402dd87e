// Block-quantized rows of any format: dequantized, or unpacked into quantized values and scales.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "quant/block_shape.h"
#include "quant/fp8.h"
#include "quant/gguf.h"
#include "quant/int4_groups.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// Stores the numbers of a run.
template <class Block, class T>
inline void store_run(const int8_t* quants, vf scale, vf minimum, T* out) {
    for (int i = 0; i < Block::kRun; i += W) {
        const vf numbers = Block::kFloats ? from_e4m3(load_bytes((const uint8_t*)quants + i)) : load(quants + i);
        store(out + i, fma(numbers, scale, minimum));
    }
}

// A row of n numbers of one format.
template <class Block, class T>
inline void dequantize_blocks(const uint8_t* packed, int64_t n, T* out) {
    constexpr int kRuns = Block::kValues / Block::kRun;
    float scales[kRuns], minimums[kRuns];
    for (float& minimum : minimums) minimum = -0.0f;  // for formats without minimums
    for (int64_t done = 0; done < n; done += Block::kValues, packed += Block::kBytes) {
        alignas(64) int8_t quants[Block::kValues];
        Block::unpack(packed, quants, scales, minimums);
        for (int run = 0; run < kRuns; run++, out += Block::kRun)
            store_run<Block>(quants + run * Block::kRun, set1(scales[run]), set1(minimums[run]), out);
    }
}

// Unpacks n values of a row of one format, with the scale and the minimum of each kLeastRun of them.
template <class Block>
inline void unpack_quants(const uint8_t* packed, int64_t n, int8_t* quants, float* scales, float* minimums) {
    constexpr int kRuns = Block::kValues / Block::kRun, kEach = Block::kRun / kLeastRun;
    float own_scales[kRuns], own_minimums[kRuns];
    for (float& minimum : own_minimums) minimum = -0.0f;  // for formats without minimums
    for (; n > 0; n -= Block::kValues, packed += Block::kBytes, quants += Block::kValues) {
        Block::unpack(packed, quants, own_scales, own_minimums);
        for (int i = 0; i < kRuns * kEach; i++)
            *scales++ = own_scales[i / kEach], *minimums++ = own_minimums[i / kEach];
    }
}

// Unpacks n values of a row of any quantized format, likewise.
inline void unpack_quants(BlockType type, const uint8_t* packed, int64_t n, int8_t* quants, float* scales,
                          float* minimums) {
    switch (type) {
        case BlockType::Q4_0: return unpack_quants<Q4_0>(packed, n, quants, scales, minimums);
        case BlockType::Q4_1: return unpack_quants<Q4_1>(packed, n, quants, scales, minimums);
        case BlockType::Q5_0: return unpack_quants<Q5_0>(packed, n, quants, scales, minimums);
        case BlockType::Q5_1: return unpack_quants<Q5_1>(packed, n, quants, scales, minimums);
        case BlockType::Q8_0: return unpack_quants<Q8_0>(packed, n, quants, scales, minimums);
        case BlockType::Q2_K: return unpack_quants<Q2_K>(packed, n, quants, scales, minimums);
        case BlockType::Q3_K: return unpack_quants<Q3_K>(packed, n, quants, scales, minimums);
        case BlockType::Q4_K: return unpack_quants<Q4_K>(packed, n, quants, scales, minimums);
        case BlockType::Q5_K: return unpack_quants<Q5_K>(packed, n, quants, scales, minimums);
        case BlockType::Q6_K: return unpack_quants<Q6_K>(packed, n, quants, scales, minimums);
        case BlockType::IQ4_NL: return unpack_quants<IQ4_NL>(packed, n, quants, scales, minimums);
        case BlockType::IQ4_XS: return unpack_quants<IQ4_XS>(packed, n, quants, scales, minimums);
        case BlockType::MXFP4: return unpack_quants<MXFP4>(packed, n, quants, scales, minimums);
        case BlockType::W4_G32: return unpack_quants<Int4Group<32>>(packed, n, quants, scales, minimums);
        case BlockType::W4_G64: return unpack_quants<Int4Group<64>>(packed, n, quants, scales, minimums);
        case BlockType::W4_G128: return unpack_quants<Int4Group<128>>(packed, n, quants, scales, minimums);
        case BlockType::FP8_G32: return unpack_quants<Fp8<32>>(packed, n, quants, scales, minimums);
        case BlockType::FP8_G128: return unpack_quants<Fp8<128>>(packed, n, quants, scales, minimums);
        default: return;  // F32, F16, BF16 are numbers
    }
}

// A row of n numbers of another type.
template <class From, class T>
inline void convert_row(const uint8_t* packed, int64_t n, T* out) {
    const From* from = (const From*)packed;
    if constexpr (__is_same(From, T)) memcpy(out, from, n * sizeof(T));
    else
        for (int64_t i = 0; i < n; i += W) {
            const int count = int(smaller(W, n - i));
            store_part(out + i, load_part(from + i, count), count);
        }
}

// A row of n numbers of any format.
template <class T>
inline void dequantize_blocks(BlockType type, const uint8_t* packed, int64_t n, T* out) {
    switch (type) {
        case BlockType::F32: return convert_row<float>(packed, n, out);
        case BlockType::F16: return convert_row<f16>(packed, n, out);
        case BlockType::BF16: return convert_row<bf16>(packed, n, out);
        case BlockType::Q4_0: return dequantize_blocks<Q4_0>(packed, n, out);
        case BlockType::Q4_1: return dequantize_blocks<Q4_1>(packed, n, out);
        case BlockType::Q5_0: return dequantize_blocks<Q5_0>(packed, n, out);
        case BlockType::Q5_1: return dequantize_blocks<Q5_1>(packed, n, out);
        case BlockType::Q8_0: return dequantize_blocks<Q8_0>(packed, n, out);
        case BlockType::Q2_K: return dequantize_blocks<Q2_K>(packed, n, out);
        case BlockType::Q3_K: return dequantize_blocks<Q3_K>(packed, n, out);
        case BlockType::Q4_K: return dequantize_blocks<Q4_K>(packed, n, out);
        case BlockType::Q5_K: return dequantize_blocks<Q5_K>(packed, n, out);
        case BlockType::Q6_K: return dequantize_blocks<Q6_K>(packed, n, out);
        case BlockType::IQ4_NL: return dequantize_blocks<IQ4_NL>(packed, n, out);
        case BlockType::IQ4_XS: return dequantize_blocks<IQ4_XS>(packed, n, out);
        case BlockType::MXFP4: return dequantize_blocks<MXFP4>(packed, n, out);
        case BlockType::W4_G32: return dequantize_blocks<Int4Group<32>>(packed, n, out);
        case BlockType::W4_G64: return dequantize_blocks<Int4Group<64>>(packed, n, out);
        case BlockType::W4_G128: return dequantize_blocks<Int4Group<128>>(packed, n, out);
        case BlockType::FP8_G32: return dequantize_blocks<Fp8<32>>(packed, n, out);
        case BlockType::FP8_G128: return dequantize_blocks<Fp8<128>>(packed, n, out);
    }
}

// Dequantizes rows [row, stop); interleaved ones are put into order.
inline void unpack_blocks(const Blocks& args, int64_t row, int64_t stop) {
    with_type(args.type, [&](auto* type) {
        using T = __typeof__(*type);
        for (; row < stop; row++) {
            const int64_t head = args.interleaved ? row / args.interleaved * args.interleaved : row, i = row - head;
            const int64_t target = head + i / 2 + i % 2 * (args.interleaved / 2);
            const uint8_t* packed = args.packed + row * args.row_bytes;
            dequantize_blocks(args.packing, packed, args.columns, (T*)args.out + target * args.columns);
        }
    });
}

}  // namespace
}  // namespace batchgen
