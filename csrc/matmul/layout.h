// Layouts of the two operands in memory, and the transposition that makes both.
//
// A panel of w is [K in words, kPanelN]: at each word of K a row of kPanelN columns. A tile of x is [K in words, rows
// of the tile], with at most kTileM rows.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/operands.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

constexpr int64_t kMinPackedM = 4;  // x with fewer rows is read as it lies
constexpr int64_t kBlockK = 1024;   // words: so much of a panel stays in a cache beside the rows

// Words of K, padded.
template <class Mma>
inline int64_t packed_k(const Linear& args) {
    return (round_up(args.k, Mma::kMultipleOfK) + Mma::kPerWord - 1) / Mma::kPerWord;
}

// The row of w that is column `c` of a panel; at least N where there is none. For a gated activation a panel has a
// vector of the gate's columns and then one of those that it is multiplied with.
inline int64_t weight_row(const Linear& args, int64_t panel, int c) {
    if (!is_gated(args.activation)) return panel * kPanelN + c;
    const int64_t column = panel * W + c % W, half = args.n / 2;
    return column < half ? column + (c / W) * half : args.n;
}

// Bytes of a panel of numbers, or of int8 values with a scale for each column behind them.
template <class Mma>
inline int64_t operand_panel_bytes(const Linear& args) {
    return kPanelN * (packed_k<Mma>(args) * int64_t(sizeof(typename Mma::Operand)) + (kIsInt8<Mma> ? 4 : 0));
}

// The address of a panel of w that is prepacked as numbers or int8 values.
template <class Mma>
inline const typename Mma::Operand* packed_panel(const Linear& args, int64_t panel) {
    return (const typename Mma::Operand*)((const uint8_t*)args.w + panel * operand_panel_bytes<Mma>(args));
}

// Stores the words [kk, kk + W) of K of the rows from `c` on of a tile of `count` rows; r[i] has word kk + i of W rows.
inline void store_row_tile(const vi* r, uint32_t* tile, int64_t kk, int64_t k, int64_t c, int64_t count) {
    const int64_t lanes = smaller(W, count - c), k_count = smaller(W, k - kk);
    uint32_t* at = tile + kk * count + c;
    // A whole vector may run over the next words of K, which are stored after it, but not beyond the tile.
    if (k_count == W && (lanes == W || (c == 0 && (kk + W - 1) * count + W <= k * count))) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store_int(at + i * count, r[i]);
        return;
    }
    for (int64_t i = 0; i < k_count; i++) {
        uint32_t all[W];
        store_int(all, r[i]);
        memcpy(at + i * count, all, lanes * 4);
    }
}

// Loads and transposes the words [kk, kk + W) of W rows, of which `values` values exist: r[i] has word kk + i of all
// rows. A row that is null is zeros.
template <class Mma, class T>
inline void gather_k(const T* const* rows, int64_t kk, int64_t values, vi* r) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
        if (!rows[i]) r[i] = set1_int(0);
        else if constexpr (Mma::kPerWord == 1) r[i] = as_int(load_part(rows[i] + kk, int(values)));
        else if (values == 2 * W) r[i] = load_int((const uint32_t*)(rows[i] + 2 * kk));
        else {
            uint32_t part[W] = {};
            memcpy(part, rows[i] + 2 * kk, values * 2);
            r[i] = load_int(part);
        }
    }
    transpose(r);
}

}  // namespace
}  // namespace batchgen
