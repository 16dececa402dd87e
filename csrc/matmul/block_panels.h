// Prepacked panels of block-quantized weights: kPanelN columns, in as many bytes as the rows have.
//
// A panel is [blocks of a row], each with the blocks of all columns: first their scales and minimums, those of a run
// side by side, then their quantized values in words of 32 bits, a vector of words for each four values of K. A word
// has eight slots of four bits: slot i is value i of these four in the order of an operand, in that lane. Values of
// more than four bits have their upper bits in a second plane of words; where a plane has fewer bits, several groups of
// four share its words, shifted. Where values are multiplied as bytes (matmul/split_bytes.h), slots 2 i and 2 i + 1 are
// byte i of the two vectors of columns, and a plane of values of eight bits is the bytes of one vector. They lie
// alike where they are multiplied as bf16 pairs (matmul/bf16_pairs.h). For tile registers most formats have the values
// of a row side by side instead (matmul/row_panels.h).
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/layout.h"
#include "matmul/operands.h"
#include "quant/blocks.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// W words of 32 bits, with the operators of the compiler's vector types.
typedef uint32_t Lanes __attribute__((vector_size(4 * W)));

// What quantized values are: integers, indexes into a table of values, or FP8 numbers (quant/fp8.h).
enum class QuantsAre { Integers, InTable, Float8 };

// A kind of quantized values: what they are, and their bits in the first and in the second plane.
template <int Low, int High, QuantsAre Are = QuantsAre::Integers>
struct QuantKind {
    static constexpr int kLow = Low, kHigh = High;
    static constexpr bool kInTable = Are == QuantsAre::InTable, kFloat8 = Are == QuantsAre::Float8;
};

// Layouts of the scales of a panel's block, which begins at `at`. `get` loads the scales and minimums of a run for W
// columns from `c` on; `put` stores those of column `c`, from its block in the file, into memory that was zeros. kBytes
// counts the bytes of a column.
//

inline vf halves_at(const uint8_t* at, int c) { return load((const f16*)at + c); }
inline void put_half(const uint8_t* block, int c, uint8_t* at) { memcpy(at + 2 * c, block, 2); }

// An fp16 scale of each block; quantized values are larger by Offset than what they stand for.
template <int Offset>
struct HalfScale {
    static constexpr int kBytes = 2;
    static constexpr bool kMinimums = false;  // other than the offset times the scale
    static void get(const uint8_t* at, int, int c, vf& scale, vf& minimum) {
        scale = halves_at(at, c), minimum = mul(scale, set1(-Offset));
    }
    static void put(const uint8_t* block, int c, uint8_t* at) { put_half(block, c, at); }
};

// An fp16 scale and an fp16 minimum of each block.
struct HalfScaleAndMinimum {
    static constexpr int kBytes = 4;
    static constexpr bool kMinimums = true;
    static void get(const uint8_t* at, int, int c, vf& scale, vf& minimum) {
        scale = halves_at(at, c), minimum = halves_at(at, kPanelN + c);
    }
    static void put(const uint8_t* block, int c, uint8_t* at) {
        put_half(block, c, at), put_half(block + 2, kPanelN + c, at);
    }
};

// A scale of each block that is a power of two, one byte (MXFP4).
struct ExponentScale {
    static constexpr int kBytes = 1;
    static constexpr bool kMinimums = false;
    static void get(const uint8_t* at, int, int c, vf& scale, vf& minimum) {
        const Lanes e = (Lanes)load_bytes(at + c);
        // 2^(e - 128) is subnormal for the lowest exponents.
        const Lanes tiny = (Lanes)(e < 2);
        scale = as_float((vi)(((e - 1) << 23 & ~tiny) | ((0x200000 + 0x200000 * e) & tiny))), minimum = set1(-0.0f);
    }
    static void put(const uint8_t* block, int c, uint8_t* at) { at[c] = block[0]; }
};

