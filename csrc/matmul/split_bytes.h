// Products of x in bf16 with quantized integers, where there are products of bytes (BATCHGEN_VNNI): x is split into
// high and low bytes.
//
// The numbers of a row of x in a run are integers of 16 bits times a power of two, so an integer weight times such a
// number is two products of bytes, with its high and with its low byte:
//     sum += scale * 2^e * (256 (w . hi) + (w . lo)) + minimum * 2^e * (1 . x)
// Sums of a run are exact. A number of x is rounded to a multiple of 2^-14 to 2^-15 of the largest in its run; bf16 has
// 8 bits, so numbers above 2^-7 of the largest keep all of theirs. No weight is rounded. Each element is summed in the
// order of runs, however many rows there are.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/block_panels.h"
#include "matmul/quant_panels.h"
#include "matmul/operands.h"
#include "matmul/row_blocks.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

#ifdef BATCHGEN_SPLIT_BYTES
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef int8_t SmallInts __attribute__((vector_size(W)));

// What a quantized value without a sign is larger by than the value it stands for; 0 where there is a minimum.
template <class Format>
constexpr int kQuantBias = Format::Kind::kInTable ? 128 : Format::kOffset;

// ---- x in high and low bytes ---------------------------------------------------------------------------------------

// The runs of a format: values of K, whether they have a minimum, and what values are larger by.
struct RunLayout {
    int k_count;
    bool minimums;
    int bias;
};
inline RunLayout run_layout(BlockType type) {
    RunLayout runs{};
    with_panels(type, [&]<class Format>(const int8_t*) {
        runs = {Format::Block::kRun, Format::kMinimums, kQuantBias<Format>};
    });
    return runs;
}

// A tile of x is [K / 4, rows of the tile, 2]: words of the high bytes of four numbers, and of the low bytes. Behind
// all tiles are the factors of each, [runs, 2, rows of the tile]: the power of two of a run, and the sum of its
// numbers; or where there is no minimum what the sum of products is too large by, as an integer.
inline int64_t num_run_factors(const Linear& args) { return 2 * args.m * (args.k / run_layout(args.packing).k_count); }
// The factors of the tile whose first row is `row`.
inline uint32_t* factors_of_tile(const Linear& args, const void* packed_x, int64_t row) {
    return (uint32_t*)packed_x + args.m * args.k / 2 + 2 * row * (args.k / run_layout(args.packing).k_count);
}

