// AVX-512 (F, BW, VL, DQ), with BATCHGEN_VNNI its products of bytes, and with BATCHGEN_FAST_BF16 those of bf16 pairs
// too.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

namespace batchgen {
namespace {

constexpr int W = 16;
using vf = __m512;
using vi = __m512i;

inline vf zero() { return _mm512_setzero_ps(); }
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vi set1_int(uint32_t x) { return _mm512_set1_epi32(int(x)); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
// Of two numbers the second where one is no number.
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf round_even(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf select_less(vf a, vf b, vf then, vf otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, then);
}
// 2 to an integer n in [-126, 127].
inline vf pow2(vf n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline float sum(vf a) { return _mm512_reduce_add_ps(a); }
inline float largest(vf a) { return _mm512_reduce_max_ps(a); }

inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline vf load(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline vf load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline vf load(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline float to_float(f16 a) { return _cvtsh_ss(a.bits); }
inline void store(float* p, vf a) { _mm512_storeu_ps(p, a); }
inline void store(f16* p, vf a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
inline __m256i to_bf16(vf a) {
#ifdef BATCHGEN_FAST_BF16
    return (__m256i)_mm512_cvtneps_pbh(a);
#else
    __m512i bits = _mm512_castps_si512(a), lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
inline void store(bf16* p, vf a) { _mm256_storeu_si256((__m256i*)p, to_bf16(a)); }
// Past the caches, to a multiple of a vector's size.
inline void stream(float* p, vf a) { _mm512_stream_ps(p, a); }
inline void stream(f16* p, vf a) { _mm256_stream_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
inline void stream(bf16* p, vf a) { _mm256_stream_si256((__m256i*)p, to_bf16(a)); }
inline void end_streams() { _mm_sfence(); }

inline vi load_int(const uint32_t* p) { return _mm512_loadu_si512(p); }
// The first n, 0 < n <= W; zero beyond.
inline vi load_int_part(const uint32_t* p, int n) { return _mm512_maskz_loadu_epi32(__mmask16((1u << n) - 1), p); }
inline void store_int(uint32_t* p, vi a) { _mm512_storeu_si512(p, a); }
inline vi as_int(vf a) { return _mm512_castps_si512(a); }
inline vf as_float(vi a) { return _mm512_castsi512_ps(a); }
// Of 32 bits at p bytes that are all ones or all zeros.
inline void bytes_of_bits(const uint8_t* p, uint8_t* out) {
    uint32_t bits;
    memcpy(&bits, p, 4);
    _mm256_storeu_si256((__m256i*)out, _mm256_movm_epi8(bits));
}
#define BATCHGEN_BYTES_OF_BITS
// W bytes as integers; their low and high halves as floats.
inline vi load_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
// What the low four bits of each lane stand for, of 16 numbers.
struct Table {
    vf numbers;
    explicit Table(const int8_t* values) : numbers(load(values)) {}
    vf operator()(vi a) const { return _mm512_permutexvar_ps(a, numbers); }
};
// The same of each byte, of numbers that are `above` more than these.
struct ByteTable {
    vi numbers;
    ByteTable(const int8_t* values, int above)
        : numbers(_mm512_add_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)values)),
                                  _mm512_set1_epi8(char(above)))) {}
    vi operator()(vi index) const { return _mm512_shuffle_epi8(numbers, index); }
};
// out[i] = table[index[i]] of 16 numbers, by 16 indexes below 16.
inline void look_up(const int8_t* table, const uint8_t* index, int8_t* out) {
    const __m128i found =
        _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)table), _mm_loadu_si128((const __m128i*)index));
    _mm_storeu_si128((__m128i*)out, found);
}
inline vf low_nibbles(vi a) { return _mm512_cvtepi32_ps(_mm512_and_si512(a, _mm512_set1_epi32(15))); }
inline vf high_nibbles(vi a) { return _mm512_cvtepi32_ps(_mm512_srli_epi32(a, 4)); }
// FloatMma that are integers in [0, 15], low and high, as bytes low | high << 4.
inline void store_nibbles(uint8_t* p, vf low, vf high) {
    vi both = _mm512_or_si512(_mm512_cvtps_epi32(low), _mm512_slli_epi32(_mm512_cvtps_epi32(high), 4));
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(both));
}

// The halves of each 32 bits: bf16, and floats of 16 bits.
inline void split_bf16(vi words, vf& low, vf& high) {
    low = as_float(_mm512_slli_epi32(words, 16));
    high = as_float(_mm512_and_si512(words, _mm512_set1_epi32(int(0xffff0000))));
}
inline void split_f16(vi words, vf& low, vf& high) {
    low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
    high = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
}

__attribute__((always_inline)) inline void transpose(vi* r) {
    vi t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // r[4i + c]: column c of every four, rows 4i .. 4i + 3
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        vi a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        vi d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88), e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(a, d, 0x88);
        t[4 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(a, d, 0xdd);
        t[12 + c] = _mm512_shuffle_i32x4(b, e, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

inline vi sub_int(vi a, vi b) { return _mm512_sub_epi32(a, b); }
// Of |a| and |b|; no number where one is none: compared as integers it is above all numbers.
inline vf max_or_nan(vf a, vf b) {
    return as_float(_mm512_max_epi32(as_int(_mm512_abs_ps(a)), as_int(_mm512_abs_ps(b))));
}

// Of two vectors the halves of each 128 bits, or of all 512, joined: the first one's are before the second one's.
template <class F>
inline vf join_in_lanes(vf a, vf b, F join) {
    return join(_mm512_mask_blend_ps(0xcccc, a, b), _mm512_shuffle_ps(a, b, 0x4e));
}
template <class F>
inline vf join_lanes(vf a, vf b, F join) {
    return join(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}
// Lane i: all lanes of r[i] joined two by two. Those that are 2 apart first, then 8, 1 and 4: in this order most steps
// take a blend instead of a second shuffle.
template <class F>
inline vf across(const vf* r, F join) {
    vf halves[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const vf* a = r + 8 * i;
        const vf even = join_lanes(join_in_lanes(a[0], a[1], join), join_in_lanes(a[4], a[5], join), join);
        const vf odd = join_lanes(join_in_lanes(a[2], a[3], join), join_in_lanes(a[6], a[7], join), join);
        halves[i] = join(_mm512_shuffle_ps(even, odd, 0x88), _mm512_shuffle_ps(even, odd, 0xdd));
    }
    return join(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88), _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}
// Lane i: the sum of r[i].
inline vf sums(const vf* r) { return across(r, add); }

// p times 2 to the integer n, 0 where that is too small.
inline vf scale_by_pow2(vf p, vf n) { return _mm512_scalef_ps(p, n); }
#define BATCHGEN_SCALES_BY_POW2

#ifdef BATCHGEN_VNNI
// In each 32 bits c + the products of the four bytes of a, without a sign, and of b, with one.
inline vi dot_bytes(vi a, vi b, vi c) {
    // By its name: around the intrinsic, GCC 12 copies and spills sums.
    asm("vpdpbusd\t{%2, %1, %0|%0, %1, %2}" : "+v"(c) : "v"(a), "v"(b));
    return c;
}
#endif

#define BATCHGEN_QUARTERS
// 16 bytes of each place beside each other.
inline vi load_quarters(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
    const auto at = [](const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(at(a)), at(b), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low),
                              _mm256_inserti128_si256(_mm256_castsi128_si256(at(c)), at(d), 1), 1);
}
// Of each 128 bits the four words: r[i] becomes word i of r[0] to r[3], in the first 128 bits, the second and so on.
__attribute__((always_inline)) inline void transpose_quarters(vi* r) {
    const vi a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    const vi c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(a, c), r[1] = _mm512_unpackhi_epi64(a, c);
    r[2] = _mm512_unpacklo_epi64(b, d), r[3] = _mm512_unpackhi_epi64(b, d);
}

#ifdef BATCHGEN_FAST_BF16
inline vf dot_pairs(vi a, vi b, vf c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
// Of each half of a lane, which of some numbers of bf16 its lowest bits stand for.
struct PairTable {
    vi numbers;
    explicit PairTable(const bf16* from) : numbers(load_int((const uint32_t*)from)) {}
    vi of_32(vi index) const { return _mm512_permutexvar_epi16(index, numbers); }
};
// Numbers as bf16: pairs of neighbours of the first, then of the second.
inline vi to_pairs(vf first, vf second) { return (vi)_mm512_cvtne2ps_pbh(second, first); }
// Each lane twice: the first half of them, and the second.
inline void repeated(vf a, vf& first, vf& second) {
    const vi order = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    first = _mm512_permutexvar_ps(order, a);
    second = _mm512_permutexvar_ps(_mm512_add_epi32(order, _mm512_set1_epi32(8)), a);
}
// The pairs (a_i, b_i) of 32 bf16 each, first and second half of them.
inline void interleave(vi a, vi b, vi& first, vi& second) {
    const vi low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                    36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    first = _mm512_permutex2var_epi16(a, low, b);
    second = _mm512_permutex2var_epi16(a, _mm512_add_epi16(low, _mm512_set1_epi16(16)), b);
}
// Bytes of a in the low, of b in the high half of each lane.
inline vi pair_bytes(vi a, vi b) { return _mm512_or_si512(a, _mm512_slli_epi32(b, 16)); }

inline vi and_bits(vi a, vi b) { return _mm512_and_si512(a, b); }
inline vi add_int(vi a, vi b) { return _mm512_add_epi32(a, b); }
template <int N>
inline vi shift_left(vi a) {
    return _mm512_slli_epi32(a, N);
}
template <int N>
inline vi shift_right(vi a) {
    return _mm512_srli_epi32(a, N);
}
// To the nearest; -2^31 of what is no number or beyond all integers.
inline vi to_int(vf a) { return _mm512_cvtps_epi32(a); }
inline void store_low_bytes(int8_t* p, vi a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
inline vi set1_bytes(const int8_t* four) {
    int bits;
    memcpy(&bits, four, 4);
    return _mm512_set1_epi32(bits);
}
// The 32 bytes of each of four rows as (a_i, b_i, c_i, d_i): first and second half of them.
inline void interleave_four(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, vi& first,
                            vi& second) {
    auto both = [](const uint8_t* p, const uint8_t* q) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p)),
                                  _mm256_loadu_si256((const __m256i*)q), 1);
    };
    const vi ac = both(a, c), bd = both(b, d);
    // Bf16Mma of a and b in the lower, of c and d in the upper half; of each 16 bytes the first 8, and the others.
    const vi even = _mm512_unpacklo_epi8(ac, bd), odd = _mm512_unpackhi_epi8(ac, bd);
    const vi order = _mm512_set_epi16(55, 39, 54, 38, 53, 37, 52, 36, 51, 35, 50, 34, 49, 33, 48, 32, 23, 7, 22, 6, 21,
                                      5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    first = _mm512_permutex2var_epi16(even, order, odd);
    second = _mm512_permutex2var_epi16(even, _mm512_add_epi16(order, _mm512_set1_epi16(8)), odd);
}
#endif

// A number as it is: the compiler must not make one rounding of this product and a sum.
inline vf rounded(vf a) {
    asm("" : "+v"(a));
    return a;
}

// Products of codes, which are integers of 8 bits with a sign. Code: what those of x are kept in, so many in 32 bits.
// load_codes: those of w that go with them, of W columns. c + the products in each 32 bits; nothing is rounded or cut
// off.
#ifdef BATCHGEN_VNNI
using Code = int8_t;
constexpr int kCodeOffset = 128;  // codes of w are without a sign, and so much larger
inline vi load_codes(const uint32_t* p) { return load_int(p); }
inline vi dot_codes(vi x, vi w, vi c) { return dot_bytes(w, x, c); }
// FloatMma that are such integers.
inline void store_codes(Code* p, vf a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))); }
#else
using Code = int16_t;
constexpr int kCodeOffset = 0;
inline vi load_codes(const uint16_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline vi dot_codes(vi x, vi w, vi c) { return _mm512_add_epi32(c, _mm512_madd_epi16(x, w)); }
// FloatMma that are such integers.
inline void store_codes(Code* p, vf a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a)));
}
#endif

}  // namespace
}  // namespace batchgen