// An fp16 scale and an fp16 minimum of each block, and of each run integers of 6 bits that they are multiplied with
// (Q4_K, Q5_K). A byte has the low four bits of both integers; another one the upper bits of two columns.
struct SixBitPairs {
    static constexpr int kBytes = 16, kRunBytes = kPanelN + W;
    static constexpr bool kMinimums = true;
    static void get(const uint8_t* at, int run, int c, vf& scale, vf& minimum) {
        const uint8_t* p = at + 4 * kPanelN + run * kRunBytes;
        const Lanes low = (Lanes)load_bytes(p + c), high = (Lanes)load_bytes(p + kPanelN) >> (c / W * 4);
        const vf scales = to_float((vi)((low & 15) | (high & 3) << 4));
        const vf minimums = to_float((vi)(low >> 4 | (high >> 2 & 3) << 4));
        scale = mul(halves_at(at, c), scales), minimum = mul(mul(set1(-1), halves_at(at, kPanelN + c)), minimums);
    }
    static void put(const uint8_t* block, int c, uint8_t* at) {
        put_half(block, c, at), put_half(block + 2, kPanelN + c, at);
        uint8_t scales[16];
        six_bit_quants(block + 4, scales);
        const uint8_t* minimums = scales + 8;
        for (int run = 0; run < 8; run++) {
            uint8_t* p = at + 4 * kPanelN + run * kRunBytes;
            p[c] = uint8_t((scales[run] & 15) | minimums[run] << 4);
            p[kPanelN + c % W] |= uint8_t((scales[run] >> 4 | minimums[run] >> 4 << 2) << (c / W * 4));
        }
    }
};

// An fp16 scale of each block, and of each run an integer of 6 bits less 32 that it is multiplied with (Q3_K, IQ4_XS).
// A byte has the low four bits of two columns; another one the upper bits of two columns and two runs.
template <class Block, int At, int Offset>
struct SixBitScales {
    static constexpr int kRuns = Block::kValues / Block::kRun, kBytes = 2 + kRuns * 3 / 4;
    static constexpr bool kMinimums = false;
    static void get(const uint8_t* at, int run, int c, vf& scale, vf& minimum) {
        const uint8_t* p = at + 2 * kPanelN;
        const Lanes low = (Lanes)load_bytes(p + run * W) >> (c / W * 4) & 15;
        const Lanes high = (Lanes)load_bytes(p + (kRuns + run / 2) * W) >> (run % 2 * 4 + c / W * 2) & 3;
        scale = mul(halves_at(at, c), sub(to_float((vi)(low | high << 4)), set1(32))),
        minimum = mul(scale, set1(-Offset));
    }
    static void put(const uint8_t* block, int c, uint8_t* at) {
        put_half(block + At, c, at);
        uint8_t scales[kRuns];
        Block::scale_quants(block, scales);
        uint8_t* p = at + 2 * kPanelN;
        for (int run = 0; run < kRuns; run++) {
            const int scale = scales[run];
            p[run * W + c % W] |= uint8_t((scale & 15) << (c / W * 4));
            p[(kRuns + run / 2) * W + c % W] |= uint8_t(scale >> 4 << (run % 2 * 4 + c / W * 2));
        }
    }
};

// An fp16 scale and an fp16 minimum of each block, and of each run integers of 4 bits that they are multiplied with
// (Q2_K).
struct NibblePairs {
    static constexpr int kBytes = 20;
    static constexpr bool kMinimums = true;
    static void get(const uint8_t* at, int run, int c, vf& scale, vf& minimum) {
        const vi both = load_bytes(at + (4 + run) * kPanelN + c);
        scale = mul(halves_at(at, c), low_nibbles(both));
        minimum = mul(mul(set1(-1), halves_at(at, kPanelN + c)), high_nibbles(both));
    }
    static void put(const uint8_t* block, int c, uint8_t* at) {
        put_half(block + 80, c, at), put_half(block + 82, kPanelN + c, at);
        for (int run = 0; run < 16; run++) at[(4 + run) * kPanelN + c] = block[run];
    }
};

