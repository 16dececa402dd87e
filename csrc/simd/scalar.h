// Vectors of BATCHGEN_WIDTH floats, by default four, in the compiler's own vector types: for every machine, and the
// reference of what the operations in the other headers of simd/ mean.
//
// With a width of 16 and BATCHGEN_FAST_BF16 it has the operations of avx512.h, so that the code on them runs on any
// machine and under sanitizers; slowly.
//
// vf is a vector of W floats, vi one of W words of 32 bits.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "simd/table.h"

namespace batchgen {
namespace {

#ifndef BATCHGEN_WIDTH
#define BATCHGEN_WIDTH 4
#endif
constexpr int W = BATCHGEN_WIDTH;
typedef float vf __attribute__((vector_size(4 * W)));
typedef uint32_t vi __attribute__((vector_size(4 * W)));
typedef int32_t vs __attribute__((vector_size(4 * W)));
typedef uint16_t halves __attribute__((vector_size(2 * W)));
typedef uint8_t quarters __attribute__((vector_size(W)));
typedef int8_t signed_quarters __attribute__((vector_size(W)));

inline vf set1(float x) { return x - vf{}; }  // x - 0 keeps the sign of -0
inline vf zero() { return set1(0); }
inline vi set1_int(uint32_t x) { return x | vi{}; }
inline vf add(vf a, vf b) { return a + b; }
inline vf sub(vf a, vf b) { return a - b; }
inline vf mul(vf a, vf b) { return a * b; }
inline vf div(vf a, vf b) { return a / b; }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vi as_int(vf a) { return (vi)a; }
inline vf as_float(vi a) { return (vf)a; }
inline vf select(vs mask, vf then, vf otherwise) {
    return as_float(((vi)mask & as_int(then)) | (~(vi)mask & as_int(otherwise)));
}
inline vf select_less(vf a, vf b, vf then, vf otherwise) { return select(a < b, then, otherwise); }
inline vf max(vf a, vf b) { return select(a > b, a, b); }
inline vf min(vf a, vf b) { return select(a < b, a, b); }
// Rounds to the nearest integer, ties to even, for |a| < 2^22: beside 1.5 * 2^23 there are no bits for fractions.
inline vf round_even(vf a) {
    vf magic = set1(12582912.0f);
    return (a + magic) - magic;
}
inline vf pow2(vf n) { return as_float((vi)(__builtin_convertvector(n, vs) + 127) << 23); }
// All lanes joined two by two, neighbours first.
template <class F>
inline float joined(vf a, F join) {
    float all[W];
    memcpy(all, &a, sizeof a);
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; i++) all[i] = join(all[2 * i], all[2 * i + 1]);
    return all[0];
}
inline float sum(vf a) {
    return joined(a, [](float x, float y) { return x + y; });
}
inline float largest(vf a) {
    return joined(a, [](float x, float y) { return x > y ? x : y; });
}

inline float to_float(f16 h) {
    uint32_t sign = uint32_t(h.bits & 0x8000) << 16, magnitude = uint32_t(h.bits & 0x7fff) << 13, bits;
    float f;
    if (magnitude >= 0x0f800000) {  // infinities and NaN
        bits = sign | magnitude | 0x7f800000;
        memcpy(&f, &bits, 4);
        return f;
    }
    memcpy(&f, &magnitude, 4);
    f *= 0x1p112f;  // the exponent's bias; right for subnormal numbers too
    memcpy(&bits, &f, 4);
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}
inline f16 to_f16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return f16{uint16_t(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return f16{uint16_t(sign | 0x7c00)};
    if (magnitude < 0x38800000) {  // subnormal: the sum's last bit is worth 2^-24
        float part, shift = 0.5f;
        memcpy(&part, &magnitude, 4);
        part += shift;
        memcpy(&magnitude, &part, 4);
        return f16{uint16_t(sign | (magnitude - 0x3f000000))};
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return f16{uint16_t(sign | ((magnitude - 0x38000000) >> 13))};
}
inline bf16 to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16{0x7fc0};
    return bf16{uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline vf load(const float* p) {
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}
inline vf load(const bf16* p) {
    halves a;
    memcpy(&a, p, sizeof a);
    return as_float(__builtin_convertvector(a, vi) << 16);
}
inline vf load(const f16* p) {
    vf a;
    for (int i = 0; i < W; i++) a[i] = to_float(p[i]);
    return a;
}
inline vf load(const int8_t* p) {
    signed_quarters a;
    memcpy(&a, p, sizeof a);
    return __builtin_convertvector(__builtin_convertvector(a, vs), vf);
}
inline void store(float* p, vf a) { memcpy(p, &a, sizeof a); }
inline void store(f16* p, vf a) {
    for (int i = 0; i < W; i++) p[i] = to_f16(a[i]);
}
inline void store(bf16* p, vf a) {
    for (int i = 0; i < W; i++) p[i] = to_bf16(a[i]);
}

// Stores past the caches, where a set can; `end_streams` ends a run of them.
template <class T>
inline void stream(T* p, vf a) {
    store(p, a);
}
inline void end_streams() {}

inline vi load_int(const uint32_t* p) {
    vi a;
    memcpy(&a, p, sizeof a);
    return a;
}
// The first n words at p, 0 < n <= W; the other lanes are zero.
inline vi load_int_part(const uint32_t* p, int n) {
    vi a = set1_int(0);
    memcpy(&a, p, n * sizeof *p);
    return a;
}
inline void store_int(uint32_t* p, vi a) { memcpy(p, &a, sizeof a); }
inline vi load_bytes(const uint8_t* p) {
    quarters a;
    memcpy(&a, p, sizeof a);
    return __builtin_convertvector(a, vi);
}
inline vf to_float(vi a) { return __builtin_convertvector((vs)a, vf); }
// A table of 16 numbers, looked up by the low four bits of each lane.
using Table = IndexedTable<vf, vi>;
// In each 16 bytes, the bytes of the table that the low four bits of the indexes name.
inline vi shuffle_bytes(vi table, vi index) {
    uint8_t numbers[sizeof table], bytes[sizeof index];
    memcpy(numbers, &table, sizeof table);
    memcpy(bytes, &index, sizeof index);
    for (int i = 0; i < int(sizeof bytes); i++) bytes[i] = numbers[i / 16 * 16 + bytes[i] % 16];
    memcpy(&index, bytes, sizeof index);
    return index;
}
// out[i] = table[index[i]] of 16 numbers, by 16 indexes below 16.
inline void look_up(const int8_t* table, const uint8_t* index, int8_t* out) {
    for (int i = 0; i < 16; i++) out[i] = table[index[i]];
}
inline vf low_nibbles(vi a) { return __builtin_convertvector((vs)(a & 15), vf); }
inline vf high_nibbles(vi a) { return __builtin_convertvector((vs)(a >> 4), vf); }
inline void store_nibbles(uint8_t* p, vf low, vf high) {
    for (int i = 0; i < W; i++) p[i] = uint8_t(int(low[i]) | int(high[i]) << 4);
}

// The low and the high 16 bits of each word as floats: pairs of bf16, and of fp16.
inline void split_bf16(vi words, vf& low, vf& high) {
    low = as_float(words << 16), high = as_float(words & 0xffff0000u);
}
// The other way: each lane of two vectors rounded to bf16.
inline vi join_bf16(vf low, vf high) {
    const auto rounded = [](vf a) {
        const vi bits = as_int(a);
        return as_int(select(a == a, as_float(bits + 0x7fff + (bits >> 16 & 1)), as_float(set1_int(0x7fc00000))));
    };
    return rounded(low) >> 16 | (rounded(high) & 0xffff0000u);
}
inline void split_f16(vi words, vf& low, vf& high) {
    for (int i = 0; i < W; i++) {
        low[i] = to_float(f16{uint16_t(words[i])});
        high[i] = to_float(f16{uint16_t(words[i] >> 16)});
    }
}

inline void transpose(vi* r) {
    uint32_t from[W][W], to[W][W];
    memcpy(from, r, sizeof from);
    for (int i = 0; i < W; i++)
        for (int j = 0; j < W; j++) to[i][j] = from[j][i];
    memcpy(r, to, sizeof to);
}

inline vi sub_int(vi a, vi b) { return a - b; }
// The larger of |a| and |b|; NaN where either is NaN, which as an integer is above all numbers.
inline vf max_or_nan(vf a, vf b) {
    const vs x = (vs)(as_int(a) & 0x7fffffffu), y = (vs)(as_int(b) & 0x7fffffffu);
    return select(x > y, (vf)x, (vf)y);
}
// Adds to each lane of c the products of four bytes of a, unsigned, and of b, signed.
inline vi dot_bytes(vi a, vi b, vi c) {
    for (int n = 0; n < 32; n += 8) c += (a >> n & 0xff) * (vi)((vs)(b << (24 - n)) >> 24);
    return c;
}

// The number itself. CMakeLists.txt forbids the compiler to contract products and sums in this set.
inline vf rounded(vf a) { return a; }

// Products of int8 values. XInt8 is the type that those of x are stored in; a word of 32 bits has as many as fit.
// load_int8 loads the values of w that meet a word of x, of W columns. dot_int8 adds to each lane of c the products of
// its words, exactly.
using XInt8 = int8_t;
constexpr int kInt8Bias = 128;  // values of w are stored without a sign, and larger by this
inline vi load_int8(const uint32_t* p) { return load_int(p); }
inline vi dot_int8(vi x, vi w, vi c) { return dot_bytes(w, x, c); }
// Stores floats that are such integers.
inline void store_int8(XInt8* p, vf a) {
    for (int i = 0; i < W; i++) p[i] = a[i] == a[i] ? XInt8(a[i]) : 0;
}

#ifdef BATCHGEN_FAST_BF16
// The operations of avx512.h on bf16 pairs and bytes; comments are there.

template <class F>
inline vf across(const vf* r, F join) {
    constexpr int order[] = {2, 8, 1, 4};
    vf a[W], result;
    for (int i = 0; i < W; i++) {
        a[i] = r[i];
        for (int n : order) {
            vf other;
            for (int j = 0; j < W; j++) other[j] = a[i][j ^ n];
            a[i] = join(a[i], other);
        }
        result[i] = a[i][0];
    }
    return result;
}
inline vf sums(const vf* r) { return across(r, add); }

inline vf scale_by_pow2(vf p, vf n) {
    const vf bounded = max(min(n, set1(252)), set1(-252)), half = round_even(bounded * 0.5f);
    return p * pow2(half) * pow2(bounded - half);
}
#define BATCHGEN_SCALES_BY_POW2

// Adds the products of pairs of bf16 to c: the high half first, each with a rounding of its own, as VDPBF16PS does. The
// instruction takes numbers below 2^-126 for zero; here they are numbers.
inline vf dot_pairs(vi a, vi b, vf c) {
    c = fma(as_float(a & 0xffff0000u), as_float(b & 0xffff0000u), c);
    return fma(as_float(a << 16), as_float(b << 16), c);
}
struct PairTable {
    bf16 numbers[2 * W];
    explicit PairTable(const bf16* from) { memcpy(numbers, from, sizeof numbers); }
    explicit PairTable(vi from) { memcpy(numbers, &from, sizeof numbers); }
    vi of_32(vi index) const {
        uint16_t halves[2 * W];
        memcpy(halves, &index, sizeof halves);
        for (uint16_t& half : halves) half = numbers[half % (2 * W)].bits;
        memcpy(&index, halves, sizeof halves);
        return index;
    }
};
inline vi widen_bytes(const uint8_t* p) {
    uint16_t halves[2 * W];
    for (int i = 0; i < 2 * W; i++) halves[i] = p[i];
    return load_int((const uint32_t*)halves);
}
inline vi add_where(vi a, uint32_t bits, int number) {
    uint16_t halves[2 * W];
    memcpy(halves, &a, sizeof halves);
    for (int i = 0; i < 2 * W; i++) halves[i] = uint16_t(halves[i] + (bits >> i & 1) * number);
    return load_int((const uint32_t*)halves);
}
#define BATCHGEN_LOAD_QUARTERS
inline vi load_quarters(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
    const uint8_t* const from[] = {a, b, c, d};
    vi all;
    for (int i = 0; i < 4; i++) memcpy((uint8_t*)&all + W * i, from[i], W);
    return all;
}
inline void transpose_quarters(vi* r) {
    uint32_t from[4][W], to[4][W];
    memcpy(from, r, sizeof from);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < W; j++) to[i][j] = from[j % 4][j / 4 * 4 + i];
    memcpy(r, to, sizeof to);
}
inline vi to_pairs(vf first, vf second) {
    bf16 all[2 * W];
    store(all, first), store(all + W, second);
    return load_int((const uint32_t*)all);
}
inline vi pairs_of(vf even, vf odd) {
    bf16 pairs[2 * W], all[2 * W];
    store(all, even), store(all + W, odd);
    for (int i = 0; i < W; i++) pairs[2 * i] = all[i], pairs[2 * i + 1] = all[W + i];
    return load_int((const uint32_t*)pairs);
}
inline void repeated(vf a, vf& first, vf& second) {
    for (int i = 0; i < W; i++) first[i] = a[i / 2], second[i] = a[W / 2 + i / 2];
}
inline void interleave(vi a, vi b, vi& first, vi& second) {
    uint16_t from[2][2 * W], pairs[2 * W][2];
    memcpy(from[0], &a, sizeof a);
    memcpy(from[1], &b, sizeof b);
    for (int i = 0; i < 2 * W; i++) pairs[i][0] = from[0][i], pairs[i][1] = from[1][i];
    memcpy(&first, pairs, sizeof first);
    memcpy(&second, pairs + W, sizeof second);
}
inline vi pair_bytes(vi a, vi b) { return a | b << 16; }
inline vi and_bits(vi a, vi b) { return a & b; }
inline vi or_bits(vi a, vi b) { return a | b; }
inline vi add_int(vi a, vi b) { return a + b; }
template <int N>
inline vi shift_left(vi a) {
    return a << N;
}
template <int N>
inline vi shift_right(vi a) {
    return a >> N;
}
inline vi to_int(vf a) {
    const vf whole = select((a < 4e6f) & (a > -4e6f), round_even(a), a);  // larger floats have no fractions to speak of
    const vs fits = (a < 0x1p31f) & (a >= -0x1p31f);
    return as_int(select(fits, as_float((vi) __builtin_convertvector(select(fits, whole, vf{}), vs)),
                         as_float(set1_int(0x80000000))));
}
inline void store_low_bytes(int8_t* p, vi a) {
    for (int i = 0; i < W; i++) p[i] = int8_t(a[i]);
}
inline vi set1_bytes(const int8_t* four) {
    uint32_t bits;
    memcpy(&bits, four, 4);
    return set1_int(bits);
}
inline void interleave_four(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, vi& first,
                            vi& second) {
    uint8_t fours[2 * W][4];
    for (int i = 0; i < 2 * W; i++) fours[i][0] = a[i], fours[i][1] = b[i], fours[i][2] = c[i], fours[i][3] = d[i];
    memcpy(&first, fours, sizeof first);
    memcpy(&second, fours + W, sizeof second);
}
#endif

}  // namespace
}  // namespace batchgen
