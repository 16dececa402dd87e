// Vectors of 8 floats: AVX2 with FMA and F16C; with BATCHGEN_VNNI also the products of bytes of AVX-VNNI.
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

constexpr int W = 8;
using vf = __m256;
using vi = __m256i;

inline vf zero() { return _mm256_setzero_ps(); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vi set1_int(uint32_t x) { return _mm256_set1_epi32(int(x)); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf round_even(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf select_less(vf a, vf b, vf then, vf otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline vf pow2(vf n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline float sum(vf a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float largest(vf a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline vf load(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline vf load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline vf load(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline void store(float* p, vf a) { _mm256_storeu_ps(p, a); }
inline void store(f16* p, vf a) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
// The low 16 bits of each lane.
inline __m128i narrow(vi a) { return _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)); }
// Each lane rounded to bf16, in its high 16 bits; the others are any.
inline vi rounded_to_bf16(vf a) {
    vi bits = _mm256_castps_si256(a), lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    vi rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
    vi nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
}
inline __m128i to_bf16(vf a) { return narrow(_mm256_srli_epi32(rounded_to_bf16(a), 16)); }
inline void store(bf16* p, vf a) { _mm_storeu_si128((__m128i*)p, to_bf16(a)); }
// Stores past the caches, to addresses aligned to what is stored.
inline void stream(float* p, vf a) { _mm256_stream_ps(p, a); }
inline void stream(f16* p, vf a) { _mm_stream_si128((__m128i*)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
inline void stream(bf16* p, vf a) { _mm_stream_si128((__m128i*)p, to_bf16(a)); }

inline vi load_int(const uint32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
// The first n words at p, 0 < n <= W; the other lanes are zero.
inline vi load_int_part(const uint32_t* p, int n) {
    uint32_t part[W] = {};
    memcpy(part, p, n * sizeof *p);
    return load_int(part);
}
inline void store_int(uint32_t* p, vi a) { _mm256_storeu_si256((__m256i*)p, a); }
inline vi as_int(vf a) { return _mm256_castps_si256(a); }
inline vf as_float(vi a) { return _mm256_castsi256_ps(a); }
inline vi load_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
// A table of 16 numbers, looked up by the low four bits of each lane.
struct Table {
    vf low, high;
    explicit Table(const int8_t* values) : low(load(values)), high(load(values + 8)) {}
    vf operator()(vi a) const {
        const vf fourth_bit = _mm256_castsi256_ps(_mm256_slli_epi32(a, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, a), _mm256_permutevar8x32_ps(high, a), fourth_bit);
    }
};
// In each 16 bytes, the bytes of the table that the low four bits of the indexes name.
inline vi shuffle_bytes(vi table, vi index) { return _mm256_shuffle_epi8(table, index); }
inline vf low_nibbles(vi a) { return _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(15))); }
inline vf high_nibbles(vi a) { return _mm256_cvtepi32_ps(_mm256_srli_epi32(a, 4)); }
inline void store_nibbles(uint8_t* p, vf low, vf high) {
    vi both = _mm256_or_si256(_mm256_cvtps_epi32(low), _mm256_slli_epi32(_mm256_cvtps_epi32(high), 4));
    __m128i words = narrow(both);
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(words, words));
}

// The low and the high 16 bits of each word as floats: pairs of bf16, and of fp16.
inline void split_bf16(vi words, vf& low, vf& high) {
    low = as_float(_mm256_slli_epi32(words, 16));
    high = as_float(_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000))));
}
// The other way: each lane of two vectors rounded to bf16.
inline vi join_bf16(vf low, vf high) {
    return _mm256_blend_epi16(_mm256_srli_epi32(rounded_to_bf16(low), 16), rounded_to_bf16(high), 0xaa);
}
inline void split_f16(vi words, vf& low, vf& high) {
    low = _mm256_cvtph_ps(narrow(_mm256_and_si256(words, _mm256_set1_epi32(0xffff))));
    high = _mm256_cvtph_ps(narrow(_mm256_srli_epi32(words, 16)));
}

__attribute__((always_inline)) inline void transpose(vi* r) {
    __m256 t[8], s[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(as_float(r[2 * i]), as_float(r[2 * i + 1]));
        t[2 * i + 1] = _mm256_unpackhi_ps(as_float(r[2 * i]), as_float(r[2 * i + 1]));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        s[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        s[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        s[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        s[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        r[c] = as_int(_mm256_permute2f128_ps(s[c], s[4 + c], 0x20));
        r[4 + c] = as_int(_mm256_permute2f128_ps(s[c], s[4 + c], 0x31));
    }
}

// The number itself. It keeps the compiler from contracting a product and a sum into one rounding.
inline vf rounded(vf a) {
    asm("" : "+x"(a));
    return a;
}
inline vi sub_int(vi a, vi b) { return _mm256_sub_epi32(a, b); }
// The larger of |a| and |b|; NaN where either is NaN, which as an integer is above all numbers.
inline vf max_or_nan(vf a, vf b) {
    const vi magnitude = _mm256_set1_epi32(0x7fffffff);
    return as_float(_mm256_max_epi32(_mm256_and_si256(as_int(a), magnitude), _mm256_and_si256(as_int(b), magnitude)));
}

// Products of int8 values. XInt8 is the type that those of x are stored in; a word of 32 bits has as many as fit.
// load_int8 loads the values of w that meet a word of x, of W columns. dot_int8 adds to each lane of c the products of
// its words, exactly.
#ifdef BATCHGEN_VNNI
using XInt8 = int8_t;
constexpr int kInt8Bias = 128;  // values of w are stored without a sign, and larger by this
inline vi load_int8(const uint32_t* p) { return load_int(p); }
inline vi dot_int8(vi x, vi w, vi c) {
    asm("%{vex%} vpdpbusd\t{%2, %1, %0|%0, %1, %2}" : "+x"(c) : "x"(w), "x"(x));
    return c;
}
// Stores floats that are such integers.
inline void store_int8(XInt8* p, vf a) {
    const __m256i words = _mm256_cvtps_epi32(a);
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(pairs, pairs));
}
#else
using XInt8 = int16_t;
constexpr int kInt8Bias = 0;
inline vi load_int8(const uint16_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline vi dot_int8(vi x, vi w, vi c) { return _mm256_add_epi32(c, _mm256_madd_epi16(x, w)); }
// Stores floats that are such integers.
inline void store_int8(XInt8* p, vf a) {
    const __m256i words = _mm256_cvtps_epi32(a);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
#endif

}  // namespace
}  // namespace batchgen
