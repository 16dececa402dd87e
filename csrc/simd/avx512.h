// Vectors of 16 floats: AVX-512 (F, BW, VL, DQ); with BATCHGEN_VNNI also its products of bytes, and with
// BATCHGEN_FAST_BF16 those of bf16 pairs.
//
// simd/scalar.h says what each operation means.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "simd/x86.h"

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
// The second of two numbers where either is NaN.
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf round_even(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf select_less(vf a, vf b, vf then, vf otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, then);
}
// 2^n, n an integer in [-126, 127].
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
inline void store(float* p, vf a) { _mm512_storeu_ps(p, a); }
inline void store(f16* p, vf a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
// Each lane rounded to bf16, in its high 16 bits; the others are any.
inline vi rounded_to_bf16(vf a) {
    __m512i bits = _mm512_castps_si512(a), lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
}
inline __m256i to_bf16(vf a) {
#ifdef BATCHGEN_FAST_BF16
    return (__m256i)_mm512_cvtneps_pbh(a);
#else
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_to_bf16(a), 16));
#endif
}
inline void store(bf16* p, vf a) { _mm256_storeu_si256((__m256i*)p, to_bf16(a)); }
// Stores past the caches, to addresses aligned to what is stored.
inline void stream(float* p, vf a) { _mm512_stream_ps(p, a); }
inline void stream(f16* p, vf a) { _mm256_stream_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
inline void stream(bf16* p, vf a) { _mm256_stream_si256((__m256i*)p, to_bf16(a)); }

inline vi load_int(const uint32_t* p) { return _mm512_loadu_si512(p); }
// The first n words at p, 0 < n <= W; the other lanes are zero.
inline vi load_int_part(const uint32_t* p, int n) { return _mm512_maskz_loadu_epi32(__mmask16((1u << n) - 1), p); }
inline void store_int(uint32_t* p, vi a) { _mm512_storeu_si512(p, a); }
inline vi as_int(vf a) { return _mm512_castps_si512(a); }
inline vf as_float(vi a) { return _mm512_castsi512_ps(a); }
// Each of the 32 bits at p as a byte of all ones or all zeros.
inline void bytes_of_bits(const uint8_t* p, uint8_t* out) {
    uint32_t bits;
    memcpy(&bits, p, 4);
    _mm256_storeu_si256((__m256i*)out, _mm256_movm_epi8(bits));
}
#define BATCHGEN_BYTES_OF_BITS
// W bytes as integers.
inline vi load_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
// A table of 16 numbers, looked up by the low four bits of each lane.
struct Table {
    vf numbers;
    explicit Table(const int8_t* values) : numbers(load(values)) {}
    vf operator()(vi a) const { return _mm512_permutexvar_ps(a, numbers); }
};
// In each 16 bytes, the bytes of the table that the low four bits of the indexes name.
inline vi shuffle_bytes(vi table, vi index) { return _mm512_shuffle_epi8(table, index); }
inline vf low_nibbles(vi a) { return _mm512_cvtepi32_ps(_mm512_and_si512(a, _mm512_set1_epi32(15))); }
inline vf high_nibbles(vi a) { return _mm512_cvtepi32_ps(_mm512_srli_epi32(a, 4)); }
// Stores floats that are integers in [0, 15] as bytes low | high << 4.
inline void store_nibbles(uint8_t* p, vf low, vf high) {
    vi both = _mm512_or_si512(_mm512_cvtps_epi32(low), _mm512_slli_epi32(_mm512_cvtps_epi32(high), 4));
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(both));
}

// The low and the high 16 bits of each word as floats: pairs of bf16, and of fp16.
inline void split_bf16(vi words, vf& low, vf& high) {
    low = as_float(_mm512_slli_epi32(words, 16));
    high = as_float(_mm512_and_si512(words, _mm512_set1_epi32(int(0xffff0000))));
}
// The other way: each lane of two vectors rounded to bf16.
inline vi join_bf16(vf low, vf high) {
#ifdef BATCHGEN_FAST_BF16
    const vi order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                      20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (vi)_mm512_cvtne2ps_pbh(high, low));
