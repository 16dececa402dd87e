// Products of quantized values themselves, with scales applied to their sums: what bytes (matmul/split_bytes.h) and
// bf16 pairs (matmul/bf16_pairs.h) share.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/block_panels.h"
#include "matmul/layout.h"
#include "matmul/micro_kernel.h"
#include "simd/target.h"

namespace batchgen {
namespace {

// Scales and minimums of the runs of a chunk of a panel.
struct RunScales {
    vf scales[kChunkRuns][2], minimums[kChunkRuns][2];
};

// Loads the scales of `count` blocks that are `stride` bytes apart.
template <class Format>
__attribute__((noinline)) void scales_of_runs(const uint8_t* blocks, int64_t stride, int64_t count, RunScales& out) {
    for (int64_t b = 0; b < count; b++, blocks += stride)
        for (int run = 0; run < Format::kRuns; run++)
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++)
                Format::Scales::get(blocks, run, part * W, out.scales[b * Format::kRuns + run][part],
                                    out.minimums[b * Format::kRuns + run][part]);
}

// A format's layout, and what makes the scales of some blocks, `stride` bytes apart.
struct QuantFormat {
    PanelLayout layout;
    void (*scales)(const uint8_t* blocks, int64_t stride, int64_t count, RunScales& out);
};

template <class Format>
constexpr QuantFormat quant_format(const int8_t* table) {
    return {panel_layout<Format>(table), scales_of_runs<Format>};
}

// A chunk of a panel, whose scales are written to `scales`.
struct QuantChunk : PanelChunk {
    QuantChunk(const QuantFormat& format, const uint8_t* panel, int64_t k, int64_t at, const uint8_t* next,
               RunScales& scales) {
        seek(format.layout, panel, k, at, next);
        format.scales(blocks, format.layout.block_bytes, num_blocks, scales);
    }
};

// The bytes [start, start + count) of the row of column c, or null where there is none. Those of panel `next` are
// prefetched into the second-level cache: hardware cannot follow as many rows as a panel has.
inline const uint8_t* row_at(const Linear& args, int64_t panel, int64_t next, int c, int64_t start, int64_t count) {
    const auto* w = (const uint8_t*)args.w;
    const int64_t row = weight_row(args, panel, c), ahead = weight_row(args, next, c);
    if (row >= args.n) return nullptr;
    if (ahead < args.n) {
        const uint8_t* first = w + ahead * args.w_stride + start;
        for (const uint8_t* line = first - uintptr_t(first) % 64; line < first + count; line += 64)
            __builtin_prefetch(line, 0, 2);
    }
    return w + row * args.w_stride + start;
}

#ifdef BATCHGEN_LOAD_QUARTERS
// The index in a row of the value in a byte; of the one in its lower nibble where it has two.
template <class Block>
constexpr int64_t k_of_byte(int64_t byte) {
    if constexpr (Block::kNibbles == 0) return byte;
    else return byte / Block::kNibbles * 2 * Block::kNibbles + byte % Block::kNibbles;
}

// A chunk of the rows of W columns, from `c` on, whose values are bytes or nibbles as they lie. Their scales go to
// `heads` [blocks, Format::kScaleBytes], zeros where there is no row.
template <class Format>
struct ColumnRows {
    using Block = typename Format::Block;
    static constexpr int64_t kPiece = 16, kCodeBytes = Block::kValues / (Block::kNibbles ? 2 : 1);
    const uint8_t* rows[W];

