// What the products of matrices are made of: how A and B lie in words of 32 bits, and what sums are kept in.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "simd/numeric.h"
#include "simd/target.h"

namespace batchgen {
namespace {

struct NoTiles {};  // where products are made in vectors

// What is summed up, where B lies, and where C does.
struct FloatMmaBase {
    using Arithmetic = Fused;
    static constexpr int kWhole = 1;  // depths are filled up to a multiple of it
    using Sum = vf;
    using Operand = uint32_t;  // a column of B at one depth
    using Number = float;
    static vi columns(const Operand* b) { return load_int(b); }
    static vf none() { return zero(); }
    static vf scaled(const float* c, float scale) { return mul(load(c), set1(scale)); }
    static void put(float* c, vf sum) { store(c, sum); }
};

struct FloatMma : FloatMmaBase {
    using Tiles = NoTiles;
    using Value = float;
    static constexpr int kPair = 1;  // values in 32 bits
    static inline vf dot(vi a, vi b, vf c) { return fma(as_float(a), as_float(b), c); }
};
#ifdef BATCHGEN_FAST_BF16
struct Bf16Mma : FloatMmaBase {
#ifdef BATCHGEN_TILES
    using Tiles = batchgen::Tiles;
#else
    using Tiles = NoTiles;
#endif
    using Value = bf16;
    static constexpr int kPair = 2;
    static inline vf dot(vi a, vi b, vf c) { return dot_pairs(a, b, c); }
    static inline vi to_operand(vf first, vf second) { return to_pairs(first, second); }
    static inline void twice(vf a, vf& first, vf& second) { repeated(a, first, second); }
};
#endif

// Accumulators fill the registers, but for a few: 12 rows of 2 vectors where there are 32 of them.
#if defined(__aarch64__)
constexpr int kTileM = 12;
#else
constexpr int kTileM = W == 16 ? 12 : 6;
#endif
constexpr int kPanelN = 2 * W;

inline uint16_t operand_with(int16_t) { return 0; }
inline uint32_t operand_with(int8_t) { return 0; }

struct Int8Mma {
    using Value = Code;
    using Arithmetic = Apart;
    static constexpr int kWhole = 4;
    using Sum = vi;
    using Operand = decltype(operand_with(Code{}));
    using Number = uint32_t;
    static constexpr int kPair = 4 / sizeof(Code);
    static vi columns(const Operand* b) { return load_codes(b); }
    static vi none() { return set1_int(0); }
    static vi scaled(const uint32_t* c, float) { return load_int(c); }  // by one
    static void put(uint32_t* c, vi sum) { store_int(c, sum); }
    static vi dot(vi a, vi b, vi c) { return dot_codes(a, b, c); }
};

template <class Mma>
constexpr bool kIsInt8 = __is_same(Mma, Int8Mma);

// What is done in tile registers where there are some: products of pairs, and of bytes.
template <class Mma>
constexpr bool uses_tiles() {
    return kTiles && Mma::kPair > 1;
}

// Calls f with the kind of product and x's type.
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
