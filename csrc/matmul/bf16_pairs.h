// Products of x in bf16 with quantized values that bf16 has exactly, where there are products of bf16 pairs.
//
// FP8 numbers are bf16 numbers too, and so are the values that 4 bits stand for. So a run of 32 values is multiplied as
// it is, and its scale is applied to its sum in fp32:
//     sum += scale * (w . x) + minimum * (1 . x)
// Neither a weight nor x is rounded. Each element is summed in the order of runs, however many rows there are. A pair
// has every other of four values of K, as the bytes of four values lie in the halves of a word; x is arranged to match.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/block_panels.h"
#include "matmul/layout.h"
#include "matmul/quant_panels.h"
#include "matmul/operands.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

#ifdef BATCHGEN_FAST_BF16
typedef uint16_t Halves __attribute__((vector_size(4 * W)));
constexpr int kPairRun = 32, kRunWords = 8;  // values of K in a run; words of x in a quad

// A layout with the numbers that an operand is looked up in by the lowest five bits of a value.
struct PairFormat : QuantFormat {
    alignas(64) bf16 numbers[2 * W];
};

// The FP8 number without an exponent that has these bits, of which three count.
inline float subnormal_fp8(int bits) { return float(bits % 8) * 0x1p-9f; }

// Of FP8 the table has the subnormal numbers; of 4 bits what each value stands for, or where there are minimums the
// value.
template <class Format>
inline PairFormat pair_format(const int8_t* table) {
    using Kind = typename Format::Kind;
    PairFormat format{quant_format<Format>(table), {}};
    for (int i = 0; i < 2 * W; i++) {
        const float number = Kind::kFloat8    ? subnormal_fp8(i)
                             : Kind::kInTable ? float(table[i % 16])
                                              : float(i % 16 - Format::kOffset);
        format.numbers[i].bits = uint16_t(float_bits(number) >> 16);
    }
    return format;
}

// Two FP8 numbers in the low bytes of each half of a lane as bf16. The exponent bias is 7 in FP8 and 127 in bf16.
__attribute__((always_inline)) inline vi pairs_of_fp8(Lanes quants, const PairTable& small) {
    const Halves quant = (Halves)quants, normal = ((quant & 0x7f) << 4) + 0x3c00;
    const Halves number = (quant & 0x78) == 0 ? (Halves)small.of_32((vi)quants) : normal;
    return (vi)(number | (quant & 0x80) << 8);
}

// Calls sink(word of K in the quad, vector of columns, operand) for a quad of a panel.
template <class Kind, class Sink>
__attribute__((always_inline)) inline void quad_of_pairs(QuantChunk::Planes planes, const PairTable& table, Sink sink) {
#pragma GCC unroll 4
    for (int group = 0; group < 4; group++) {
        const Lanes low = (Lanes)load_int((const uint32_t*)planes.low + group * W);
        if constexpr (Kind::kFloat8) {
            const Lanes parts[2] = {low, (Lanes)load_int((const uint32_t*)planes.high + group * W)};
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                sink(2 * group + i / 2, i % 2, pairs_of_fp8(parts[i % 2] >> (8 * (i / 2)) & 0x00ff00ff, table));
        } else {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) sink(2 * group + i / 2, i % 2, table.of_32((vi)(low >> 4 * i)));
        }
    }
}

inline bool has_minimums(BlockType type) {
    bool minimums = false;
    with_panels(type, [&]<class Format>(const int8_t*) { minimums = Format::kMinimums; });
    return minimums;
}

// The sums of the runs of x are behind all its tiles, [runs, rows of the tile], where a format has minimums.
inline int64_t num_run_sums(const Linear& args) {
    return has_minimums(args.packing) ? args.m * (args.k / kPairRun) : 0;
}
inline const float* run_sums_of_tile(const Linear& args, const void* packed_x, int64_t row) {
    return (const float*)packed_x + args.m * args.k / 2 + row * (args.k / kPairRun);
}

