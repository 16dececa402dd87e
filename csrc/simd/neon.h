// Vectors of 4 floats: Advanced SIMD of 64-bit Arm, with products of bytes where the target has them
// (armv8.2-a+dotprod).
//
// simd/scalar.h says what each operation means.
#pragma once

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "simd/table.h"

namespace batchgen {
namespace {

constexpr int W = 4;
using vf = float32x4_t;
using vi = uint32x4_t;

inline vf zero() { return vdupq_n_f32(0); }
inline vf set1(float x) { return vdupq_n_f32(x); }
inline vi set1_int(uint32_t x) { return vdupq_n_u32(x); }
inline vf add(vf a, vf b) { return vaddq_f32(a, b); }
inline vf sub(vf a, vf b) { return vsubq_f32(a, b); }
inline vf mul(vf a, vf b) { return vmulq_f32(a, b); }
inline vf div(vf a, vf b) { return vdivq_f32(a, b); }
inline vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
inline vf max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline vf min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline vf round_even(vf a) { return vrndnq_f32(a); }
inline vf select_less(vf a, vf b, vf then, vf otherwise) { return vbslq_f32(vcltq_f32(a, b), then, otherwise); }
inline vf pow2(vf n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23)); }
inline float sum(vf a) { return vaddvq_f32(a); }
inline float largest(vf a) { return vmaxvq_f32(a); }

inline vf load(const float* p) { return vld1q_f32(p); }
inline vf load(const bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
inline vf load(const f16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
inline vf load(const int8_t* p) { return vcvtq_f32_s32(int32x4_t{p[0], p[1], p[2], p[3]}); }
inline float to_float(f16 a) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(a.bits))), 0); }
inline void store(float* p, vf a) { vst1q_f32(p, a); }
inline void store(f16* p, vf a) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
// Each lane rounded to bf16, in its high 16 bits; the others are any.
inline vi rounded_to_bf16(vf a) {
    vi bits = vreinterpretq_u32_f32(a), lsb = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    vi rounded = vaddq_u32(bits, vaddq_u32(lsb, vdupq_n_u32(0x7fff)));
    return vbslq_u32(vceqq_f32(a, a), rounded, vdupq_n_u32(0x7fc00000));
}
inline void store(bf16* p, vf a) { vst1_u16(&p->bits, vshrn_n_u32(rounded_to_bf16(a), 16)); }

// Stores through the caches: Arm has no stores past them.
template <class T>
inline void stream(T* p, vf a) {
    store(p, a);
}
inline void end_streams() {}

inline vi load_int(const uint32_t* p) { return vld1q_u32(p); }
// The first n words at p, 0 < n <= W; the other lanes are zero.
inline vi load_int_part(const uint32_t* p, int n) {
    uint32_t part[W] = {};
    memcpy(part, p, n * sizeof *p);
    return load_int(part);
}
inline void store_int(uint32_t* p, vi a) { vst1q_u32(p, a); }
inline vi as_int(vf a) { return vreinterpretq_u32_f32(a); }
inline vf as_float(vi a) { return vreinterpretq_f32_u32(a); }
inline vi load_bytes(const uint8_t* p) { return vi{p[0], p[1], p[2], p[3]}; }
inline vf to_float(vi a) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a)); }
// A table of 16 numbers, looked up by the low four bits of each lane.
using Table = IndexedTable<vf, vi>;
// out[i] = table[index[i]] of 16 numbers, by 16 indexes below 16.
inline void look_up(const int8_t* table, const uint8_t* index, int8_t* out) {
    vst1q_s8(out, vqtbl1q_s8(vld1q_s8(table), vld1q_u8(index)));
}
inline vf low_nibbles(vi a) { return vcvtq_f32_u32(vandq_u32(a, vdupq_n_u32(15))); }
inline vf high_nibbles(vi a) { return vcvtq_f32_u32(vshrq_n_u32(a, 4)); }
inline void store_nibbles(uint8_t* p, vf low, vf high) {
    vi both = vorrq_u32(vcvtnq_u32_f32(low), vshlq_n_u32(vcvtnq_u32_f32(high), 4));
    p[0] = uint8_t(vgetq_lane_u32(both, 0)), p[1] = uint8_t(vgetq_lane_u32(both, 1));
    p[2] = uint8_t(vgetq_lane_u32(both, 2)), p[3] = uint8_t(vgetq_lane_u32(both, 3));
}

// The low and the high 16 bits of each word as floats: pairs of bf16, and of fp16.
inline void split_bf16(vi words, vf& low, vf& high) {
    low = as_float(vshlq_n_u32(words, 16));
    high = as_float(vandq_u32(words, vdupq_n_u32(0xffff0000)));
}
// The other way: each lane of two vectors rounded to bf16.
inline vi join_bf16(vf low, vf high) { return vsriq_n_u32(rounded_to_bf16(high), rounded_to_bf16(low), 16); }
inline void split_f16(vi words, vf& low, vf& high) {
    low = vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(words)));
    high = vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(words, 16)));
}

inline void transpose(vi* r) {
    uint32x4x2_t a = vtrnq_u32(r[0], r[1]), b = vtrnq_u32(r[2], r[3]);
    r[0] = vcombine_u32(vget_low_u32(a.val[0]), vget_low_u32(b.val[0]));
    r[1] = vcombine_u32(vget_low_u32(a.val[1]), vget_low_u32(b.val[1]));
    r[2] = vcombine_u32(vget_high_u32(a.val[0]), vget_high_u32(b.val[0]));
    r[3] = vcombine_u32(vget_high_u32(a.val[1]), vget_high_u32(b.val[1]));
}

// The number itself. It keeps the compiler from contracting a product and a sum into one rounding.
inline vf rounded(vf a) {
    asm("" : "+w"(a));
    return a;
}
inline vi sub_int(vi a, vi b) { return vsubq_u32(a, b); }
// The larger of |a| and |b|; NaN where either is NaN, which as an integer is above all numbers.
inline vf max_or_nan(vf a, vf b) {
    return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(vabsq_f32(a)), vreinterpretq_u32_f32(vabsq_f32(b))));
}

// Products of int8 values. XInt8 is the type that those of x are stored in; a word of 32 bits has as many as fit.
// load_int8 loads the values of w that meet a word of x, of W columns. dot_int8 adds to each lane of c the products of
// its words, exactly.
using XInt8 = int8_t;
constexpr int kInt8Bias = 0;
inline vi load_int8(const uint32_t* p) { return load_int(p); }
inline vi dot_int8(vi x, vi w, vi c) {
    const int8x16_t a = vreinterpretq_s8_u32(x), b = vreinterpretq_s8_u32(w);
    const int32x4_t sums = vreinterpretq_s32_u32(c);
#ifdef __ARM_FEATURE_DOTPROD
    return vreinterpretq_u32_s32(vdotq_s32(sums, a, b));
#else
    // Two products fit 16 bits: values of x are never -128.
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return vreinterpretq_u32_s32(vpadalq_s16(sums, vpaddq_s16(low, high)));
#endif
}
// Stores floats that are such integers.
inline void store_int8(XInt8* p, vf a) {
    const int16x4_t words = vmovn_s32(vcvtnq_s32_f32(a));
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    memcpy(p, &bytes, 4);
}

}  // namespace
}  // namespace batchgen
