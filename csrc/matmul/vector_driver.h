// The loop over rows and panels of a linear layer in vectors.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "matmul/epilogue.h"
#include "matmul/bf16_pairs.h"
#include "matmul/micro_kernel.h"
#include "matmul/prepack.h"
#include "matmul/split_bytes.h"
#include "simd/carve.h"

namespace batchgen {
namespace {

// Whether rows of x are operands as they lie.
template <class Mma, class T>
inline constexpr bool direct() {
    return sizeof(typename Mma::Value) == sizeof(T) && (Mma::kPerWord == 2 || sizeof(T) == 4);
}

// The scratch memory of a call: rows of x, a block of a panel, and sums.
template <class Mma>
struct LinearScratch {
    uint32_t* a;
    typename Mma::Operand* b;
    typename Mma::Number* c;
    LinearScratch(int64_t k, int64_t rows, Carve& carve) {
        a = carve.take<uint32_t>(kIsInt8<Mma> ? 0 : rows * k);
        b = carve.take<typename Mma::Operand>(kPanelN * smaller(k, kBlockK));
        c = carve.take<typename Mma::Number>(panels_at_once(rows) * rows * kPanelN);
    }
};

// Rows of A: one after the other, or side by side in tiles (`pack_row_tiles`).
struct Rows {
    const uint32_t* at;
    int64_t stride;
    bool uses_tiles;
};

// The rows of x from `row` on as an operand; they are converted into `space` where they have to be.
template <class Mma, class T>
inline Rows rows_as_operand(const Linear& args, int64_t row, int64_t rows, uint32_t* space) {
    const int64_t k = packed_k<Mma>(args);
    if constexpr (kIsInt8<Mma>) {
        return {(const uint32_t*)QuantizedX(args, args.packed_x).quants + row * k, k, true};
    } else {
        if (args.packed_x) return {(const uint32_t*)args.packed_x + row * k, k, true};
        if (direct<Mma, T>() && args.k % Mma::kPerWord == 0 && args.x_stride % Mma::kPerWord == 0 &&
            uintptr_t(args.x) % 4 == 0)
            return {(const uint32_t*)((const T*)args.x + row * args.x_stride), args.x_stride / Mma::kPerWord, false};
        for (int64_t r = 0; r < rows; r++) {
            const T* x = (const T*)args.x + (row + r) * args.x_stride;
            typename Mma::Value* out = (typename Mma::Value*)(space + r * k);
            if (args.k % Mma::kPerWord) out[args.k] = typename Mma::Value{};
            for (int64_t i = 0; i < args.k; i += W) {
                const int n = int(smaller(W, args.k - i));
                store_part(out + i, load_part(x + i, n), n);
            }
        }
        return {space, k, false};
    }
}

// Multiplies at most kSmallM rows of x with prepacked block-quantized panels.
template <class Mma, class T, class O>
inline void small_m_block(const Linear& args, int64_t row, int64_t rows, Rows a, int64_t panel, int64_t panel_stop,
                          int64_t next_panel, float* c) {
    const SmallMRows x{a.at, a.uses_tiles ? 1 : a.stride, a.uses_tiles ? rows : 1};
    const int64_t step = panels_at_once(rows);
    for (; panel < panel_stop; panel += step) {
        // An odd last panel is multiplied twice where two go at once.
        const int64_t last = smaller(panel + step, panel_stop) - 1;
        const auto after = [&](int64_t p) { return p + step < panel_stop ? p + step : next_panel; };
        small_m_product<Mma, T>(args, int(rows), {panel, last}, {after(panel), after(last)}, x, c);
        for (int64_t p = panel; p <= last; p++) finish<Mma, T, O>(args, row, p, rows, c + (p - panel) * rows * kPanelN);
    }
}

// Rows [row, row_stop) times panels [panel, panel_stop).
template <class Mma, class T, class O>
inline void linear_block(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                         int64_t next_panel, void* scratch) {
    const int64_t k = packed_k<Mma>(args), rows = row_stop - row;
    Carve carve{(uint8_t*)scratch};
    LinearScratch<Mma> s(k, rows, carve);
    if constexpr (__is_same(T, bf16) && !kIsInt8<Mma>) {
        const auto multiply = [&](const auto& products) {
            products_of_panels(args, products, rows, panel, panel_stop, next_panel, (uint32_t*)s.b, s.c,
                               [&](int64_t p) { finish<Mma, T, O>(args, row, p, rows, s.c); });
        };
        if (splits_bytes(args)) return with_split_products(args, row, multiply);
        if (multiplies_pairs(args)) return with_pair_products(args, row, multiply);
    }
    const Rows a = rows_as_operand<Mma, T>(args, row, rows, s.a);
    if constexpr (direct<Mma, T>() && !kIsInt8<Mma> && !kMultipliesQuants<Mma>) {
        if (args.packed && args.packing != BlockType::F32 && rows <= kSmallM)
            return small_m_block<Mma, T, O>(args, row, rows, a, panel, panel_stop, next_panel, s.c);
    }
    // Dequantized blocks of K are short, so that they stay in the first-level cache.
    const int64_t block = args.packed && args.packing != BlockType::F32 ? kChunkK / Mma::kPerWord : kBlockK;
    for (; panel < panel_stop; panel++) {
        const int64_t next = panel + 1 < panel_stop ? panel + 1 : next_panel;
        for (int64_t kk = 0; kk < k; kk += block) {
            const int64_t stop = smaller(k, kk + block);
            const typename Mma::Operand* b = packed_panel<Mma>(args, panel) + kk * kPanelN;
            if (!is_operand(args)) {
                pack_panel<Mma, T>(args, panel, next, kk, stop, s.b);
                b = s.b;
            }
            // The same words of K of the next panel are prefetched, a part with each tile of rows.
            const uint8_t* ahead = nullptr;
            if (is_operand(args)) {
                ahead = (const uint8_t*)(packed_panel<Mma>(args, next) + kk * kPanelN);
            }
            const int64_t ahead_bytes = (stop - kk) * kPanelN * int64_t(sizeof *b);
            for (int64_t r = 0; r < rows; r += kTileM) {
                const int64_t fetched = r / kTileM * 64 * (stop - kk);
                const uint8_t* fetch = ahead && fetched < ahead_bytes ? ahead + fetched : nullptr;
                with_count<kTileM>(int(smaller(kTileM, rows - r)), [&]<int MR>() {
                    static const float one[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
                    const uint32_t* at = a.at + r * a.stride + (a.uses_tiles ? kk * MR : kk);
                    const auto product =
                        a.uses_tiles ? product_tile<Mma, MR, 2, true> : product_tile<Mma, MR, 2, false>;
                    product(at, a.stride, b, kPanelN, stop - kk, s.c + r * kPanelN, kPanelN, kk ? one : nullptr, fetch);
                });
            }
        }
        finish<Mma, T, O>(args, row, panel, rows, s.c);
    }
}

}  // namespace
}  // namespace batchgen
