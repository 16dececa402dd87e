// int8 weights: quantization of x, panels of w, and the scales of sums.
//
// Sums are exact integers; each column of w has a scale, and so has each row of x. batchgen/ops/int8.py says how rows
// are quantized and in which order sums become results, and does the same in torch, bit for bit. x is quantized once
// for all threads. A prepacked panel has its columns' scales behind its values.
#pragma once

#include <stdint.h>
#include <string.h>

#include "matmul/layout.h"
#include "matmul/operands.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// What prepacked values of w are larger by than the weights.
#ifdef BATCHGEN_TILES
constexpr int kWeightOffset = 0;
#else
constexpr int kWeightOffset = kInt8Bias;  // taken off again by the sum of the row's values
#endif

// The byte of a row of w at which its scale is.
inline int64_t scale_at(const Linear& args) { return round_up(args.k, 4); }

// The quantized rows of x at `packed_x`: their scales, the excess of their sums, and their values.
struct QuantizedX {
    float* scales;
    int32_t* excess;  // of each sum, through kWeightOffset
    uint8_t* quants;
    static int64_t bytes_beside(const Linear& args) { return 8 * round_up(args.m, 16); }
    QuantizedX(const Linear& args, const void* at) {
        const int64_t rows = round_up(args.m, 16);
        scales = (float*)at, excess = (int32_t*)(scales + rows), quants = (uint8_t*)(excess + rows);
    }
};

constexpr int kRotated = 64;  // values that one Hadamard matrix rotates

constexpr int kRotatedVectors = kRotated / W;

// The signs of the second of two numbers that are added: -1 in lanes whose index has the bit Apart.
template <int Apart>
struct Signs {
    float of[W];
    constexpr Signs() : of() {
        for (int i = 0; i < W; i++) of[i] = i & Apart ? -1 : 1;
    }
};
template <int Apart>
constexpr Signs<Apart> kSigns;

// One stage of the Walsh-Hadamard transform: the sum and the difference of numbers that are Apart from each other.
template <int Apart>
__attribute__((always_inline)) inline void hadamard_stage(vf (&block)[kRotatedVectors]) {
    constexpr int kVectors = Apart / W;
#pragma GCC unroll 16
    for (int i = 0; i < kRotatedVectors; i++) {
        if constexpr (Apart < W) {
            block[i] = fma(block[i], load(kSigns<Apart>.of), swap_lanes<Apart>(block[i]));
        } else if (!(i & kVectors)) {
            const vf a = block[i], b = block[i + kVectors];
            block[i] = add(a, b), block[i + kVectors] = sub(a, b);
        }
    }
}

// A row of x before quantization: zeros beyond its end, and rotated by a Hadamard matrix in whole blocks of 64 if
// `rotated`.
template <class T>
struct RowValues {
    const T* x;
    int64_t n;
    bool rotated;

    // Loads the 64 numbers from `from` on, a multiple of 64. Loops over them are unrolled so that they stay in
    // registers.
    __attribute__((always_inline)) void block(int64_t from, vf (&out)[kRotatedVectors]) const {
        T part[kRotated];
        const bool whole = from + kRotated <= n;
        const T* at = x + from;
        if (!whole) {
            memset(part, 0, sizeof part);
            memcpy(part, at, (n - from) * sizeof(T));
            at = part;
        }
#pragma GCC unroll 16
        for (int i = 0; i < kRotatedVectors; i++) out[i] = load(at + i * W);
        if (!whole || !rotated) return;
        hadamard_stage<1>(out), hadamard_stage<2>(out), hadamard_stage<4>(out);
        hadamard_stage<8>(out), hadamard_stage<16>(out), hadamard_stage<32>(out);
#pragma GCC unroll 16
        for (int i = 0; i < kRotatedVectors; i++) out[i] = mul(out[i], set1(1.0f / 8));
    }
};

// The scale of a row of x, and the factor that quantizes its numbers.
struct RowScale {
    float scale, steps;
    template <class T>
    explicit RowScale(const RowValues<T>& x) {
        constexpr float kLeast = 0x1p-100f;  // a row whose largest number is smaller is zeros
        vf largest = zero(), block[kRotatedVectors];
        for (int64_t i = 0; i < x.n; i += kRotated) {
            x.block(i, block);
#pragma GCC unroll 16
            for (int j = 0; j < kRotatedVectors; j++) largest = max_or_nan(largest, block[j]);
        }
        uint32_t all[W], most = 0;
        store_int(all, as_int(largest));
        for (int i = 0; i < W; i++) most = all[i] > most ? all[i] : most;
        float value;
        memcpy(&value, &most, 4);
        const bool finite = most < 0x7f800000, counts = finite && value >= kLeast;
        scale = counts ? value / 127 : finite ? 0 : __builtin_nanf("");
        steps = counts ? 127 / value : 0;
    }
};

// Quantizes the 64 numbers from `from` on, a multiple of 64.
template <class T>
inline void store_quantized(const RowValues<T>& x, int64_t from, float steps, XInt8* out) {
    vf block[kRotatedVectors];
    x.block(from, block);
#pragma GCC unroll 16
    for (int i = 0; i < kRotatedVectors; i++) store_int8(out + i * W, round_even(mul(block[i], set1(steps))));
}

// Whether the rows of w were rotated before they were quantized: their scales are negative then.
inline bool is_rotated(const Linear& args) {
    float first;
    if (args.packed) memcpy(&first, packed_panel<Int8Mma>(args, 0) + packed_k<Int8Mma>(args) * kPanelN, 4);
    else memcpy(&first, (const uint8_t*)args.w + scale_at(args), 4);
    return __builtin_signbit(first);
}

