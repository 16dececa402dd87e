// Rows of blocks as they lie in a GGUF, or as other files' codes are put (quant/int4_groups.h, quant/fp8.h), to rows of
// floats.
//
// Every packed format comes down to the same thing: a block of integers of at most 8 bits (codes), and for each run of
// 16 or 32 of them a scale and a minimum; a value is code * scale + minimum. A format is a struct that takes a block
// apart in this way. Codes and scales are so short that the product is exact, and a minimum of -0 adds nothing, not
// even a sign: the results are those of any other order of computing.

template <int Values, int Bytes, int Run>
struct BlockShape {
    static constexpr int kValues = Values, kBytes = Bytes, kRun = Run;
    static constexpr bool kFloats = false;  // codes are numbers of FP8 (quant/fp8.h), and not integers
    // Where a block has its codes, if nothing is to be put together for them: bytes, or nibbles, the low ones of
    // kNibbles bytes before the high ones. 0: there is.
    static constexpr int kCodesAt = 0, kNibbles = 0;
};

// The same, of formats with a kCodesAt.
template <int Values, int Bytes, int Run, int CodesAt, int Nibbles>
struct PlainShape : BlockShape<Values, Bytes, Run> {
    static constexpr int kCodesAt = CodesAt, kNibbles = Nibbles;
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
inline void nibble_halves(const uint8_t* p, int8_t* codes, uint8_t offset = 0) {
    Bytes16 bytes;
    memcpy(&bytes, p, 16);
    const Bytes16 low = (bytes & 15) - offset, high = (bytes >> 4) - offset;
    memcpy(codes, &low, 16);
    memcpy(codes + 16, &high, 16);
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
inline void five_bit_halves(const uint8_t* p, const uint8_t* fifth, int8_t* codes) {
    uint8_t set[32];
    bytes_of_bits(fifth, set);
    Bytes16 bytes, upper[2];
    memcpy(&bytes, p, 16), memcpy(upper, set, 32);
    const Bytes16 low = (bytes & 15) | (Signed ? ~upper[0] & 0xf0 : upper[0] & 0x10);
    const Bytes16 high = (bytes >> 4) | (Signed ? ~upper[1] & 0xf0 : upper[1] & 0x10);
    memcpy(codes, &low, 16);
    memcpy(codes + 16, &high, 16);
}

// The 4-bit floats of OCP's microscaling formats, times two; and the values of the IQ4 formats.
constexpr int8_t kFp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// As `nibble_halves`, what they stand for; Indexes: where in the table that is.
template <bool Indexes>
inline void table_halves(const int8_t* table, const uint8_t* p, int8_t* codes) {
    if constexpr (Indexes) return nibble_halves(p, codes);
    Bytes16 bytes;
    memcpy(&bytes, p, 16);
    const Bytes16 low = bytes & 15, high = bytes >> 4;
    look_up(table, (const uint8_t*)&low, codes);
    look_up(table, (const uint8_t*)&high, codes + 16);
}

struct Q4_0 : PlainShape<32, 18, 32, 2, 16> {
    static void run_scales(const uint8_t* block, float* scales, float*) { scales[0] = half_at(block); }
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        nibble_halves(block + 2, codes, 8);
    }
};

struct Q4_1 : PlainShape<32, 20, 32, 4, 16> {
    static void run_scales(const uint8_t* block, float* scales, float* minimums) {
        scales[0] = half_at(block), minimums[0] = half_at(block + 2);
    }
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        nibble_halves(block + 4, codes);
    }
};

struct Q5_0 : BlockShape<32, 22, 32> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float*) {
        scales[0] = half_at(block);
        five_bit_halves<true>(block + 6, block + 2, codes);
    }
};

struct Q5_1 : BlockShape<32, 24, 32> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        scales[0] = half_at(block), minimums[0] = half_at(block + 2);
        five_bit_halves<false>(block + 8, block + 4, codes);
    }
};

struct Q8_0 : PlainShape<32, 34, 32, 2, 0> {
    static void run_scales(const uint8_t* block, float* scales, float*) { scales[0] = half_at(block); }
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        memcpy(codes, block + 2, 32);
    }
};

struct IQ4_NL : PlainShape<32, 18, 32, 2, 16> {
    static void run_scales(const uint8_t* block, float* scales, float*) { scales[0] = half_at(block); }
    template <bool Indexes = false>
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        table_halves<Indexes>(kIq4Values, block + 2, codes);
    }
};

