// Prepacking of both operands of a linear layer: w into panels, x into tiles.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/block_panels.h"
#include "matmul/quant_panels.h"
#include "matmul/dequantize.h"
#include "matmul/bf16_pairs.h"
#include "matmul/int8.h"
#include "matmul/layout.h"
#include "matmul/operands.h"
#include "matmul/row_blocks.h"
#include "matmul/row_panels.h"
#include "matmul/split_bytes.h"

namespace batchgen {
namespace {

// Dequantizes the words [start, stop) of K of a prepacked panel; all of K where its values lie in rows.
template <class Mma, class T>
inline void numbers_of_packed(const Linear& args, int64_t panel, int64_t next, int64_t start, int64_t stop,
                              typename Mma::Operand* out) {
    bool done = false;
    if constexpr (kTiles && Mma::kPerWord == 2)
        with_panels(args.packing, [&]<class Format>(const int8_t* table) {
            if constexpr (kInRows<Mma, Format>) operand_of_rows<Format>(args, table, panel, next, out), done = true;
        });
    if (!done) numbers_of_panel<Mma, T>(args, panel, next, start, stop, out);
}

// Packs the words [start, stop) of K of a panel: out [stop - start, kPanelN]. next: the panel that is read after it,
// where w is prepacked blocks.
template <class Mma, class T>
inline void pack_panel(const Linear& args, int64_t panel, int64_t next, int64_t start, int64_t stop,
                       typename Mma::Operand* out) {
    if constexpr (kIsInt8<Mma>) {
        return pack_int8_panel(args, panel, start, stop, out);
    } else {
        if constexpr (!kMultipliesQuants<Mma>) {
            if (args.packing != BlockType::F32) {
                if (args.packed) return numbers_of_packed<Mma, T>(args, panel, next, start, stop, out);
                return unpack_panel<Mma, T>(args, panel, start, stop, out);
            }
        }
        const auto row_of = [&](int64_t of_panel, int c) {
            const int64_t row = weight_row(args, of_panel, c);
            return row < args.n ? (const T*)args.w + row * args.w_stride : nullptr;
        };
        constexpr int64_t kLineWords = 64 / int64_t(sizeof(T)) / Mma::kPerWord;
        for (int c = 0; c < kPanelN; c += W) {
            const T *rows[W], *ahead[W];
            for (int i = 0; i < W; i++) rows[i] = row_of(panel, c + i), ahead[i] = row_of(next, c + i);
            for (int64_t kk = start; kk < stop; kk += W) {
                // Rows are short and many: what the processor itself foresees ends with each.
                if ((kk - start) % kLineWords == 0) {
#pragma GCC unroll 16
                    for (int i = 0; i < W; i++)
                        if (ahead[i]) __builtin_prefetch(ahead[i] + kk * Mma::kPerWord, 0, 2);
                }
                const int64_t count = smaller(W, stop - kk);
                vi r[W];
                gather_k<Mma>(rows, kk, smaller(count * Mma::kPerWord, args.k - kk * Mma::kPerWord), r);
#pragma GCC unroll 16
                for (int i = 0; i < W; i++)
                    if (i < count) store_int(out + (kk - start + i) * kPanelN + c, r[i]);
            }
        }
    }
}

// Packs the tiles [tile, stop) of x, [tiles, K in words, rows of the tile]. Rows as they lie, far apart, would evict
// each other from the first-level cache.
template <class Mma, class T>
inline void pack_row_tiles(const Linear& args, int64_t tile, int64_t stop, void* out) {
    const int64_t k = packed_k<Mma>(args);
    for (; tile < stop; tile++) {
        const int64_t row = tile * kTileM, count = smaller(kTileM, args.m - row);
        uint32_t* to = (uint32_t*)out + row * k;
        for (int64_t c = 0; c < count; c += W) {
            const int64_t lanes = smaller(W, count - c);
            const T* rows[W];
            for (int i = 0; i < W; i++)
                rows[i] = i < lanes ? (const T*)args.x + (row + c + i) * args.x_stride : nullptr;
            for (int64_t kk = 0; kk < k; kk += W) {
                const int64_t k_count = smaller(W, k - kk);
                vi r[W];
                gather_k<Mma>(rows, kk, smaller(k_count * Mma::kPerWord, args.k - kk * Mma::kPerWord), r);
                store_row_tile(r, to, kk, k, c, count);
            }
        }
    }
}

// Bytes of a panel as `prepack_panels` makes it.
template <class Mma>
inline int64_t panel_bytes_of(const Linear& args) {
    if (splits_bytes(args)) return unpacked_panel_bytes(args, 4);
    if (multiplies_pairs(args)) return unpacked_panel_bytes(args, 2);
    return operand_panel_bytes<Mma>(args);
}

// Prepacks the panels [panel, stop) of w; block-quantized ones are unpacked.
inline void prepack_panels(const Linear& args, int64_t panel, int64_t stop, void* out) {
    with_mma(args, [&]<class Mma, class T>() {
        const int64_t k = packed_k<Mma>(args);
        for (; panel < stop; panel++) {
            auto* to = (typename Mma::Operand*)((uint8_t*)out + panel * panel_bytes_of<Mma>(args));
            const int64_t next = panel + 1 < stop ? panel + 1 : panel;
            if (splits_bytes(args) || multiplies_pairs(args)) {
                const auto unpack = [&](const auto& products) {
                    unpack_quant_panel(args, products, panel, next, (uint32_t*)to);
                };
                splits_bytes(args) ? with_split_products(args, 0, unpack) : with_pair_products(args, 0, unpack);
                continue;
            }
            pack_panel<Mma, T>(args, panel, next, 0, k, to);
            if constexpr (kIsInt8<Mma>) gather_scales(args, panel, (float*)(to + k * kPanelN));
        }
    });
}

// Prepacks the panels [panel, stop) of block-quantized w into as many bytes.
inline void prepack_block_panels(const Linear& args, int64_t panel, int64_t stop, void* out) {
    with_mma(args, [&]<class Mma, class T>() {
        if constexpr (!kIsInt8<Mma>)
            with_panels(args.packing, [&]<class Format>(const int8_t*) {
                for (; panel < stop; panel++)
                    prepack_block_panel<Mma, T, Format>(args, panel, (uint8_t*)out + panel * block_panel_bytes(args));
            });
    });
}

inline int64_t panel_bytes(const Linear& args) {
    return with_mma(args, [&]<class Mma, class T>() { return panel_bytes_of<Mma>(args); });
}

}  // namespace
}  // namespace batchgen
