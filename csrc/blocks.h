// Rows of blocks as they lie in a GGUF, or as other files' codes are put (int4_groups.h, fp8.h), to rows of floats.
//
// Every packed format comes down to the same thing: a block of integers of at most 8 bits (codes), and for each run of 16 or 32
// of them a scale and a minimum; a value is code * scale + minimum. A format is a struct that takes a block apart in this way.
// Codes and scales are so short that the product is exact, and a minimum of -0 adds nothing, not even a sign: the results are
// those of any other order of computing.

template <int Values, int Bytes, int Run>
struct BlockShape {
    static constexpr int kValues = Values, kBytes = Bytes, kRun = Run;
    static constexpr bool kFloats = false;  // codes are numbers of FP8 (fp8.h), and not integers
};

inline float half_at(const uint8_t* p) {
    f16 half;
    memcpy(&half, p, sizeof half);
    return to_float(half);
}

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

// 32 values, the first half of them in the low nibbles, less an offset.
inline void nibble_halves(const uint8_t* p, int8_t* codes, uint8_t offset = 0) {
    Bytes16 bytes;
    memcpy(&bytes, p, 16);
    const Bytes16 low = (bytes & 15) - offset, high = (bytes >> 4) - offset;
    memcpy(codes, &low, 16);
    memcpy(codes + 16, &high, 16);
}

// 1 in the bytes i whose bit i is set.
inline uint64_t spread(uint8_t bits) {
    const uint64_t apart = bits * 0x0101010101010101u & 0x8040201008040201u;  // of byte i only bit i
    return ((apart + 0x7f7f7f7f7f7f7f7fu) >> 7) & 0x0101010101010101u;
}

// Gives 32 codes of four bits the 32 bits at p as their fifth; Signed: less 16, so that the upper bits are ones where it is 0.
template <bool Signed>
inline void add_fifth_bits(const uint8_t* p, int8_t* codes) {
    for (int i = 0; i < 4; i++) {
        const uint64_t upper = Signed ? (spread(p[i]) ^ 0x0101010101010101u) * 0xf0 : spread(p[i]) * 0x10;
        uint64_t eight;
        memcpy(&eight, codes + 8 * i, 8);
        eight |= upper;
        memcpy(codes + 8 * i, &eight, 8);
    }
}

// The 4-bit floats of OCP's microscaling formats, times two; and the values of the IQ4 formats.
constexpr int8_t kFp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

inline void table_halves(const int8_t* table, const uint8_t* p, int8_t* codes) {
    Bytes16 bytes;
    memcpy(&bytes, p, 16);
    const Bytes16 low = bytes & 15, high = bytes >> 4;
    look_up(table, (const uint8_t*)&low, codes);
    look_up(table, (const uint8_t*)&high, codes + 16);
}

struct Q4_0 : BlockShape<32, 18, 32> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float*) {
        scales[0] = half_at(block);
        nibble_halves(block + 2, codes, 8);
    }
};

struct Q4_1 : BlockShape<32, 20, 32> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        scales[0] = half_at(block), minimums[0] = half_at(block + 2);
        nibble_halves(block + 4, codes);
    }
};

struct Q5_0 : BlockShape<32, 22, 32> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float*) {
        scales[0] = half_at(block);
        nibble_halves(block + 6, codes);
        add_fifth_bits<true>(block + 2, codes);
    }
};

struct Q5_1 : BlockShape<32, 24, 32> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        scales[0] = half_at(block), minimums[0] = half_at(block + 2);
        nibble_halves(block + 8, codes);
        add_fifth_bits<false>(block + 4, codes);
    }
};

struct Q8_0 : BlockShape<32, 34, 32> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float*) {
        scales[0] = half_at(block);
        memcpy(codes, block + 2, 32);
    }
};

struct IQ4_NL : BlockShape<32, 18, 32> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float*) {
        scales[0] = half_at(block);
        table_halves(kIq4Values, block + 2, codes);
    }
};

struct MXFP4 : BlockShape<32, 17, 32> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float*) {
        // 2^(e - 127), halved as the table is doubled.
        const uint32_t e = block[0], bits = e < 2 ? 0x200000u << e : (e - 1) << 23;
        memcpy(scales, &bits, 4);
        table_halves(kFp4Values, block + 1, codes);
    }
};