// Quantizes the tiles [tile, stop) of x into the layout of `pack_row_tiles`.
template <class T>
inline void pack_quantized_x(const Linear& args, int64_t tile, int64_t stop, void* out) {
    constexpr int kWords = kRotated / Int8Mma::kPerWord, kLanes = int(kTileM + W - 1) / W * W;
    constexpr uint32_t kOnes = sizeof(XInt8) == 1 ? 0x01010101 : 0x00010001;
    const QuantizedX coded(args, out);
    const int64_t k = packed_k<Int8Mma>(args);
    const bool rotated = is_rotated(args);
    for (; tile < stop; tile++) {
        const int64_t first = tile * kTileM, count = smaller(kTileM, args.m - first);
        uint32_t* to = (uint32_t*)coded.quants + first * k;
        const auto row = [&](int64_t r) {
            return RowValues<T>{(const T*)args.x + (first + r) * args.x_stride, args.k, rotated};
        };
        float steps[kTileM];
        for (int64_t r = 0; r < count; r++) {
            const RowScale scale(row(r));
            steps[r] = scale.steps, coded.scales[first + r] = scale.scale;
        }
        vi sums[kLanes / W];  // of each row's values
        for (vi& some : sums) some = set1_int(0);
        alignas(64) uint32_t quants[kLanes][kWords] = {};
        for (int64_t kk = 0; kk < k; kk += kWords) {
            for (int64_t r = 0; r < count; r++)
                store_quantized(row(r), kk * Int8Mma::kPerWord, steps[r], (XInt8*)quants[r]);
            for (int64_t c = 0; c < count; c += W) {
                for (int64_t at = kk; at < smaller(k, kk + kWords); at += W) {
                    vi r[W];
#pragma GCC unroll 16
                    for (int i = 0; i < W; i++) r[i] = load_int(quants[c + i] + at - kk);
                    transpose(r);
                    if (kWeightOffset) {
#pragma GCC unroll 16
                        for (int i = 0; i < W; i++) sums[c / W] = dot_int8(r[i], set1_int(kOnes), sums[c / W]);
                    }
                    store_row_tile(r, to, at, k, c, count);
                }
            }
        }
        uint32_t excess[kLanes];
        for (int i = 0; i < kLanes; i += W) store_int(excess + i, sums[i / W]);
        for (int64_t r = 0; r < count; r++) coded.excess[first + r] = kWeightOffset * int32_t(excess[r]);
    }
}

// Packs the words [start, stop) of K of a panel of int8 weights.
inline void pack_int8_panel(const Linear& args, int64_t panel, int64_t start, int64_t stop, Int8Mma::Operand* out) {
    constexpr int kParts =
        sizeof(uint32_t) / sizeof(Int8Mma::Operand);  // operands of the four values of a column that are read at once
    constexpr uint32_t kFlip = kWeightOffset ? 0x80808080 : 0;
    for (int c = 0; c < kPanelN; c += W) {
        const uint32_t* rows[W];
        for (int i = 0; i < W; i++) {
            const int64_t row = weight_row(args, panel, c + i);
            rows[i] = row < args.n ? (const uint32_t*)((const uint8_t*)args.w + row * args.w_stride) : nullptr;
        }
        const int64_t end = (stop + kParts - 1) / kParts;
        for (int64_t kk = start / kParts; kk < end; kk += W) {
            const int count = int(smaller(W, end - kk));
            vi r[W];
            for (int i = 0; i < W; i++)
                r[i] = !rows[i]     ? set1_int(0)
                       : count == W ? load_int(rows[i] + kk)
                                    : load_int_part(rows[i] + kk, count);
            transpose(r);
            for (int i = 0; i < count; i++) {
                uint32_t fours[W];
                store_int(fours, r[i]);
                const int64_t first = (kk + i) * kParts;
                for (int part = 0; part < kParts && first + part < stop; part++)
                    for (int j = 0; j < W; j++)
                        out[(first + part - start) * kPanelN + c + j] =
                            Int8Mma::Operand((fours[j] ^ kFlip) >> (16 * part));
            }
        }
    }
}

// The scales of a panel's columns, from rows of w.
inline void gather_scales(const Linear& args, int64_t panel, float* out) {
    for (int c = 0; c < kPanelN; c++) {
        const int64_t row = weight_row(args, panel, c);
        out[c] = 0;
        if (row < args.n) memcpy(out + c, (const uint8_t*)args.w + row * args.w_stride + scale_at(args), 4);
    }
}

// The integer sums of a panel as floats, with both scales applied.
struct ScaledSums {
    const uint32_t* c;
    const float* row_scales;
    const int32_t* excess;
    float scales[kPanelN];
    ScaledSums(const Linear& args, int64_t row, int64_t panel, const void* c) : c((const uint32_t*)c) {
        const QuantizedX rows(args, args.packed_x);
        row_scales = rows.scales + row, excess = rows.excess + row;
        if (args.packed)
            memcpy(scales, packed_panel<Int8Mma>(args, panel) + packed_k<Int8Mma>(args) * kPanelN, sizeof scales);
        else gather_scales(args, panel, scales);
        for (float& scale : scales) scale = __builtin_fabsf(scale);
    }
    vf operator()(int64_t r, int part) const {
        const vi sums = sub_int(load_int(c + r * kPanelN + part), set1_int(uint32_t(excess[r])));
        return rounded(mul(mul(to_float(sums), load(scales + part)), set1(row_scales[r])));
    }
};

}  // namespace
}  // namespace batchgen
