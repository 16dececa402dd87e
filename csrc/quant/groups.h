// Rows quantized in groups of 64 values to 4, 5 or 8 bits a value, with a scale and a minimum for each group, as
// batchgen/ops/quant.py describes them.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "simd/numeric.h"
#include "simd/target.h"

namespace batchgen {
namespace {

constexpr float kMaxF16 = 65504.0f;

inline float f16_value(f16 x) { return value_of(&x); }
inline f16 to_f16_value(float x) {
    f16 all[W];
    store(all, set1(x));
    return all[0];
}

// Quantizes a row of floats, which it clamps to the range of fp16. x has space for W values more.
template <int Bits>
inline void quantize_row(float* x, int64_t n, uint8_t* packed) {
    constexpr int kMost = (1 << Bits) - 1;
    uint8_t* table = packed + code_bytes(int(n), Bits);
    for (int64_t start = 0; start < n; start += kGroup, table += 4) {
        float* group = x + start;
        const int size = int(smaller(kGroup, n - start)), half = (size + 1) / 2;
        float low = kMaxF16, high = -kMaxF16;
        bool number = true;
        for (int i = 0; i < size; i++) {
            float v = group[i];
            number &= v == v;
            v = v > kMaxF16 ? kMaxF16 : v < -kMaxF16 ? -kMaxF16 : v;
            group[i] = v;
            low = v < low ? v : low;
            high = v > high ? v : high;
        }
        low += 0.0f, high += 0.0f;  // of both zeros the positive one
        const f16 minimum = to_f16_value(number ? low : __builtin_nanf(""));
        const float least = f16_value(minimum);
        f16 scale = to_f16_value(number && high > least ? (high - least) / kMost : number ? 0.0f : __builtin_nanf(""));
        float step = f16_value(scale);
        // At the very end of the range a scale that was rounded up takes the maximum beyond fp16: it goes one step
        // down.
        if (least + kMost * step > kMaxF16) scale.bits--, step = f16_value(scale);
        memcpy(table, &scale, 2);
        memcpy(table + 2, &minimum, 2);
        const vf steps = set1(step > 0 ? 1 / step : 0), base = set1(number ? least : 0);
        float codes[kGroup + 2 * W] = {};
        for (int i = 0; i < size; i += W) {
            vf code = round_even(mul(sub(load_part(group + i, size - i), base), steps));
            store(codes + i, max(min(code, set1(kMost)), zero()));
        }
        if constexpr (Bits == 8) {
            for (int i = 0; i < size; i++) packed[i] = uint8_t(int(codes[i]));
            packed += size;
        } else {
            for (int i = size; i < 2 * half; i++) codes[i] = 0;
            uint8_t* bits = packed + half;
            if (Bits == 5) memset(bits, 0, group_bytes(size, 5) - half);
            for (int i = 0; Bits == 5 && i < size; i++) {
                if (codes[i] < 16) continue;
                const int column = i < half ? i : i - half;
                bits[(i < half ? 0 : (half + 7) / 8) + column / 8] |= uint8_t(1 << column % 8);
                codes[i] -= 16;
            }
            for (int i = 0; i < half; i += W) {
                uint8_t out[W];
                store_nibbles(out, load(codes + i), load(codes + half + i));
                memcpy(packed + i, out, smaller(W, half - i));
            }
            packed += group_bytes(size, Bits);
        }
    }
}

// Eight bits as the fifth bits of eight bytes.
inline uint64_t fifth_bits(uint8_t bits) {
    const uint64_t apart = (bits * 0x0101010101010101u) & 0x8040201008040201u;
    return ((apart + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
}

// The codes of a group of 4 or 5 bits as bytes; size: a multiple of 8. Writes up to 8 bytes too many.
template <int Bits>
inline void expand_group(const uint8_t* group, int size, uint8_t* out) {
    const int half = size / 2, bytes = (half + 7) / 8;
    const uint8_t* bits = group + half;
    for (int part = 0; part < 2; part++)  // the second half overwrites what the first writes too many
        for (int i = 0; i < half; i += 8) {
            uint64_t nibbles;
            memcpy(&nibbles, group + i, 8);
            nibbles = nibbles >> 4 * part & 0x0f0f0f0f0f0f0f0fu;
            if (Bits == 5) nibbles |= fifth_bits(bits[part * bytes + i / 8]);
            memcpy(out + part * half + i, &nibbles, 8);
        }
}

#ifdef __AVX2__
template <int Bits>
inline void expand_group(const uint8_t* group, uint8_t* out) {
    const __m256i lower = _mm256_set1_epi8(15), nibbles = _mm256_loadu_si256((const __m256i*)group);
    const __m256i places = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
    const __m256i each = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    auto joined = [&](__m256i nibbles, const uint8_t* bits) {
        if constexpr (Bits == 4) return _mm256_and_si256(nibbles, lower);
        int32_t word;
        memcpy(&word, bits, 4);
        const __m256i bit = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), each), places);
        const __m256i fifth = _mm256_and_si256(_mm256_cmpeq_epi8(bit, places), _mm256_set1_epi8(16));
        return _mm256_or_si256(_mm256_and_si256(nibbles, lower), fifth);
    };
    _mm256_storeu_si256((__m256i*)out, joined(nibbles, group + kGroup / 2));
    _mm256_storeu_si256((__m256i*)(out + kGroup / 2), joined(_mm256_srli_epi16(nibbles, 4), group + kGroup / 2 + 4));
}
#else
template <int Bits>
inline void expand_group(const uint8_t* group, uint8_t* out) {
    expand_group<Bits>(group, kGroup, out);
}
#endif

// The codes of a row of 4 or 5 bits as bytes, likewise.
template <int Bits>
inline void expand_to_bytes(const uint8_t* row, int n, uint8_t* out) {
    for (; n >= kGroup; n -= kGroup, row += group_bytes(kGroup, Bits), out += kGroup) expand_group<Bits>(row, out);
    if (n) expand_group<Bits>(row, n, out);
}

template <class T>
inline void dequantize_group(const uint8_t* packed, int size, vf scale, vf minimum, T* out) {
    const int half = (size + 1) / 2;
    for (int i = 0; i < half; i += W) {
        const vi bytes = load_bytes_part(packed + i, half - i);
        store_part(out + i, fma(low_nibbles(bytes), scale, minimum), half - i);
        if (half + i < size) store_part(out + half + i, fma(high_nibbles(bytes), scale, minimum), size - half - i);
    }
}

template <class T>
inline void stream_group(const uint8_t* packed, vf scale, vf minimum, T* out) {
    constexpr int kHalf = kGroup / 2;
    for (int i = 0; i < kHalf; i += W) stream(out + i, fma(low_nibbles(load_bytes(packed + i)), scale, minimum));
    for (int i = 0; i < kHalf; i += W)
        stream(out + kHalf + i, fma(high_nibbles(load_bytes(packed + i)), scale, minimum));
}

// Dequantizes a row of 4 bits. Streamed: results go past the caches, which they are larger than; stores through a cache
// would read every line first.
template <bool Streamed, class T>
inline void dequantize_row(const uint8_t* packed, int64_t n, T* out) {
    constexpr int kAhead = 6144;  // bytes that are read in the time of memory's latency
    const uint8_t* table = packed + code_bytes(int(n), 4);
    const int64_t groups = (n + kGroup - 1) / kGroup;
    for (int64_t first = 0; first < groups; first += W, table += 4 * W) {
        const int count = int(smaller(W, groups - first));
        uint32_t words[W] = {};
        memcpy(words, table, 4 * count);
        vf scale, minimum;
        split_f16(load_int(words), scale, minimum);
        float scales[W], minimums[W];
        store(scales, scale), store(minimums, minimum);
        for (int g = 0; g < count; g++, packed += kGroup / 2, out += kGroup) {
            const int size = int(smaller(kGroup, n - (first + g) * kGroup));
            __builtin_prefetch(packed + kAhead);
            if (Streamed) {
                stream_group(packed, set1(scales[g]), set1(minimums[g]), out);
            } else if (size == kGroup) {
                dequantize_group(packed, kGroup, set1(scales[g]), set1(minimums[g]), out);
            } else {
                dequantize_group(packed, size, set1(scales[g]), set1(minimums[g]), out);
            }
        }
    }
}

template <int Bits, class T>
inline void quantize_rows(const Quant& args, int64_t row, int64_t stop) {
    for (; row < stop; row++) {
        uint8_t* packed = args.packed + row * args.row_bytes;
        for (int64_t start = 0; start < args.columns; start += kGroup) {
            // One group at a time, with its offset in the values and in the table.
            float values[kGroup + W];
            const int size = int(smaller(kGroup, args.columns - start)), bytes = code_bytes(size, Bits);
            for (int i = 0; i < size; i += W)
                store(values + i, load_part((const T*)args.x + row * args.columns + start + i, size - i));
            uint8_t group[kGroup + 4];
            quantize_row<Bits>(values, size, group);
            memcpy(packed + code_bytes(int(start), Bits), group, bytes);
            memcpy(packed + code_bytes(int(args.columns), Bits) + start / kGroup * 4, group + bytes, 4);
        }
    }
}

// Quantizes rows [row, stop).
inline void quantize(const Quant& args, int64_t row, int64_t stop) {
    with_type(args.type, [&](auto* type) {
        using T = __typeof__(*type);
        if (args.bits == 8) quantize_rows<8, T>(args, row, stop);
        else if (args.bits == 5) quantize_rows<5, T>(args, row, stop);
        else quantize_rows<4, T>(args, row, stop);
    });
}

// Dequantizes rows [row, stop) of 4 bits.
inline void dequantize(const Quant& args, int64_t row, int64_t stop) {
    constexpr int64_t kLarge = 16 << 20;  // bytes: no cache holds as many until they are read
    with_type(args.type, [&](auto* type) {
        using T = __typeof__(*type);
        const bool streamed = args.rows * args.columns * int64_t(sizeof(T)) >= kLarge && args.columns % kGroup == 0 &&
                              uintptr_t(args.out) % 64 == 0;
        for (; row < stop; row++) {
            const uint8_t* packed = args.packed + row * args.row_bytes;
            T* out = (T*)args.out + row * args.columns;
            if (streamed) dequantize_row<true>(packed, args.columns, out);
            else dequantize_row<false>(packed, args.columns, out);
        }
        if (streamed) end_streams();
    });
}

}  // namespace
}  // namespace batchgen