// An fp16 scale of each block, and of each run an integer of 8 bits that it is multiplied with (Q6_K).
struct ByteScales {
    static constexpr int kBytes = 18;
    static constexpr bool kMinimums = false;
    static void get(const uint8_t* at, int run, int c, vf& scale, vf& minimum) {
        scale = mul(halves_at(at, c), load((const int8_t*)at + (2 + run) * kPanelN + c)),
        minimum = mul(scale, set1(-32));
    }
    static void put(const uint8_t* block, int c, uint8_t* at) {
        put_half(block + 208, c, at);
        for (int run = 0; run < 16; run++) at[(2 + run) * kPanelN + c] = block[192 + run];
    }
};

// Four bytes of each block: a zero point and the upper bytes of a scale (quant/int4_groups.h), or an fp32 scale.
struct WordScale {
    static constexpr int kBytes = 4;
    static vi words_at(const uint8_t* at, int c) { return load_int((const uint32_t*)at + c); }
    static void put(const uint8_t* block, int c, uint8_t* at) { memcpy(at + 4 * c, block, 4); }
};
struct ZeroPointScale : WordScale {
    static constexpr bool kMinimums = true;
    static void get(const uint8_t* at, int, int c, vf& scale, vf& minimum) {
        const Lanes words = (Lanes)words_at(at, c);
        scale = as_float((vi)(words & 0xffffff00u)), minimum = mul(mul(set1(-1), scale), to_float((vi)(words & 255)));
    }
};
struct FloatScale : WordScale {
    static constexpr bool kMinimums = false;
    static void get(const uint8_t* at, int, int c, vf& scale, vf& minimum) {
        scale = as_float(words_at(at, c)), minimum = set1(-0.0f);
    }
};

// A block format in panels. Offset is added to the values of `unpack`, so that none is below zero.
template <class Format, class ScalesOf, class KindOf, int Offset>
struct InPanels {
    using Block = Format;
    using Scales = ScalesOf;
    using Kind = KindOf;
    static constexpr int kOffset = Offset;
    static constexpr bool kMinimums = Scales::kMinimums;
    static constexpr int kRuns = Block::kValues / Block::kRun;
    static constexpr int64_t kBlockBytes = int64_t(kPanelN) * Block::kBytes, kScaleBytes = kPanelN * Scales::kBytes;
    static constexpr int64_t kLowBytes = kPanelN * Block::kValues * Kind::kLow / 8;
    static_assert(kScaleBytes + kPanelN * Block::kValues * (Kind::kLow + Kind::kHigh) / 8 == kBlockBytes);
};

