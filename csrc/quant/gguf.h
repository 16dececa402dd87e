// The block formats of GGUF files, one struct each (llama.cpp's names).
//
// `unpack` takes a block apart into quantized values and the scale and minimum of each run; formats without minimums
// leave those alone.
#pragma once

#include <stdint.h>
#include <string.h>

#include "quant/block_shape.h"
#include "simd/target.h"

namespace batchgen {
namespace {

struct Q4_0 : PlainShape<32, 18, 32, 2, 16> {
    static void run_scales(const uint8_t* block, float* scales, float*) { scales[0] = half_at(block); }
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        nibble_halves(block + 2, quants, 8);
    }
};

struct Q4_1 : PlainShape<32, 20, 32, 4, 16> {
    static void run_scales(const uint8_t* block, float* scales, float* minimums) {
        scales[0] = half_at(block), minimums[0] = half_at(block + 2);
    }
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        nibble_halves(block + 4, quants);
    }
};

struct Q5_0 : BlockShape<32, 22, 32> {
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float*) {
        scales[0] = half_at(block);
        five_bit_halves<true>(block + 6, block + 2, quants);
    }
};

struct Q5_1 : BlockShape<32, 24, 32> {
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float* minimums) {
        scales[0] = half_at(block), minimums[0] = half_at(block + 2);
        five_bit_halves<false>(block + 8, block + 4, quants);
    }
};

struct Q8_0 : PlainShape<32, 34, 32, 2, 0> {
    static void run_scales(const uint8_t* block, float* scales, float*) { scales[0] = half_at(block); }
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        memcpy(quants, block + 2, 32);
    }
};

struct IQ4_NL : PlainShape<32, 18, 32, 2, 16> {
    static void run_scales(const uint8_t* block, float* scales, float*) { scales[0] = half_at(block); }
    template <bool Indexes = false>
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        table_halves<Indexes>(kIq4Values, block + 2, quants);
    }
};

struct MXFP4 : PlainShape<32, 17, 32, 1, 16> {
    static void run_scales(const uint8_t* block, float* scales, float*) {
        // 2^(e - 127), halved because the values of the table are doubled.
        const uint32_t e = block[0], bits = e < 2 ? 0x200000u << e : (e - 1) << 23;
        memcpy(scales, &bits, 4);
    }
    template <bool Indexes = false>
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        table_halves<Indexes>(kFp4Values, block + 1, quants);
    }
};

// Blocks of 256 values. In Q2_K to Q6_K the scales of runs are integers, which a float of the block multiplies.

// Unpacks 256 values of two bits: four times 32 from 32 bytes, twice.
inline void two_bits(const uint8_t* p, int8_t* quants) {
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i += kVectorBytes) {
            VectorOfBytes bytes, own;
            memcpy(&bytes, p + 32 * half + i, kVectorBytes);
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++) {
                bits_of<2>(bytes, 2 * part, own);
                memcpy(quants + 128 * half + 32 * part + i, &own, kVectorBytes);
            }
        }
}

// Adds bit i of 32 bytes, shifted left by Place, to the values [32 i, 32 i + 32), and `offset` to all values.
template <int Place>
inline void add_bits_by_32(const uint8_t* p, int8_t* quants, int8_t offset = 0) {
    for (int i = 0; i < 32; i += kVectorBytes) {
        VectorOfBytes bytes, bit, own;
        memcpy(&bytes, p + i, kVectorBytes);
#pragma GCC unroll 8
        for (int part = 0; part < 8; part++) {
            int8_t* at = quants + 32 * part + i;
            bits_of<1>(bytes, part, bit);
            memcpy(&own, at, kVectorBytes);
            own += (VectorOfBytes)((VectorWords)bit << Place) + uint8_t(offset);
            memcpy(at, &own, kVectorBytes);
        }
    }
}

// Unpacks 256 nibbles: of each 32 bytes the low ones, then the high ones.
inline void nibbles_by_32(const uint8_t* p, int8_t* quants) {
    for (int i = 0; i < 128; i += kVectorBytes) {
        VectorOfBytes bytes, own;
        memcpy(&bytes, p + i, kVectorBytes);
        int8_t* to = quants + i / 32 * 64 + i % 32;
        bits_of<4>(bytes, 0, own);
        memcpy(to, &own, kVectorBytes);
        bits_of<4>(bytes, 4, own);
        memcpy(to + 32, &own, kVectorBytes);
    }
}

// Unpacks eight scales and then eight minimums of 6 bits each from 12 bytes (Q4_K, Q5_K).
inline void six_bit_quants(const uint8_t* p, uint8_t* out) {
    typedef uint64_t Longs2 __attribute__((vector_size(16)));
    uint32_t first[2], last;  // four integers each, and above them the upper two bits of four others
    memcpy(first, p, 8), memcpy(&last, p + 8, 4);
    Longs2 all;
    for (int i = 0; i < 2; i++) {
        const uint32_t low = first[i] & 0x3f3f3f3f, high = (last >> 4 * i & 0x0f0f0f0f) | (first[i] >> 2 & 0x30303030);
        all[i] = low | uint64_t(high) << 32;
    }
    memcpy(out, &all, 16);
}

