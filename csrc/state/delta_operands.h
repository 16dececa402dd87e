// The operands of the gated delta rule as floats: queries and keys of a token, normed; states of value heads.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "norm.h"
#include "simd/carve.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

constexpr int kDeltaChunk = 64;         // tokens of a sequence whose updates are computed together
constexpr int kDeltaHeads = 4;          // value heads of a piece, at most
constexpr float kDeltaNormEps = 1e-6f;  // of the L2 norms

inline float exp_of(float x) {
    float all[W];
    store(all, exp(set1(x)));
    return all[0];
}

// A query or a key, divided by its L2 norm and multiplied by a factor; zeros up to whole vectors.
template <class T>
inline void load_normed(const T* x, int n, float factor, float* out) {
    const float squares = sum_over(x, n, [](vf v) { return v; }, [](vf all, vf v) { return fma(v, v, all); });
    const vf scale = set1(factor / __builtin_sqrtf(squares + kDeltaNormEps));
    for (int i = 0; i < n; i += W) store(out + i, mul(load_part(x + i, n - i), scale));
}

// Calls f with a null pointer whose type is that of the states.
template <class F>
inline auto with_state_type(Type type, F f) {
    return type == Type::BF16 ? f((bf16*)nullptr) : f((float*)nullptr);
}

// Where the parts of a token's qkv begin, and where its results go.
template <class T>
struct DeltaToken {
    const T *q, *k, *v;
    T* out;
    float g, beta;

    DeltaToken(const DeltaRule& args, int64_t token, int head) {
        const int64_t keys = int64_t(args.key_heads) * args.key_dim;
        const int64_t key_head = head / (args.value_heads / args.key_heads);
        q = (const T*)args.qkv + token * args.qkv_stride + key_head * args.key_dim;
        k = q + keys;
        v = (const T*)args.qkv + token * args.qkv_stride + 2 * keys + int64_t(head) * args.value_dim;
        const int64_t at = token * args.value_heads + head;
        out = (T*)args.out + at * args.value_dim;
        g = args.g[at], beta = args.beta[at];
    }
};

// The state of a value head in a slot.
template <class S>
inline S* delta_state(const DeltaRule& args, int64_t slot, int head) {
    return (S*)args.states + slot * args.state_stride + int64_t(head) * args.key_dim * args.value_dim;
}

}  // namespace
}  // namespace batchgen
