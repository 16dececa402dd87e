// Linear layers of bf16, and of codes of 8 bits, in tile registers, over the panels of matmul/linear.h as they are.
//
// Depths are worked on in blocks whose rows stay in the second-level cache for some panels; of a block's rows a part of
// the depth at a time, so that the panel's part stays in the nearest cache while rows pass by. Sums wait in memory
// between parts, which changes nothing about them: each is a sum of steps in the order of depth, whatever the rows and
// the parts.
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
constexpr int64_t kBlockSteps = 32;  // of a block of depths, at most: 1,024 values of bf16
constexpr int64_t kNearSteps = 12;   // of a part of it: 24 KiB of a panel
constexpr int64_t kBlockPanels = 8;  // that share a block's rows, where there are several blocks
constexpr int64_t kMostRows = 512;   // of a block: 1 MiB of x, and half as much of sums
constexpr int64_t kRegisterBytes = 1024;

// Values of x in a step.
template <class M>
constexpr int64_t kStepValues = M::kPair * kStep;

template <class M>
struct DepthCut {
    int64_t steps, block;  // all steps, and those of a block
    explicit DepthCut(const Linear& args) : steps((args.depth + kStepValues<M> - 1) / kStepValues<M>) {
        const int64_t blocks = (steps + kBlockSteps - 1) / kBlockSteps;
        block = (steps + blocks - 1) / blocks;
    }
};

// Whether x is put in order first: to be made codes, to fill up the last step with zeros, and where rows as they lie
// would take each other's places in the caches, being far apart, or by multiples of a page.
template <class M>
inline bool packs_rows(const Linear& args) {
    return kCoded<M> || args.depth % kStepValues<M> != 0 ||
           (args.rows > kStep && (args.depth > kStepValues<M> * kBlockSteps || args.x_stride * 2 % 4096 == 0));
}

inline int64_t row_groups(const Linear& args) { return (args.rows + kStep - 1) / kStep; }

template <class M>
inline LinearCut tile_cut(const Linear& args) {
    const DepthCut<M> cut(args);
    const int64_t packed =
        row_groups(args) * cut.steps * kRegisterBytes + (kCoded<M> ? CodedRows::bytes_beside(args) : 0);
    const bool one = cut.block == cut.steps;
    return {
        2 * kStep, kMostRows, one ? 1 : kBlockPanels, one ? INT32_MAX : kBlockPanels, packs_rows<M>(args) ? packed : 0,
        kStep,     false};
}

// Where registers of x that is put in order lie.
template <class M>
inline uint8_t* packed_registers(const Linear& args, const void* at) {
    return kCoded<M> ? CodedRows(args, at).codes : (uint8_t*)at;
}

// Groups [group, stop) of 16 rows of x, as registers take them: [blocks, groups, steps of the block] of them.
template <class M, class T>
inline void pack_tile_rows(const Linear& args, int64_t group, int64_t stop, void* out) {
    const DepthCut<M> cut(args);
    const int64_t groups = row_groups(args);
    uint8_t* registers = packed_registers<M>(args, out);
    for (int64_t r = group * kStep; r < smaller(stop * kStep, args.rows); r++) {
        const T* x = (const T*)args.x + r * args.x_stride;
        const RowValues<T> values{x, args.depth, kCoded<M> && is_rotated(args)};
        float steps_of_row = 0;
        if constexpr (kCoded<M>) {
            const RowScale row(values);
            CodedRows(args, out).scales[r] = row.scale, CodedRows(args, out).excess[r] = 0;
            steps_of_row = row.steps;
        }
        for (int64_t step = 0; step < cut.steps; step++) {
            const int64_t from = step / cut.block * cut.block, each = smaller(cut.block, cut.steps - from);
            uint8_t* to =
                registers + (from * groups + r / kStep * each + step - from) * kRegisterBytes + r % kStep * 64;
            const int64_t first = step * kStepValues<M>;
            if constexpr (kCoded<M>) {
                put_codes(values, first, steps_of_row, (Code*)to);
            } else {
                const int64_t bytes = smaller(64, (args.depth - first) * 2);
                if (bytes < 64) memset(to, 0, 64);
                memcpy(to, x + first, bytes);
            }
        }
    }
}

// Steps [from, stop), a block, of the rows from `row` on, a multiple of 16.
template <class M>
inline TileOperand rows_of(const Linear& args, int64_t row, int64_t from, int64_t stop) {
    if (args.packed_x) {
        const int64_t groups = row_groups(args), each = (stop - from) * kRegisterBytes;
        const uint8_t* registers = packed_registers<M>(args, args.packed_x);
        return {registers + from * groups * kRegisterBytes + row / kStep * each, each, kRegisterBytes, 64};
    }
    const int64_t stride = args.x_stride * 2;
    return {(const uint8_t*)args.x + row * stride + from * 64, kStep * stride, 64, stride};
}

template <class M>
constexpr TileProduct kTileProduct = kCoded<M> ? TileProduct::I8 : TileProduct::BF16;

