// Linear layers: out = activation(x wᵀ + bias) + residual.
//
// w is worked on a panel of kPanel columns at a time, packed so that a vector of columns lies together at each depth:
// once beforehand, or, where weights pass through memory, when a panel is needed. An element's sum is taken in the
// order of depth, whatever rows are beside it: a row's result does not depend on its batch.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "matmul/prepack.h"
#include "matmul/tile_driver.h"
#include "matmul/vector_driver.h"
#include "simd/carve.h"

namespace batchgen {
namespace {

inline LinearCut linear_cut(const Linear& args) {
    return with_products(args, [&]<class M, class T>() {
        if constexpr (in_tiles<M>()) return tile_cut<M>(args);
        // As many rows at once as stay in a core's cache beside a panel, 384 KiB, but enough for a panel to be worth
        // fetching.
        const int64_t depth = packed_depth<M>(args), rows = 96 * 1024 / depth / kRowTile * kRowTile;
        const int64_t tiled = round_up(args.rows, kRowTile) * depth * 4;
        int64_t packed = args.rows >= kPackedRows ? tiled : 0;
        if (kCoded<M>) packed = CodedRows::bytes_beside(args) + tiled;
        else if (in_digits(args)) packed = args.rows * args.depth * 2 + 4 * digit_factors(args);
        else if (in_fp8<M>(args)) packed = tiled;
        return LinearCut{kRowTile, rows > 480 ? 480 : rows < 192 ? 192 : rows, 1, INT32_MAX, packed,
                         kRowTile, in_digits(args) || in_fp8<M>(args)};
    });
}

// Groups [group, stop) of rows of x, to where they are among all of them.
inline void pack_rows(const Linear& args, int64_t group, int64_t stop, void* out) {
    with_products(args, [&]<class M, class T>() {
        if constexpr (in_tiles<M>()) pack_tile_rows<M, T>(args, group, stop, out);
        else if constexpr (kCoded<M>) pack_coded_rows<T>(args, group, stop, out);
        else if (in_digits(args)) pack_digits(args, group, stop, out);
        else pack_row_tiles<M, T>(args, group, stop, out);
    });
}

inline int64_t linear_scratch(const Linear& args, int64_t rows, int64_t panels) {
    return with_products(args, [&]<class M, class T>() {
        Carve carve{nullptr};
        if constexpr (in_tiles<M>()) TileScratch<M>(args, rows, panels, carve);
        else LinearScratch<M>(packed_depth<M>(args), rows, carve);
        return carve.used;
    });
}

template <class M, class T, class O>
inline void linear_of(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                      int64_t next_panel, void* scratch) {
    if constexpr (in_tiles<M>()) linear_tiles<M, T, O>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
    else linear_block<M, T, O>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
}

inline void linear(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                   int64_t next_panel, void* scratch) {
    with_products(args, [&]<class M, class T>() {
        if (args.out_type == Type::F32)
            linear_of<M, T, float>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
        else linear_of<M, T, T>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
    });
}

}  // namespace
}  // namespace batchgen
