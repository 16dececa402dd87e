// The shape of quantized blocks, and what unpacks their bits.
//
// Every block format comes down to the same: a block of integers of at most 8 bits (or FP8 numbers), and for each run
// of 16 or 32 of them a scale and a minimum; a number is value * scale + minimum. A format is a struct with a shape and
// a function `unpack` (quant/gguf.h, quant/int4_groups.h, quant/fp8.h). Values and scales are so short that the product
// is exact, and a minimum of -0 adds nothing, not even a sign: every order of computing gives the same result.
#pragma once

#include <stdint.h>
#include <string.h>

#include "simd/numeric.h"
#include "simd/target.h"

namespace batchgen {
namespace {

// Values and bytes of a block, and values of a run.
template <int Values, int Bytes, int Run>
struct BlockShape {
    static constexpr int kValues = Values, kBytes = Bytes, kRun = Run;
    static constexpr bool kFloats = false;  // values are FP8 numbers (quant/fp8.h)
    // Where a block has its values, if these are bytes or nibbles as they lie: bytes where kNibbles is 0, else the low
    // nibbles of kNibbles bytes before their high ones. kQuantsAt is 0 where values have to be put together.
    static constexpr int kQuantsAt = 0, kNibbles = 0;
};

// The shape of a format with a kQuantsAt.
template <int Values, int Bytes, int Run, int QuantsAt, int Nibbles>
struct PlainShape : BlockShape<Values, Bytes, Run> {
    static constexpr int kQuantsAt = QuantsAt, kNibbles = Nibbles;
};

// The fp16 number at p.
inline float half_at(const uint8_t* p) {
    f16 half;
    memcpy(&half, p, sizeof half);
    return to_float(half);
}

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

// Bytes that are unpacked together: a vector of the set, but no more than 32, which every format unpacks alike.
constexpr int kVectorBytes = W < 8 ? 16 : 32;
typedef uint8_t VectorOfBytes __attribute__((vector_size(kVectorBytes)));
typedef uint32_t VectorWords __attribute__((vector_size(kVectorBytes)));
typedef uint64_t VectorLongs __attribute__((vector_size(kVectorBytes)));

// Bits [shift, shift + Bits) of each byte.
template <int Bits>
inline void bits_of(const VectorOfBytes& bytes, int shift, VectorOfBytes& out) {
    out = (VectorOfBytes)((VectorWords)bytes >> shift) & uint8_t((1 << Bits) - 1);
}

// Unpacks 32 values, the first half from the low nibbles, less an offset.
inline void nibble_halves(const uint8_t* p, int8_t* quants, uint8_t offset = 0) {
    Bytes16 bytes;
    memcpy(&bytes, p, 16);
    const Bytes16 low = (bytes & 15) - offset, high = (bytes >> 4) - offset;
    memcpy(quants, &low, 16);
    memcpy(quants + 16, &high, 16);
}

#ifndef BATCHGEN_BYTES_OF_BITS
// Each of the 32 bits at p as a byte of all ones or all zeros.
inline void bytes_of_bits(const uint8_t* p, uint8_t* out) {
    for (int i = 0; i < 32; i += kVectorBytes) {
        VectorLongs bytes;
#pragma GCC unroll 4
        for (int j = 0; j < kVectorBytes / 8; j++) bytes[j] = p[i / 8 + j] * 0x0101010101010101u;
        const VectorOfBytes of_bits =
            (VectorOfBytes)((VectorOfBytes)(bytes & 0x8040201008040201u) != 0);  // only bit j of byte j
        memcpy(out + i, &of_bits, kVectorBytes);
    }
}
#endif

// Unpacks 32 values of five bits: nibbles as `nibble_halves` does, and the 32 bits at `fifth` above them. Signed: less
// 16, so the upper bits are ones where the fifth is 0.
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

// Values of the 4-bit floats of OCP's microscaling formats, times two; and of the IQ4 formats.
constexpr int8_t kFp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Unpacks 32 nibbles as `nibble_halves` does and looks them up in a table; Indexes: they stay indexes.
template <bool Indexes>
inline void table_halves(const int8_t* table, const uint8_t* p, int8_t* quants) {
    if constexpr (Indexes) return nibble_halves(p, quants);
    Bytes16 bytes;
    memcpy(&bytes, p, 16);
    const Bytes16 low = bytes & 15, high = bytes >> 4;
    look_up(table, (const uint8_t*)&low, quants);
    look_up(table, (const uint8_t*)&high, quants + 16);
}

constexpr int kLeastRun = 16;  // values with one scale and minimum, in every format

constexpr int64_t kChunkK = 256;  // values of a row that are handled together: whole blocks of every format
constexpr int64_t kChunkRuns = kChunkK / kLeastRun;

}  // namespace
}  // namespace batchgen