// Splits one of the `count` rows of a tile. A row with a NaN or an infinity gets a factor of NaN, and so do all its
// results.
inline void split_row(const bf16* x, int64_t k, const RunLayout& runs, int64_t count, uint32_t* words,
                      uint32_t* factors) {
    constexpr uint32_t kBias = 127, kBits = 15, kLeast = 28;  // numbers below 2^-98 are multiples of 2^-113
    constexpr float kMagic = 12582912;  // added to a small number it leaves its integer in the lowest bits
    const int vectors = runs.k_count / W;
    Ints largest_of_all = {};
    for (int64_t kk = 0, run = 0; kk < k; kk += runs.k_count, run++) {
        vf values[32 / W];
        Ints most = {};
        for (int v = 0; v < vectors; v++) {
            values[v] = load(x + kk + v * W);
            const Ints magnitude = (Ints)as_int(values[v]) & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        largest_of_all = most > largest_of_all ? most : largest_of_all;
        // All numbers are below 2^(exponent - 126) by more than a bit of bf16: bytes have a sign, so the high one ends
        // at 127.
        uint32_t exponent = (float_bits(largest(as_float((vi)most))) + 0x10000) >> 23;
        if (exponent < kLeast) exponent = kLeast;
        const vf factor = set1(float_with((2 * kBias - 1 + kBits - exponent) << 23));
        Ints sums = {};
        alignas(32) int8_t hi[32], lo[32];
        for (int v = 0; v < vectors; v++) {
            const Ints whole = (Ints)as_int(add(mul(values[v], factor), set1(kMagic))) - int32_t(0x4b400000);
            const Ints high = (whole + 128) >> 8, low = whole - (high << 8);
            const SmallInts high_bytes = __builtin_convertvector(high, SmallInts);
            const SmallInts low_bytes = __builtin_convertvector(low, SmallInts);
            memcpy(hi + v * W, &high_bytes, W), memcpy(lo + v * W, &low_bytes, W);
            sums += whole;
        }
        const float sum_of_all = sum(to_float((vi)sums)), power = float_with((exponent + 1 - kBits) << 23);
        factors[2 * run * count] = float_bits(power);
        const uint32_t too_large = uint32_t(-runs.bias) * uint32_t(int64_t(sum_of_all));
        factors[(2 * run + 1) * count] = runs.minimums ? float_bits(sum_of_all * power) : too_large;
        for (int i = 0; i < runs.k_count; i += 4, words += 2 * count)
            memcpy(words, hi + i, 4), memcpy(words + 1, lo + i, 4);
    }
    const vf in_order = as_float((vi)largest_of_all);
    float each[W];
    store(each, in_order);
    for (float number : each)
        if (float_bits(number) >= 0x7f800000) factors[0] = 0x7fc00000;
}

// Splits the tiles [tile, stop) of x.
inline void pack_split_tiles(const Linear& args, int64_t tile, int64_t stop, void* out) {
    const RunLayout runs = run_layout(args.packing);
    for (; tile < stop; tile++) {
        const int64_t row = tile * kTileM, count = smaller(kTileM, args.m - row);
        uint32_t *words = (uint32_t*)out + row * args.k / 2, *factors = factors_of_tile(args, out, row);
        for (int64_t r = 0; r < count; r++)
            split_row((const bf16*)args.x + (row + r) * args.x_stride, args.k, runs, count, words + 2 * r, factors + r);
    }
}

// ---- quantized values as an operand --------------------------------------------------------------------------------

// Sixteen numbers, each `bias` larger than in `values`, by the indexes in the bytes of a vector.
struct ByteTable {
    vi numbers;
    ByteTable(const int8_t* values, int bias) {
        uint8_t bytes[sizeof numbers];
        for (int i = 0; i < int(sizeof bytes); i++) bytes[i] = uint8_t(values[i % 16] + bias);
        memcpy(&numbers, bytes, sizeof numbers);
    }
    vi operator()(vi index) const { return shuffle_bytes(numbers, index); }
};

// Quantized values as bytes without a sign: as they are, or looked up in the format's table.
template <class Kind>
struct QuantBytes {
    explicit QuantBytes(const int8_t*) {}
    vi operator()(Lanes quants) const { return (vi)quants; }
};
template <int Low, int High>
struct QuantBytes<QuantKind<Low, High, QuantsAre::InTable>> {
    ByteTable table;
    explicit QuantBytes(const int8_t* values) : table(values, 128) {}
    vi operator()(Lanes quants) const { return table((vi)quants); }
};

// The operands of a group of four values of K, of both vectors of columns.
template <class Kind>
__attribute__((always_inline)) inline void group_quants(const uint8_t* low, const uint8_t* high, int group,
                                                        const QuantBytes<Kind>& bytes, vi& first, vi& second) {
    if constexpr (Kind::kLow + Kind::kHigh == 8) {
        first = load_int((const uint32_t*)low + group * W), second = load_int((const uint32_t*)high + group * W);
    } else {
        Lanes slots = slots_at<Kind::kLow>(low, group), upper = {};
        if constexpr (Kind::kHigh > 0) upper = slots_at<Kind::kHigh>(high, group);
        if constexpr (Kind::kHigh > 0 && kInSlots<Kind>) slots |= upper << Kind::kLow;
        Lanes even = slots & 0x0f0f0f0fu, odd = slots >> 4 & 0x0f0f0f0fu;
        if constexpr (Kind::kHigh > 0 && !kInSlots<Kind>)
            even |= (upper & 0x0f0f0f0fu) << 4, odd |= upper & 0xf0f0f0f0u;
        first = bytes(even), second = bytes(odd);
    }
}

// Calls sink(group, first operand, second operand) for the groups of quad i of a chunk.
template <class Kind, class Sink>
__attribute__((always_inline)) inline void quant_quad(const QuantFormat& format, const QuantChunk& chunk, int64_t i,
                                                      const QuantBytes<Kind>& bytes, Sink sink) {
    const auto [low, high] = chunk.quad<Kind>(format.layout, i);
#pragma GCC unroll 4
    for (int group = 0; group < 4; group++) {
        vi first, second;
        group_quants<Kind>(low, high, group, bytes, first, second);
        sink(group, first, second);
    }
}

// ---- products ------------------------------------------------------------------------------------------------------

// Sums of a run for MR rows.
template <int MR>
struct SplitSums {
    vi of[MR][2][2];  // [row][high or low byte][vector of columns]
    // Starts the sums. factors: [2, count]; where there is no minimum, what the sum will be too large by is taken off
    // first.
    template <bool Minimums>
    __attribute__((always_inline)) void begin(const uint32_t* factors, int64_t count) {
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++) {
            of[r][0][0] = of[r][0][1] = set1_int(0);
            of[r][1][0] = of[r][1][1] = set1_int(Minimums ? 0 : factors[count + r]);
        }
    }
    // Adds the products of four values of K. x: [rows of the tile, 2].
    __attribute__((always_inline)) void add_products(const uint32_t* x, vi first, vi second) {
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++) {
            const vi hi = set1_int(x[2 * r]), lo = set1_int(x[2 * r + 1]);
            of[r][0][0] = dot_int8(hi, first, of[r][0][0]), of[r][0][1] = dot_int8(hi, second, of[r][0][1]);
            of[r][1][0] = dot_int8(lo, first, of[r][1][0]), of[r][1][1] = dot_int8(lo, second, of[r][1][1]);
        }
    }
    // c [MR, kPanelN] += the sums, scaled. factors: [2, count].
    template <bool Minimums>
    __attribute__((always_inline)) void put(const uint32_t* factors, int64_t count, const vf* scale, const vf* minimum,
                                            float* c) const {
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++) {
            const vf power = as_float(set1_int(factors[r]));
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                const Lanes whole = ((Lanes)of[r][0][part] << 8) + (Lanes)of[r][1][part];
                float* at = c + (2 * r + part) * W;
                vf sum = fma(mul(to_float((vi)whole), power), scale[part], load(at));
                if constexpr (Minimums) sum = fma(as_float(set1_int(factors[count + r])), minimum[part], sum);
                store(at, sum);
            }
        }
    }
};