#else
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(rounded_to_bf16(low), 16), rounded_to_bf16(high));
#endif
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
// The larger of |a| and |b|; NaN where either is NaN, which as an integer is above all numbers.
inline vf max_or_nan(vf a, vf b) {
    return as_float(_mm512_max_epi32(as_int(_mm512_abs_ps(a)), as_int(_mm512_abs_ps(b))));
}

// The halves of each 128 bits of two vectors joined, or those of all 512 bits; results of a lie before those of b.
template <class F>
inline vf join_in_lanes(vf a, vf b, F join) {
    return join(_mm512_mask_blend_ps(0xcccc, a, b), _mm512_shuffle_ps(a, b, 0x4e));
}
template <class F>
inline vf join_lanes(vf a, vf b, F join) {
    return join(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}
// Lane i is all lanes of r[i], joined two by two: first those that are 2 apart, then 8, 1 and 4. In this order most
// steps take a blend instead of a second shuffle.
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
// Lane i is the sum of r[i].
inline vf sums(const vf* r) { return across(r, add); }

// p 2^n for integers n; 0 where that is too small.
inline vf scale_by_pow2(vf p, vf n) { return _mm512_scalef_ps(p, n); }
#define BATCHGEN_SCALES_BY_POW2

#ifdef BATCHGEN_VNNI
// Adds to each lane of c the products of four bytes of a, unsigned, and of b, signed.
inline vi dot_bytes(vi a, vi b, vi c) {
    // GCC 12 copies and spills the sums around the intrinsic.
    asm("vpdpbusd\t{%2, %1, %0|%0, %1, %2}" : "+v"(c) : "v"(a), "v"(b));
    return c;
}
#endif

#define BATCHGEN_LOAD_QUARTERS
// 16 bytes from each address, side by side.
inline vi load_quarters(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
    const auto at = [](const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(at(a)), at(b), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low),
                              _mm256_inserti128_si256(_mm256_castsi128_si256(at(c)), at(d), 1), 1);
}
// Transposes 4x4 words in each 128 bits: word j of r[i] becomes word i of r[j].
__attribute__((always_inline)) inline void transpose_quarters(vi* r) {
    const vi a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    const vi c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(a, c), r[1] = _mm512_unpackhi_epi64(a, c);
    r[2] = _mm512_unpacklo_epi64(b, d), r[3] = _mm512_unpackhi_epi64(b, d);
}

#ifdef BATCHGEN_FAST_BF16
inline vf dot_pairs(vi a, vi b, vf c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
// A table of 2 W numbers of bf16, looked up by the lowest bits of each 16.
struct PairTable {
    vi numbers;
    explicit PairTable(const bf16* from) : numbers(load_int((const uint32_t*)from)) {}
    explicit PairTable(vi numbers) : numbers(numbers) {}
    vi of_32(vi index) const { return _mm512_permutexvar_epi16(index, numbers); }
};
// 2 W bytes, each in 16 bits.
inline vi widen_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
// Adds a number to the 16 bits i of a where bit i is set.
inline vi add_where(vi a, uint32_t bits, int number) {
    return _mm512_mask_add_epi16(a, bits, a, _mm512_set1_epi16(short(number)));
}
// All lanes of the first as bf16, then those of the second.
inline vi to_pairs(vf first, vf second) { return (vi)_mm512_cvtne2ps_pbh(second, first); }
// The pairs (even_i, odd_i), rounded to bf16.
inline vi pairs_of(vf even, vf odd) {
    const vi order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                      20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, to_pairs(even, odd));
}
// Each lane twice: lanes of the first half of a, and of the second.
inline void repeated(vf a, vf& first, vf& second) {
    const vi order = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    first = _mm512_permutexvar_ps(order, a);
    second = _mm512_permutexvar_ps(_mm512_add_epi32(order, _mm512_set1_epi32(8)), a);
}
// The pairs (a_i, b_i) of the bf16 in a and b: the first half of them, and the second.
inline void interleave(vi a, vi b, vi& first, vi& second) {
    const vi low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                    36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    first = _mm512_permutex2var_epi16(a, low, b);
    second = _mm512_permutex2var_epi16(a, _mm512_add_epi16(low, _mm512_set1_epi16(16)), b);
}
// The bytes of a in the low and those of b in the high half of each lane.
inline vi pair_bytes(vi a, vi b) { return _mm512_or_si512(a, _mm512_slli_epi32(b, 16)); }

