// Rows of blocks as they lie in a GGUF, or as other files' codes are put (quant/int4_groups.h, quant/fp8.h), to rows of
// floats.
//
// Every packed format comes down to the same thing: a block of integers of at most 8 bits (codes), and for each run of
// 16 or 32 of them a scale and a minimum; a value is code * scale + minimum. A format is a struct that takes a block
// apart in this way. Codes and scales are so short that the product is exact, and a minimum of -0 adds nothing, not
// even a sign: the results are those of any other order of computing.
#pragma once

#include <stdint.h>
#include <string.h>

#include "simd/numeric.h"
#include "simd/target.h"

namespace batchgen {
namespace {

template <int Values, int Bytes, int Run>
struct BlockShape {
    static constexpr int kValues = Values, kBytes = Bytes, kRun = Run;
    static constexpr bool kFloats = false;  // codes are numbers of FP8 (quant/fp8.h), and not integers
    // Where a block has its codes, if nothing is to be put together for them: bytes, or nibbles, the low ones of
    // kNibbles bytes before the high ones. 0: there is.
    static constexpr int kQuantsAt = 0, kNibbles = 0;
};

// The same, of formats with a kQuantsAt.
template <int Values, int Bytes, int Run, int CodesAt, int Nibbles>
struct PlainShape : BlockShape<Values, Bytes, Run> {
    static constexpr int kQuantsAt = CodesAt, kNibbles = Nibbles;
};

inline float half_at(const uint8_t* p) {
    f16 half;
    memcpy(&half, p, sizeof half);
    return to_float(half);
}

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

// As many bytes as a vector of the set has, but no more than 32: neighbours that are taken apart alike in every format.
constexpr int kSome = W < 8 ? 16 : 32;
typedef uint8_t Some __attribute__((vector_size(kSome)));
typedef uint32_t SomeWords __attribute__((vector_size(kSome)));
typedef uint64_t SomeLongs __attribute__((vector_size(kSome)));

// So many bits of each byte from bit `shift` on.
template <int Bits>
inline void bits_of(const Some& bytes, int shift, Some& out) {
    out = (Some)((SomeWords)bytes >> shift) & uint8_t((1 << Bits) - 1);
}

// 32 values, the first half of them in the low nibbles, less an offset.
inline void nibble_halves(const uint8_t* p, int8_t* quants, uint8_t offset = 0) {
    Bytes16 bytes;
    memcpy(&bytes, p, 16);
    const Bytes16 low = (bytes & 15) - offset, high = (bytes >> 4) - offset;
    memcpy(quants, &low, 16);
    memcpy(quants + 16, &high, 16);
}

#ifndef BATCHGEN_BYTES_OF_BITS
// Of 32 bits at p bytes that are all ones or all zeros.
inline void bytes_of_bits(const uint8_t* p, uint8_t* out) {
    for (int i = 0; i < 32; i += kSome) {
        SomeLongs bytes;
#pragma GCC unroll 4
        for (int j = 0; j < kSome / 8; j++) bytes[j] = p[i / 8 + j] * 0x0101010101010101u;
        const Some of_bits = (Some)((Some)(bytes & 0x8040201008040201u) != 0);  // of byte j only bit j
        memcpy(out + i, &of_bits, kSome);
    }
}
#endif

// As `nibble_halves`, with the 32 bits at `fifth` above the nibbles; Signed: less 16, so that upper bits are ones where
// it is 0.
template <bool Signed>
inline void five_bit_halves(const uint8_t* p, const uint8_t* fifth, int8_t* quants) {
    uint8_t set[32];
    bytes_of_bits(fifth, set);
    Bytes16 bytes, upper[2];
    memcpy(&bytes, p, 16), memcpy(upper, set, 32);
    const Bytes16 low = (bytes & 15) | (Signed ? ~upper[0] & 0xf0 : upper[0] & 0x10);
    const Bytes16 high = (bytes >> 4) | (Signed ? ~upper[1] & 0xf0 : upper[1] & 0x10);
    memcpy(quants, &low, 16);
    memcpy(quants + 16, &high, 16);
}

// The 4-bit floats of OCP's microscaling formats, times two; and the values of the IQ4 formats.
constexpr int8_t kFp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// As `nibble_halves`, what they stand for; Indexes: where in the table that is.
template <bool Indexes>
inline void table_halves(const int8_t* table, const uint8_t* p, int8_t* quants) {
    if constexpr (Indexes) return nibble_halves(p, quants);
    Bytes16 bytes;
    memcpy(&bytes, p, 16);
    const Bytes16 low = bytes & 15, high = bytes >> 4;
    look_up(table, (const uint8_t*)&low, quants);
    look_up(table, (const uint8_t*)&high, quants + 16);
}

constexpr int kLeastRun = 16;  // values that have the same scale and minimum, in every format

constexpr int64_t kChunkK = 256;  // values of a row at a time: whole blocks of every format
constexpr int64_t kChunkRuns = kChunkK / kLeastRun;

}  // namespace
}  // namespace batchgen
