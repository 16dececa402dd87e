// Panels of numbers from block-quantized rows as they lie in a file.
//
// Chunks of W rows at a time are unpacked into quantized values and scales (quant/blocks.h) and transposed into words
// of four values a column, which become numbers of x's type. The numbers are those of `unpack_blocks`, so sums are
// those of the dequantized weights, bit for bit.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/layout.h"
#include "matmul/operands.h"
#include "quant/blocks.h"
#include "simd/target.h"

namespace batchgen {
namespace {

// Signed words.
typedef int32_t Words __attribute__((vector_size(4 * W)));

// A chunk of W rows: quantized values, and the scales and minimums of their runs.
struct UnpackedRows {
    alignas(64) int8_t quants[W][kChunkK];
    alignas(64) float scales[W][kChunkRuns], minimums[W][kChunkRuns];
};

// Transposes W rows: out[i] has value i of each.
template <int kCount>
inline void transpose_floats(const float (&rows)[W][kCount], vf* out) {
    static_assert(kCount % W == 0);
    for (int from = 0; from < kCount; from += W) {
        vi r[W];
        for (int i = 0; i < W; i++) r[i] = as_int(load(rows[i] + from));
        transpose(r);
        for (int i = 0; i < W; i++) out[from + i] = as_float(r[i]);
    }
}

// Stores two neighbouring values of K of W columns, rounded to T, as an operand has them.
template <class Mma, class T>
inline void store_two_k(vf first, vf second, typename Mma::Operand* out) {
    if constexpr (__is_same(T, float)) {
        store_int(out, as_int(first)), store_int(out + kPanelN, as_int(second));
    } else {
        T rounded[2][W];
        store(rounded[0], first), store(rounded[1], second);
        const vi a = as_int(load(rounded[0])), b = as_int(load(rounded[1]));
        if constexpr (Mma::kPerWord == 1) store_int(out, a), store_int(out + kPanelN, b);
        else store_int(out, (vi)(((Words)a >> 16 & 0xffff) | (Words)b));
    }
}

// Stores the values [from, stop) of the chunk, multiples of kLeastRun, to `out`, where the first of them goes. IsFp8:
// quantized values are FP8 numbers. number(value, run) makes the number that is stored.
template <class Mma, class T, bool IsFp8, class Number>
inline void store_numbers(const UnpackedRows& unpacked, int64_t from, int64_t stop, typename Mma::Operand* out,
                          Number number) {
    constexpr int kEach = W * 4;  // values of a row that are transposed together
    for (int64_t kk = from / kEach * kEach; kk < stop; kk += kEach) {
        vi r[W];
        for (int i = 0; i < W; i++) r[i] = load_int((const uint32_t*)(unpacked.quants[i] + kk));
        transpose(r);
        for (int i = 0; i < W; i++) {
            const int64_t k = kk + 4 * i;
            if (k < from || k >= stop) continue;
            const Words quants = (Words)r[i];
            const auto made = [&](Words quant) {
                return number(IsFp8 ? from_e4m3((vi)quant) : to_float((vi)quant), k / kLeastRun);
            };
            typename Mma::Operand* to = out + (k - from) / Mma::kPerWord * kPanelN;
            store_two_k<Mma, T>(made(quants << 24 >> 24), made(quants << 16 >> 24), to);
            store_two_k<Mma, T>(made(quants << 8 >> 24), made(quants >> 24), to + 2 / Mma::kPerWord * kPanelN);
        }
    }
}

// Dequantizes and stores the values [from, stop) of the chunk.
template <class Mma, class T, bool IsFp8>
inline void store_unpacked(const UnpackedRows& unpacked, int64_t from, int64_t stop, typename Mma::Operand* out) {
    vf scales[kChunkRuns], minimums[kChunkRuns];
    transpose_floats(unpacked.scales, scales), transpose_floats(unpacked.minimums, minimums);
    store_numbers<Mma, T, IsFp8>(unpacked, from, stop, out,
                                 [&](vf quant, int64_t run) { return fma(quant, scales[run], minimums[run]); });
}

// Unpacks a chunk, the values of K from `at` on, of the rows of W columns of a panel.
inline void unpack_rows(const Linear& args, int64_t panel, int c, int64_t at, UnpackedRows& unpacked) {
    const int64_t here = smaller(kChunkK, args.k - at);
    const uint8_t* packed = (const uint8_t*)args.w + at * args.w_stride / args.k;  // all blocks of a row have one size
    for (int i = 0; i < W; i++) {
        const int64_t row = weight_row(args, panel, c + i);
        if (row < args.n) {
            unpack_quants(args.packing, packed + row * args.w_stride, here, unpacked.quants[i], unpacked.scales[i],
                          unpacked.minimums[i]);
        } else {
            memset(unpacked.quants[i], 0, sizeof unpacked.quants[i]);
            memset(unpacked.scales[i], 0, sizeof unpacked.scales[i]),
                memset(unpacked.minimums[i], 0, sizeof unpacked.minimums[i]);
        }
    }
}

// Dequantizes the words [start, stop) of K of a panel: out [stop - start, kPanelN].
template <class Mma, class T>
inline void unpack_panel(const Linear& args, int64_t panel, int64_t start, int64_t stop, typename Mma::Operand* out) {
    const int64_t first = start * Mma::kPerWord, end = smaller(stop * Mma::kPerWord, args.k);
    UnpackedRows unpacked;
    for (int c = 0; c < kPanelN; c += W) {
        for (int64_t at = first / kChunkK * kChunkK; at < end; at += kChunkK) {
            const int64_t here = smaller(kChunkK, args.k - at), from = at < first ? first - at : 0;
            unpack_rows(args, panel, c, at, unpacked);
            const int64_t stop_here = smaller(here, end - at);
            typename Mma::Operand* to = out + ((at + from) / Mma::kPerWord - start) * kPanelN + c;
            if (is_fp8(args.packing)) store_unpacked<Mma, T, true>(unpacked, from, stop_here, to);
            else store_unpacked<Mma, T, false>(unpacked, from, stop_here, to);
        }
    }
}

}  // namespace
}  // namespace batchgen
