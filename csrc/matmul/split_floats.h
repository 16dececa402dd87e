// fp32 linear layers in tile registers of bf16. A float is the sum of three bf16, which have its 24 bits: the nearest
// one, the one nearest to the rest, and the rest of that. A product of two floats is the sum of six products of parts;
// the three others are less than 2^-24 of it, as is what a sum in fp32 rounds away (G. Henry, P. T. P. Tang, A.
// Heinecke: Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations, 2019).
//
// Panels of w are those of products of floats (matmul/layout.h), and are split when they are multiplied. Where all of a
// panel's weights are bf16 already, as many files store them, their other parts are zero, and three products are left.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/epilogue.h"
#include "matmul/prepack.h"
#include "matmul/tile_driver.h"
#include "matmul/tile_registers.h"
#include "simd/carve.h"

namespace batchgen {
namespace {

// Whether a layer's floats are split: x in fp32, and w in fp32 or block-quantized.
inline bool splits_floats(const Linear& args) { return kTiles && args.type == Type::F32 && !args.int8; }

#ifdef BATCHGEN_TILES
constexpr int64_t kSplitSteps = 24;            // steps of a block of K, at most
constexpr int64_t kSplitPanels = 12;           // panels that share a block's rows, where there are several blocks
constexpr int64_t kMostXBytes = 1280 << 10;    // of x in a block of K, for all rows of a call
constexpr int64_t kMostPackedBytes = 8 << 20;  // of x in all blocks
constexpr int kParts = 3;                      // of a float, bf16 each
constexpr int64_t kPartValues = 2 * kStep;     // values of K of a step
constexpr int64_t kXStepBytes = kParts * kStep * 64;  // of 16 rows of x, a register for each part
constexpr int64_t kWStepBytes = 2 * kXStepBytes;      // of a panel

// Splits 2 kStep floats of a row into a row of a register for each part.
inline void split_row(vf low, vf high, uint8_t* to) {
    for (int part = 0; part < kParts; part++, to += kStep * 64) {
        store_int((uint32_t*)to, to_pairs(low, high));
        low = sub(low, load((const bf16*)to)), high = sub(high, load((const bf16*)to + W));
    }
}

// Splits words of K of a panel, [k, kPanelN] with zeros up to whole steps: [steps, parts, kStep, kPanelN], pairs of
// bf16. Returns whether all are bf16 already.
inline bool split_words(const uint32_t* words, int64_t k, int64_t steps, uint32_t* out) {
    static const uint32_t zeros[kPanelN] = {};
    vi rest = set1_int(0);
    for (int64_t kk = 0; kk < kPartValues * steps; kk += 2) {
        const uint32_t *even = kk < k ? words + kk * kPanelN : zeros, *odd = kk + 1 < k ? even + kPanelN : zeros;
        uint32_t* to = out + (kk / kPartValues * kParts * kStep + kk % kPartValues / 2) * kPanelN;
        vf e[2] = {as_float(load_int(even)), as_float(load_int(even + W))};
        vf o[2] = {as_float(load_int(odd)), as_float(load_int(odd + W))};
#pragma GCC unroll 3
        for (int part = 0; part < kParts; part++, to += kStep * kPanelN) {
            vi pairs[2];
            interleave(to_pairs(e[0], e[1]), to_pairs(o[0], o[1]), pairs[0], pairs[1]);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                store_int(to + i * W, pairs[i]);
                if (part) rest = or_bits(rest, pairs[i]);
                e[i] = sub(e[i], as_float(shift_left<16>(pairs[i])));
                o[i] = sub(o[i], as_float(and_bits(pairs[i], set1_int(0xffff0000))));
            }
        }
    }
    uint32_t bits[W], any = 0;
    store_int(bits, rest);
    for (int i = 0; i < W; i++) any |= bits[i];
    return !any;
}

// The blocks of K.
struct SplitBlocking {
    int64_t steps, block;  // steps of K, and of a block
    explicit SplitBlocking(const Linear& args) : steps((args.k + kPartValues - 1) / kPartValues) {
        const int64_t blocks = (steps + kSplitSteps - 1) / kSplitSteps;
        block = (steps + blocks - 1) / blocks;
    }
    bool is_one() const { return block == steps; }
    // Rows of a call, at most.
    int64_t rows() const {
        const int64_t groups = smaller(kMostXBytes / block, kMostPackedBytes / steps) / kXStepBytes / 2 * 2;
        return kStep * (groups < 2 ? 2 : groups);
    }
};

inline LinearCut split_cut(const Linear& args) {
    const SplitBlocking cut(args);
    return {2 * kStep,
            cut.rows(),
            cut.is_one() ? 1 : kSplitPanels,
            cut.is_one() ? INT32_MAX : kSplitPanels,
            row_groups(args) * cut.steps * kXStepBytes,
            kStep,
            true,
            false};
}

// Splits groups [group, stop) of 16 rows of x: [blocks, groups, steps of the block, parts], each part a register.
inline void pack_split_rows(const Linear& args, int64_t group, int64_t stop, void* out) {
    const SplitBlocking cut(args);
    const int64_t groups = row_groups(args);
    for (; group < stop; group++) {
        const int64_t count = smaller(kStep, args.m - group * kStep);
        const float* rows = (const float*)args.x + group * kStep * args.x_stride;
        for (int64_t step = 0; step < cut.steps; step++) {
            const int64_t from = step / cut.block * cut.block, each = smaller(cut.block, cut.steps - from);
            uint8_t* to = (uint8_t*)out + (from * groups + group * each + step - from) * kXStepBytes;
            const int64_t first = step * kPartValues, left = args.k - first;
            for (int64_t r = 0; r < count; r++) {
                const float* x = rows + r * args.x_stride + first;
                const vf low = left >= W ? load(x) : load_part(x, int(left));
                const vf high = left >= 2 * W ? load(x + W) : left > W ? load_part(x + W, int(left - W)) : zero();
                split_row(low, high, to + r * 64);
            }
        }
    }
}

// Splits the words [first, first + k) of K of a panel, and says whether all are bf16 already. next: the panel that is
// read after it.
inline bool split_panel(const Linear& args, int64_t panel, int64_t next, int64_t first, int64_t k, uint32_t* words,
                        uint32_t* out) {
    const uint32_t* at = packed_panel<FloatMma>(args, panel) + first * kPanelN;
    if (!is_operand(args)) pack_panel<FloatMma, float>(args, panel, next, first, first + k, words), at = words;
    return split_words(at, k, (k + kPartValues - 1) / kPartValues, out);
}

// Part of another panel of floats, which is prefetched beside the products: `lines` cache lines of each step, if any.
struct FloatsAhead {
    const uint8_t* at;
    int64_t lines;
};

// c [rows, kPanelN] = a b, or c + a b with `add`, for up to 32 rows, for which the registers are configured. a has the
// parts of 16 rows, and `half` bytes further those of 16 more. Products of small parts come first, in an order in which
// each takes one operand over from the one before.
template <bool kTwo, bool kBf16>
inline void split_block(Tiles& tiles, const uint8_t* a, int64_t half, const uint8_t* b, int64_t steps, float* c,
                        bool add, FloatsAhead ahead) {
    constexpr int64_t kX = kXStepBytes / kParts, kW = kWStepBytes / kParts, kColumns = 64, kStride = kPanelN * 4;
    float* lower = c + kStep * kPanelN;
    if (add) {
        tiles.load<0>(c, kStride), tiles.load<1>(c + kStep, kStride);
        if constexpr (kTwo) tiles.load<2>(lower, kStride), tiles.load<3>(lower + kStep, kStride);
    } else {
        tiles.zero<0>(), tiles.zero<1>();
        if constexpr (kTwo) tiles.zero<2>(), tiles.zero<3>();
    }
    // Loads of one operand between the products with it, each as late as it may be.
    const auto with_x = [&](int part) {
        tiles.load<4>(a + part * kX, 64);
        tiles.dot_bf16<0, 4, 6>(), tiles.dot_bf16<1, 4, 7>();
        if constexpr (kTwo) tiles.load<5>(a + half + part * kX, 64);
        if constexpr (kTwo) tiles.dot_bf16<2, 5, 6>(), tiles.dot_bf16<3, 5, 7>();
    };
    const auto with_w = [&](int part) {
        tiles.load<6>(b + part * kW, kStride);
        tiles.dot_bf16<0, 4, 6>();
        if constexpr (kTwo) tiles.dot_bf16<2, 5, 6>();
        tiles.load<7>(b + part * kW + kColumns, kStride);
        tiles.dot_bf16<1, 4, 7>();
        if constexpr (kTwo) tiles.dot_bf16<3, 5, 7>();
    };
    for (int64_t step = 0; step < steps; step++, a += kXStepBytes, b += kWStepBytes) {
        for (int64_t i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.at + (step * 2 * kStepLines + i) * 64, 0, 2);
        tiles.load<6>(b, kStride), tiles.load<7>(b + kColumns, kStride);
        with_x(2), with_x(1);
        if constexpr (!kBf16) with_w(1);
        with_x(0);
        if constexpr (!kBf16) with_w(0), with_w(2);
    }
    tiles.store<0>(c, kStride), tiles.store<1>(c + kStep, kStride);
    if constexpr (kTwo) tiles.store<2>(lower, kStride), tiles.store<3>(lower + kStep, kStride);
}

// The scratch memory of a call: words of K of a panel, where w is not prepacked; a block of a panel, split; and sums.
struct SplitScratch {
    uint32_t *words, *b;
    float* c;
    SplitScratch(const Linear& args, int64_t rows, int64_t panels, Carve& carve) {
        const SplitBlocking cut(args);
        words = carve.take<uint32_t>(is_operand(args) ? 0 : cut.block * kPartValues * kPanelN);
        b = carve.take<uint32_t>(cut.block * kWStepBytes / 4);
        c = carve.take<float>((cut.is_one() ? 2 * kStep : panels * rows) * kPanelN);
    }
};

// Prefetches what `finish` writes of a panel: rows far apart, which hardware does not foresee.
inline void prefetch_out(const Linear& args, int64_t row, int64_t panel, int64_t rows) {
    const float* out = (const float*)args.out + row * args.out_stride + panel * kPanelN;
    for (int64_t r = 0; r < rows; r++, out += args.out_stride) __builtin_prefetch(out, 1, 2);
}

// Rows [row, row_stop) times panels [panel, panel_stop).
inline void linear_split(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                         int64_t next_panel, void* scratch) {
    constexpr int64_t kAtOnce = 2 * kStep, kLines = 2 * kStepLines;  // cache lines of a step of floats
    const SplitBlocking cut(args);
    const int64_t k = packed_k<FloatMma>(args), rows = row_stop - row, groups = row_groups(args);
    Carve carve{(uint8_t*)scratch};
    const SplitScratch s(args, rows, panel_stop - panel, carve);
    const int64_t turns = (rows + kAtOnce - 1) / kAtOnce, lines = (kLines + turns - 1) / turns;
    Tiles tiles;
    for (int64_t from = 0; from < cut.steps; from += cut.block) {
        const int64_t stop = smaller(cut.steps, from + cut.block), steps = stop - from, half = steps * kXStepBytes;
        const int64_t first = from * kPartValues, words = smaller(k, stop * kPartValues) - first;
        const bool last = stop == cut.steps;
        for (int64_t p = panel; p < panel_stop; p++) {
            const int64_t next = p + 1 < panel_stop ? p + 1 : next_panel;
            const bool are_bf16 = split_panel(args, p, next, first, words, s.words, s.b);
            const uint8_t* ahead = nullptr;
            if (is_operand(args)) ahead = (const uint8_t*)(packed_panel<FloatMma>(args, next) + first * kPanelN);
            for (int64_t r = 0; r < rows; r += kAtOnce) {
                const int64_t count = smaller(kAtOnce, rows - r), line = r / kAtOnce * lines;
                float* c = s.c + (cut.is_one() ? 0 : ((p - panel) * rows + r) * kPanelN);
                const uint8_t* a =
                    (const uint8_t*)args.packed_x + from * groups * kXStepBytes + (row + r) / kStep * half;
                if (last) prefetch_out(args, row + r, p, count);
                const auto multiply = count > kStep ? are_bf16 ? split_block<true, true> : split_block<true, false>
                                      : are_bf16    ? split_block<false, true>
                                                    : split_block<false, false>;
                tiles.configure(int(count));
                multiply(tiles, a, half, (const uint8_t*)s.b, steps, c, from,
                         {ahead + line * 64, ahead ? smaller(lines, kLines - line) : 0});
                if (last) finish<FloatMma, float, float>(args, row + r, p, count, c);
            }
        }
    }
}
#else  // never called
inline LinearCut split_cut(const Linear&) { return {}; }
inline void pack_split_rows(const Linear&, int64_t, int64_t, void*) {}
struct SplitScratch {
    SplitScratch(const Linear&, int64_t, int64_t, Carve&) {}
};
inline void linear_split(const Linear&, int64_t, int64_t, int64_t, int64_t, int64_t, void*) {}
#endif

}  // namespace
}  // namespace batchgen