#include "int4_groups.h"
#include "fp8.h"

// Blocks of 256 values. Q2_K to Q6_K: scales of runs are integers, and there is one float that they are multiplied with.

// Two bits of each of 32 bytes for every 32 values: 128 values of 32 bytes, twice.
inline void two_bits(const uint8_t* p, int8_t* codes) {
    for (int half = 0; half < 2; half++)
        for (int part = 0; part < 4; part++)
            for (int i = 0; i < 32; i++) codes[128 * half + 32 * part + i] = int8_t(p[32 * half + i] >> 2 * part & 3);
}

// The low nibbles of each 32 bytes, then the high ones.
inline void nibbles_by_32(const uint8_t* p, int8_t* codes) {
    for (int i = 0; i < 8; i++) {
        Bytes16 bytes;
        memcpy(&bytes, p + 16 * i, 16);
        const Bytes16 low = bytes & 15, high = bytes >> 4;
        int8_t* to = codes + i / 2 * 64 + i % 2 * 16;
        memcpy(to, &low, 16);
        memcpy(to + 32, &high, 16);
    }
}

// Eight scales and eight minimums of 6 bits each in 12 bytes, of Q4_K and Q5_K.
inline void six_bit_codes(const uint8_t* p, uint8_t* scales, uint8_t* minimums) {
    for (int i = 0; i < 4; i++) {
        scales[i] = p[i] & 63;
        minimums[i] = p[4 + i] & 63;
        scales[4 + i] = uint8_t((p[8 + i] & 15) | p[i] >> 6 << 4);
        minimums[4 + i] = uint8_t(p[8 + i] >> 4 | p[4 + i] >> 6 << 4);
    }
}

inline void six_bit_scales(const uint8_t* block, float* scales, float* minimums) {
    const float scale = half_at(block), minimum = half_at(block + 2);
    uint8_t scale_codes[8], minimum_codes[8];
    six_bit_codes(block + 4, scale_codes, minimum_codes);
    for (int i = 0; i < 8; i++) scales[i] = scale * float(scale_codes[i]), minimums[i] = -(minimum * float(minimum_codes[i]));
}

struct Q2_K : BlockShape<256, 84, 16> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        const float scale = half_at(block + 80), minimum = half_at(block + 82);
        for (int i = 0; i < 16; i++) {
            scales[i] = scale * float(block[i] & 15);
            minimums[i] = -(minimum * float(block[i] >> 4));
        }
        two_bits(block + 16, codes);
    }
};

struct Q3_K : BlockShape<256, 110, 16> {
    // The scale of a run, 32 larger.
    static int six_bits(const uint8_t* block, int run) {
        const uint8_t* p = block + 96;
        return (p[run % 8] >> run / 8 * 4 & 15) | (p[8 + run % 4] >> run / 4 * 2 & 3) << 4;
    }
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float*) {
        const float scale = half_at(block + 108);
        for (int i = 0; i < 16; i++) scales[i] = scale * float(six_bits(block, i) - 32);
        two_bits(block + 32, codes);
        for (int part = 0; part < 8; part++)  // the third bit counts 4 where it is not set
            for (int i = 0; i < 32; i++) {
                int8_t& code = codes[32 * part + i];
                code = int8_t(code + (block[i] >> part & 1) * 4 - 4);
            }
    }
};

struct Q4_K : BlockShape<256, 144, 32> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        six_bit_scales(block, scales, minimums);
        nibbles_by_32(block + 16, codes);
    }
};

struct Q5_K : BlockShape<256, 176, 32> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        six_bit_scales(block, scales, minimums);
        nibbles_by_32(block + 48, codes);
        const uint8_t* p = block + 16;
        for (int part = 0; part < 8; part++)
            for (int i = 0; i < 32; i++) codes[32 * part + i] = int8_t(codes[32 * part + i] | (p[i] >> part & 1) << 4);
    }
};

