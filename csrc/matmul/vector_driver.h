// Linear layers in vectors: some rows of x times some panels of w.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "matmul/epilogue.h"
#include "matmul/fp8.h"
#include "matmul/micro_kernel.h"
#include "matmul/prepack.h"
#include "matmul/split_bytes.h"
#include "simd/carve.h"

namespace batchgen {
namespace {

template <class M, class T>
inline constexpr bool direct() {
    return sizeof(typename M::Value) == sizeof(T) && (M::kPair == 2 || sizeof(T) == 4);
}

template <class M>
struct LinearScratch {
    uint32_t* a;
    typename M::Operand* b;
    typename M::Number* c;
    LinearScratch(int64_t depth, int64_t rows, Carve& carve) {
        a = carve.take<uint32_t>(kCoded<M> ? 0 : rows * depth);
        b = carve.take<typename M::Operand>(kPanel * smaller(depth, kDepthBlock));
        c = carve.take<typename M::Number>(panels_at_once(rows) * rows * kPanel);
    }
};

// Rows of A, from `row` on: one after the other, or in tiles whose rows lie beside each other (`pack_row_tiles`).
struct Rows {
    const uint32_t* at;
    int64_t stride;
    bool in_tiles;
};

template <class M, class T>
inline Rows rows_as_operand(const Linear& args, int64_t row, int64_t rows, uint32_t* space) {
    const int64_t depth = packed_depth<M>(args);
    if constexpr (kCoded<M>) {
        return {(const uint32_t*)CodedRows(args, args.packed_x).codes + row * depth, depth, true};
    } else {
        if (args.packed_x) return {(const uint32_t*)args.packed_x + row * depth, depth, true};
        if (direct<M, T>() && args.depth % M::kPair == 0 && args.x_stride % M::kPair == 0 && uintptr_t(args.x) % 4 == 0)
            return {(const uint32_t*)((const T*)args.x + row * args.x_stride), args.x_stride / M::kPair, false};
        for (int64_t r = 0; r < rows; r++) {
            const T* x = (const T*)args.x + (row + r) * args.x_stride;
            typename M::Value* out = (typename M::Value*)(space + r * depth);
            if (args.depth % M::kPair) out[args.depth] = typename M::Value{};
            for (int64_t i = 0; i < args.depth; i += W) {
                const int n = int(smaller(W, args.depth - i));
                store_part(out + i, load_part(x + i, n), n);
            }
        }
        return {space, depth, false};
    }
}

// Rows of x, at most kRowsOfPacked, times weights that are rows of a GGUF in panels.
template <class M, class T, class O>
inline void few_rows(const Linear& args, int64_t row, int64_t rows, Rows a, int64_t panel, int64_t panel_stop,
                     int64_t next_panel, float* c) {
    const FewRows x{a.at, a.in_tiles ? 1 : a.stride, a.in_tiles ? rows : 1};
    const int64_t step = panels_at_once(rows);
    for (; panel < panel_stop; panel += step) {
        // The last one goes twice where two go at once and none is beside it.
        const int64_t last = smaller(panel + step, panel_stop) - 1;
        const auto after = [&](int64_t p) { return p + step < panel_stop ? p + step : next_panel; };
        product_of_few<M, T>(args, int(rows), {panel, last}, {after(panel), after(last)}, x, c);
        for (int64_t p = panel; p <= last; p++) finish<M, T, O>(args, row, p, rows, c + (p - panel) * rows * kPanel);
    }
}

template <class M, class T, class O>
inline void linear_block(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                         int64_t next_panel, void* scratch) {
    const int64_t depth = packed_depth<M>(args), rows = row_stop - row;
    Carve carve{(uint8_t*)scratch};
    LinearScratch<M> s(depth, rows, carve);
    if constexpr (__is_same(T, bf16) && !kCoded<M>) {
        const auto multiply = [&](const auto& products) {
            products_of_panels(args, products, rows, panel, panel_stop, next_panel, (uint32_t*)s.b, s.c,
                               [&](int64_t p) { finish<M, T, O>(args, row, p, rows, s.c); });
        };
        if (in_digits(args)) return with_digits(args, row, multiply);
        if (in_fp8<M>(args)) return with_fp8(args, row, multiply);
    }
    const Rows a = rows_as_operand<M, T>(args, row, rows, s.a);
    if constexpr (direct<M, T>() && !kCoded<M> && !kHasFp8<M>) {
        if (args.packed && args.packing != BlockType::F32 && rows <= kRowsOfPacked)
            return few_rows<M, T, O>(args, row, rows, a, panel, panel_stop, next_panel, s.c);
    }
    // Numbers of packed ones stay in the nearest cache.
    const int64_t block = args.packed && args.packing != BlockType::F32 ? kTaken / M::kPair : kDepthBlock;
    for (; panel < panel_stop; panel++) {
        const int64_t next = panel + 1 < panel_stop ? panel + 1 : next_panel;
        for (int64_t d = 0; d < depth; d += block) {
            const int64_t stop = smaller(depth, d + block);
            const typename M::Operand* b = packed_panel<M>(args, panel) + d * kPanel;
            if (!is_operand(args)) {
                pack_panel<M, T>(args, panel, next, d, stop, s.b);
                b = s.b;
            }
            // The same depths of the panel after this one, a part with each tile of rows.
            const uint8_t* ahead = nullptr;
            if (is_operand(args)) {
                ahead = (const uint8_t*)(packed_panel<M>(args, next) + d * kPanel);
            }
            const int64_t ahead_bytes = (stop - d) * kPanel * int64_t(sizeof *b);
            for (int64_t r = 0; r < rows; r += kRowTile) {
                const int64_t fetched = r / kRowTile * 64 * (stop - d);
                const uint8_t* fetch = ahead && fetched < ahead_bytes ? ahead + fetched : nullptr;
                with_count<kRowTile>(int(smaller(kRowTile, rows - r)), [&]<int MR>() {
                    static const float one[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
                    const uint32_t* at = a.at + r * a.stride + (a.in_tiles ? d * MR : d);
                    const auto product = a.in_tiles ? product_tile<M, MR, 2, true> : product_tile<M, MR, 2, false>;
                    product(at, a.stride, b, kPanel, stop - d, s.c + r * kPanel, kPanel, d ? one : nullptr, fetch);
                });
            }
        }
        finish<M, T, O>(args, row, panel, rows, s.c);
    }
}

}  // namespace
}  // namespace batchgen