// Calls f<InPanels<...>>(table) for a block format; table is null where values are not looked up.
template <class F>
inline void with_panels(BlockType type, F f) {
    using Four = QuantKind<4, 0>;
    using Five = QuantKind<4, 1>;
    using Floats8 = QuantKind<4, 4, QuantsAre::Float8>;
    using Looked = QuantKind<4, 0, QuantsAre::InTable>;
    const int8_t* plain = nullptr;
    switch (type) {
        case BlockType::Q4_0: return f.template operator()<InPanels<Q4_0, HalfScale<8>, Four, 8>>(plain);
        case BlockType::Q4_1: return f.template operator()<InPanels<Q4_1, HalfScaleAndMinimum, Four, 0>>(plain);
        case BlockType::Q5_0: return f.template operator()<InPanels<Q5_0, HalfScale<16>, Five, 16>>(plain);
        case BlockType::Q5_1: return f.template operator()<InPanels<Q5_1, HalfScaleAndMinimum, Five, 0>>(plain);
        case BlockType::Q8_0: return f.template operator()<InPanels<Q8_0, HalfScale<128>, QuantKind<4, 4>, 128>>(plain);
        case BlockType::Q2_K: return f.template operator()<InPanels<Q2_K, NibblePairs, QuantKind<2, 0>, 0>>(plain);
        case BlockType::Q3_K:
            return f.template operator()<InPanels<Q3_K, SixBitScales<Q3_K, 108, 4>, QuantKind<2, 1>, 4>>(plain);
        case BlockType::Q4_K: return f.template operator()<InPanels<Q4_K, SixBitPairs, Four, 0>>(plain);
        case BlockType::Q5_K: return f.template operator()<InPanels<Q5_K, SixBitPairs, Five, 0>>(plain);
        case BlockType::Q6_K: return f.template operator()<InPanels<Q6_K, ByteScales, QuantKind<4, 2>, 32>>(plain);
        case BlockType::IQ4_NL: return f.template operator()<InPanels<IQ4_NL, HalfScale<0>, Looked, 0>>(kIq4Values);
        case BlockType::IQ4_XS:
            return f.template operator()<InPanels<IQ4_XS, SixBitScales<IQ4_XS, 0, 0>, Looked, 0>>(kIq4Values);
        case BlockType::MXFP4: return f.template operator()<InPanels<MXFP4, ExponentScale, Looked, 0>>(kFp4Values);
        case BlockType::W4_G32: return f.template operator()<InPanels<Int4Group<32>, ZeroPointScale, Four, 0>>(plain);
        case BlockType::W4_G64: return f.template operator()<InPanels<Int4Group<64>, ZeroPointScale, Four, 0>>(plain);
        case BlockType::W4_G128: return f.template operator()<InPanels<Int4Group<128>, ZeroPointScale, Four, 0>>(plain);
        case BlockType::FP8_G32: return f.template operator()<InPanels<Fp8<32>, FloatScale, Floats8, 0>>(plain);
        case BlockType::FP8_G128: return f.template operator()<InPanels<Fp8<128>, FloatScale, Floats8, 0>>(plain);
        default: return;  // F32, F16, BF16 are numbers
    }
}

// Whether w is prepacked as numbers or int8 values, which the micro-kernel reads directly; other panels are unpacked.
inline bool is_operand(const Linear& args) { return args.packed && args.packing == BlockType::F32; }

// Whether quantized values themselves are multiplied with x in bf16, and scales applied to sums: integers, with x split
// into high and low bytes (matmul/split_bytes.h), or as bf16 pairs (matmul/bf16_pairs.h) FP8, and values of four bits
// where such products are as fast as those of bytes (BATCHGEN_EVEN_PAIRS). Tile registers cannot apply a scale between
// two steps.
#if (defined(BATCHGEN_VNNI) || defined(BATCHGEN_FAST_BF16)) && !defined(BATCHGEN_TILES)
#define BATCHGEN_SPLIT_BYTES
constexpr bool kHasSplitBytes = true;
#else
constexpr bool kHasSplitBytes = false;
#endif
constexpr bool kHasPairs = kFastBF16 && !kTiles;
#ifdef BATCHGEN_EVEN_PAIRS
constexpr bool kEvenPairs = true;
#else
constexpr bool kEvenPairs = false;
#endif
template <class Kind>
constexpr bool kAsPairs = kHasPairs && (Kind::kFloat8 || (kEvenPairs && Kind::kLow == 4 && Kind::kHigh == 0));
// Whether a layer multiplies quantized values as bf16 pairs.
inline bool multiplies_pairs(const Linear& args) {
    bool pairs = false;
    if (args.type == Type::BF16 && !args.int8)
        with_panels(args.packing, [&]<class Format>(const int8_t*) { pairs = kAsPairs<typename Format::Kind>; });
    return pairs;
}
// Whether a layer multiplies integers with x split into bytes.
inline bool splits_bytes(const Linear& args) {
    return kHasSplitBytes && args.type == Type::BF16 && !args.int8 && args.packing != BlockType::F32 &&
           !is_fp8(args.packing) && !multiplies_pairs(args);
}

// Whether panels of a format have the values of a row side by side, for tile registers (matmul/row_panels.h): those
// whose runs have 32 values of at most five bits, and FP8.
template <class Mma, class Format>
constexpr bool kInRows =
    kTiles && Mma::kPerWord == 2 && Format::Kind::kLow == 4 && (Format::Kind::kHigh <= 1 || Format::Kind::kFloat8);