// Packs the tiles [tile, stop) of x, as `pack_row_tiles` does but for the values of pairs, and sums their runs.
inline void pack_pair_tiles(const Linear& args, int64_t tile, int64_t stop, void* out) {
    static_assert(kPairRun / 2 == W && kTileM <= W);  // the words of a run are transposed together, of all rows
    const int64_t k = args.k / 2;
    const bool minimums = has_minimums(args.packing);
    for (; tile < stop; tile++) {
        const int64_t row = tile * kTileM, count = smaller(kTileM, args.m - row);
        float* sums = (float*)run_sums_of_tile(args, out, row);
        const bf16* rows[W];
        for (int i = 0; i < W; i++) rows[i] = i < count ? (const bf16*)args.x + (row + i) * args.x_stride : nullptr;
        for (int64_t kk = 0; kk < k; kk += W, sums += count) {
            vi r[W];
            gather_k<Bf16Mma>(rows, kk, kPairRun, r);
            vf sum = zero();
#pragma GCC unroll 8
            for (int i = 0; i < W; i += 2) {
                const Lanes first = (Lanes)r[i], second = (Lanes)r[i + 1];
                r[i] = (vi)((first & 0xffff) | second << 16), r[i + 1] = (vi)(first >> 16 | (second & 0xffff0000));
                for (int j = 0; j < 2; j++) sum = dot_pairs(r[i + j], set1_int(0x3f803f80), sum);
            }
            store_row_tile(r, (uint32_t*)out + row * k, kk, k, 0, count);
            if (minimums) store_part(sums, sum, int(count));
        }
    }
}

// c [MR, kPanelN] = a tile of rows times a panel, each operand used as soon as it is unpacked. next: the panel that is
// read after it; x_sums: the tile's sums of runs.
template <class Kind, bool Minimums, int MR>
__attribute__((noinline)) void small_m_pair_product(const PairFormat& format, const uint8_t* panel, const uint8_t* next,
                                                    int64_t k, const uint32_t* x, const float* x_sums, float* c) {
    const PairTable table(format.numbers);
    RunScales scales;
    memset(c, 0, MR * kPanelN * sizeof *c);
    for (int64_t at = 0; at < k; at += kChunkK) {
        const QuantChunk chunk(format, panel, k, at, next, scales);
        for (int64_t run = 0; run < chunk.k_count / kPairRun; run++) {
            vf acc[MR][2];
#pragma GCC unroll 12
            for (int r = 0; r < MR; r++) acc[r][0] = acc[r][1] = zero();
#pragma GCC unroll 2
            for (int quad = 0; quad < kPairRun / kQuad; quad++) {
                const auto use = [&](int word, int part, vi operand) __attribute__((always_inline)) {
#pragma GCC unroll 12
                    for (int r = 0; r < MR; r++)
                        acc[r][part] = dot_pairs(set1_int(x[word * MR + r]), operand, acc[r][part]);
                };
                quad_of_pairs<Kind>(chunk.template quad<Kind>(format.layout, run * (kPairRun / kQuad) + quad), table,
                                    use);
                x += kRunWords * MR;
            }
#pragma GCC unroll 12
            for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
                for (int part = 0; part < 2; part++) {
                    float* to = c + (2 * r + part) * W;
                    vf sum = fma(acc[r][part], scales.scales[run][part], load(to));
                    if constexpr (Minimums) sum = fma(set1(x_sums[r]), scales.minimums[run][part], sum);
                    store(to, sum);
                }
            if constexpr (Minimums) x_sums += MR;
        }
    }
}

// Unpacks a chunk of a prepacked panel: out [values / 2, kPanelN], and its scales.
template <class Kind>
__attribute__((noinline)) void pair_operand(const PairFormat& format, const uint8_t* panel, const uint8_t* next,
                                            int64_t k, int64_t at, uint32_t* out, RunScales& scales) {
    const PairTable table(format.numbers);
    const QuantChunk chunk(format, panel, k, at, next, scales);
    for (int64_t i = 0; i < chunk.k_count / kQuad; i++, out += kRunWords * kPanelN)
        quad_of_pairs<Kind>(chunk.template quad<Kind>(format.layout, i), table,
                            [&](int word, int part, vi operand) __attribute__((always_inline)) {
                                store_int(out + word * kPanelN + part * W, operand);
                            });
}

