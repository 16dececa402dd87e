// What products share in which codes are multiplied and scales applied to their sums: of integers
// (matmul/split_bytes.h) and of FP8 (matmul/fp8.h).
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

// Scales and minimums of the runs of kChunkK depths of a panel.
struct RunScales {
    vf scales[kChunkRuns][2], minimums[kChunkRuns][2];
};

template <class Format>
__attribute__((noinline)) void scales_of_runs(const uint8_t* blocks, int64_t stride, int64_t count, RunScales& out) {
    for (int64_t b = 0; b < count; b++, blocks += stride)
        for (int run = 0; run < Format::kRuns; run++)
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++)
                Format::Scales::get(blocks, run, part * W, out.scales[b * Format::kRuns + run][part],
                                    out.minimums[b * Format::kRuns + run][part]);
}

// Where a format's panels have what.
struct QuantFormat {
    void (*scales)(const uint8_t* blocks, int64_t stride, int64_t count, RunScales& out);
    const int8_t* table;
    int64_t block_bytes, scale_bytes, low_bytes;
    int quads_of_block;  // a power of two, by its exponent
};

template <class Format>
constexpr QuantFormat quant_format(const int8_t* table) {
    return {scales_of_runs<Format>, table,
            Format::kBlockBytes,    Format::kScaleBytes,
            Format::kLowBytes,      __builtin_ctz(Format::Block::kValues / kQuad)};
}

// Up to kChunkK depths of a panel from `at` on, and their scales.
struct QuantChunk {
    struct Planes {
        const uint8_t *low, *high;
    };
    const uint8_t *blocks, *ahead;  // ahead: what is read after them
    int64_t k_count, ahead_of_quad;

    QuantChunk(const QuantFormat& format, const uint8_t* panel, int64_t k, int64_t at, const uint8_t* next,
               RunScales& scales) {
        k_count = smaller(kChunkK, k - at);
        const int64_t count = k_count / kQuad >> format.quads_of_block;
        blocks = panel + (at / kQuad >> format.quads_of_block) * format.block_bytes;
        ahead = at + kChunkK < k ? blocks + count * format.block_bytes : next;
        ahead_of_quad = format.block_bytes >> format.quads_of_block;
        format.scales(blocks, format.block_bytes, count, scales);
    }
    // The codes of quad i. As much of what comes after the stretch is fetched.
    template <class Kind>
    __attribute__((always_inline)) Planes quad(const QuantFormat& format, int64_t i) const {
        constexpr int64_t kLowBytes = kPanelN * kQuad * Kind::kLow / 8, kHighBytes = kPanelN * kQuad * Kind::kHigh / 8;
        const int64_t block = i >> format.quads_of_block, within = i - (block << format.quads_of_block);
        for (int64_t line = 0; line < ahead_of_quad; line += 64) __builtin_prefetch(ahead + i * ahead_of_quad + line);
        const uint8_t* low = blocks + block * format.block_bytes + format.scale_bytes;
        return {low + within * kLowBytes, low + format.low_bytes + within * kHighBytes};
    }
};

// Int8Mma [start, start + count) of the row of column c; null: there is none. The same of panel `next` are fetched into
// the second cache: as many rows as a panel has are too many for the hardware to follow.
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

#ifdef BATCHGEN_QUARTERS
// Where in a row the code of a byte is, in its lower nibble where there are two.
template <class Block>
constexpr int64_t k_of_byte(int64_t byte) {
    if constexpr (Block::kNibbles == 0) return byte;
    else return byte / Block::kNibbles * 2 * Block::kNibbles + byte % Block::kNibbles;
}

// Rows of W columns from `c` on whose codes are bytes or nibbles where they lie, kChunkK depths of them or those that
// are left: sink(depth, words) takes 4 bytes of codes of each column, four times in a row. What a panel has before its
// codes goes to `heads` [blocks, Format::kScaleBytes]; it is zeros where no row is.
template <class Format, class Sink>
__attribute__((always_inline)) inline void words_of_rows(const Linear& args, int64_t panel, int64_t next, int c,
                                                         int64_t at, uint8_t* heads, Sink sink) {
    using Block = typename Format::Block;
    static const uint8_t nothing[kChunkK / Block::kValues * Block::kBytes] = {};
    constexpr int kPiece = 16, kCodeBytes = Block::kValues / (Block::kNibbles ? 2 : 1);
    const int64_t blocks = smaller(kChunkK, args.k - at) / Block::kValues;
    const uint8_t* rows[W];
    for (int i = 0; i < W; i++) {
        rows[i] = row_at(args, panel, next, c + i, at / Block::kValues * Block::kBytes, blocks * Block::kBytes);
        if (!rows[i]) rows[i] = nothing;
        else
            for (int64_t b = 0; b < blocks; b++)
                Format::Scales::put(rows[i] + b * Block::kBytes, c + i, heads + b * Format::kScaleBytes);
    }
    for (int64_t byte = 0; byte < blocks * kCodeBytes; byte += kPiece) {
        const int64_t place = byte / kCodeBytes * Block::kBytes + Block::kQuantsAt + byte % kCodeBytes;
        const int64_t k = k_of_byte<Block>(byte);
        vi r[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            r[i] = load_quarters(rows[i] + place, rows[i + 4] + place, rows[i + 8] + place, rows[i + 12] + place);
        transpose_quarters(r);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sink(k + 4 * i, (Lanes)r[i]);
    }
}
#endif

// A panel that has been unpacked for many rows: an operand, words of so many depths, and then the scales of each
// stretch.
inline RunScales* unpacked_scales(const Linear& args, int k_count, uint32_t* panel) {
    return (RunScales*)(panel + args.k / k_count * kPanelN);
}
inline int64_t unpacked_panel_bytes(const Linear& args, int k_count) {
    return args.k / k_count * kPanelN * 4 + (args.k + kChunkK - 1) / kChunkK * int64_t(sizeof(RunScales));
}

// Products are made by a struct with
//     kKPerWord: depths of a word of an operand; kSmallM: rows that are multiplied with codes in registers, at most
//     operand(panel, next, at, out, scales): kChunkK depths of a panel, or those that are left
//     few<MR>(panel, next, c): c [MR, kPanelN] = all rows times a panel
//     some<MR>(r, i, count, at, depths, b, scales, c): c += rows r + i and on, of a tile of `count` rows from r on,
//     times an operand
constexpr int kScaledTileM = kTileM / 2;  // so that sums of a run stay in registers

template <class Products>
inline void unpack_quant_panel(const Linear& args, const Products& products, int64_t panel, int64_t next,
                               uint32_t* out) {
    RunScales* scales = unpacked_scales(args, Products::kKPerWord, out);
    for (int64_t at = 0; at < args.k; at += kChunkK)
        products.operand(panel, next, at, out + at / Products::kKPerWord * kPanelN, scales[at / kChunkK]);
}

// `rows` rows times some panels: finish(panel) takes the sums in c [rows, kPanelN] of each.
template <class Products, class Finish>
inline void products_of_panels(const Linear& args, const Products& products, int64_t rows, int64_t panel,
                               int64_t panel_stop, int64_t next_panel, uint32_t* space, float* c, Finish finish) {
    for (; panel < panel_stop; panel++) {
        const int64_t next = panel + 1 < panel_stop ? panel + 1 : next_panel;
        if (args.packed && !args.unpacked && rows <= Products::kSmallM) {
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
                // In two halves of about as many rows: one or two would wait for their own sums.
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