// c [rows, kPanel] = a b, or with `add` + a b. ahead: another panel's steps, to be fetched meanwhile, or null.
template <class M>
inline void tile_panel(Tiles& tiles, int64_t rows, TileOperand a, TileOperand b, int64_t steps, float* c, bool add,
                       const uint8_t* ahead) {
    const int64_t at_once = 2 * kStep, whole = rows / at_once * at_once, turns = (rows + at_once - 1) / at_once;
    const int64_t lines = (kStepLines + turns - 1) / turns;  // of a step, fetched by each 32 rows until all are
    auto block = [&](int64_t row, int64_t count, int64_t from, int64_t stop) {
        TileAhead fetched = kNothingAhead;
        const int64_t line = row / at_once * lines;
        if (ahead && line < kStepLines) fetched = {ahead + (from * kStepLines + line) * 64, int(lines)};
        tiles.configure(int(count));
        const TileOperand left{a.at + row / kStep * a.half + from * a.step, a.half, a.step, a.stride};
        const TileOperand right{b.at + from * b.step, b.half, b.step, b.stride};
        tile_block<kTileProduct<M>>(tiles, count, kPanel, left, right, stop - from, c + row * kPanel, kPanel,
                                    add || from, fetched);
    };
    const int64_t parts = whole > at_once ? (steps + kNearSteps - 1) / kNearSteps : 1,
                  part = (steps + parts - 1) / parts;
    for (int64_t from = 0; from < steps; from += part)
        for (int64_t row = 0; row < whole; row += at_once) block(row, at_once, from, smaller(steps, from + part));
    if (whole < rows) block(whole, rows - whole, 0, steps);
}

template <class M>
struct TileScratch {
    uint32_t* b;
    float* c;
    TileScratch(const Linear& args, int64_t rows, int64_t panels, Carve& carve) {
        const DepthCut<M> cut(args);
        b = carve.take<uint32_t>(cut.block * kStep * kPanel);
        c = carve.take<float>((cut.block == cut.steps ? 1 : panels) * rows * kPanel);
    }
};

template <class M, class T, class O>
inline void linear_tiles(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                         int64_t next_panel, void* scratch) {
    const DepthCut<M> cut(args);
    const int64_t depth = packed_depth<M>(args), rows = row_stop - row;
    Carve carve{(uint8_t*)scratch};
    const TileScratch<M> s(args, rows, panel_stop - panel, carve);
    const auto packed = [&](int64_t p, int64_t step) { return packed_panel<M>(args, p) + step * kStep * kPanel; };
    const auto operand = [](const uint32_t* b) {
        return TileOperand{(const uint8_t*)b, 64, kStep * kPanel * 4, kPanel * 4};
    };
    Tiles tiles;
    for (int64_t from = 0; from < cut.steps; from += cut.block) {
        const int64_t stop = smaller(cut.steps, from + cut.block), end = smaller(stop * kStep, depth);
        const TileOperand a = rows_of<M>(args, row, from, stop);
        for (int64_t p = panel; p < panel_stop; p++) {
            float* c = s.c + (cut.block == cut.steps ? 0 : (p - panel) * rows * kPanel);
            // Steps of the panel as it lies; those after them are in s.b, with zeros where the depth ends within a
            // step.
            const int64_t whole = is_operand(args) ? end / kStep - from : 0, begin = (from + whole) * kStep;
            const int64_t next = p + 1 < panel_stop ? p + 1 : next_panel;
            if (!is_operand(args)) pack_panel<M, T>(args, p, next, begin, end, s.b);
            else if (begin < end) memcpy(s.b, packed(p, from + whole), (end - begin) * kPanel * 4);
            memset(s.b + (end - begin) * kPanel, 0, (stop * kStep - end) * kPanel * 4);
            const uint8_t* ahead = nullptr;
            if (args.packing != BlockType::F32) ahead = nullptr;  // the panel after it lies nowhere
            else if (p + 1 < panel_stop) ahead = (const uint8_t*)packed(p + 1, from);
            else ahead = (const uint8_t*)(stop < cut.steps ? packed(panel, stop) : packed(next_panel, 0));
            if (whole) tile_panel<M>(tiles, rows, a, operand(packed(p, from)), whole, c, from, ahead);
            if (begin < end) {
                const TileOperand rest{a.at + whole * a.step, a.half, a.step, a.stride};
                tile_panel<M>(tiles, rows, rest, operand(s.b), stop - from - whole, c, from || whole, nullptr);
            }
            if (stop == cut.steps) finish<M, T, O>(args, row, p, rows, c);
        }
    }
}
#else  // named, but never called
template <class M>
inline LinearCut tile_cut(const Linear&) {
    return {};
}
template <class M>
struct TileScratch {
    TileScratch(const Linear&, int64_t, int64_t, Carve&) {}
};
template <class M, class T, class O>
void linear_tiles(const Linear&, int64_t, int64_t, int64_t, int64_t, int64_t, void*) {}
template <class M, class T>
inline void pack_tile_rows(const Linear&, int64_t, int64_t, void*) {}
#endif

}  // namespace
}  // namespace batchgen