// Calls sink(word of K, operand) for the values in 4 bytes of each column, the first of which is the first of a word;
// high nibbles are further words.
template <class Block, class Sink>
__attribute__((always_inline)) inline void operands_of_words(Lanes words, const PairTable& table, Sink sink) {
    if constexpr (Block::kFloats) {
        sink(0, pairs_of_fp8(words & 0x00ff00ff, table)), sink(1, pairs_of_fp8(words >> 8 & 0x00ff00ff, table));
    } else {
        constexpr int kUpper = Block::kNibbles / 2;
        sink(0, table.of_32((vi)words)), sink(1, table.of_32((vi)(words >> 8)));
        sink(kUpper, table.of_32((vi)(words >> 4))), sink(kUpper + 1, table.of_32((vi)(words >> 12)));
    }
}

// Unpacks a chunk of the rows of a panel as they lie in a file, likewise.
template <class Format>
__attribute__((noinline)) void pair_operand_of_rows(const Linear& args, const PairFormat& format, int64_t panel,
                                                    int64_t next, int64_t at, uint32_t* out, RunScales& scales) {
    using Block = typename Format::Block;
    const PairTable table(format.numbers);
    uint8_t heads[kChunkK / Block::kValues * Format::kScaleBytes] = {};
    for (int part = 0; part < 2; part++)
        words_of_rows<Format>(args, panel, next, part * W, at, heads, [&](int64_t k, Lanes words) {
            uint32_t* to = out + k / 2 * kPanelN + part * W;
            operands_of_words<Block>(words, table,
                                     [&](int word, vi operand) { store_int(to + word * kPanelN, operand); });
        });
    scales_of_runs<Format>(heads, Format::kScaleBytes, smaller(kChunkK, args.k - at) / Block::kValues, scales);
}

// c [MR, kPanelN] = a tile of rows times a panel whose rows lie as in a file, each operand used as soon as it is
// unpacked; otherwise as `small_m_pair_product`.
template <class Format, int MR>
__attribute__((noinline)) void small_m_pair_product_of_rows(const Linear& args, const PairFormat& format, int64_t panel,
                                                            int64_t next, const uint32_t* x, const float* x_sums,
                                                            float* c) {
    using Block = typename Format::Block;
    // Values whose operands are made together, whole runs, and the pieces of bytes that have them.
    constexpr int kTogether = Block::kNibbles == 32 ? 64 : kPairRun, kPieces = kTogether / (Block::kNibbles ? 32 : 16);
    const PairTable table(format.numbers);
    memset(c, 0, MR * kPanelN * sizeof *c);
    for (int64_t at = 0; at < args.k; at += kChunkK) {
        const int64_t k_count = smaller(kChunkK, args.k - at);
        uint8_t heads[kChunkK / Block::kValues * Format::kScaleBytes] = {};
        RunScales scales;
        const ColumnRows<Format> columns[2] = {{args, panel, next, 0, at, heads}, {args, panel, next, W, at, heads}};
        scales_of_runs<Format>(heads, Format::kScaleBytes, k_count / Block::kValues, scales);
        for (int64_t k = 0; k < k_count; k += kTogether) {
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                vi operands[kTogether / 2];
#pragma GCC unroll 2
                for (int piece = 0; piece < kPieces; piece++) {
                    vi words[4];
                    columns[part].words(k / kTogether * (16 * kPieces) + 16 * piece, words);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++)
                        operands_of_words<Block>((Lanes)words[i], table,
                                                 [&](int word, vi operand) __attribute__((always_inline)) {
                                                     operands[8 * piece + 2 * i + word] = operand;
                                                 });
                }
#pragma GCC unroll 2
                for (int run = 0; run < kTogether / kPairRun; run++) {
                    vf acc[MR];
#pragma GCC unroll 8
                    for (int r = 0; r < MR; r++) acc[r] = zero();
#pragma GCC unroll 16
                    for (int word = 0; word < W; word++)
#pragma GCC unroll 8
                        for (int r = 0; r < MR; r++)
                            acc[r] =
                                dot_pairs(set1_int(x[(run * W + word) * MR + r]), operands[run * W + word], acc[r]);
                    const int64_t of_chunk = k / kPairRun + run;
#pragma GCC unroll 8
                    for (int r = 0; r < MR; r++) {
                        float* to = c + (2 * r + part) * W;
                        vf sum = fma(acc[r], scales.scales[of_chunk][part], load(to));
                        if constexpr (Format::kMinimums)
                            sum = fma(set1(x_sums[run * MR + r]), scales.minimums[of_chunk][part], sum);
                        store(to, sum);
                    }
                }
            }
            x += kTogether / 2 * MR, x_sums += kTogether / kPairRun * MR;
        }
    }
}

