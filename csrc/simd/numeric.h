// Partial vectors of any type, dispatch on types, and the functions of activations and softmax: exp, tanh, erf.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "simd/carve.h"
#include "simd/target.h"

namespace batchgen {
namespace {

// The bits of a number, and the number that has these bits.
inline uint32_t float_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}
inline float float_with(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

// The first n numbers at p as floats, 0 < n; the other lanes are zero.
template <class T>
inline vf load_part(const T* p, int n) {
    if (n >= W) return load(p);
    T part[W] = {};
    memcpy(part, p, n * sizeof(T));
    return load(part);
}

// Stores the first n lanes.
template <class T>
inline void store_part(T* p, vf a, int n) {
    if (n >= W) return store(p, a);
    T part[W];
    store(part, a);
    memcpy(p, part, n * sizeof(T));
}

// The first n bytes at p as integers; the other lanes are zero.
inline vi load_bytes_part(const uint8_t* p, int n) {
    if (n >= W) return load_bytes(p);
    uint8_t part[W] = {};
    memcpy(part, p, n);
    return load_bytes(part);
}

// Lane i becomes lane i ^ X, for a power of two X below W. The width is a parameter so that only its branch is
// compiled.
template <int X, class V = vf, int kWidth = W>
inline V swap_lanes(V a) {
#if __has_builtin(__builtin_shufflevector)
    if constexpr (kWidth == 4) {
        return __builtin_shufflevector(a, a, X, 1 ^ X, 2 ^ X, 3 ^ X);
    } else if constexpr (kWidth == 8) {
        return __builtin_shufflevector(a, a, X, 1 ^ X, 2 ^ X, 3 ^ X, 4 ^ X, 5 ^ X, 6 ^ X, 7 ^ X);
    } else {
        return __builtin_shufflevector(a, a, X, 1 ^ X, 2 ^ X, 3 ^ X, 4 ^ X, 5 ^ X, 6 ^ X, 7 ^ X, 8 ^ X, 9 ^ X, 10 ^ X,
                                       11 ^ X, 12 ^ X, 13 ^ X, 14 ^ X, 15 ^ X);
    }
#else  // GCC 11
    int order __attribute__((vector_size(4 * W)));
    for (int i = 0; i < W; i++) order[i] = i ^ X;
    return __builtin_shuffle(a, order);
#endif
}

// One number as a float.
template <class T>
inline float value_of(const T* p) {
    float all[W];
    store(all, load_part(p, 1));
    return all[0];
}

// Lane i is the largest lane of r[i], for i < count.
inline vf largest_of(const vf* r, int count) {
#ifdef BATCHGEN_FAST_BF16
    if (count > 3) return across(r, [](vf a, vf b) { return max(a, b); });
#endif
    float all[W] = {};
    for (int i = 0; i < count; i++) all[i] = largest(r[i]);
    return load(all);
}

// Calls f with a null pointer whose type is that of the numbers.
template <class F>
inline auto with_type(Type type, F f) {
    switch (type) {
        case Type::BF16: return f((bf16*)nullptr);
        case Type::F16: return f((f16*)nullptr);
        default: return f((float*)nullptr);
    }
}

constexpr float kLog2E = 1.44269504f;

#ifdef BATCHGEN_SCALES_BY_POW2
// x, or -104 where it is less: exp(-104) is 0.
inline vf exp_argument(vf x) { return max(set1(-104), x); }
inline vf times_pow2(vf x, vf p, vf n) {
    (void)x;
    return scale_by_pow2(p, n);
}
#else
inline vf exp_argument(vf x) { return max(set1(-87.4f), min(set1(88.7f), x)); }
inline vf times_pow2(vf x, vf p, vf n) {
    return select_less(x, set1(-87.3f), zero(), mul(p, pow2(max(min(n, set1(127)), set1(-126)))));
}
#endif

// The rounding of a product and a sum: in one step where the machine can (Fused), or in two, which gives the same bits
// on every machine (Apart).
struct Fused {
    static constexpr bool kSame = false;
    static vf kept(vf a) { return a; }
    static vf fma(vf a, vf b, vf c) { return batchgen::fma(a, b, c); }
};
struct Apart {
    static constexpr bool kSame = true;
    static vf kept(vf a) { return rounded(a); }
    static vf fma(vf a, vf b, vf c) { return add(rounded(mul(a, b)), c); }
};

// e^x within 2 units in the last place; 0 where that would be below 2^-126 or so, also for -inf. With Apart, x is
// clamped to [-87, 87].
template <class A = Fused>
inline vf exp(vf x) {
    const vf bounded = A::kSame ? max(set1(-87), min(set1(87), x)) : exp_argument(x);
    const vf n = round_even(mul(bounded, set1(kLog2E)));
    vf r = A::fma(n, set1(-0.693359375f), bounded);
    r = A::fma(n, set1(2.12194440e-4f), r);
    // Taylor's polynomial of degree 7: |r| <= ln(2) / 2.
    vf p = set1(1.0f / 5040);
    p = A::fma(p, r, set1(1.0f / 720));
    p = A::fma(p, r, set1(1.0f / 120));
    p = A::fma(p, r, set1(1.0f / 24));
    p = A::fma(p, r, set1(1.0f / 6));
    p = A::fma(p, r, set1(0.5f));
    p = A::fma(p, r, set1(1));
    p = A::fma(p, r, set1(1));
    return A::kSame ? mul(p, pow2(n)) : times_pow2(x, p, n);
}

#ifdef BATCHGEN_SCALES_BY_POW2
// 2^x with a relative error of at most 8e-5, enough for what is rounded to bf16; x is finite.
inline vf exp2_rough(vf x) {
    const vf n = round_even(x), r = sub(x, n);
    vf p = set1(0.055171682f);  // minimax in relative error, |r| <= 1 / 2
    p = fma(p, r, set1(0.242611165f));
    p = fma(p, r, set1(0.693260992f));
    p = fma(p, r, set1(0.999928072f));
    return scale_by_pow2(p, n);
}
#endif

template <class A = Fused>
inline vf sigmoid(vf x) {
    return div(set1(1), add(set1(1), exp<A>(sub(zero(), x))));
}

template <class A = Fused>
inline vf tanh(vf x) {  // 2 sigmoid(2x) - 1
    return fma(set1(2), sigmoid<A>(add(x, x)), set1(-1));
}

// The error function, within 2.5e-7, and below 1/2 within 5e-7 of its value: x times the minimax polynomial of degree
// 14 in x * x on [0, 3.9^2]. From 3.9 on it is 1.
template <class A = Fused>
inline vf erf(vf x) {
    const vf a = max(set1(-3.9f), min(set1(3.9f), x));
    const vf s = A::fma(mul(a, a), set1(0.131492436f), set1(-1));  // in [-1, 1]
    static constexpr float kCoefficients[] = {0.00165119988f, -0.00409022067f, 0.00280105066f, -0.00334578869f,
                                              0.0124268159f,  -0.022294879f,   0.029866837f,   -0.041713018f,
                                              0.0576697476f,  -0.0740148872f,  0.0907058865f,  -0.109513976f,
                                              0.134689063f,   -0.181011543f,   0.362583995f};
    vf p = set1(kCoefficients[0]);
#pragma GCC unroll 14
    for (int i = 1; i < 15; i++) p = A::fma(p, s, set1(kCoefficients[i]));
    return max(set1(-1), min(set1(1), A::kept(mul(p, a))));
}

// An activation that is not gated.
template <class A = Fused>
inline vf activate(Activation activation, vf x) {
    switch (activation) {
        case Activation::Relu: return max(zero(), x);
        case Activation::Gelu: return mul(mul(set1(0.5f), x), add(set1(1), erf<A>(mul(x, set1(0.70710678f)))));
        case Activation::GeluTanh: {
            vf inner = A::kept(mul(set1(0.79788456f), A::fma(mul(set1(0.044715f), mul(x, x)), x, x)));
            return mul(mul(set1(0.5f), x), add(set1(1), tanh<A>(inner)));
        }
        default: return x;
    }
}

template <class A = Fused>
inline vf silu(vf x) {
    return mul(x, sigmoid<A>(x));
}

// The factor that a gated activation makes of the gate x.
template <class A = Fused>
inline vf gate(Activation activation, vf x) {
    switch (activation) {
        case Activation::GeluTanhMul: return activate<A>(Activation::GeluTanh, x);
        case Activation::GeluMul: return activate<A>(Activation::Gelu, x);
        default: return silu<A>(x);
    }
}

// A gated activation of the gate x and of `up`.
template <class A = Fused>
inline vf gated(Activation activation, vf x, vf up) {
    if (activation == Activation::SwigluOaiMul) {  // gpt-oss clamps both, and adds 1 to `up`
        const vf bounded = min(set1(7), x);
        const vf weight = mul(bounded, sigmoid<A>(A::kept(mul(set1(1.702f), bounded))));
        return mul(weight, add(max(set1(-7), min(set1(7), up)), set1(1)));
    }
    return mul(gate<A>(activation, x), up);
}

}  // namespace
}  // namespace batchgen
