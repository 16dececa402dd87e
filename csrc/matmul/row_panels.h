// Numbers of prepacked rows of quantized values: 32 values of K of each row of w, the left operand of tile registers.
//
// Values of at most five bits have few numbers in a run of a row: they are computed and rounded once, and looked up.
// FP8 numbers become bf16 first, which has them exactly. Numbers are those of matmul/dequantize.h.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "matmul/bf16_pairs.h"
#include "matmul/block_panels.h"
#include "matmul/quant_panels.h"
#include "simd/target.h"

namespace batchgen {
namespace {

#ifdef BATCHGEN_TILES
constexpr int64_t kRunNumbersBytes = kPanelN * kRowRun * 2;  // of a run of a panel

// The numbers of a panel's runs, asked for in their order from one that begins a chunk on. next: the panel that is read
// after it.
template <class Format>
struct PanelRuns {
    using Kind = typename Format::Kind;
    const uint8_t *panel, *next;
    int64_t runs;
    vf values[2];  // what quantized values are multiplied as; of FP8 those without an exponent
    RunScales scales;

    PanelRuns(const Linear& args, const int8_t* table, int64_t of, int64_t after)
        : panel(block_panel(args, of)), next(block_panel(args, after)), runs(args.k / kRowRun) {
        float all[2 * W];
        for (int i = 0; i < 2 * W; i++)
            all[i] = Kind::kFloat8 ? subnormal_fp8(i) : Kind::kInTable ? float(table[i % W]) : float(i);
        values[0] = load(all), values[1] = load(all + W);
    }

    // out [kPanelN, 32]: the numbers of a run.
    __attribute__((always_inline)) void operator()(int64_t run, uint8_t* out) {
        constexpr int64_t kChunk = kChunkK / kRowRun, kBytes = Format::kBlockBytes / Format::kRuns;
        const int64_t block = run / Format::kRuns * Format::kBlockBytes;
        if (run % kChunk == 0)
            scales_of_runs<Format>(panel + block, Format::kBlockBytes, smaller(kChunk, runs - run) / Format::kRuns,
                                   scales);
        for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(next + run * kBytes + line, 0, 2);
        const uint8_t* quants = panel + block + Format::kScaleBytes + run % Format::kRuns * kRowRunBytes<Kind>;
        // Loads repeat a scale in all lanes.
        const auto* scale = (const float*)scales.scales[run % kChunk];
        const auto* minimum = (const float*)scales.minimums[run % kChunk];
        const auto scaled = [&](vf number, int c) { return fma(number, set1(scale[c]), set1(minimum[c])); };
        const auto put = [&](int c, vi numbers) { store_int((uint32_t*)(out + c * kRowRun * 2), numbers); };
        if constexpr (Kind::kFloat8) {
            const PairTable subnormal(to_pairs(values[0], values[1]));
#pragma GCC unroll 4
            for (int c = 0; c < kPanelN; c++) {
                vf even, odd;
                split_bf16(pairs_of_fp8((Lanes)widen_bytes(quants + c * kRowRun), subnormal), even, odd);
                put(c, join_bf16(scaled(even, c), scaled(odd, c)));
            }
        } else {
#pragma GCC unroll 4
            for (int c = 0; c < W; c++) {
                const Halves both = (Halves)widen_bytes(quants + c * kRowRun);
                if constexpr (Kind::kHigh) {
                    const auto looked_up = [&](int column, Halves low) {
                        uint32_t fifth;
                        memcpy(&fifth, quants + kFifthBitsAt + column * 4, 4);
                        const PairTable numbers(to_pairs(scaled(values[0], column), scaled(values[1], column)));
                        put(column, numbers.of_32(add_where((vi)low, fifth, W)));
                    };
                    looked_up(c, both & 15), looked_up(W + c, both >> 4);
                } else {
                    const PairTable numbers(to_pairs(scaled(values[0], c), scaled(values[0], W + c)));
                    put(c, numbers.of_32((vi)(both & 15))), put(W + c, numbers.of_32((vi)(both >> 4 | W)));
                }
            }
        }
    }
};

// Dequantizes a panel as the right operand, for many rows: [words of K, kPanelN].
template <class Format>
inline void operand_of_rows(const Linear& args, const int8_t* table, int64_t panel, int64_t next, uint32_t* out) {
    PanelRuns<Format> numbers(args, table, panel, next);
    alignas(64) uint32_t rows[kPanelN * W];
    for (int64_t run = 0; run < numbers.runs; run++, out += W * kPanelN) {
        numbers(run, (uint8_t*)rows);
        for (int half = 0; half < 2; half++) {
            vi r[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) r[i] = load_int(rows + (half * W + i) * W);
            transpose(r);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store_int(out + i * kPanelN + half * W, r[i]);
        }
    }
}
#endif

}  // namespace
}  // namespace batchgen