struct Q6_K : BlockShape<256, 210, 16> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float*) {
        const float scale = half_at(block + 208);
        for (int i = 0; i < 16; i++) scales[i] = scale * float(int8_t(block[192 + i]));
        const uint8_t* low = block;
        int8_t high[256];
        two_bits(block + 128, high);
        for (int part = 0; part < 4; part++)
            for (int i = 0; i < 64; i++) {
                const int nibble = low[part / 2 * 64 + i] >> part % 2 * 4 & 15, at = 64 * part + i;
                codes[at] = int8_t((nibble | high[at] << 4) - 32);
            }
    }
};

struct IQ4_XS : BlockShape<256, 136, 32> {
    static int six_bits(const uint8_t* block, int run) {
        return (block[4 + run / 2] >> run % 2 * 4 & 15) | (block[2 + run / 4] >> run % 4 * 2 & 3) << 4;
    }
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float*) {
        const float scale = half_at(block);
        for (int i = 0; i < 8; i++) {
            scales[i] = scale * float(six_bits(block, i) - 32);
            table_halves(kIq4Values, block + 8 + 16 * i, codes + 32 * i);
        }
    }
};

template <class Block, class T>
inline void unpack_row(const uint8_t* packed, int64_t n, T* out) {
    constexpr int kRuns = Block::kValues / Block::kRun;
    float scales[kRuns], minimums[kRuns];
    for (float& minimum : minimums) minimum = -0.0f;  // of formats that have none
    for (int64_t done = 0; done < n; done += Block::kValues, packed += Block::kBytes) {
        alignas(64) int8_t codes[Block::kValues];
        Block::take_apart(packed, codes, scales, minimums);
        for (int run = 0; run < kRuns; run++) {
            const vf scale = set1(scales[run]), minimum = set1(minimums[run]);
            for (int i = 0; i < Block::kRun; i += W, out += W) {
                const int8_t* some = codes + run * Block::kRun + i;
                const vf numbers = Block::kFloats ? from_e4m3(load_bytes((const uint8_t*)some)) : load(some);
                store(out, fma(numbers, scale, minimum));
            }
        }
    }
}

constexpr int kLeastRun = 16;  // values that have the same scale and minimum, in every format

// Codes of n values of a row, and the scale and minimum of each kLeastRun of them.
template <class Block>
inline void take_row_apart(const uint8_t* packed, int64_t n, int8_t* codes, float* scales, float* minimums) {
    constexpr int kRuns = Block::kValues / Block::kRun, kEach = Block::kRun / kLeastRun;
    float own_scales[kRuns], own_minimums[kRuns];
    for (float& minimum : own_minimums) minimum = -0.0f;  // of formats that have none
    for (; n > 0; n -= Block::kValues, packed += Block::kBytes, codes += Block::kValues) {
        Block::take_apart(packed, codes, own_scales, own_minimums);
        for (int i = 0; i < kRuns * kEach; i++) *scales++ = own_scales[i / kEach], *minimums++ = own_minimums[i / kEach];
    }
}

// Of a packed format.
inline void take_apart(BlockType type, const uint8_t* packed, int64_t n, int8_t* codes, float* scales, float* minimums) {
    switch (type) {
        case BlockType::Q4_0: return take_row_apart<Q4_0>(packed, n, codes, scales, minimums);
        case BlockType::Q4_1: return take_row_apart<Q4_1>(packed, n, codes, scales, minimums);
        case BlockType::Q5_0: return take_row_apart<Q5_0>(packed, n, codes, scales, minimums);
        case BlockType::Q5_1: return take_row_apart<Q5_1>(packed, n, codes, scales, minimums);
        case BlockType::Q8_0: return take_row_apart<Q8_0>(packed, n, codes, scales, minimums);
        case BlockType::Q2_K: return take_row_apart<Q2_K>(packed, n, codes, scales, minimums);
        case BlockType::Q3_K: return take_row_apart<Q3_K>(packed, n, codes, scales, minimums);
        case BlockType::Q4_K: return take_row_apart<Q4_K>(packed, n, codes, scales, minimums);
        case BlockType::Q5_K: return take_row_apart<Q5_K>(packed, n, codes, scales, minimums);
        case BlockType::Q6_K: return take_row_apart<Q6_K>(packed, n, codes, scales, minimums);
        case BlockType::IQ4_NL: return take_row_apart<IQ4_NL>(packed, n, codes, scales, minimums);
        case BlockType::IQ4_XS: return take_row_apart<IQ4_XS>(packed, n, codes, scales, minimums);
        case BlockType::MXFP4: return take_row_apart<MXFP4>(packed, n, codes, scales, minimums);
        case BlockType::W4_G32: return take_row_apart<Int4Group<32>>(packed, n, codes, scales, minimums);
        case BlockType::W4_G64: return take_row_apart<Int4Group<64>>(packed, n, codes, scales, minimums);
        case BlockType::W4_G128: return take_row_apart<Int4Group<128>>(packed, n, codes, scales, minimums);
        case BlockType::FP8_G32: return take_row_apart<Fp8<32>>(packed, n, codes, scales, minimums);
        case BlockType::FP8_G128: return take_row_apart<Fp8<128>>(packed, n, codes, scales, minimums);
        default: return;  // F32, F16, BF16 are numbers
    }
}

