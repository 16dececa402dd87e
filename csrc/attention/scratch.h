// The sizes of attention's tiles, and the scratch memory of a call.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "matmul/operands.h"
#include "simd/carve.h"
#include "simd/target.h"

namespace batchgen {
namespace {

constexpr int kKeys = 128;       // of a tile, at most: many rows share the work that there is for each of them
constexpr int kSmallMKeys = 64;  // of small M: the next tile's KV has to fit a cache beside this one's
constexpr int kSmallMRows = 16;
constexpr int kGroups = kMaxHeadDim / kGroup;
constexpr float kLowest = -1e30f;  // below every score, and exp(kLowest - kLowest) is a number

// Rows whose scores are made at once, and keys that these are made for at a time: what products in tile registers, or
// in vectors, take.
template <class Mma>
constexpr int kRowsAtOnce = uses_tiles<Mma>() ? 32 : 12;
template <class Mma>
constexpr int kKeyStep = uses_tiles<Mma>() ? 32 : W;

constexpr int kMaxSmallM = 8;  // rows that are not worth packing K and V for
// Rows that tile registers take the rows of K for as they lie.
constexpr int kMinSmallMInTiles = 4, kMaxSmallMInTiles = 16;
// Bytes of a row in fixed point: the high parts, then the low ones. At fixed offsets, for the sake of addresses.
constexpr int kFixedRow = 2 * kMaxHeadDim, kFixedWeights = 2 * kSmallMKeys;

constexpr int kByteRow = kMaxHeadDim + 8;  // bytes from one row of a tile's codes to the next

template <class Mma>
struct AttentionScratch {
    int64_t depth, columns;  // head_dim in units of 32 bits, and in values, rounded up to vectors
    uint32_t *a, *p, *k, *v;
    float *s, *t, *acc, *highest, *change;
    float* total;                                      // [rows, W], to be added up
    float *query_sum, *least;                          // [rows, groups]: sum of q, sum of p * minimum
    float *k_scale, *k_minimum, *v_scale, *v_minimum;  // [groups, keys]
    int tile;                                          // keys of a tile, and from row to row of k's, s' and p's
    float* expanded;                                   // [W, columns + slack]
    int64_t expanded_stride;
    // Small M over quantized KV, whose tile is in k and v: queries and weights in fixed point.
    int8_t *fixed_q, *fixed_p;  // [rows, kFixedRow], [kMaxSmallM, groups, kFixedWeights]
    float *q_step, *p_step;     // [rows], [kMaxSmallM, groups]
    uint32_t* transposed;       // [heads, depth, 16]: queries as columns, of small M
    uint8_t* bytes;             // [kKeys, kByteRow]: K's or V's codes of 4 or 5 bits

    AttentionScratch(const Attention& args, Carve& carve) {
        columns = round_up(args.kv.head_dim, W);
        depth = round_up(args.kv.head_dim, W * Mma::kPair) / Mma::kPair;
        a = carve.take<uint32_t>(kTileRows * depth);
        p = carve.take<uint32_t>(kRowsAtOnce<Mma> * kKeys / Mma::kPair);
        k = carve.take<uint32_t>(depth * kKeys);
        v = carve.take<uint32_t>(kKeys / Mma::kPair * columns + 2 * W);
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
        const int64_t fixed = Mma::kPair == 2 && code_bits(args.kv.type) && args.kv.head_dim % kGroup == 0;
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
