// The loop over rows and panels of a linear layer in tile registers, of bf16 or int8, over the panels of
// matmul/layout.h.
//
// K is cut into blocks whose rows of x stay in the second-level cache while several panels pass. Rows pass a panel in
// groups whose sums stay in the first-level cache, and for each group K is cut into parts, so that a panel's part stays
// there too: rows are loaded past it. Sums wait in memory between parts, which does not change them: each is a sum of
// steps in the order of K.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/epilogue.h"
#include "matmul/prepack.h"
#include "matmul/tile_registers.h"
#include "simd/carve.h"

namespace batchgen {
namespace {

#ifdef BATCHGEN_TILES
constexpr int64_t kBlockSteps = 64;      // steps of a block, at most: 2,048 numbers of bf16
constexpr int64_t kNearSteps = 10;       // steps of a part: 20 KiB of a panel
constexpr int64_t kGroupRows = 64;       // rows whose sums stay in the first-level cache while K passes
constexpr int64_t kBlockPanels = 8;      // panels that share a block's rows, where there are several blocks
constexpr int64_t kMostRows = 512;       // rows of a call
constexpr int64_t kMostBytes = 1 << 20;  // of x in a block of K, for all rows of a call
constexpr int64_t kRegisterBytes = 1024;

// Values of x in a step.
template <class Mma>
constexpr int64_t kStepValues = Mma::kPerWord * kStep;

// The blocks of K.
template <class Mma>
struct KBlocking {
    int64_t steps, block;  // steps of K, and of a block
    explicit KBlocking(const Linear& args) : steps((args.k + kStepValues<Mma> - 1) / kStepValues<Mma>) {
        const int64_t blocks = (steps + kBlockSteps - 1) / kBlockSteps;
        block = (steps + blocks - 1) / blocks;
    }
    bool is_one() const { return block == steps; }
    // Rows of a call, at most.
    int64_t rows() const {
        return smaller(kMostRows, kMostBytes / (block * kRegisterBytes) * kStep / kGroupRows * kGroupRows);
    }
};

// Whether x is packed: to be quantized, to pad K to whole steps, and where rows as they lie would evict each other from
// the caches, being far apart or multiples of a page apart.
template <class Mma>
inline bool packs_rows(const Linear& args) {
    return kIsInt8<Mma> || args.k % kStepValues<Mma> != 0 ||
           (args.m > kStep && (args.k > kStepValues<Mma> * kBlockSteps || args.x_stride * 2 % 4096 == 0));
}

// Groups of 16 rows of x.
inline int64_t row_groups(const Linear& args) { return (args.m + kStep - 1) / kStep; }

// The cut of a layer into calls.
template <class Mma>
inline LinearCut tile_cut(const Linear& args) {
    const KBlocking<Mma> cut(args);
    const int64_t packed =
        row_groups(args) * cut.steps * kRegisterBytes + (kIsInt8<Mma> ? QuantizedX::bytes_beside(args) : 0);
    return {2 * kStep,
            cut.rows(),
            cut.is_one() ? 1 : kBlockPanels,
            cut.is_one() ? INT32_MAX : kBlockPanels,
            packs_rows<Mma>(args) ? packed : 0,
            kStep,
            false,
            false};
}

// The packed registers of x at `at`.
template <class Mma>
inline uint8_t* packed_registers(const Linear& args, const void* at) {
    return kIsInt8<Mma> ? QuantizedX(args, at).quants : (uint8_t*)at;
}

// Packs groups [group, stop) of 16 rows of x, as registers load them: [blocks, groups, steps of the block].
template <class Mma, class T>
inline void pack_tile_rows(const Linear& args, int64_t group, int64_t stop, void* out) {
    const KBlocking<Mma> cut(args);
    const int64_t groups = row_groups(args);
    uint8_t* registers = packed_registers<Mma>(args, out);
    for (int64_t r = group * kStep; r < smaller(stop * kStep, args.m); r++) {
        const T* x = (const T*)args.x + r * args.x_stride;
        const RowValues<T> values{x, args.k, kIsInt8<Mma> && is_rotated(args)};
        float steps_of_row = 0;
        if constexpr (kIsInt8<Mma>) {
            const RowScale row(values);
            QuantizedX(args, out).scales[r] = row.scale, QuantizedX(args, out).excess[r] = 0;
            steps_of_row = row.steps;
        }
        for (int64_t step = 0; step < cut.steps; step++) {
            const int64_t from = step / cut.block * cut.block, each = smaller(cut.block, cut.steps - from);
            uint8_t* to =
                registers + (from * groups + r / kStep * each + step - from) * kRegisterBytes + r % kStep * 64;
            const int64_t first = step * kStepValues<Mma>;
            if constexpr (kIsInt8<Mma>) {
                store_quantized(values, first, steps_of_row, (XInt8*)to);
            } else {
                const int64_t bytes = smaller(64, (args.k - first) * 2);
                if (bytes < 64) memset(to, 0, 64);
                memcpy(to, x + first, bytes);
            }
        }
    }
}

// The operand of the steps [from, stop), one block, of the rows from `row` on, a multiple of 16.
template <class Mma>
inline TileOperand rows_of(const Linear& args, int64_t row, int64_t from, int64_t stop) {
    if (args.packed_x) {
        const int64_t groups = row_groups(args), each = (stop - from) * kRegisterBytes;
        const uint8_t* registers = packed_registers<Mma>(args, args.packed_x);
        return {registers + from * groups * kRegisterBytes + row / kStep * each, each, kRegisterBytes, 64};
    }
    const int64_t stride = args.x_stride * 2;
    return {(const uint8_t*)args.x + row * stride + from * 64, kStep * stride, 64, stride};
}

template <class Mma>
constexpr TileProduct kTileProduct = kIsInt8<Mma> ? TileProduct::I8 : TileProduct::BF16;

// Part of another panel, which is prefetched beside the products of `turns` times 32 rows: of each step some cache
// lines with each turn, until all are. With one turn, in which a step has little to do, it is one line of four:
// hardware follows what is read in order of addresses and fetches the others, without the buffers of the first-level
// cache, for which loads of tiles would have to wait.
struct PanelAhead {
    const uint8_t* at;  // or null
    int64_t turns, turn;

