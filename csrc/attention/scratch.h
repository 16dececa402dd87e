// Sizes of the tiles of attention, and the scratch memory of a call.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "matmul/operands.h"
#include "simd/carve.h"
#include "simd/target.h"

namespace batchgen {
namespace {

constexpr int kKeys = 128;       // keys of a tile, at most: many rows share the packing of a key
constexpr int kSmallMKeys = 64;  // with at most kSmallMRows rows: the next tile has to fit a cache beside this one
constexpr int kSmallMRows = 16;
constexpr int kGroups = kMaxHeadDim / kGroup;
constexpr float kLowest = -1e30f;  // below every score, and exp(kLowest - kLowest) is a number

// Rows whose scores are made together, and the multiple of keys that products take: whole registers, or vectors.
template <class Mma>
constexpr int kRowsAtOnce = uses_tiles<Mma>() ? 32 : 12;
template <class Mma>
constexpr int kKeyStep = uses_tiles<Mma>() ? 32 : W;

constexpr int kMaxSmallM = 8;  // the most rows for which K and V are not packed
// The rows for which tile registers load K as it lies.
constexpr int kMinSmallMInTiles = 6, kMaxSmallMInTiles = 16;
// Bytes of a row that is split into high and then low bytes, at constant offsets, which addresses can hold.
constexpr int kFixedRow = 2 * kMaxHeadDim, kFixedWeights = 2 * kSmallMKeys;

constexpr int kByteRow = kMaxHeadDim + 8;  // bytes from row to row of a tile that is expanded to bytes

// The scratch memory of a call, carved into its arrays.
template <class Mma>
struct AttentionScratch {
    int64_t depth, columns;  // head_dim in words and in values, rounded up to vectors
    uint32_t *a, *p, *k, *v;
    float *s, *t, *acc, *highest, *change;
    float* total;                                      // [rows, W]: partial sums of softmax weights
    float *query_sum, *least;                          // [rows, groups]: sum of q, sum of p * minimum
    float *k_scale, *k_minimum, *v_scale, *v_minimum;  // [groups, keys]
    int tile;                                          // keys of a tile: the stride of k, s and p
    float* expanded;                                   // [W, columns + slack]
    int64_t expanded_stride;
    // Small M over quantized KV: queries and weights split into bytes; k and v have the tile.
    int8_t *fixed_q, *fixed_p;  // [rows, kFixedRow], [kMaxSmallM, groups, kFixedWeights]
    float *q_step, *p_step;     // [rows], [kMaxSmallM, groups]
    uint32_t* transposed;       // [heads, depth, 16]: queries as columns, of small M
    uint8_t* bytes;             // [kKeys, kByteRow]: K's or V's codes of 4 or 5 bits

    AttentionScratch(const Attention& args, Carve& carve) {
        columns = round_up(args.kv.head_dim, W);
        depth = round_up(args.kv.head_dim, W * Mma::kPerWord) / Mma::kPerWord;
        a = carve.take<uint32_t>(kTileRows * depth);
        p = carve.take<uint32_t>(kRowsAtOnce<Mma> * kKeys / Mma::kPerWord);
        k = carve.take<uint32_t>(depth * kKeys);
        v = carve.take<uint32_t>(kKeys / Mma::kPerWord * columns + 2 * W);
        s = carve.take<float>(kRowsAtOnce<Mma> * kKeys);
        t = carve.take<float>(kRowsAtOnce<Mma> * kKeys);
        acc = carve.take<float>(kTileRows * columns);
        highest = carve.take<float>(kTileRows);
        total = carve.take<float>(kTileRows * W);
        change = carve.take<float>(kRowsAtOnce<Mma> + W);
        query_sum = carve.take<float>(kTileRows * kGroups);
        least = carve.take<float>(kTileRows * kGroups);
        k_scale = carve.take<float>(kGroups * kKeys);
        k_minimum = carve.take<float>(kGroups * kKeys);
        v_scale = carve.take<float>(kGroups * kKeys);
        v_minimum = carve.take<float>(kGroups * kKeys);
        expanded_stride = columns + 2 * W;
        expanded = carve.take<float>(W * expanded_stride);
        const int64_t fixed = Mma::kPerWord == 2 && code_bits(args.kv.type) && args.kv.head_dim % kGroup == 0;
        fixed_q = carve.take<int8_t>(fixed * kTileRows * kFixedRow);
        fixed_p = carve.take<int8_t>(fixed * kMaxSmallM * kGroups * kFixedWeights);
        q_step = carve.take<float>(fixed * kTileRows);
        p_step = carve.take<float>(fixed * kMaxSmallM * kGroups);
        transposed = carve.take<uint32_t>(uses_tiles<Mma>() && args.kv.type == Type::BF16
                                              ? kTileRows / kMinSmallMInTiles * depth * kMaxSmallMInTiles
                                              : 0);
        const int bits = code_bits(args.kv.type);
        bytes = carve.take<uint8_t>(bits && bits < 8 ? kKeys * kByteRow : 0);
    }
};

}  // namespace
}  // namespace batchgen
