// The loop over rows and panels of a linear layer in tile registers with prepacked weights whose values lie in rows
// (matmul/row_panels.h), in calls of up to kMostRows rows. Rows of w are the left operand, as they are dequantized, and
// rows of x the right one: pairs of K by up to 16 rows of x. So sums are of out's transpose, but otherwise those of
// matmul/tile_driver.h, bit for bit: a register has a sum of its own for each pair of a row of w and one of x.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/block_panels.h"
#include "matmul/epilogue.h"
#include "matmul/layout.h"
#include "matmul/row_panels.h"
#include "matmul/tile_driver.h"
#include "matmul/tile_registers.h"
#include "simd/carve.h"

namespace batchgen {
namespace {

#ifdef BATCHGEN_TILES
constexpr int64_t kFewRows = 2 * kStep;  // whose sums stay in registers while K passes
constexpr int64_t kStoredRuns = 4;       // runs of a panel whose numbers are in memory then

// Whether a layer is one of these: not where panels were unpacked for more rows.
template <class Mma>
inline bool multiplies_rows(const Linear& args) {
    bool in_rows = false;
    if (args.packed && !args.unpacked && uses_tiles<Mma>() && !kIsInt8<Mma>)
        with_panels(args.packing, [&]<class Format>(const int8_t*) { in_rows = kInRows<Mma, Format>; });
    return in_rows;
}

// x is packed in [blocks of K, groups of 16 rows, words of the block, rows]; a group has as many rows as the others
// unless it is the only one.
struct RowBlocking {
    int64_t steps, block, groups, step_bytes;  // bytes of a step of a group
    explicit RowBlocking(const Linear& args)
        : steps(args.k / kRowRun),
          block(args.m > kFewRows ? smaller(steps, round_up(KBlocking<Bf16Mma>(args).block, kChunkK / kRowRun))
                                  : steps),
          groups(row_groups(args)),
          step_bytes(kStep * 4 * smaller(args.m, kStep)) {}
    bool is_one() const { return block == steps; }
    bool sums_in_registers(int64_t rows) const { return is_one() && rows <= kFewRows; }
    // The operand of the block of K that begins at step `from`, of the rows of x from `row` on, a multiple of 16. One
    // row is read as it lies.
    TileOperand operand(const Linear& args, int64_t from, int64_t row) const {
        const int64_t each = smaller(block, steps - from) * step_bytes;
        const uint8_t* at = args.packed_x
                                ? (const uint8_t*)args.packed_x + from * groups * step_bytes + row / kStep * each
                                : (const uint8_t*)((const bf16*)args.x + row * args.x_stride);
        return {at, each, step_bytes, step_bytes / kStep};
    }
};

// The cut of a layer into calls.
inline LinearCut rows_cut(const Linear& args) {
    const RowBlocking cut(args);
    return {kFewRows,
            KBlocking<Bf16Mma>(args).rows(),
            cut.is_one() ? 1 : kBlockPanels,
            cut.is_one() ? INT32_MAX : kBlockPanels,
            args.m > 1 ? cut.groups * cut.steps * cut.step_bytes : 0,
            kStep,
            false};
}

// Packs the groups [group, stop) of x.
inline void pack_columns(const Linear& args, int64_t group, int64_t stop, void* out) {
    const RowBlocking cut(args);
    const int64_t width = smaller(args.m, kStep);
    for (; group < stop; group++) {
        const bf16* rows[W];
        for (int i = 0; i < W; i++) {
            const int64_t row = group * kStep + i;
            rows[i] = row < args.m ? (const bf16*)args.x + row * args.x_stride : nullptr;
        }
        for (int64_t step = 0; step < cut.steps; step++) {
            const int64_t from = step / cut.block * cut.block, each = smaller(cut.block, cut.steps - from);
            vi r[W];
            gather_k<Bf16Mma>(rows, step * kStep, 2 * W, r);
            auto* to = (uint32_t*)((uint8_t*)out + (from * cut.groups + group * each + step - from) * cut.step_bytes);
            store_row_tile(r, to, 0, kStep, 0, width);
        }
    }
}

// out [columns, kPanelN] = c [kPanelN, columns] transposed.
inline void transpose_sums(const float* c, int64_t stride, int64_t columns, float* out) {
    for (int half = 0; half < 2; half++)
        for (int64_t column = 0; column < columns; column += W) {
            vi r[W];
            const float* from = c + half * W * stride + column;
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) r[i] = as_int(load(from + i * stride));
            transpose(r);
            float* to = out + column * kPanelN + half * W;
#pragma GCC unroll 16
            for (int i = 0; i < W; i++)
                if (column + i < columns) store(to + i * kPanelN, as_float(r[i]));
        }
}

// The operand of the numbers of runs.
inline TileOperand operand_of_runs(const uint8_t* numbers) {
    return {numbers, kRunNumbersBytes / 2, kRunNumbersBytes, kRowRun * 2};
}

// c [kPanelN, 32] = a panel times up to 32 rows of x, whose sums stay in registers. A run is multiplied some runs after
// it was dequantized: loads of tiles wait until what was stored is in the cache. And products of a run wait for those
// before them, so the next runs are dequantized beside them.
template <int Columns, class Format>
__attribute__((noinline)) void few_rows_product(Tiles& tiles, int rows, PanelRuns<Format>& numbers, TileOperand x,
                                                uint8_t* space, float* c) {
    constexpr int64_t kLag = kStoredRuns - 1, kStride = 2 * kStep * 4;
    tiles.configure_columns(rows);
    tiles.zero<0>(), tiles.zero<2>();
    if constexpr (Columns == 2) tiles.zero<1>(), tiles.zero<3>();
    for (int64_t run = 0; run < numbers.runs + kLag; run++) {
        if (run < numbers.runs) numbers(run, space + run % kStoredRuns * kRunNumbersBytes);
        if (run < kLag) continue;
        const uint8_t* w = space + (run - kLag) % kStoredRuns * kRunNumbersBytes;
        tiles.load<4>(w, kRowRun * 2);
        tiles.load<6>(x.at, x.stride);
        tiles.dot_bf16<0, 4, 6>();
        if constexpr (Columns == 2) tiles.load<7>(x.at + x.half, x.stride), tiles.dot_bf16<1, 4, 7>();
        tiles.load<5>(w + kRunNumbersBytes / 2, kRowRun * 2);
        tiles.dot_bf16<2, 5, 6>();
        if constexpr (Columns == 2) tiles.dot_bf16<3, 5, 7>();
        x.at += x.step;
    }
    tiles.store<0>(c, kStride), tiles.store<2>(c + kStep * 2 * kStep, kStride);
    if constexpr (Columns == 2)
        tiles.store<1>(c + kStep, kStride), tiles.store<3>(c + kStep * 2 * kStep + kStep, kStride);
}

// The scratch memory of a call: numbers of runs, sums of the transpose, and sums.
struct RowScratch {
    uint8_t* numbers;
    float *sums, *c;
    RowScratch(const Linear& args, int64_t rows, int64_t panels, Carve& carve) {
        const RowBlocking cut(args);
        const bool few = cut.sums_in_registers(rows);
        numbers = carve.take<uint8_t>((few || cut.block < kStoredRuns ? kStoredRuns : cut.block) * kRunNumbersBytes);
        sums = carve.take<float>((few            ? kFewRows
                                  : cut.is_one() ? kGroupRows
                                                 : panels * round_up(rows, kGroupRows)) *
                                 kPanelN);
        c = carve.take<float>((few ? kFewRows : kGroupRows) * kPanelN);
    }
};

// sums [kPanelN, kGroupRows] += steps of a panel times up to kGroupRows rows of x, or = with `first`.
inline void group_product(Tiles& tiles, int64_t rows, const TileOperand& w, TileOperand x, int64_t steps, bool first,
                          float* sums) {
    for (int64_t r = 0; r < rows; r += 2 * kStep, x.at += 2 * x.half) {
        const int64_t columns = smaller(2 * kStep, rows - r);
        tiles.configure_columns(int(columns));
        tile_block(tiles, kPanelN, columns, w, x, steps, sums + r, kGroupRows, !first);
    }
}

// Rows [row, row_stop) times panels [panel, panel_stop).
template <class Format, class O>
inline void linear_rows(const Linear& args, const int8_t* table, int64_t row, int64_t row_stop, int64_t panel,
                        int64_t panel_stop, int64_t next_panel, void* scratch) {
    const RowBlocking cut(args);
    const int64_t rows = row_stop - row, all = round_up(rows, kGroupRows);
    Carve carve{(uint8_t*)scratch};
    const RowScratch s(args, rows, panel_stop - panel, carve);
    Tiles tiles;
    for (int64_t from = 0; from < cut.steps; from += cut.block) {
        const int64_t stop = smaller(cut.steps, from + cut.block);
        for (int64_t p = panel; p < panel_stop; p++) {
            PanelRuns<Format> numbers(args, table, p, p + 1 < panel_stop ? p + 1 : next_panel);
            if (cut.sums_in_registers(rows)) {
                const TileOperand x = cut.operand(args, 0, row);
                rows > kStep ? few_rows_product<2>(tiles, int(rows), numbers, x, s.numbers, s.sums)
                             : few_rows_product<1>(tiles, int(rows), numbers, x, s.numbers, s.sums);
                transpose_sums(s.sums, 2 * kStep, rows, s.c);
                finish<Bf16Mma, bf16, O>(args, row, p, rows, s.c);
                continue;
            }
            for (int64_t run = from; run < stop; run++) numbers(run, s.numbers + (run - from) * kRunNumbersBytes);
            for (int64_t first = 0; first < rows; first += kGroupRows) {
                const int64_t count = smaller(kGroupRows, rows - first);
                float* sums = s.sums + (cut.is_one() ? 0 : ((p - panel) * all + first) * kPanelN);
                for (int64_t part = from; part < stop; part += kNearSteps) {
                    TileOperand x = cut.operand(args, from, row + first);
                    x.at += (part - from) * x.step;
                    group_product(tiles, count, operand_of_runs(s.numbers + (part - from) * kRunNumbersBytes), x,
                                  smaller(kNearSteps, stop - part), part == 0, sums);
                }
                if (stop < cut.steps) continue;
                transpose_sums(sums, kGroupRows, count, s.c);
                finish<Bf16Mma, bf16, O>(args, row + first, p, count, s.c);
            }
        }
    }
}

template <class Mma, class O>
inline void linear_rows(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                        int64_t next_panel, void* scratch) {
    with_panels(args.packing, [&]<class Format>(const int8_t* table) {
        if constexpr (kInRows<Mma, Format>)
            linear_rows<Format, O>(args, table, row, row_stop, panel, panel_stop, next_panel, scratch);
    });
}
#else  // never called
template <class Mma>
inline bool multiplies_rows(const Linear&) {
    return false;
}
inline LinearCut rows_cut(const Linear&) { return {}; }
inline void pack_columns(const Linear&, int64_t, int64_t, void*) {}
struct RowScratch {
    RowScratch(const Linear&, int64_t, int64_t, Carve&) {}
};
template <class Mma, class O>
inline void linear_rows(const Linear&, int64_t, int64_t, int64_t, int64_t, int64_t, void*) {}
#endif

}  // namespace
}  // namespace batchgen
