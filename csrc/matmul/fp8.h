// Products of x in bf16 with FP8 weights, where there are products of bf16 pairs.
//
// An FP8 number is a bf16 number too. So a run of 32 numbers is multiplied as it is, and its scale is applied to its
// sum in fp32:
//     sum += scale * (w . x)
// No weight is rounded. Each element is summed in the order of runs, however many rows there are.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/block_panels.h"
#include "matmul/quant_panels.h"
#include "matmul/operands.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

#ifdef BATCHGEN_FAST_BF16
typedef uint16_t Halves __attribute__((vector_size(4 * W)));
constexpr int kFp8Run = 32, kRunWords = 8;  // values of K in a run; words of x in a quad

// The subnormal numbers of FP8 as bf16.
inline PairTable small_fp8() {
    alignas(64) bf16 numbers[32];
    for (int i = 0; i < 32; i++) numbers[i].bits = uint16_t(float_bits(float(i % 8) * 0x1p-9f) >> 16);
    return PairTable(numbers);
}

// Two FP8 numbers in the low bytes of each half of a lane as bf16. The exponent bias is 7 in FP8 and 127 in bf16.
__attribute__((always_inline)) inline vi pairs_of_fp8(Lanes quants, const PairTable& small) {
    const Halves quant = (Halves)quants, normal = ((quant & 0x7f) << 4) + 0x3c00;
    const Halves number = (quant & 0x78) == 0 ? (Halves)small.of_32((vi)quants) : normal;
    return (vi)(number | (quant & 0x80) << 8);
}

// Calls sink(word of K in the quad, vector of columns, operand) for a quad of a panel.
template <class Sink>
__attribute__((always_inline)) inline void fp8_quad(QuantChunk::Planes planes, const PairTable& small, Sink sink) {
#pragma GCC unroll 4
    for (int group = 0; group < 4; group++) {
        const Lanes pairs[2] = {(Lanes)load_int((const uint32_t*)planes.low + group * W),
                                (Lanes)load_int((const uint32_t*)planes.high + group * W)};
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            sink(2 * group + i / 2, i % 2, pairs_of_fp8(pairs[i / 2] >> (8 * (i % 2)) & 0x00ff00ff, small));
    }
}

// c [MR, kPanelN] = a tile of rows times a panel, each operand used as soon as it is unpacked. next: the panel that is
// read after it.
template <class Kind, int MR>
__attribute__((noinline)) void small_m_fp8_product(const QuantFormat& format, const uint8_t* panel, const uint8_t* next,
                                                   int64_t k, const uint32_t* x, float* c) {
    const PairTable small = small_fp8();
    RunScales scales;
    memset(c, 0, MR * kPanelN * sizeof *c);
    for (int64_t at = 0; at < k; at += kChunkK) {
        const QuantChunk chunk(format, panel, k, at, next, scales);
        for (int64_t run = 0; run < chunk.k_count / kFp8Run; run++) {
            vf acc[MR][2];
#pragma GCC unroll 12
            for (int r = 0; r < MR; r++) acc[r][0] = acc[r][1] = zero();
#pragma GCC unroll 2
            for (int quad = 0; quad < kFp8Run / kQuad; quad++) {
                const auto use = [&](int word, int part, vi operand) __attribute__((always_inline)) {
#pragma GCC unroll 12
                    for (int r = 0; r < MR; r++)
                        acc[r][part] = dot_pairs(set1_int(x[word * MR + r]), operand, acc[r][part]);
                };
                fp8_quad(chunk.template quad<Kind>(format.layout, run * (kFp8Run / kQuad) + quad), small, use);
                x += kRunWords * MR;
            }
#pragma GCC unroll 12
            for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
                for (int part = 0; part < 2; part++) {
                    float* to = c + (2 * r + part) * W;
                    store(to, fma(acc[r][part], scales.scales[run][part], load(to)));
                }
        }
    }
}

// Unpacks a chunk of a prepacked panel: out [values / 2, kPanelN], and its scales.
template <class Kind>
__attribute__((noinline)) void fp8_operand(const QuantFormat& format, const uint8_t* panel, const uint8_t* next,
                                           int64_t k, int64_t at, uint32_t* out, RunScales& scales) {
    const PairTable small = small_fp8();
    const QuantChunk chunk(format, panel, k, at, next, scales);
    for (int64_t i = 0; i < chunk.k_count / kQuad; i++, out += kRunWords * kPanelN)
        fp8_quad(chunk.template quad<Kind>(format.layout, i), small,
                 [&](int word, int part, vi operand)
                     __attribute__((always_inline)) { store_int(out + word * kPanelN + part * W, operand); });
}