// The scales and minimums of the runs of a Q4_K or Q5_K block.
inline void six_bit_scales(const uint8_t* block, float* scales, float* minimums) {
    const vf scale = set1(half_at(block)), minimum = set1(-half_at(block + 2));
    uint8_t quants[16];
    float by_scale[16], by_minimum[16];
    six_bit_quants(block + 4, quants);
    for (int i = 0; i < 16; i += W) {
        const vf numbers = to_float(load_bytes(quants + i));
        store(by_scale + i, mul(scale, numbers)), store(by_minimum + i, mul(minimum, numbers));
    }
    memcpy(scales, by_scale, 32), memcpy(minimums, by_minimum + 8, 32);
}

struct Q2_K : BlockShape<256, 84, 16> {
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float* minimums) {
        const vf scale = set1(half_at(block + 80)), minimum = set1(-half_at(block + 82));
        for (int i = 0; i < 16; i += W) {
            const vi both = load_bytes(block + i);
            store(scales + i, mul(scale, low_nibbles(both))), store(minimums + i, mul(minimum, high_nibbles(both)));
        }
        two_bits(block + 16, quants);
    }
};

struct Q3_K : BlockShape<256, 110, 16> {
    // The integer scales of runs, larger by 32.
    static void scale_quants(const uint8_t* block, uint8_t* quants) {
        uint32_t low[2], high;
        memcpy(low, block + 96, 8), memcpy(&high, block + 104, 4);
        for (int i = 0; i < 4; i++) {
            const uint32_t four = (low[i % 2] >> i / 2 * 4 & 0x0f0f0f0f) | (high >> 2 * i & 0x03030303) << 4;
            memcpy(quants + 4 * i, &four, 4);
        }
    }
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float*) {
        uint8_t six_bits[16];
        scale_quants(block, six_bits);
        const vf scale = set1(half_at(block + 108));
        for (int i = 0; i < 16; i += W)
            store(scales + i, mul(scale, sub(to_float(load_bytes(six_bits + i)), set1(32))));
        two_bits(block + 32, quants);
        add_bits_by_32<2>(block, quants, -4);  // the third bit counts 4 where it is not set
    }
};

struct Q4_K : PlainShape<256, 144, 32, 16, 32> {
    static void run_scales(const uint8_t* block, float* scales, float* minimums) {
        six_bit_scales(block, scales, minimums);
    }
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        nibbles_by_32(block + 16, quants);
    }
};

struct Q5_K : BlockShape<256, 176, 32> {
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float* minimums) {
        six_bit_scales(block, scales, minimums);
        nibbles_by_32(block + 48, quants);
        add_bits_by_32<4>(block + 16, quants);
    }
};

struct Q6_K : BlockShape<256, 210, 16> {
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float*) {
        const vf scale = set1(half_at(block + 208));
        for (int i = 0; i < 16; i += W) store(scales + i, mul(scale, load((const int8_t*)block + 192 + i)));
        two_bits(block + 128, quants);
        for (int i = 0; i < 128; i += kVectorBytes) {
            VectorOfBytes bytes, nibbles, own;
            memcpy(&bytes, block + i, kVectorBytes);
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {  // 64 values from low nibbles, then 64 from high ones
                int8_t* at = quants + i / 64 * 128 + part * 64 + i % 64;
                bits_of<4>(bytes, 4 * part, nibbles);
                memcpy(&own, at, kVectorBytes);
                own = (nibbles | (VectorOfBytes)((VectorWords)own << 4)) - 32;
                memcpy(at, &own, kVectorBytes);
            }
        }
    }
};

struct IQ4_XS : PlainShape<256, 136, 32, 8, 16> {
    // The integer scales of runs, larger by 32.
    static void scale_quants(const uint8_t* block, uint8_t* quants) {
        for (int run = 0; run < 8; run++)
            quants[run] =
                uint8_t((block[4 + run / 2] >> run % 2 * 4 & 15) | (block[2 + run / 4] >> run % 4 * 2 & 3) << 4);
    }
    static void run_scales(const uint8_t* block, float* scales, float*) {
        uint8_t six_bits[8];
        scale_quants(block, six_bits);
        const float scale = half_at(block);
        for (int i = 0; i < 8; i++) scales[i] = scale * float(int(six_bits[i]) - 32);
    }
    template <bool Indexes = false>
    static void unpack(const uint8_t* block, int8_t* __restrict quants, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        for (int i = 0; i < 8; i++) table_halves<Indexes>(kIq4Values, block + 8 + 16 * i, quants + 32 * i);
    }
};

}  // namespace
}  // namespace batchgen