inline vi and_bits(vi a, vi b) { return _mm512_and_si512(a, b); }
inline vi or_bits(vi a, vi b) { return _mm512_or_si512(a, b); }
inline vi add_int(vi a, vi b) { return _mm512_add_epi32(a, b); }
template <int N>
inline vi shift_left(vi a) {
    return _mm512_slli_epi32(a, N);
}
template <int N>
inline vi shift_right(vi a) {
    return _mm512_srli_epi32(a, N);
}
// Rounds to the nearest integer; -2^31 for NaN and for what is beyond all integers.
inline vi to_int(vf a) { return _mm512_cvtps_epi32(a); }
inline void store_low_bytes(int8_t* p, vi a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
inline vi set1_bytes(const int8_t* four) {
    int bits;
    memcpy(&bits, four, 4);
    return _mm512_set1_epi32(bits);
}
// The groups (a_i, b_i, c_i, d_i) of 32 bytes of each row: the first half of them, and the second.
inline void interleave_four(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, vi& first,
                            vi& second) {
    auto both = [](const uint8_t* p, const uint8_t* q) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p)),
                                  _mm256_loadu_si256((const __m256i*)q), 1);
    };
    const vi ac = both(a, c), bd = both(b, d);
    // Pairs of a and b in the lower, of c and d in the upper half; of each 16 bytes the first 8, and the others.
    const vi even = _mm512_unpacklo_epi8(ac, bd), odd = _mm512_unpackhi_epi8(ac, bd);
    const vi order = _mm512_set_epi16(55, 39, 54, 38, 53, 37, 52, 36, 51, 35, 50, 34, 49, 33, 48, 32, 23, 7, 22, 6, 21,
                                      5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    first = _mm512_permutex2var_epi16(even, order, odd);
    second = _mm512_permutex2var_epi16(even, _mm512_add_epi16(order, _mm512_set1_epi16(8)), odd);
}
#endif

// The number itself. It keeps the compiler from contracting a product and a sum into one rounding.
inline vf rounded(vf a) {
    asm("" : "+v"(a));
    return a;
}

// Products of int8 values. XInt8 is the type that those of x are stored in; a word of 32 bits has as many as fit.
// load_int8 loads the values of w that meet a word of x, of W columns. dot_int8 adds to each lane of c the products of
// its words, exactly.
#ifdef BATCHGEN_VNNI
using XInt8 = int8_t;
constexpr int kInt8Bias = 128;  // values of w are stored without a sign, and larger by this
inline vi load_int8(const uint32_t* p) { return load_int(p); }
inline vi dot_int8(vi x, vi w, vi c) { return dot_bytes(w, x, c); }
// Stores floats that are such integers.
inline void store_int8(XInt8* p, vf a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))); }
#else
using XInt8 = int16_t;
constexpr int kInt8Bias = 0;
inline vi load_int8(const uint16_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline vi dot_int8(vi x, vi w, vi c) { return _mm512_add_epi32(c, _mm512_madd_epi16(x, w)); }
// Stores floats that are such integers.
inline void store_int8(XInt8* p, vf a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a)));
}
#endif

}  // namespace
}  // namespace batchgen
