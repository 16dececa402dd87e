// Panels of weights that are rows of a GGUF as they lie in the file, on their way through memory: some values of a
// vector's width of rows at a time are taken apart into codes and scales (quant/blocks.h), codes are put in the order
// of columns four in a word, and become numbers of x's type there. These are what `unpack_blocks` makes, so sums are
// those of the unpacked weights, bit for bit; or they stay codes, with their scales beside them (matmul/split_bytes.h).
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

// 32-bit words with a sign.
typedef int32_t Words __attribute__((vector_size(4 * W)));

// Stretches of W rows.
struct TakenRows {
    alignas(64) int8_t codes[W][kTaken];
    alignas(64) float scales[W][kTakenRuns], minimums[W][kTakenRuns];
};

// out[i] = value i of each of W rows.
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

// Two neighbouring depths of W columns, rounded to T, to where an operand has them.
template <class M, class T>
inline void put_depths(vf first, vf second, typename M::Operand* out) {
    if constexpr (__is_same(T, float)) {
        store_int(out, as_int(first)), store_int(out + kPanel, as_int(second));
    } else {
        T rounded[2][W];
        store(rounded[0], first), store(rounded[1], second);
        const vi a = as_int(load(rounded[0])), b = as_int(load(rounded[1]));
        if constexpr (M::kPair == 1) store_int(out, a), store_int(out + kPanel, b);
        else store_int(out, (vi)(((Words)a >> 16 & 0xffff) | (Words)b));
    }
}

// Depths [from, stop) of the stretch, multiples of kLeastRun, to `out`, where the first of them goes. Floats: codes are
// FP8's. number(code, depth) is what goes there.
template <class M, class T, bool Floats, class Number>
inline void put_numbers(const TakenRows& taken, int64_t from, int64_t stop, typename M::Operand* out, Number number) {
    constexpr int kEach = W * 4;  // codes of a row that are put in order together
    for (int64_t d = from / kEach * kEach; d < stop; d += kEach) {
        vi r[W];
        for (int i = 0; i < W; i++) r[i] = load_int((const uint32_t*)(taken.codes[i] + d));
        transpose(r);
        for (int i = 0; i < W; i++) {
            const int64_t depth = d + 4 * i;
            if (depth < from || depth >= stop) continue;
            const Words codes = (Words)r[i];
            const auto made = [&](Words code) {
                return number(Floats ? from_e4m3((vi)code) : to_float((vi)code), depth / kLeastRun);
            };
            typename M::Operand* to = out + (depth - from) / M::kPair * kPanel;
            put_depths<M, T>(made(codes << 24 >> 24), made(codes << 16 >> 24), to);
            put_depths<M, T>(made(codes << 8 >> 24), made(codes >> 24), to + 2 / M::kPair * kPanel);
        }
    }
}

template <class M, class T, bool Floats>
inline void put_taken(const TakenRows& taken, int64_t from, int64_t stop, typename M::Operand* out) {
    vf scales[kTakenRuns], minimums[kTakenRuns];
    transpose_floats(taken.scales, scales), transpose_floats(taken.minimums, minimums);
    put_numbers<M, T, Floats>(taken, from, stop, out,
                              [&](vf code, int64_t run) { return fma(code, scales[run], minimums[run]); });
}

// kTaken depths from `at` on, or those that are left, of W columns of a panel.
inline void take_rows(const Linear& args, int64_t panel, int c, int64_t at, TakenRows& taken) {
    const int64_t here = smaller(kTaken, args.depth - at);
    const uint8_t* packed = (const uint8_t*)args.w + at * args.w_stride / args.depth;  // a row is blocks of one size
    for (int i = 0; i < W; i++) {
        const int64_t row = weight_row(args, panel, c + i);
        if (row < args.columns) {
            take_apart(args.packing, packed + row * args.w_stride, here, taken.codes[i], taken.scales[i],
                       taken.minimums[i]);
        } else {
            memset(taken.codes[i], 0, sizeof taken.codes[i]);
            memset(taken.scales[i], 0, sizeof taken.scales[i]), memset(taken.minimums[i], 0, sizeof taken.minimums[i]);
        }
    }
}

// Depths [start, stop), in units of 32 bits, of a panel: out [stop - start, kPanel].
template <class M, class T>
inline void unpack_panel(const Linear& args, int64_t panel, int64_t start, int64_t stop, typename M::Operand* out) {
    const int64_t first = start * M::kPair, end = smaller(stop * M::kPair, args.depth);
    TakenRows taken;
    for (int c = 0; c < kPanel; c += W) {
        for (int64_t at = first / kTaken * kTaken; at < end; at += kTaken) {
            const int64_t here = smaller(kTaken, args.depth - at), from = at < first ? first - at : 0;
            take_rows(args, panel, c, at, taken);
            const int64_t stop_here = smaller(here, end - at);
            typename M::Operand* to = out + ((at + from) / M::kPair - start) * kPanel + c;
            if (is_fp8(args.packing)) put_taken<M, T, true>(taken, from, stop_here, to);
            else put_taken<M, T, false>(taken, from, stop_here, to);
        }
    }
}

}  // namespace
}  // namespace batchgen
