// The micro-kernel in tile registers: up to 32 rows by 32 columns of C at once, of bf16 pairs or bytes.
//
// A step is 16 words of K. B is read from panels as they are: 16 words of K by 16 columns fill a register. The order of
// each sum depends on K alone.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "simd/target.h"

namespace batchgen {
namespace {

#ifdef BATCHGEN_TILES
constexpr int kStep = 16;  // words of K in a step; columns and rows of a register

// An operand in memory, strides in bytes: `half` to what the second register loads, `step` from step to step, `stride`
// from row to row.
struct TileOperand {
    const uint8_t* at;
    int64_t half, step, stride;
};

// Memory to prefetch: `lines` cache lines in each step, `apart` lines apart, which begin kStepLines further from step
// to step.
struct TileAhead {
    const uint8_t* at;
    int lines, apart;
};
constexpr int kStepLines = 2 * kStep;  // cache lines of a panel in a step
constexpr TileAhead kNothingAhead{nullptr, 0, 1};

// Prefetches the lines of one step.
inline void fetch(TileAhead ahead, int64_t step) {
    for (int i = 0; i < ahead.lines; i++)
        __builtin_prefetch(ahead.at + (step * kStepLines + i * ahead.apart) * 64, 0, 2);
}

// Register C += registers A and B, for one kind of product.
template <TileProduct Kind, int C, int A, int B>
inline void dot(Tiles& tiles) {
    if constexpr (Kind == TileProduct::BF16) tiles.dot_bf16<C, A, B>();
    else if constexpr (Kind == TileProduct::I8) tiles.dot_i8<C, A, B>();
    else tiles.dot_u8<C, A, B>();
}

// The operand that is to stay in the first-level cache: the other one is loaded only once while it is there.
enum class Stays { Both, A, B };

template <bool kOnce, int N>
inline void load(Tiles& tiles, const uint8_t* at, int64_t stride) {
    if constexpr (kOnce) tiles.load_once<N>(at, stride);
    else tiles.load<N>(at, stride);
}

// c [16 Rows, 16 Columns] = a b, or c + a b with `add`, in Rows x Columns registers.
template <int Rows, int Columns, TileProduct Kind, Stays kStays>
inline void tile_block(Tiles& tiles, const TileOperand& left, const TileOperand& right, int64_t steps, float* c,
                       int64_t c_stride, bool add, TileAhead ahead) {
    constexpr bool kAOnce = kStays == Stays::B, kBOnce = kStays == Stays::A;
    // In registers: what a step loads from memory waits behind its loads of tiles, and the next step for it.
    const uint8_t *a = left.at, *b = right.at;
    const int64_t a_half = left.half, a_step = left.step, a_stride = left.stride;
    const int64_t b_half = right.half, b_step = right.step, b_stride = right.stride;
    const int64_t stride = c_stride * 4;
    float* lower = c + kStep * c_stride;
    if (add) {
        tiles.load<0>(c, stride);
        if constexpr (Columns == 2) tiles.load<1>(c + kStep, stride);
        if constexpr (Rows == 2) tiles.load<2>(lower, stride);
        if constexpr (Rows == 2 && Columns == 2) tiles.load<3>(lower + kStep, stride);
    } else {
        tiles.zero<0>();
        if constexpr (Columns == 2) tiles.zero<1>();
        if constexpr (Rows == 2) tiles.zero<2>();
        if constexpr (Rows == 2 && Columns == 2) tiles.zero<3>();
    }
    int64_t step = 0;
    auto advance = [&] {
        fetch(ahead, step++);
        a += a_step, b += b_step;
    };
    // Two rows of registers share B. With one row, every other step loads B into other registers, so that loads run
    // ahead.
    for (; step < steps; advance()) {
        load<kAOnce, 4>(tiles, a, a_stride);
        load<kBOnce, 6>(tiles, b, b_stride);
        dot<Kind, 0, 4, 6>(tiles);
        if constexpr (Columns == 2) load<kBOnce, 7>(tiles, b + b_half, b_stride), dot<Kind, 1, 4, 7>(tiles);
        if constexpr (Rows == 2) load<kAOnce, 5>(tiles, a + a_half, a_stride), dot<Kind, 2, 5, 6>(tiles);
        if constexpr (Rows == 2 && Columns == 2) dot<Kind, 3, 5, 7>(tiles);
        if constexpr (Rows == 1) {
            advance();
            if (step == steps) break;
            load<kAOnce, 5>(tiles, a, a_stride);
            load<kBOnce, 2>(tiles, b, b_stride);
            dot<Kind, 0, 5, 2>(tiles);
            if constexpr (Columns == 2) load<kBOnce, 3>(tiles, b + b_half, b_stride), dot<Kind, 1, 5, 3>(tiles);
        }
    }
    tiles.store<0>(c, stride);
    if constexpr (Columns == 2) tiles.store<1>(c + kStep, stride);
    if constexpr (Rows == 2) tiles.store<2>(lower, stride);
    if constexpr (Rows == 2 && Columns == 2) tiles.store<3>(lower + kStep, stride);
}

// c = a b, or c + a b with `add`, for up to 32 rows, for which the registers are configured, and 16 or 32 columns.
template <TileProduct Kind = TileProduct::BF16, Stays kStays = Stays::Both>
inline void tile_block(Tiles& tiles, int64_t rows, int64_t columns, TileOperand a, TileOperand b, int64_t steps,
                       float* c, int64_t c_stride, bool add, TileAhead ahead = kNothingAhead) {
    const bool two = columns > kStep;
    if (rows > kStep && two) tile_block<2, 2, Kind, kStays>(tiles, a, b, steps, c, c_stride, add, ahead);
    else if (rows > kStep) tile_block<2, 1, Kind, kStays>(tiles, a, b, steps, c, c_stride, add, ahead);
    else if (two) tile_block<1, 2, Kind, kStays>(tiles, a, b, steps, c, c_stride, add, ahead);
    else tile_block<1, 1, Kind, kStays>(tiles, a, b, steps, c, c_stride, add, ahead);
}

// `product` of matmul/micro_kernel.h for up to 32 rows. K is padded to whole steps in both operands, in A with zeros.
template <class Mma>
inline void product(Tiles& tiles, const uint32_t* a, int64_t a_stride, int64_t rows, const uint32_t* b,
                    int64_t b_stride, int64_t columns, int64_t k, float* c, int64_t c_stride, const float* scale) {
    for (int64_t r = 0; scale && r < rows; r++) {
        if (scale[r] == 1) continue;
        float* row = c + r * c_stride;
        for (int64_t i = 0; i < columns; i += W) store(row + i, mul(load(row + i), set1(scale[r])));
    }
    tiles.configure(int(rows));
    const TileOperand left{(const uint8_t*)a, kStep * a_stride * 4, kStep * 4, a_stride * 4};
    for (int64_t n = 0; n < columns; n += 2 * kStep) {
        const TileOperand right{(const uint8_t*)(b + n), kStep * 4, kStep * b_stride * 4, b_stride * 4};
        tile_block(tiles, rows, columns - n, left, right, (k + kStep - 1) / kStep, c + n, c_stride, scale != nullptr);
    }
}

// c [rows, 16] += a [rows, 64 bytes] b [16, 64 bytes], in one register each; for tests and for the check at start.
inline void tile_dot(TileProduct kind, int rows, const void* a, const void* b, void* c) {
    Tiles tiles;
    tiles.configure(rows);
    tiles.load<0>(c, 64);
    tiles.load<4>(a, 64);
    tiles.load<6>(b, 64);
    switch (kind) {
        case TileProduct::BF16: dot<TileProduct::BF16, 0, 4, 6>(tiles); break;
        case TileProduct::I8: dot<TileProduct::I8, 0, 4, 6>(tiles); break;
        case TileProduct::U8: dot<TileProduct::U8, 0, 4, 6>(tiles); break;
    }
    tiles.store<0>(c, 64);
}
#endif

}  // namespace
}  // namespace batchgen