template <class From, class T>
inline void convert_row(const uint8_t* packed, int64_t n, T* out) {
    const From* from = (const From*)packed;
    if constexpr (__is_same(From, T)) memcpy(out, from, n * sizeof(T));
    else
        for (int64_t i = 0; i < n; i += W) {
            const int count = int(smaller(W, n - i));
            store_part(out + i, load_part(from + i, count), count);
        }
}

template <class T>
inline void unpack_block_row(BlockType type, const uint8_t* packed, int64_t n, T* out) {
    switch (type) {
        case BlockType::F32: return convert_row<float>(packed, n, out);
        case BlockType::F16: return convert_row<f16>(packed, n, out);
        case BlockType::BF16: return convert_row<bf16>(packed, n, out);
        case BlockType::Q4_0: return unpack_row<Q4_0>(packed, n, out);
        case BlockType::Q4_1: return unpack_row<Q4_1>(packed, n, out);
        case BlockType::Q5_0: return unpack_row<Q5_0>(packed, n, out);
        case BlockType::Q5_1: return unpack_row<Q5_1>(packed, n, out);
        case BlockType::Q8_0: return unpack_row<Q8_0>(packed, n, out);
        case BlockType::Q2_K: return unpack_row<Q2_K>(packed, n, out);
        case BlockType::Q3_K: return unpack_row<Q3_K>(packed, n, out);
        case BlockType::Q4_K: return unpack_row<Q4_K>(packed, n, out);
        case BlockType::Q5_K: return unpack_row<Q5_K>(packed, n, out);
        case BlockType::Q6_K: return unpack_row<Q6_K>(packed, n, out);
        case BlockType::IQ4_NL: return unpack_row<IQ4_NL>(packed, n, out);
        case BlockType::IQ4_XS: return unpack_row<IQ4_XS>(packed, n, out);
        case BlockType::MXFP4: return unpack_row<MXFP4>(packed, n, out);
        case BlockType::W4_G32: return unpack_row<Int4Group<32>>(packed, n, out);
        case BlockType::W4_G64: return unpack_row<Int4Group<64>>(packed, n, out);
        case BlockType::W4_G128: return unpack_row<Int4Group<128>>(packed, n, out);
        case BlockType::FP8_G32: return unpack_row<Fp8<32>>(packed, n, out);
        case BlockType::FP8_G128: return unpack_row<Fp8<128>>(packed, n, out);
    }
}

inline void unpack_blocks(const Blocks& args, int64_t row, int64_t stop) {
    with_type(args.type, [&](auto* type) {
        using T = __typeof__(*type);
        for (; row < stop; row++) {
            const int64_t head = args.interleaved ? row / args.interleaved * args.interleaved : row, i = row - head;
            const int64_t target = head + i / 2 + i % 2 * (args.interleaved / 2);
            const uint8_t* packed = args.packed + row * args.row_bytes;
            unpack_block_row(args.packing, packed, args.columns, (T*)args.out + target * args.columns);
        }
    });
}