struct MXFP4 : PlainShape<32, 17, 32, 1, 16> {
    static void run_scales(const uint8_t* block, float* scales, float*) {
        // 2^(e - 127), halved as the table is doubled.
        const uint32_t e = block[0], bits = e < 2 ? 0x200000u << e : (e - 1) << 23;
        memcpy(scales, &bits, 4);
    }
    template <bool Indexes = false>
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        table_halves<Indexes>(kFp4Values, block + 1, codes);
    }
};

#include "quant/int4_groups.h"
#include "quant/fp8.h"

// Blocks of 256 values. Q2_K to Q6_K: scales of runs are integers, and there is one float that they are multiplied
// with.

// Two bits of each of 32 bytes for every 32 values: 128 values of 32 bytes, twice.
inline void two_bits(const uint8_t* p, int8_t* codes) {
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i += kSome) {
            Some bytes, own;
            memcpy(&bytes, p + 32 * half + i, kSome);
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++) {
                bits_of<2>(bytes, 2 * part, own);
                memcpy(codes + 128 * half + 32 * part + i, &own, kSome);
            }
        }
}

// Bit `part` of 32 bytes, times 1 << Place, added to the codes 32 * part and on, and `offset` to all.
template <int Place>
inline void add_bits_by_32(const uint8_t* p, int8_t* codes, int8_t offset = 0) {
    for (int i = 0; i < 32; i += kSome) {
        Some bytes, bit, own;
        memcpy(&bytes, p + i, kSome);
#pragma GCC unroll 8
        for (int part = 0; part < 8; part++) {
            int8_t* at = codes + 32 * part + i;
            bits_of<1>(bytes, part, bit);
            memcpy(&own, at, kSome);
            own += (Some)((SomeWords)bit << Place) + uint8_t(offset);
            memcpy(at, &own, kSome);
        }
    }
}

// The low nibbles of each 32 bytes, then the high ones.
inline void nibbles_by_32(const uint8_t* p, int8_t* codes) {
    for (int i = 0; i < 128; i += kSome) {
        Some bytes, own;
        memcpy(&bytes, p + i, kSome);
        int8_t* to = codes + i / 32 * 64 + i % 32;
        bits_of<4>(bytes, 0, own);
        memcpy(to, &own, kSome);
        bits_of<4>(bytes, 4, own);
        memcpy(to + 32, &own, kSome);
    }
}

// Eight scales and eight minimums of 6 bits each in 12 bytes, of Q4_K and Q5_K.
inline void six_bit_codes(const uint8_t* p, uint8_t* scales, uint8_t* minimums) {
    uint32_t first[2], last;  // four codes in each, the upper two bits of four others above them
    memcpy(first, p, 8), memcpy(&last, p + 8, 4);
    uint8_t* const out[2] = {scales, minimums};
    for (int i = 0; i < 2; i++) {
        const uint32_t low = first[i] & 0x3f3f3f3f, high = (last >> 4 * i & 0x0f0f0f0f) | (first[i] >> 2 & 0x30303030);
        memcpy(out[i], &low, 4), memcpy(out[i] + 4, &high, 4);
    }
}

inline void six_bit_scales(const uint8_t* block, float* scales, float* minimums) {
    const float scale = half_at(block), minimum = half_at(block + 2);
    uint8_t scale_codes[8], minimum_codes[8];
    six_bit_codes(block + 4, scale_codes, minimum_codes);
    for (int i = 0; i < 8; i++)
        scales[i] = scale * float(scale_codes[i]), minimums[i] = -(minimum * float(minimum_codes[i]));
}

struct Q2_K : BlockShape<256, 84, 16> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        const vf scale = set1(half_at(block + 80)), minimum = set1(-half_at(block + 82));
        for (int i = 0; i < 16; i += W) {
            const vi both = load_bytes(block + i);
            store(scales + i, mul(scale, low_nibbles(both))), store(minimums + i, mul(minimum, high_nibbles(both)));
        }
        two_bits(block + 16, codes);
    }
};