// Whether all block-quantized weights are multiplied in one of these ways.
template <class Mma>
constexpr bool kMultipliesQuants = false;
#ifdef BATCHGEN_FAST_BF16
template <>
constexpr bool kMultipliesQuants<Bf16Mma> = !kTiles;
#endif

// Bytes of a panel of block-quantized weights, and the address of one.
inline int64_t block_panel_bytes(const Linear& args) { return kPanelN * args.w_stride; }

inline const uint8_t* block_panel(const Linear& args, int64_t panel) {
    return (const uint8_t*)args.w + panel * block_panel_bytes(args);
}

constexpr int kQuad = 16;  // values of K with one scale and minimum in every format: four groups of four

// The eight slots of a group, from the bytes of its four values in W columns each, which are less than 16.
template <class Mma, bool InBytes>
inline Lanes slots_of(const Lanes (&columns)[2]) {
    if constexpr (InBytes || Mma::kPerWord == 1) {
        return columns[0] | columns[1] << 4;
    } else {
        Lanes even, slots = {};
        for (int i = 0; i < W; i++) even[i] = i % 2 ? 0 : ~0u;
        for (int part = 0; part < 2; part++) {
            vf halves[2];
            Mma::twice(as_float((vi)columns[part]), halves[0], halves[1]);
            for (int half = 0; half < 2; half++) {  // two neighbouring values of K are two lanes
                const Lanes bytes = (Lanes)as_int(halves[half]), own = (bytes & even) | (bytes >> 8 & ~even);
                slots |= (own & 0x00ff00ff) << (8 * part + 4 * half);
            }
        }
        return slots;
    }
}

// The words of a group in both planes, from its values in bytes.
template <class Mma, class T, class Kind>
inline void planes_of(const Lanes (&quants)[2], Lanes (&planes)[2]) {
    constexpr bool kInBytes = __is_same(T, bf16) && (kAsPairs<Kind> || (kHasSplitBytes && !Kind::kFloat8));
    if constexpr (kInBytes && Kind::kLow + Kind::kHigh == 8) {
        planes[0] = quants[0], planes[1] = quants[1];
    } else {
        const auto plane = [&](int shift, int bits) {
            const uint32_t mask = ((1u << bits) - 1) * 0x01010101u;
            const Lanes columns[2] = {quants[0] >> shift & mask, quants[1] >> shift & mask};
            return slots_of<Mma, kInBytes>(columns);
        };
        planes[0] = plane(0, Kind::kLow), planes[1] = Lanes{};
        if constexpr (Kind::kHigh) planes[1] = plane(Kind::kLow, Kind::kHigh);
    }
}

// The layout of a format's panels, so that functions are compiled for a kind of quantized values and not for a format.
struct PanelLayout {
    const int8_t* table;
    int64_t block_bytes, scale_bytes, low_bytes;
    int log2_quads_of_block, log2_quads_of_run;
};

template <class Format>
constexpr PanelLayout panel_layout(const int8_t* table) {
    using Block = typename Format::Block;
    return {table,
            Format::kBlockBytes,
            Format::kScaleBytes,
            Format::kLowBytes,
            __builtin_ctz(Block::kValues / kQuad),
            __builtin_ctz(Block::kRun / kQuad)};
}

// The blocks of up to kChunkK values of K of a panel, from `at` on. next: the memory that is read after the panel.
struct PanelChunk {
    struct Planes {
        const uint8_t *low, *high;
    };
    const uint8_t *blocks, *ahead;  // ahead: the memory that is read after the chunk
    int64_t k_count, num_blocks, ahead_of_quad;

