// Both operands of a linear layer put into the layouts that products read: w into panels, x into tiles.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/block_panels.h"
#include "matmul/code_panels.h"
#include "matmul/dequantize.h"
#include "matmul/fp8.h"
#include "matmul/int8.h"
#include "matmul/layout.h"
#include "matmul/operands.h"
#include "matmul/row_blocks.h"
#include "matmul/split_bytes.h"

namespace batchgen {
namespace {

// Depths [start, stop), in units of 32 bits, of a panel: out [stop - start, kPanel]. next: the panel after it, if it
// has been put in order, as rows of a GGUF are.
template <class M, class T>
inline void pack_panel(const Linear& args, int64_t panel, int64_t next, int64_t start, int64_t stop,
                       typename M::Operand* out) {
    if constexpr (kCoded<M>) {
        return pack_codes(args, panel, start, stop, out);
    } else {
        if constexpr (!kHasFp8<M>) {  // where blocks are multiplied as codes
            if (args.packing != BlockType::F32) {
                if (args.packed) return numbers_of_panel<M, T>(args, panel, next, start, stop, out);
                return unpack_panel<M, T>(args, panel, start, stop, out);
            }
        }
        for (int c = 0; c < kPanel; c += W) {
            const T* rows[W];
            for (int i = 0; i < W; i++) {
                const int64_t row = weight_row(args, panel, c + i);
                rows[i] = row < args.columns ? (const T*)args.w + row * args.w_stride : nullptr;
            }
            for (int64_t d = start; d < stop; d += W) {
                const int64_t count = smaller(W, stop - d);
                vi r[W];
                gather_depths<M>(rows, d, smaller(count * M::kPair, args.depth - d * M::kPair), r);
#pragma GCC unroll 16
                for (int i = 0; i < W; i++)
                    if (i < count) store_int(out + (d - start + i) * kPanel + c, r[i]);
            }
        }
    }
}

// Tiles [tile, stop) of kRowTile rows of x, the rows of a tile beside each other at each depth: [tiles, depth, rows of
// the tile]. Rows as they lie, far apart, take each other's places in the nearest cache.
template <class M, class T>
inline void pack_row_tiles(const Linear& args, int64_t tile, int64_t stop, void* out) {
    const int64_t depth = packed_depth<M>(args);
    for (; tile < stop; tile++) {
        const int64_t row = tile * kRowTile, count = smaller(kRowTile, args.rows - row);
        uint32_t* to = (uint32_t*)out + row * depth;
        for (int64_t c = 0; c < count; c += W) {
            const int64_t lanes = smaller(W, count - c);
            const T* rows[W];
            for (int i = 0; i < W; i++)
                rows[i] = i < lanes ? (const T*)args.x + (row + c + i) * args.x_stride : nullptr;
            for (int64_t d = 0; d < depth; d += W) {
                const int64_t depths = smaller(W, depth - d);
                vi r[W];
                gather_depths<M>(rows, d, smaller(depths * M::kPair, args.depth - d * M::kPair), r);
                put_beside(r, to, d, depth, c, count);
            }
        }
    }
}

template <class M>
inline int64_t panel_bytes_of(const Linear& args) {
    if (in_digits(args)) return unpacked_panel_bytes(args, 4);
    if (in_fp8<M>(args)) return unpacked_panel_bytes(args, 2);
    return operand_panel_bytes<M>(args);
}

inline void pack_panels(const Linear& args, int64_t panel, int64_t stop, void* out) {
    with_products(args, [&]<class M, class T>() {
        const int64_t depth = packed_depth<M>(args);
        for (; panel < stop; panel++) {
            auto* to = (typename M::Operand*)((uint8_t*)out + panel * panel_bytes_of<M>(args));
            const int64_t next = panel + 1 < stop ? panel + 1 : panel;
            if (in_digits(args) || in_fp8<M>(args)) {
                const auto unpack = [&](const auto& products) {
                    unpack_panel_of_codes(args, products, panel, next, (uint32_t*)to);
                };
                in_digits(args) ? with_digits(args, 0, unpack) : with_fp8(args, 0, unpack);
                continue;
            }
            pack_panel<M, T>(args, panel, next, 0, depth, to);
            if constexpr (kCoded<M>) gather_scales(args, panel, (float*)(to + depth * kPanel));
        }
    });
}

// Rows of a GGUF to panels of as many bytes.
inline void arrange_panels(const Linear& args, int64_t panel, int64_t stop, void* out) {
    with_products(args, [&]<class M, class T>() {
        if constexpr (!kCoded<M>)
            with_panels(args.packing, [&]<class Format>(const int8_t*) {
                for (; panel < stop; panel++)
                    arrange_panel<M, T, Format>(args, panel, (uint8_t*)out + panel * block_panel_bytes(args));
            });
    });
}

inline int64_t panel_bytes(const Linear& args) {
    return with_products(args, [&]<class M, class T>() { return panel_bytes_of<M>(args); });
}

}  // namespace
}  // namespace batchgen