struct Q3_K : BlockShape<256, 110, 16> {
    // The scales of runs, 32 larger.
    static void scale_codes(const uint8_t* block, uint8_t* codes) {
        uint32_t low[2], high;
        memcpy(low, block + 96, 8), memcpy(&high, block + 104, 4);
        for (int i = 0; i < 4; i++) {
            const uint32_t four = (low[i % 2] >> i / 2 * 4 & 0x0f0f0f0f) | (high >> 2 * i & 0x03030303) << 4;
            memcpy(codes + 4 * i, &four, 4);
        }
    }
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float*) {
        uint8_t six_bits[16];
        scale_codes(block, six_bits);
        const vf scale = set1(half_at(block + 108));
        for (int i = 0; i < 16; i += W)
            store(scales + i, mul(scale, sub(to_float(load_bytes(six_bits + i)), set1(32))));
        two_bits(block + 32, codes);
        add_bits_by_32<2>(block, codes, -4);  // the third bit counts 4 where it is not set
    }
};

struct Q4_K : PlainShape<256, 144, 32, 16, 32> {
    static void run_scales(const uint8_t* block, float* scales, float* minimums) {
        six_bit_scales(block, scales, minimums);
    }
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        nibbles_by_32(block + 16, codes);
    }
};

struct Q5_K : BlockShape<256, 176, 32> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        six_bit_scales(block, scales, minimums);
        nibbles_by_32(block + 48, codes);
        add_bits_by_32<4>(block + 16, codes);
    }
};

struct Q6_K : BlockShape<256, 210, 16> {
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float*) {
        const vf scale = set1(half_at(block + 208));
        for (int i = 0; i < 16; i += W) store(scales + i, mul(scale, load((const int8_t*)block + 192 + i)));
        two_bits(block + 128, codes);
        for (int i = 0; i < 128; i += kSome) {
            Some bytes, nibbles, own;
            memcpy(&bytes, block + i, kSome);
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {  // 64 values of the low nibbles of 64 bytes, then of the high ones
                int8_t* at = codes + i / 64 * 128 + part * 64 + i % 64;
                bits_of<4>(bytes, 4 * part, nibbles);
                memcpy(&own, at, kSome);
                own = (nibbles | (Some)((SomeWords)own << 4)) - 32;
                memcpy(at, &own, kSome);
            }
        }
    }
};

struct IQ4_XS : PlainShape<256, 136, 32, 8, 16> {
    // The scales of runs, 32 larger.
    static void scale_codes(const uint8_t* block, uint8_t* codes) {
        for (int run = 0; run < 8; run++)
            codes[run] =
                uint8_t((block[4 + run / 2] >> run % 2 * 4 & 15) | (block[2 + run / 4] >> run % 4 * 2 & 3) << 4);
    }
    static void run_scales(const uint8_t* block, float* scales, float*) {
        uint8_t six_bits[8];
        scale_codes(block, six_bits);
        const float scale = half_at(block);
        for (int i = 0; i < 8; i++) scales[i] = scale * float(int(six_bits[i]) - 32);
    }
    template <bool Indexes = false>
    static void take_apart(const uint8_t* block, int8_t* __restrict codes, float* scales, float* minimums) {
        run_scales(block, scales, minimums);
        for (int i = 0; i < 8; i++) table_halves<Indexes>(kIq4Values, block + 8 + 16 * i, codes + 32 * i);
    }
};

// Numbers of a run of codes.
template <class Block, class T>
inline void put_run(const int8_t* codes, vf scale, vf minimum, T* out) {
    for (int i = 0; i < Block::kRun; i += W) {
        const vf numbers = Block::kFloats ? from_e4m3(load_bytes((const uint8_t*)codes + i)) : load(codes + i);
        store(out + i, fma(numbers, scale, minimum));
    }
}

template <class Block, class T>
inline void unpack_row(const uint8_t* packed, int64_t n, T* out) {
    constexpr int kRuns = Block::kValues / Block::kRun;
    float scales[kRuns], minimums[kRuns];
    for (float& minimum : minimums) minimum = -0.0f;  // of formats that have none
    for (int64_t done = 0; done < n; done += Block::kValues, packed += Block::kBytes) {
        alignas(64) int8_t codes[Block::kValues];
        Block::take_apart(packed, codes, scales, minimums);
        for (int run = 0; run < kRuns; run++, out += Block::kRun)
            put_run<Block>(codes + run * Block::kRun, set1(scales[run]), set1(minimums[run]), out);
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
        for (int i = 0; i < kRuns * kEach; i++)
            *scales++ = own_scales[i / kEach], *minimums++ = own_minimums[i / kEach];
    }
}

// Of a packed format.
inline void take_apart(BlockType type, const uint8_t* packed, int64_t n, int8_t* codes, float* scales,
                       float* minimums) {
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
