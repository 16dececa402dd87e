// Linear layers: out [M, N] = activation(x [M, K] w^T + bias) + residual.
//
// w [N, K] is worked on a panel of kPanelN rows of w at a time, packed so that at each word of K its columns lie side
// by side: once beforehand, or when the panel is needed. The sum of an element is taken in the order of K whatever rows
// are beside it, so a row's result does not depend on its batch.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "matmul/prepack.h"
#include "matmul/split_floats.h"
#include "matmul/tile_driver.h"
#include "matmul/tile_rows.h"
#include "matmul/vector_driver.h"
#include "simd/carve.h"

namespace batchgen {
namespace {

// The best cut of a layer into calls.
inline LinearCut linear_cut(const Linear& args) {
    if (splits_floats(args)) return split_cut(args);
    return with_mma(args, [&]<class Mma, class T>() {
        if (multiplies_rows<Mma>(args)) return rows_cut(args);
        if constexpr (uses_tiles<Mma>()) return tile_cut<Mma>(args);
        // As many rows as stay in a core's cache beside a panel, 384 KiB, but enough for a panel to be worth loading.
        const int64_t k = packed_k<Mma>(args), rows = 96 * 1024 / k / kTileM * kTileM;
        const int64_t tiled = round_up(args.m, kTileM) * k * 4;
        int64_t packed = args.m >= kMinPackedM ? tiled : 0;
        if (kIsInt8<Mma>) packed = QuantizedX::bytes_beside(args) + tiled;
        else if (splits_bytes(args)) packed = args.m * args.k * 2 + 4 * num_run_factors(args);
        else if (multiplies_pairs(args)) packed = tiled + 4 * num_run_sums(args);
        const int64_t most = rows > 480 ? 480 : rows < 192 ? 192 : rows;
        // With 6 rows a tile, on AVX2, each thread packs few rows for itself, if there are enough for many turns: in
        // its second-level cache they stay beside panels and results, and it reads no rows that another one has packed.
        constexpr bool kOfFloats = __is_same(Mma, FloatMma) && kTileM == 6;
        const int64_t third = 32 * 1024 / k / kTileM * kTileM, few = third > 96 ? 96 : third < 48 ? 48 : third;
        if (kOfFloats && is_operand(args) && args.m >= 8 * few)
            return LinearCut{kTileM, few, 1, INT32_MAX, packed, kTileM, true, false};
        return LinearCut{kTileM, most,   1,     INT32_MAX,
                         packed, kTileM, false, splits_bytes(args) || multiplies_pairs(args)};
    });
}

// Packs groups [group, stop) of rows of x, each to its place among all of them.
inline void pack_rows(const Linear& args, int64_t group, int64_t stop, void* out) {
    if (splits_floats(args)) return pack_split_rows(args, group, stop, out);
    with_mma(args, [&]<class Mma, class T>() {
        if (multiplies_rows<Mma>(args)) pack_columns(args, group, stop, out);
        else if constexpr (uses_tiles<Mma>()) pack_tile_rows<Mma, T>(args, group, stop, out);
        else if constexpr (kIsInt8<Mma>) pack_quantized_x<T>(args, group, stop, out);
        else if (splits_bytes(args)) pack_split_tiles(args, group, stop, out);
        else if (multiplies_pairs(args)) pack_pair_tiles(args, group, stop, out);
        else pack_row_tiles<Mma, T>(args, group, stop, out);
    });
}

// Bytes of scratch memory of a call.
inline int64_t linear_scratch(const Linear& args, int64_t rows, int64_t panels) {
    Carve carve{nullptr};
    if (splits_floats(args)) {
        SplitScratch(args, rows, panels, carve);
        return carve.used;
    }
    return with_mma(args, [&]<class Mma, class T>() {
        if (multiplies_rows<Mma>(args)) RowScratch(args, rows, panels, carve);
        else if constexpr (uses_tiles<Mma>()) TileScratch<Mma>(args, rows, panels, carve);
        else LinearScratch<Mma>(packed_k<Mma>(args), rows, carve);
        return carve.used;
    });
}

template <class Mma, class T, class O>
inline void linear_of(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                      int64_t next_panel, void* scratch) {
    if (multiplies_rows<Mma>(args)) linear_rows<Mma, O>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
    else if constexpr (uses_tiles<Mma>())
        linear_tiles<Mma, T, O>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
    else linear_block<Mma, T, O>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
}

// Rows [row, row_stop) times panels [panel, panel_stop); next_panel is what the thread probably works on then.
inline void linear(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                   int64_t next_panel, void* scratch) {
    if (splits_floats(args)) return linear_split(args, row, row_stop, panel, panel_stop, next_panel, scratch);
    with_mma(args, [&]<class Mma, class T>() {
        if (args.out_type == Type::F32)
            linear_of<Mma, T, float>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
        else linear_of<Mma, T, T>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
    });
}

}  // namespace
}  // namespace batchgen
