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
constexpr int64_t kSplitSteps = 24;    // steps of a block of K, at most
constexpr int64_t kSplitPanels = 12;   // panels that share a block's rows, where there are several blocks
constexpr int64_t kSplitTogether = 4;  // panels of a call where there is one block: the first has no other beside it
constexpr int64_t kMostXBytes = 1280 << 10;           // of x in a block of K, for all rows of a call
constexpr int64_t kMostPackedBytes = 8 << 20;         // of x in all blocks
constexpr int64_t kSplitRows = 2 * kStep;             // rows that are multiplied at once
constexpr int kParts = 3;                             // of a float, bf16 each
constexpr int64_t kPartValues = 2 * kStep;            // values of K of a step
constexpr int64_t kXStepBytes = kParts * kStep * 64;  // of 16 rows of x, a register for each part
constexpr int64_t kWStepBytes = 2 * kXStepBytes;      // of a panel

// Splits pairs of floats: the pairs of each part go to a vector `apart` words further. Returns the bits of the second
// and third parts.
inline vi split_pairs(vf first, vf second, uint32_t* to, int64_t apart) {
    vi rest = set1_int(0);
#pragma GCC unroll 3
    for (int part = 0; part < kParts; part++, to += apart) {
        const vi pairs = pairs_of(first, second);
        store_int(to, pairs);
        if (part) rest = or_bits(rest, pairs);
        first = sub(first, as_float(shift_left<16>(pairs)));
        second = sub(second, as_float(and_bits(pairs, set1_int(0xffff0000))));
    }
    return rest;
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
            cut.is_one() ? kSplitTogether : kSplitPanels,
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
                split_pairs(low, high, (uint32_t*)(to + r * 64), kStep * kStep);
            }
        }
    }
}

// The words of K of a block of a panel [k, kPanelN], with zeros up to whole steps, on their way to
// [steps, parts, kStep, kPanelN], pairs of bf16; or, without `out`, to a cache.
struct PanelSplit {
    const uint32_t* words;
    uint32_t* out;
    int64_t k, steps;
    int64_t done = 0;       // pairs of words
    vi rest = set1_int(0);  // what any second or third part has

    int64_t pairs() const { return steps * kStep; }

    void advance(int64_t count) {
        const int64_t ahead = out ? 2 * kPartValues : 0;  // words; beyond this block, too: often the next one follows
        static const uint32_t zeros[kPanelN] = {};
        for (const int64_t stop = smaller(pairs(), done + count); done < stop; done++) {
            const int64_t step = done / kStep, row = done % kStep, first = step * kPartValues + row;
            const int64_t second = first + kStep;
            const uint32_t *from = first < k ? words + first * kPanelN : zeros,
                           *other = second < k ? words + second * kPanelN : zeros;
            __builtin_prefetch(words + (first + ahead) * kPanelN, 0, 2);
            __builtin_prefetch(words + (second + ahead) * kPanelN, 0, 2);
            if (!out) continue;
            uint32_t* to = out + (step * kParts * kStep + row) * kPanelN;
#pragma GCC unroll 2
            for (int i = 0; i < kPanelN; i += W)
                rest = or_bits(rest, split_pairs(as_float(load_int(from + i)), as_float(load_int(other + i)), to + i,
                                                 kStep * kPanelN));
        }
    }

    // Whether all words are bf16 already, of a panel that is split.
    bool are_bf16() const {
        uint32_t bits[W], any = 0;
        store_int(bits, rest);
        for (int i = 0; i < W; i++) any |= bits[i];
        return !any;
    }
};

