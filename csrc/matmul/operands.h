// Kinds of matrix multiply-accumulate (Mma): how a kernel reads A and B, and what it adds up.
//
// A and B are words of 32 bits that hold kPerWord neighbouring values of K: a float, a pair of bf16, or two or four
// int8 values. A is x [M, K], B is w [N, K] transposed. Every template in matmul/ and attention/ with a parameter Mma
// takes one of FloatMma, Bf16Mma and Int8Mma.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "simd/numeric.h"
#include "simd/target.h"

namespace batchgen {
namespace {

// In place of tile registers, for products in vectors.
struct NoTiles {};

// What FloatMma and Bf16Mma share: sums and results in fp32.
struct FloatMmaBase {
    using Arithmetic = Fused;
    static constexpr int kMultipleOfK = 1;  // K is padded with zeros to a multiple of it
    using Sum = vf;
    using Operand = uint32_t;  // the word of a column of B
    using Number = float;
    static vi load_b(const Operand* b) { return load_int(b); }
    static vf zero_sum() { return zero(); }
    static vf load_scaled(const float* c, float scale) { return mul(load(c), set1(scale)); }
    static void store_sum(float* c, vf sum) { store(c, sum); }
};

// Products of floats; bf16 and fp16 are widened.
struct FloatMma : FloatMmaBase {
    using Tiles = NoTiles;
    using Value = float;
    static constexpr int kPerWord = 1;
    static inline vf dot(vi a, vi b, vf c) { return fma(as_float(a), as_float(b), c); }
};
#ifdef BATCHGEN_FAST_BF16
// Products of bf16 pairs, with sums in fp32.
struct Bf16Mma : FloatMmaBase {
#ifdef BATCHGEN_TILES
    using Tiles = batchgen::Tiles;
#else
    using Tiles = NoTiles;
#endif
    using Value = bf16;
    static constexpr int kPerWord = 2;
    static inline vf dot(vi a, vi b, vf c) { return dot_pairs(a, b, c); }
    static inline vi to_operand(vf first, vf second) { return to_pairs(first, second); }
    static inline void twice(vf a, vf& first, vf& second) { repeated(a, first, second); }
};
#endif

// Rows of C in a micro-tile (MR): its accumulators, two vectors a row, fill the registers but for a few.
#if defined(__aarch64__)
constexpr int kTileM = 12;
#else
constexpr int kTileM = W == 16 ? 12 : 6;
#endif
// Columns of B in a panel, and of C in a micro-tile (NR).
constexpr int kPanelN = 2 * W;

// Int8Mma::Operand by the type of x: a word of two int16 meets 16 bits of w, a word of four int8 meets 32.
inline uint16_t operand_with(int16_t) { return 0; }
inline uint32_t operand_with(int8_t) { return 0; }

// Exact integer products of int8 weights and of x, quantized on the way.
struct Int8Mma {
    using Value = XInt8;
    using Arithmetic = Apart;
    static constexpr int kMultipleOfK = 4;
    using Sum = vi;
    using Operand = decltype(operand_with(XInt8{}));
    using Number = uint32_t;
    static constexpr int kPerWord = 4 / sizeof(XInt8);
    static vi load_b(const Operand* b) { return load_int8(b); }
    static vi zero_sum() { return set1_int(0); }
    static vi load_scaled(const uint32_t* c, float) { return load_int(c); }  // the scale is one
    static void store_sum(uint32_t* c, vi sum) { store_int(c, sum); }
    static vi dot(vi a, vi b, vi c) { return dot_int8(a, b, c); }
};

// Whether an Mma is Int8Mma.
template <class Mma>
constexpr bool kIsInt8 = __is_same(Mma, Int8Mma);

// Whether an Mma runs in tile registers: bf16 pairs and bytes do, where the set has such registers.
template <class Mma>
constexpr bool uses_tiles() {
    return kTiles && Mma::kPerWord > 1;
}

// Calls f<Mma, T>() with the Mma of a linear layer and the type of x.
template <class F>
inline auto with_mma(const Linear& args, F f) {
    if (args.int8)
        return with_type(args.type, [&](auto* type) { return f.template operator()<Int8Mma, __typeof__(*type)>(); });
#ifdef BATCHGEN_FAST_BF16
    if (args.type == Type::BF16) return f.template operator()<Bf16Mma, bf16>();
#endif
    switch (args.type) {
        case Type::BF16: return f.template operator()<FloatMma, bf16>();
        case Type::F16: return f.template operator()<FloatMma, f16>();
        default: return f.template operator()<FloatMma, float>();
    }
}

}  // namespace
}  // namespace batchgen
