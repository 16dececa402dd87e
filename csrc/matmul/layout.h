// Where panels of w and tiles of x have what, and the transposition that both are made with.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/operands.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

constexpr int64_t kPackedRows = 4;     // fewer are taken as they lie
constexpr int64_t kDepthBlock = 1024;  // of 32 bits: a panel of it stays in a cache beside the rows

template <class M>
inline int64_t packed_depth(const Linear& args) {
    return (round_up(args.depth, M::kWhole) + M::kPair - 1) / M::kPair;
}

// The row of w that is column `c` of a panel; with a gated one a vector of the gate is beside one of what it is
// multiplied with.
inline int64_t weight_row(const Linear& args, int64_t panel, int c) {
    if (!is_gated(args.activation)) return panel * kPanel + c;
    const int64_t column = panel * W + c % W, half = args.columns / 2;
    return column < half ? column + (c / W) * half : args.columns;
}

// Bytes of a packed panel of w that is numbers, or codes of 8 bits with a scale for each column.
template <class M>
inline int64_t operand_panel_bytes(const Linear& args) {
    return kPanel * (packed_depth<M>(args) * int64_t(sizeof(typename M::Operand)) + (kCoded<M> ? 4 : 0));
}

template <class M>
inline const typename M::Operand* packed_panel(const Linear& args, int64_t panel) {
    return (const typename M::Operand*)((const uint8_t*)args.w + panel * operand_panel_bytes<M>(args));
}

// r[i]: what rows c.. of a tile of `count` rows have at depth d + i; to where the rows lie beside each other.
inline void put_beside(const vi* r, uint32_t* tile, int64_t d, int64_t depth, int64_t c, int64_t count) {
    const int64_t lanes = smaller(W, count - c), depths = smaller(W, depth - d);
    uint32_t* at = tile + d * count + c;
    // A whole vector may run into the depths after it, which are written after it, but not beyond the tile.
    if (depths == W && (lanes == W || (c == 0 && (d + W - 1) * count + W <= depth * count))) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store_int(at + i * count, r[i]);
        return;
    }
    for (int64_t i = 0; i < depths; i++) {
        uint32_t all[W];
        store_int(all, r[i]);
        memcpy(at + i * count, all, lanes * 4);
    }
}

// Depths [d, d + W) of W rows, in units of 32 bits, of which `values` are there: r[i] is what all rows have at depth d
// + i. A row that is null is zeros.
template <class M, class T>
inline void gather_depths(const T* const* rows, int64_t d, int64_t values, vi* r) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
        if (!rows[i]) r[i] = set1_int(0);
        else if constexpr (M::kPair == 1) r[i] = as_int(load_part(rows[i] + d, int(values)));
        else if (values == 2 * W) r[i] = load_int((const uint32_t*)(rows[i] + 2 * d));
        else {
            uint32_t part[W] = {};
            memcpy(part, rows[i] + 2 * d, values * 2);
            r[i] = load_int(part);
        }
    }
    transpose(r);
}

}  // namespace
}  // namespace batchgen