// c [rows, kPanelN] = a b, or c + a b with `add`, for up to 32 rows, for which the registers are configured. a has the
// parts of 16 rows, and `half` bytes further those of 16 more. Products of small parts come first, in an order in which
// each takes one operand over from the one before. With each step goes a part of the work in vectors that is hidden
// beside it: so many pairs of words of another panel are split.
template <bool kTwo, bool kBf16>
inline void split_block(Tiles& tiles, const uint8_t* a, int64_t half, const uint8_t* b, int64_t steps, float* c,
                        bool add, PanelSplit& beside, int64_t pairs) {
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
        tiles.load<6>(b, kStride), tiles.load<7>(b + kColumns, kStride);
        with_x(2), with_x(1);
        beside.advance(pairs);
        if constexpr (!kBf16) with_w(1);
        with_x(0);
        if constexpr (!kBf16) with_w(0), with_w(2);
    }
    tiles.store<0>(c, kStride), tiles.store<1>(c + kStep, kStride);
    if constexpr (kTwo) tiles.store<2>(lower, kStride), tiles.store<3>(lower + kStep, kStride);
}

// The scratch memory of a call: words of K of a panel, where w is not prepacked; blocks of two panels, split; and sums.
struct SplitScratch {
    uint32_t *words, *b[2];
    float* c;
    SplitScratch(const Linear& args, int64_t rows, int64_t panels, Carve& carve) {
        const SplitBlocking cut(args);
        words = carve.take<uint32_t>(is_operand(args) ? 0 : cut.block * kPartValues * kPanelN);
        for (uint32_t*& each : b) each = carve.take<uint32_t>(cut.block * kWStepBytes / 4);
        c = carve.take<float>((cut.is_one() ? kSplitRows : panels * rows) * kPanelN);
    }
};

// Rows [row, row_stop) times panels [panel, panel_stop).
inline void linear_split(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                         int64_t next_panel, void* scratch) {
    const SplitBlocking cut(args);
    const int64_t k = packed_k<FloatMma>(args), rows = row_stop - row, groups = row_groups(args);
    Carve carve{(uint8_t*)scratch};
    const SplitScratch s(args, rows, panel_stop - panel, carve);
    // Blocks come in the order of K, each with all panels.
    int turn = 0;  // of the two buffers of b
    const auto split_of = [&](int64_t p, int64_t from) {
        const int64_t stop = smaller(cut.steps, from + cut.block);
        const int64_t first = from * kPartValues, words = smaller(k, stop * kPartValues) - first;
        const uint32_t* at = packed_panel<FloatMma>(args, p) + first * kPanelN;
        if (!is_operand(args))
            pack_panel<FloatMma, float>(args, p, p + 1 < panel_stop ? p + 1 : next_panel, first, first + words,
                                        s.words),
                at = s.words;
        return PanelSplit{at, s.b[turn ^= 1], words, stop - from};
    };
    PanelSplit split = split_of(panel, 0);
    Tiles tiles;
    for (int64_t from = 0; from < cut.steps; from += cut.block) {
        const int64_t stop = smaller(cut.steps, from + cut.block), steps = stop - from, half = steps * kXStepBytes;
        for (int64_t p = panel; p < panel_stop; p++) {
            split.advance(split.pairs());
            const bool are_bf16 = split.are_bf16();
            const uint8_t* b = (const uint8_t*)split.out;
            if (p + 1 < panel_stop) split = split_of(p + 1, from);
            else if (stop < cut.steps) split = split_of(panel, stop);
            else if (is_operand(args)) split = {packed_panel<FloatMma>(args, next_panel), nullptr, k, cut.block};
            else split = {};
            const int64_t turns = (rows + kSplitRows - 1) / kSplitRows;
            const int64_t pairs = (split.pairs() + turns * steps - 1) / (turns * steps);
            for (int64_t r = 0; r < rows; r += kSplitRows) {
                const int64_t count = smaller(kSplitRows, rows - r);
                float* c = s.c + (cut.is_one() ? 0 : ((p - panel) * rows + r) * kPanelN);
                const uint8_t* a =
                    (const uint8_t*)args.packed_x + from * groups * kXStepBytes + (row + r) / kStep * half;
                const auto multiply = count > kStep ? are_bf16 ? split_block<true, true> : split_block<true, false>
                                      : are_bf16    ? split_block<false, true>
                                                    : split_block<false, false>;
                tiles.configure(int(count));
                multiply(tiles, a, half, b, steps, c, from, split, pairs);
                if (stop == cut.steps) finish<FloatMma, float, float>(args, row + r, p, count, c);
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