    void seek(const PanelLayout& layout, const uint8_t* panel, int64_t k, int64_t at, const uint8_t* next) {
        k_count = smaller(kChunkK, k - at);
        num_blocks = k_count / kQuad >> layout.log2_quads_of_block;
        blocks = panel + (at / kQuad >> layout.log2_quads_of_block) * layout.block_bytes;
        ahead = at + kChunkK < k ? blocks + num_blocks * layout.block_bytes : next;
        ahead_of_quad = layout.block_bytes >> layout.log2_quads_of_block;
    }
    // The quantized values of quad i. As many bytes of what comes after the chunk are prefetched.
    template <class Kind>
    __attribute__((always_inline)) Planes quad(const PanelLayout& layout, int64_t i) const {
        constexpr int64_t kLowBytes = kPanelN * kQuad * Kind::kLow / 8, kHighBytes = kPanelN * kQuad * Kind::kHigh / 8;
        const int64_t block = i >> layout.log2_quads_of_block, within = i - (block << layout.log2_quads_of_block);
        for (int64_t line = 0; line < ahead_of_quad; line += 64) __builtin_prefetch(ahead + i * ahead_of_quad + line);
        const uint8_t* low = blocks + block * layout.block_bytes + layout.scale_bytes;
        return {low + within * kLowBytes, low + layout.low_bytes + within * kHighBytes};
    }
};

// Whether a value lies in a slot of four bits, or else in a byte; and the bits below it in its half of a word, at the
// place of one of four slots.
template <class Kind>
constexpr bool kInSlots = Kind::kLow + Kind::kHigh <= 4;
template <class Kind>
constexpr int bits_below(int place) {
    return kInSlots<Kind> ? 4 * place : 8 * (place / 2);
}

// The slots of a group in a plane with so many bits a value.
template <int Bits>
__attribute__((always_inline)) inline Lanes slots_at(const uint8_t* plane, int group) {
    const Lanes words = (Lanes)load_int((const uint32_t*)plane + group * Bits / 4 * W) >> (group % (4 / Bits) * Bits);
    return Bits == 4 ? words : words & ((1u << Bits) - 1) * 0x11111111u;
}

// Stores the slots of a group into a plane, which was zeros.
inline void add_to_plane(uint8_t* plane, int bits, int64_t group, Lanes slots) {
    uint32_t* at = (uint32_t*)plane + group * bits / 4 * W;
    store_int(at, (vi)((Lanes)load_int(at) | slots << (group % (4 / bits) * bits)));
}

// Unpacks blocks of a row: their quantized values, indexes where there is a table, and the scale and minimum of each
// run.
template <class Format>
inline void unpack_runs(const uint8_t* packed, int64_t k_count, int8_t* quants, float* scales, float* minimums) {
    using Block = typename Format::Block;
    for (; k_count > 0; k_count -= Block::kValues, packed += Block::kBytes, quants += Block::kValues) {
        if constexpr (Format::Kind::kInTable) Block::template unpack<true>(packed, quants, scales, minimums);
        else Block::unpack(packed, quants, scales, minimums);
        scales += Format::kRuns, minimums += Format::kRuns;
    }
}

typedef uint8_t Quads __attribute__((vector_size(4 * W)));  // the bytes of a group in W columns

// Where values of a row lie side by side, a run of a panel has first 16 times 32 bytes, which have the lowest four bits
// of a value of column c, and above them those of column c + 16; and then a word of each column with the fifth bits.
// FP8 has a byte for each value, of one column after the other.
constexpr int kRowRun = 32;
template <class Kind>
constexpr int64_t kRowRunBytes = kPanelN * kRowRun * (Kind::kLow + Kind::kHigh) / 8;
constexpr int64_t kFifthBitsAt = kPanelN * kRowRun / 2;