// Unpacks a chunk of the rows of a panel as they lie in a file, likewise.
template <class Format>
__attribute__((noinline)) void fp8_operand_of_rows(const Linear& args, int64_t panel, int64_t next, int64_t at,
                                                   uint32_t* out, RunScales& scales) {
    using Block = typename Format::Block;
    const PairTable small = small_fp8();
    uint8_t heads[kChunkK / Block::kValues * Format::kScaleBytes] = {};
    for (int part = 0; part < 2; part++)
        words_of_rows<Format>(
            args, panel, next, part * W, at, heads, [&](int64_t k, Lanes quants) {  // two pairs of values of K
                uint32_t* to = out + k / 2 * kPanelN + part * W;
                store_int(to, pairs_of_fp8((quants & 0xff) | (quants << 8 & 0x00ff0000), small));
                store_int(to + kPanelN, pairs_of_fp8((quants >> 16 & 0xff) | (quants >> 8 & 0x00ff0000), small));
            });
    scales_of_runs<Format>(heads, Format::kScaleBytes, smaller(kChunkK, args.k - at) / Block::kValues, scales);
}

// c [MR, kPanelN] += rows of a tile of `count` times `runs` runs of an operand.
template <int MR>
__attribute__((noinline)) void fp8_product(const uint32_t* x, int64_t count, const uint32_t* b, int64_t runs,
                                           const RunScales& scales, float* c) {
    vf sum[MR][2];
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++) sum[r][0] = load(c + r * kPanelN), sum[r][1] = load(c + r * kPanelN + W);
    for (int64_t run = 0; run < runs; run++) {
        vf acc[MR][2];
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++) acc[r][0] = acc[r][1] = zero();
#pragma GCC unroll 4
        for (int word = 0; word < kFp8Run / 2; word++) {
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
            for (int part = 0; part < 2; part++)
                sum[r][part] = fma(acc[r][part], scales.scales[run][part], sum[r][part]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++) store(c + r * kPanelN, sum[r][0]), store(c + r * kPanelN + W, sum[r][1]);
}

// The products of a format (matmul/quant_panels.h) for the tiles of x from `row` on.
template <class Format>
struct Fp8Products {
    using Kind = typename Format::Kind;
    static constexpr int kKPerWord = 2, kSmallM = 8;
    const Linear& args;
    QuantFormat format;
    const uint32_t* x;

    Fp8Products(const Linear& args, int64_t row) : args(args), format(quant_format<Format>(nullptr)) {
        x = (const uint32_t*)args.packed_x + row * args.k / 2;
    }
    void operand(int64_t panel, int64_t next, int64_t at, uint32_t* out, RunScales& scales) const {
        if (!args.packed) return fp8_operand_of_rows<Format>(args, panel, next, at, out, scales);
        fp8_operand<Kind>(format, block_panel(args, panel), block_panel(args, next), args.k, at, out, scales);
    }
    template <int MR>
    void small_m(int64_t panel, int64_t next, float* c) const {
        small_m_fp8_product<Kind, MR>(format, block_panel(args, panel), block_panel(args, next), args.k, x, c);
    }
    template <int MR>
    void tile(int64_t r, int64_t i, int64_t count, int64_t at, int64_t k_count, const uint32_t* b,
              const RunScales& scales, float* c) const {
        const uint32_t* tile = x + r * args.k / 2 + at / 2 * count;
        fp8_product<MR>(tile + i, count, b, k_count / kFp8Run, scales, c);
    }
};

template <class F>
inline void with_fp8_products(const Linear& args, int64_t row, F f) {
    with_panels(args.packing, [&]<class Format>(const int8_t*) {
        if constexpr (Format::Kind::kFloat8) f(Fp8Products<Format>(args, row));
    });
}
#else  // never called
template <class F>
void with_fp8_products(const Linear&, int64_t, F) {}
#endif

}  // namespace
}  // namespace batchgen
