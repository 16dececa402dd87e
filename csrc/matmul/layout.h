// Where panels of w and tiles of x have what, and the transposition that both are made with.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/operands.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

constexpr int64_t kMinPackedM = 4;  // fewer are taken as they lie
constexpr int64_t kBlockK = 1024;   // of 32 bits: a panel of it stays in a cache beside the rows

template <class Mma>
inline int64_t packed_k(const Linear& args) {
    return (round_up(args.k, Mma::kWhole) + Mma::kPair - 1) / Mma::kPair;
}

// The row of w that is column `c` of a panel; with a gated one a vector of the gate is beside one of what it is
// multiplied with.
inline int64_t weight_row(const Linear& args, int64_t panel, int c) {
    if (!is_gated(args.activation)) return panel * kPanelN + c;
    const int64_t column = panel * W + c % W, half = args.n / 2;
    return column < half ? column + (c / W) * half : args.n;
}

// Int8Mma of a packed panel of w that is numbers, or codes of 8 bits with a scale for each column.
template <class Mma>
inline int64_t operand_panel_bytes(const Linear& args) {
    return kPanelN * (packed_k<Mma>(args) * int64_t(sizeof(typename Mma::Operand)) + (kIsInt8<Mma> ? 4 : 0));
}

template <class Mma>
inline const typename Mma::Operand* packed_panel(const Linear& args, int64_t panel) {
    return (const typename Mma::Operand*)((const uint8_t*)args.w + panel * operand_panel_bytes<Mma>(args));
}

// r[i]: what rows c.. of a tile of `count` rows have at depth d + i; to where the rows lie beside each other.
inline void store_row_tile(const vi* r, uint32_t* tile, int64_t kk, int64_t k, int64_t c, int64_t count) {
    const int64_t lanes = smaller(W, count - c), k_count = smaller(W, k - kk);
    uint32_t* at = tile + kk * count + c;
    // A whole vector may run into the depths after it, which are written after it, but not beyond the tile.
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

// Depths [d, d + W) of W rows, in units of 32 bits, of which `values` are there: r[i] is what all rows have at depth d
// + i. A row that is null is zeros.
template <class Mma, class T>
inline void gather_k(const T* const* rows, int64_t kk, int64_t values, vi* r) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
        if (!rows[i]) r[i] = set1_int(0);
        else if constexpr (Mma::kPair == 1) r[i] = as_int(load_part(rows[i] + kk, int(values)));
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