// Packs the values [k, k + 32) of all columns of a panel so.
template <class Format>
inline void pack_row_run(const int8_t (&quants)[kPanelN][kChunkK], int64_t k, uint8_t* out) {
    const auto value = [&](int c, int i) { return uint8_t(quants[c][k + i] + Format::kOffset); };
    if constexpr (Format::Kind::kFloat8) {
        for (int c = 0; c < kPanelN; c++) memcpy(out + c * kRowRun, quants[c] + k, kRowRun);
        return;
    }
    for (int c = 0; c < W; c++)
        for (int i = 0; i < kRowRun; i++)
            out[c * kRowRun + i] = uint8_t((value(c, i) & 15) | (value(W + c, i) & 15) << 4);
    for (int c = 0; c < kPanelN && Format::Kind::kHigh; c++) {
        uint32_t bits = 0;
        for (int i = 0; i < kRowRun; i++) bits |= uint32_t(value(c, i) >> 4) << i;
        memcpy(out + kFifthBitsAt + c * 4, &bits, 4);
    }
}

// The value i of column c in a block whose values begin at `block`.
template <class Kind>
inline uint8_t value_in_rows(const uint8_t* block, int64_t i, int c) {
    const uint8_t* run = block + i / kRowRun * kRowRunBytes<Kind>;
    i %= kRowRun;
    if (Kind::kFloat8) return run[c * kRowRun + i];
    const int low = run[c % W * kRowRun + i] >> c / W * 4 & 15;
    const int high = Kind::kHigh ? run[kFifthBitsAt + c * 4 + i / 8] >> i % 8 & 1 : 0;
    return uint8_t(low | high << 4);
}

// Packs the rows of one panel.
template <class Mma, class T, class Format>
inline void prepack_block_panel(const Linear& args, int64_t panel, uint8_t* out) {
    using Block = typename Format::Block;
    using Kind = typename Format::Kind;
    alignas(64) int8_t quants[kPanelN][kChunkK] = {};
    float scales[kChunkRuns], minimums[kChunkRuns];
    memset(out, 0, block_panel_bytes(args));
    for (int64_t at = 0; at < args.k; at += kChunkK) {
        const int64_t here = smaller(kChunkK, args.k - at), first = at / Block::kValues, blocks = here / Block::kValues;
        uint8_t* to = out + first * Format::kBlockBytes;
        for (int c = 0; c < kPanelN; c++) {
            const int64_t row = weight_row(args, panel, c);
            memset(quants[c], 0, sizeof quants[c]);
            if (row >= args.n) continue;
            const uint8_t* packed = (const uint8_t*)args.w + row * args.w_stride + first * Block::kBytes;
            unpack_runs<Format>(packed, here, quants[c], scales, minimums);
            for (int64_t b = 0; b < blocks; b++)
                Format::Scales::put(packed + b * Block::kBytes, c, to + b * Format::kBlockBytes);
        }
        if constexpr (kInRows<Mma, Format>) {
            for (int64_t k = 0; k < here; k += kRowRun)
                pack_row_run<Format>(quants, k,
                                     to + k / Block::kValues * Format::kBlockBytes + Format::kScaleBytes +
                                         k % Block::kValues / kRowRun * kRowRunBytes<Kind>);
            continue;
        }
        for (int64_t kk = 0; kk < here; kk += 4 * W) {
            vi r[2][W];
            for (int part = 0; part < 2; part++) {
                for (int i = 0; i < W; i++)
                    r[part][i] =
                        (vi)((Quads)load_int((const uint32_t*)(quants[part * W + i] + kk)) + uint8_t(Format::kOffset));
                transpose(r[part]);
            }
            for (int i = 0; i < W && kk + 4 * i < here; i++) {
                const int64_t k = kk + 4 * i, group = k % Block::kValues / 4;
                uint8_t* low = to + k / Block::kValues * Format::kBlockBytes + Format::kScaleBytes;
                const Lanes own[2] = {(Lanes)r[0][i], (Lanes)r[1][i]};
                Lanes planes[2];
                planes_of<Mma, T, Kind>(own, planes);
                add_to_plane(low, Kind::kLow, group, planes[0]);
                if constexpr (Kind::kHigh) add_to_plane(low + Format::kLowBytes, Kind::kHigh, group, planes[1]);
            }
        }
    }
}

}  // namespace
}  // namespace batchgen