    TileAhead of_block(int64_t row, int64_t step) const {
        const int64_t apart = turns == 1 ? 4 : 1, lines = (kStepLines / apart + turns - 1) / turns;
        const int64_t first = (turn + row / (2 * kStep)) * lines;
        if (!at || first >= kStepLines) return kNothingAhead;
        return {at + (step * kStepLines + first) * 64, int(lines), int(apart)};
    }
};

// c [rows, kPanelN] = a b, or c + a b with `add`, of at most kGroupRows rows.
template <class Mma>
inline void tile_panel(Tiles& tiles, int64_t rows, TileOperand a, TileOperand b, int64_t steps, float* c, bool add,
                       PanelAhead ahead) {
    const int64_t at_once = 2 * kStep, whole = rows / at_once * at_once;
    const auto block = [&](int64_t row, int64_t count, int64_t from, int64_t stop) {
        tiles.configure(int(count));
        const TileOperand left{a.at + row / kStep * a.half + from * a.step, a.half, a.step, a.stride};
        const TileOperand right{b.at + from * b.step, b.half, b.step, b.stride};
        const auto multiply = [&]<Stays kStays>() {
            tile_block<kTileProduct<Mma>, kStays>(tiles, count, kPanelN, left, right, stop - from, c + row * kPanelN,
                                                  kPanelN, add || from, ahead.of_block(row, from));
        };
        // All panels pass the same few rows; more rows pass a panel.
        if (ahead.turns == 1) multiply.template operator()<Stays::A>();
        else multiply.template operator()<Stays::B>();
    };
    const int64_t parts = whole > at_once ? (steps + kNearSteps - 1) / kNearSteps : 1,
                  part = (steps + parts - 1) / parts;
    for (int64_t from = 0; from < steps; from += part)
        for (int64_t row = 0; row < whole; row += at_once) block(row, at_once, from, smaller(steps, from + part));
    if (whole < rows) block(whole, rows - whole, 0, steps);
}

// The scratch memory of a call: a block of a panel, and sums.
template <class Mma>
struct TileScratch {
    uint32_t* b;
    float* c;
    TileScratch(const Linear& args, int64_t rows, int64_t panels, Carve& carve) {
        const KBlocking<Mma> cut(args);
        b = carve.take<uint32_t>(cut.block * kStep * kPanelN);
        c = carve.take<float>((cut.is_one() ? smaller(rows, kGroupRows) : panels * rows) * kPanelN);
    }
};

// Rows [row, row_stop) times panels [panel, panel_stop).
template <class Mma, class T, class O>
inline void linear_tiles(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                         int64_t next_panel, void* scratch) {
    const KBlocking<Mma> cut(args);
    const int64_t k = packed_k<Mma>(args), rows = row_stop - row;
    Carve carve{(uint8_t*)scratch};
    const TileScratch<Mma> s(args, rows, panel_stop - panel, carve);
    const auto packed = [&](int64_t p, int64_t step) { return packed_panel<Mma>(args, p) + step * kStep * kPanelN; };
    const auto operand = [](const uint32_t* b) {
        return TileOperand{(const uint8_t*)b, 64, kStep * kPanelN * 4, kPanelN * 4};
    };
    const int64_t turns = (rows + 2 * kStep - 1) / (2 * kStep);
    Tiles tiles;
    for (int64_t from = 0; from < cut.steps; from += cut.block) {
        const int64_t stop = smaller(cut.steps, from + cut.block), end = smaller(stop * kStep, k);
        const bool last = stop == cut.steps;
        for (int64_t p = panel; p < panel_stop; p++) {
            // `whole` steps are read from the panel; those after them are in s.b, padded with zeros where K ends within
            // a step.
            const int64_t whole = is_operand(args) ? end / kStep - from : 0, begin = (from + whole) * kStep;
            const int64_t next = p + 1 < panel_stop ? p + 1 : next_panel;
            if (!is_operand(args)) pack_panel<Mma, T>(args, p, next, begin, end, s.b);
            else if (begin < end) memcpy(s.b, packed(p, from + whole), (end - begin) * kPanelN * 4);
            memset(s.b + (end - begin) * kPanelN, 0, (stop * kStep - end) * kPanelN * 4);
            const uint8_t* ahead = nullptr;
            if (args.packing != BlockType::F32) ahead = nullptr;  // the next panel is not unpacked yet
            else if (p + 1 < panel_stop) ahead = (const uint8_t*)packed(p + 1, from);
            else ahead = (const uint8_t*)(last ? packed(next_panel, 0) : packed(panel, stop));
            for (int64_t first = 0; first < rows; first += kGroupRows) {
                const int64_t count = smaller(kGroupRows, rows - first);
                float* c = s.c + (cut.is_one() ? 0 : ((p - panel) * rows + first) * kPanelN);
                const TileOperand a = rows_of<Mma>(args, row + first, from, stop);
                if (whole)
                    tile_panel<Mma>(tiles, count, a, operand(packed(p, from)), whole, c, from,
                                    {ahead, turns, first / (2 * kStep)});
                if (begin < end) {
                    const TileOperand rest{a.at + whole * a.step, a.half, a.step, a.stride};
                    tile_panel<Mma>(tiles, count, rest, operand(s.b), stop - from - whole, c, from || whole,
                                    {nullptr, turns, 0});
                }
                if (last) finish<Mma, T, O>(args, row + first, p, count, c);
            }
        }
    }
}
#else  // never called
template <class Mma>
inline LinearCut tile_cut(const Linear&) {
    return {};
}
template <class Mma>
struct TileScratch {
    TileScratch(const Linear&, int64_t, int64_t, Carve&) {}
};
template <class Mma, class T, class O>
void linear_tiles(const Linear&, int64_t, int64_t, int64_t, int64_t, int64_t, void*) {}
template <class Mma, class T>
inline void pack_tile_rows(const Linear&, int64_t, int64_t, void*) {}
#endif

}  // namespace
}  // namespace batchgen