// c [MR, kPanelN] = rows of a tile of `count` times a panel, each operand used as soon as it is unpacked. next: the
// panel that is read after it.
template <class Kind, int Run, bool Minimums, int MR>
__attribute__((noinline)) void small_m_split_product(const QuantFormat& format, const uint8_t* panel,
                                                     const uint8_t* next, int64_t k, const uint32_t* x,
                                                     const uint32_t* factors, int64_t count, float* c) {
    const QuantBytes<Kind> bytes(format.layout.table);
    RunScales scales;
    memset(c, 0, MR * kPanelN * sizeof *c);
    for (int64_t at = 0; at < k; at += kChunkK) {
        const QuantChunk chunk(format, panel, k, at, next, scales);
        for (int64_t run = 0; run < chunk.k_count / Run; run++) {
            SplitSums<MR> sums;
            sums.template begin<Minimums>(factors, count);
#pragma GCC unroll 2
            for (int quad = 0; quad < Run / kQuad; quad++)
                quant_quad<Kind>(format, chunk, run * (Run / kQuad) + quad, bytes,
                                 [&](int, vi first, vi second) __attribute__((always_inline)) {
                                     sums.add_products(x, first, second);
                                     x += 2 * count;
                                 });
            sums.template put<Minimums>(factors, count, scales.scales[run], scales.minimums[run], c);
            factors += 2 * count;
        }
    }
}

// c [MR, kPanelN] += rows of a tile of `count` times `runs` runs of an operand.
template <int Run, bool Minimums, int MR>
__attribute__((noinline)) void split_product(const uint32_t* x, int64_t count, const uint32_t* b, int64_t runs,
                                             const RunScales& scales, const uint32_t* factors, float* c) {
    for (int64_t run = 0; run < runs; run++) {
        SplitSums<MR> sums;
        sums.template begin<Minimums>(factors, count);
#pragma GCC unroll 4
        for (int group = 0; group < Run / 4; group++) {
            sums.add_products(x, load_int(b), load_int(b + W));
            x += 2 * count, b += kPanelN;
        }
        sums.template put<Minimums>(factors, count, scales.scales[run], scales.minimums[run], c);
        factors += 2 * count;
    }
}

// ---- operands of a chunk -----------------------------------------------------------------------------------------

// Unpacks a chunk of a prepacked panel: out [values / 4, kPanelN], and its scales.
template <class Kind>
__attribute__((noinline)) void quant_operand(const QuantFormat& format, const uint8_t* panel, const uint8_t* next,
                                             int64_t k, int64_t at, uint32_t* out, RunScales& scales) {
    const QuantBytes<Kind> bytes(format.layout.table);
    const QuantChunk chunk(format, panel, k, at, next, scales);
    for (int64_t i = 0; i < chunk.k_count / kQuad; i++, out += 4 * kPanelN)
        quant_quad<Kind>(format, chunk, i, bytes, [&](int group, vi first, vi second) __attribute__((always_inline)) {
            store_int(out + group * kPanelN, first), store_int(out + group * kPanelN + W, second);
        });
}