    ColumnRows(const Linear& args, int64_t panel, int64_t next, int c, int64_t at, uint8_t* heads) {
        static const uint8_t nothing[kChunkK / Block::kValues * Block::kBytes] = {};
        const int64_t blocks = smaller(kChunkK, args.k - at) / Block::kValues;
        for (int i = 0; i < W; i++) {
            rows[i] = row_at(args, panel, next, c + i, at / Block::kValues * Block::kBytes, blocks * Block::kBytes);
            if (!rows[i]) rows[i] = nothing;
            else
                for (int64_t b = 0; b < blocks; b++)
                    Format::Scales::put(rows[i] + b * Block::kBytes, c + i, heads + b * Format::kScaleBytes);
        }
    }
    // Loads kPiece bytes of values of each column, the first of which is `byte`, a multiple: word i has four of them.
    __attribute__((always_inline)) void words(int64_t byte, vi (&out)[4]) const {
        const int64_t place = byte / kCodeBytes * Block::kBytes + Block::kQuantsAt + byte % kCodeBytes;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            out[i] = load_quarters(rows[i] + place, rows[i + 4] + place, rows[i + 8] + place, rows[i + 12] + place);
        transpose_quarters(out);
    }
};

// Hands a chunk of the rows of W columns to sink(k, words): 4 bytes of values of each column, four times in a row.
template <class Format, class Sink>
__attribute__((always_inline)) inline void words_of_rows(const Linear& args, int64_t panel, int64_t next, int c,
                                                         int64_t at, uint8_t* heads, Sink sink) {
    using Columns = ColumnRows<Format>;
    const Columns columns(args, panel, next, c, at, heads);
    const int64_t bytes = smaller(kChunkK, args.k - at) / Format::Block::kValues * Columns::kCodeBytes;
    for (int64_t byte = 0; byte < bytes; byte += Columns::kPiece) {
        const int64_t k = k_of_byte<typename Format::Block>(byte);
        vi r[4];
        columns.words(byte, r);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sink(k + 4 * i, (Lanes)r[i]);
    }
}
#endif

// A panel that is unpacked for many rows: operand words of `k_per_word` values, then the scales of each chunk.
inline RunScales* unpacked_scales(const Linear& args, int k_per_word, uint32_t* panel) {
    return (RunScales*)(panel + args.k / k_per_word * kPanelN);
}
inline int64_t unpacked_panel_bytes(const Linear& args, int k_per_word) {
    return args.k / k_per_word * kPanelN * 4 + (args.k + kChunkK - 1) / kChunkK * int64_t(sizeof(RunScales));
}

// A kind of products is a struct with
//     kKPerWord: values of K in a word of an operand
//     kSmallM: the most rows that are multiplied in registers; kSmallMOfRows: also with w as it lies in a file
//     operand(panel, next, at, out, scales): the operand of a chunk of a panel
//     small_m<MR>(panel, next, c): c [MR, kPanelN] = all rows times a panel
//     tile<MR>(r, i, count, at, k_count, b, scales, c): c += the rows from r + i on, of a tile of `count` rows from r
//     on, times an operand
constexpr int kScaledTileM = kTileM / 2;  // rows whose sums of a run stay in registers

// Unpacks a panel into the operands and scales of all its chunks.
template <class Products>
inline void unpack_quant_panel(const Linear& args, const Products& products, int64_t panel, int64_t next,
                               uint32_t* out) {
    RunScales* scales = unpacked_scales(args, Products::kKPerWord, out);
    for (int64_t at = 0; at < args.k; at += kChunkK)
        products.operand(panel, next, at, out + at / Products::kKPerWord * kPanelN, scales[at / kChunkK]);
}

// Multiplies `rows` rows with the panels [panel, panel_stop): finish(panel) takes the sums in c [rows, kPanelN] of
// each.
template <class Products, class Finish>
inline void products_of_panels(const Linear& args, const Products& products, int64_t rows, int64_t panel,
                               int64_t panel_stop, int64_t next_panel, uint32_t* space, float* c, Finish finish) {
    for (; panel < panel_stop; panel++) {
        const int64_t next = panel + 1 < panel_stop ? panel + 1 : next_panel;
        if ((args.packed || Products::kSmallMOfRows) && !args.unpacked && rows <= Products::kSmallM) {
            with_count<Products::kSmallM>(int(rows), [&]<int MR>() { products.template small_m<MR>(panel, next, c); });
            finish(panel);
            continue;
        }
        memset(c, 0, rows * kPanelN * sizeof *c);
        for (int64_t at = 0; at < args.k; at += kChunkK) {
            RunScales own;
            const RunScales* scales = &own;
            uint32_t* b = space;
            if (args.unpacked) {
                b = (uint32_t*)((uint8_t*)args.w + panel * unpacked_panel_bytes(args, Products::kKPerWord));
                scales = unpacked_scales(args, Products::kKPerWord, b) + at / kChunkK;
                b += at / Products::kKPerWord * kPanelN;
            } else {
                products.operand(panel, next, at, b, own);
            }
            const int64_t k_count = smaller(kChunkK, args.k - at);
            for (int64_t r = 0; r < rows; r += kTileM) {
                const int64_t count = smaller(kTileM, rows - r);
                // Two halves of about as many rows: one or two rows would wait for their own sums.
                const int64_t half = count > kScaledTileM ? (count + 1) / 2 : count;
                for (int64_t i = 0; i < count; i += half)
                    with_count<kScaledTileM>(int(smaller(half, count - i)), [&]<int MR>() {
                        products.template tile<MR>(r, i, count, at, k_count, b, *scales, c + (r + i) * kPanelN);
                    });
            }
        }
        finish(panel);
    }
}

}  // namespace
}  // namespace batchgen
