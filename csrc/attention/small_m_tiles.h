// Attention of small M over bf16 KV in tile registers: keys, straight from K, are the rows of a product, and queries
// its columns.
#pragma once

#include <stdint.h>
#include <string.h>

#include "matmul/tile_registers.h"
#include "simd/target.h"

namespace batchgen {
namespace {

#ifdef BATCHGEN_TILES

// Transposes queries [rows, stride]: out [depth, 16].
inline void transpose_queries(const uint32_t* q, int64_t stride, int rows, int64_t depth, uint32_t* out) {
    for (int64_t d = 0; d < depth; d += W) {
        vi r[W];
        for (int i = 0; i < W; i++) r[i] = i < rows ? load_int(q + i * stride + d) : set1_int(0);
        transpose(r);
        for (int i = 0; i < W; i++) store_int(out + (d + i) * W, r[i]);
    }
}

// Scores of 16 keys for the rows that registers are configured for: out [rows, out_stride]. Keys that do not lie one
// after the other are copied into `space`.
inline void tile_scores(Tiles& tiles, const uint8_t* const* keys, int64_t row_bytes, int rows, const uint32_t* queries,
                        int64_t steps, uint8_t* space, float* out, int64_t out_stride) {
    const uint8_t* k = keys[0];
    int64_t stride = row_bytes;
    bool together = true;
    for (int i = 1; i < W; i++) together &= keys[i] - keys[i - 1] == row_bytes;
    if (!together) {
        k = space, stride = steps * 64;
        for (int i = 0; i < W; i++) memcpy(space + i * stride, keys[i], stride);
    }
    tiles.zero<2>();
    for (int64_t step = 0; step < steps; step++) {
        tiles.load<3>(k + step * 64, stride);
        tiles.load<6>(queries + step * kStep * W, 64);
        tiles.dot_bf16<2, 3, 6>();
    }
    alignas(64) uint32_t by_key[W][W];
    tiles.store<2>(by_key, 64);
    vi r[W];
    for (int i = 0; i < W; i++) r[i] = load_int(by_key[i]);
    transpose(r);
    for (int i = 0; i < rows; i++) store(out + i * out_stride, as_float(r[i]));
}
#endif

}  // namespace
}  // namespace batchgen