// Unpacks a chunk of the rows of a panel as they lie in a file, likewise.
template <class Format>
__attribute__((noinline)) void quant_operand_of_rows(const Linear& args, const int8_t* table, int64_t panel,
                                                     int64_t next, int64_t at, uint32_t* out, RunScales& scales) {
    using Block = typename Format::Block;
    const int64_t here = smaller(kChunkK, args.k - at), blocks = here / Block::kValues, runs = here / Block::kRun;
    const int64_t here_bytes = blocks * Block::kBytes;
#ifdef BATCHGEN_LOAD_QUARTERS
    if constexpr (Block::kQuantsAt > 0) {
        using Kind = typename Format::Kind;
        const QuantBytes<Kind> bytes(table);
        uint8_t heads[kChunkK / Block::kValues * Format::kScaleBytes] = {};
        for (int part = 0; part < 2; part++)
            words_of_rows<Format>(args, panel, next, part * W, at, heads, [&](int64_t k, Lanes words) {
                uint32_t* to = out + k / 4 * kPanelN + part * W;
                if constexpr (Block::kNibbles == 0) {
                    store_int(to, (vi)(words ^ 0x80808080u));
                } else {
                    store_int(to, bytes(words & 0x0f0f0f0fu));
                    store_int(to + Block::kNibbles / 4 * kPanelN, bytes(words >> 4 & 0x0f0f0f0fu));
                }
            });
        return scales_of_runs<Format>(heads, Format::kScaleBytes, blocks, scales);
    }
#endif
    (void)table;
    UnpackedRows unpacked;
    for (int part = 0; part < 2; part++) {
        for (int i = 0; i < W; i++) {
            const uint8_t* row =
                row_at(args, panel, next, part * W + i, at / Block::kValues * Block::kBytes, here_bytes);
            if (!row) {
                memset(unpacked.quants[i], -kQuantBias<Format>, kChunkK);
                memset(unpacked.scales[i], 0, sizeof unpacked.scales[i]),
                    memset(unpacked.minimums[i], 0, sizeof unpacked.minimums[i]);
                continue;
            }
            for (int64_t b = 0; b < blocks; b++)
                Block::unpack(row + b * Block::kBytes, unpacked.quants[i] + b * Block::kValues,
                              unpacked.scales[i] + b * Format::kRuns, unpacked.minimums[i] + b * Format::kRuns);
        }
        for (int64_t kk = 0; kk < here; kk += 4 * W) {
            vi r[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) r[i] = load_int((const uint32_t*)(unpacked.quants[i] + kk));
            transpose(r);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++)
                if (kk + 4 * i < here)
                    store_int(out + (kk / 4 + i) * kPanelN + part * W, (vi)((Quads)r[i] + uint8_t(kQuantBias<Format>)));
        }
        vf of_runs[kChunkRuns];
        transpose_floats(unpacked.scales, of_runs);
        for (int64_t i = 0; i < runs; i++) scales.scales[i][part] = of_runs[i];
        if (!Format::kMinimums) continue;
        transpose_floats(unpacked.minimums, of_runs);
        for (int64_t i = 0; i < runs; i++) scales.minimums[i][part] = of_runs[i];
    }
}

// The products of a format (matmul/quant_panels.h) for the tiles of x from `row` on.
template <class Format>
struct SplitProducts {
    using Kind = typename Format::Kind;
    static constexpr int kKPerWord = 4, kSmallM = kScaledTileM, kRun = Format::Block::kRun;
    static constexpr bool kSmallMOfRows = false;
    const Linear& args;
    QuantFormat format;
    const uint32_t *x, *factors;

    SplitProducts(const Linear& args, const int8_t* table, int64_t row)
        : args(args), format(quant_format<Format>(table)) {
        x = (const uint32_t*)args.packed_x + row * args.k / 2, factors = factors_of_tile(args, args.packed_x, row);
    }
    void operand(int64_t panel, int64_t next, int64_t at, uint32_t* out, RunScales& scales) const {
        if (!args.packed) return quant_operand_of_rows<Format>(args, format.layout.table, panel, next, at, out, scales);
        quant_operand<Kind>(format, block_panel(args, panel), block_panel(args, next), args.k, at, out, scales);
    }
    template <int MR>
    void small_m(int64_t panel, int64_t next, float* c) const {
        small_m_split_product<Kind, kRun, Format::kMinimums, MR>(format, block_panel(args, panel),
                                                                 block_panel(args, next), args.k, x, factors, MR, c);
    }
    template <int MR>
    void tile(int64_t r, int64_t i, int64_t count, int64_t at, int64_t k_count, const uint32_t* b,
              const RunScales& scales, float* c) const {
        const uint32_t* tile = x + r * args.k / 2 + at / 2 * count;
        const uint32_t* of_tile = factors + 2 * (r * (args.k / kRun) + at / kRun * count);
        split_product<kRun, Format::kMinimums, MR>(tile + 2 * i, count, b, k_count / kRun, scales, of_tile + i, c);
    }
};

template <class F>
inline void with_split_products(const Linear& args, int64_t row, F f) {
    with_panels(args.packing, [&]<class Format>(const int8_t* table) {
        if constexpr (!Format::Kind::kFloat8 && !kAsPairs<typename Format::Kind>)
            f(SplitProducts<Format>(args, table, row));
    });
}
#else  // never called
inline int64_t num_run_factors(const Linear&) { return 0; }
inline void pack_split_tiles(const Linear&, int64_t, int64_t, void*) {}
template <class F>
void with_split_products(const Linear&, int64_t, F) {}
#endif

}  // namespace
}  // namespace batchgen