// c [MR, kPanelN] += rows of a tile of `count` times `runs` runs of an operand. x_sums: those of the rows' runs.
template <bool Minimums, int MR>
__attribute__((noinline)) void pair_product(const uint32_t* x, const float* x_sums, int64_t count, const uint32_t* b,
                                            int64_t runs, const RunScales& scales, float* c) {
    vf sum[MR][2];
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++) sum[r][0] = load(c + r * kPanelN), sum[r][1] = load(c + r * kPanelN + W);
    for (int64_t run = 0; run < runs; run++) {
        vf acc[MR][2];
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++) acc[r][0] = acc[r][1] = zero();
#pragma GCC unroll 4
        for (int word = 0; word < kPairRun / 2; word++) {
            const vi first = load_int(b), second = load_int(b + W);
#pragma GCC unroll 6
            for (int r = 0; r < MR; r++) {
                const vi value = set1_int(x[r]);
                acc[r][0] = dot_pairs(value, first, acc[r][0]), acc[r][1] = dot_pairs(value, second, acc[r][1]);
            }
            x += count, b += kPanelN;
        }
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                sum[r][part] = fma(acc[r][part], scales.scales[run][part], sum[r][part]);
                if constexpr (Minimums) sum[r][part] = fma(set1(x_sums[r]), scales.minimums[run][part], sum[r][part]);
            }
        if constexpr (Minimums) x_sums += count;
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++) store(c + r * kPanelN, sum[r][0]), store(c + r * kPanelN + W, sum[r][1]);
}

// The products of a format (matmul/quant_panels.h) for the tiles of x from `row` on.
template <class Format>
struct PairProducts {
    using Kind = typename Format::Kind;
    static constexpr int kKPerWord = 2, kSmallM = 8;
    static constexpr bool kSmallMOfRows = true;
    const Linear& args;
    PairFormat format;
    const uint32_t* x;
    const float* x_sums;

    PairProducts(const Linear& args, const int8_t* table, int64_t row)
        : args(args), format(pair_format<Format>(table)) {
        static_assert(Format::Block::kRun == kPairRun);
        x = (const uint32_t*)args.packed_x + row * args.k / 2, x_sums = run_sums_of_tile(args, args.packed_x, row);
    }
    void operand(int64_t panel, int64_t next, int64_t at, uint32_t* out, RunScales& scales) const {
        if (!args.packed) return pair_operand_of_rows<Format>(args, format, panel, next, at, out, scales);
        pair_operand<Kind>(format, block_panel(args, panel), block_panel(args, next), args.k, at, out, scales);
    }
    template <int MR>
    void small_m(int64_t panel, int64_t next, float* c) const {
        if (!args.packed) return small_m_pair_product_of_rows<Format, MR>(args, format, panel, next, x, x_sums, c);
        small_m_pair_product<Kind, Format::kMinimums, MR>(format, block_panel(args, panel), block_panel(args, next),
                                                          args.k, x, x_sums, c);
    }
    template <int MR>
    void tile(int64_t r, int64_t i, int64_t count, int64_t at, int64_t k_count, const uint32_t* b,
              const RunScales& scales, float* c) const {
        const uint32_t* tile = x + r * args.k / 2 + at / 2 * count;
        const float* sums = x_sums + r * (args.k / kPairRun) + at / kPairRun * count;
        pair_product<Format::kMinimums, MR>(tile + i, sums + i, count, b, k_count / kPairRun, scales, c);
    }
};

template <class F>
inline void with_pair_products(const Linear& args, int64_t row, F f) {
    with_panels(args.packing, [&]<class Format>(const int8_t* table) {
        if constexpr (kAsPairs<typename Format::Kind>) f(PairProducts<Format>(args, table, row));
    });
}
#else  // never called
inline int64_t num_run_sums(const Linear&) { return 0; }
inline void pack_pair_tiles(const Linear&, int64_t, int64_t, void*) {}
template <class F>
void with_pair_products(const Linear&, int64_t, F) {}
#endif

}  // namespace
}  // namespace batchgen
