// The gated delta rule for sequences with one token, which is bound by memory: each state is read and written once.
//
// One pass over a state S reads S^T k and S^T q. From these come what is added, d = beta (v - exp(g) S^T k), and the
// result exp(g) S^T q + (q.k) d. A second pass, over what is in a cache by then, writes exp(g) S + k d^T. In both, the
// next state is prefetched.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "simd/numeric.h"
#include "state/delta_operands.h"

namespace batchgen {
namespace {

// Columns of a state that are loaded at once, as two vectors: those of bf16 are the even and the odd columns.
constexpr int kStepColumns = 2 * W;
template <class S>
constexpr bool kInTurns = sizeof(S) == sizeof(bf16);

inline void load_columns(const float* p, vf& first, vf& second) { first = load(p), second = load(p + W); }
inline void load_columns(const bf16* p, vf& first, vf& second) {
    split_bf16(load_int((const uint32_t*)p), first, second);
}
inline void store_columns(float* p, vf first, vf second) { store(p, first), store(p + W, second); }
inline void store_columns(bf16* p, vf first, vf second) { store_int((uint32_t*)p, join_bf16(first, second)); }

// The first n columns at p; the others are zero.
template <class S>
inline void load_some_columns(const S* p, int n, vf& first, vf& second) {
    if (n >= kStepColumns) return load_columns(p, first, second);
    S part[kStepColumns] = {};
    memcpy(part, p, n * sizeof(S));
    load_columns(part, first, second);
}
template <class S>
inline void store_some_columns(S* p, int n, vf first, vf second) {
    if (n >= kStepColumns) return store_columns(p, first, second);
    S part[kStepColumns];
    store_columns(part, first, second);
    memcpy(p, part, n * sizeof(S));
}

// Numbers of kStepColumns columns put into the order of a state's vectors, and back into that of columns.
template <class S>
inline void to_state_order(const float* columns, float* out) {
    for (int i = 0; i < W; i++) {
        out[i] = columns[kInTurns<S> ? 2 * i : i];
        out[W + i] = columns[kInTurns<S> ? 2 * i + 1 : W + i];
    }
}
template <class S>
inline void to_column_order(const float* ordered, float* out) {
    for (int i = 0; i < W; i++) {
        out[kInTurns<S> ? 2 * i : i] = ordered[i];
        out[kInTurns<S> ? 2 * i + 1 : W + i] = ordered[W + i];
    }
}

// The vectors of a step, in scratch memory.
struct StepVectors {
    float *q, *k;            // [key_dim], of the current sequence and key head
    float *from_k, *from_q;  // [value_dim]: S^T k, S^T q, in the order of the state's vectors
    float* added;            // [value_dim]: d, in that order
    StepVectors(const DeltaRule& args, Carve& carve) {
        const int64_t keys = round_up(args.key_dim, W), values = round_up(args.value_dim, kStepColumns);
        q = carve.take<float>(keys), k = carve.take<float>(keys);
        from_k = carve.take<float>(values), from_q = carve.take<float>(values), added = carve.take<float>(values);
    }
};

// Prefetches a piece of memory in so many steps.
struct SpreadPrefetch {
    const uint8_t *at, *stop;
    int64_t due = 0, of_step;  // bytes, times 2^16
    SpreadPrefetch(const void* from, int64_t bytes, int64_t steps)
        : at((const uint8_t*)from), stop(at + (from ? bytes : 0)), of_step((bytes << 16) / steps + 1) {}
    __attribute__((always_inline)) void fetch(int count) {
        for (due += count * of_step; due > 0 && at < stop; due -= 64 << 16, at += 64) __builtin_prefetch(at, 1, 2);
    }
};

constexpr int kStepRows = 8;  // rows of a state whose products are added up in registers

// from_k += S^T k and from_q += S^T q for Rows rows and some columns of S, which are loaded by `load_row`.
template <int Rows, class S, class F>
__attribute__((always_inline)) inline void read_columns(const S* state, int stride, const float* k, const float* q,
                                                        float* from_k, float* from_q, F load_row) {
    vf k_first = load(from_k), k_second = load(from_k + W), q_first = load(from_q), q_second = load(from_q + W);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
        vf first, second;
        load_row(state + r * stride, first, second);
        const vf by_k = set1(k[r]), by_q = set1(q[r]);
        k_first = fma(by_k, first, k_first), k_second = fma(by_k, second, k_second);
        q_first = fma(by_q, first, q_first), q_second = fma(by_q, second, q_second);
    }
    store(from_k, k_first), store(from_k + W, k_second);
    store(from_q, q_first), store(from_q + W, q_second);
}

// The first pass over a state: from_k += S^T k and from_q += S^T q.
template <class S>
__attribute__((noinline)) void read_state(const S* state, int rows, int n, const StepVectors& vectors,
                                          SpreadPrefetch& ahead) {
    const StepVectors s = vectors;
    const auto some_rows = [&]<int Rows>(int r) __attribute__((always_inline)) {
        ahead.fetch(Rows);
        int i = 0;
        for (; i + kStepColumns <= n; i += kStepColumns)
            read_columns<Rows>(state + r * n + i, n, s.k + r, s.q + r, s.from_k + i, s.from_q + i,
                               [](const S* p, vf& first, vf& second) { load_columns(p, first, second); });
        if (i < n)
            read_columns<Rows>(state + r * n + i, n, s.k + r, s.q + r, s.from_k + i, s.from_q + i,
                               [&](const S* p, vf& first, vf& second) { load_some_columns(p, n - i, first, second); });
    };
    int r = 0;
    for (; r + kStepRows <= rows; r += kStepRows) some_rows.template operator()<kStepRows>(r);
    for (; r < rows; r++) some_rows.template operator()<1>(r);
}

// The second pass: out = decay S + k added^T; kZero: S is zero. The last rows are first, as they are still in the
// first-level cache.
template <bool kZero, class S>
__attribute__((noinline)) void write_state(const S* state, int rows, int n, float decay, const StepVectors& vectors,
                                           S* out, SpreadPrefetch& ahead) {
    const StepVectors s = vectors;
    const vf left = set1(decay);
    for (int r = rows - 1; r >= 0; r--) {
        ahead.fetch(1);
        const vf factor = set1(s.k[r]);
        vf first = zero(), second = zero();
        const auto update = [&](int i) __attribute__((always_inline)) {
            first = fma(factor, load(s.added + i), kZero ? zero() : mul(left, first));
            second = fma(factor, load(s.added + i + W), kZero ? zero() : mul(left, second));
        };
        const S* from = state + r * n;
        S* to = out + r * n;
        int i = 0;
        for (; i + kStepColumns <= n; i += kStepColumns) {
            if (!kZero) load_columns(from + i, first, second);
            update(i);
            store_columns(to + i, first, second);
        }
        if (i >= n) continue;
        if (!kZero) load_some_columns(from + i, n - i, first, second);
        update(i);
        store_some_columns(to + i, n - i, first, second);
    }
}

// Writes the result of a token, and to s.added what it adds. product: q.k.
template <class S, class T>
inline void delta_result(const DeltaToken<T>& token, int n, float decay, float product, const StepVectors& s) {
    const vf left = set1(decay), strength = set1(token.beta), of_added = set1(product);
    for (int i = 0; i < n; i += kStepColumns) {
        float value[kStepColumns], ordered[kStepColumns], result[kStepColumns];
        for (int j = 0; j < kStepColumns; j += W)
            store(value + j, i + j < n ? load_part(token.v + i + j, n - i - j) : zero());
        to_state_order<S>(value, ordered);
        for (int j = 0; j < kStepColumns; j += W) {
            const vf added = mul(strength, sub(load(ordered + j), mul(left, load(s.from_k + i + j))));
            store(s.added + i + j, added);
            store(ordered + j, fma(of_added, added, mul(left, load(s.from_q + i + j))));
        }
        to_column_order<S>(ordered, result);
        for (int j = 0; j < kStepColumns && i + j < n; j += W)
            store_part(token.out + i + j, load(result + j), n - i - j);
    }
}

// state: the state before the token, or null where it is zero; next: the state that will be read next, or null.
template <class T, class S>
inline void delta_step(const DeltaRule& args, const DeltaToken<T>& token, const S* state, S* out, const S* next,
                       float product, const StepVectors& s) {
    const int rows = args.key_dim, n = args.value_dim;
    const int64_t bytes = round_up(n, kStepColumns) * sizeof(float);
    const float decay = exp_of(token.g);
    SpreadPrefetch ahead(next, int64_t(rows) * n * sizeof(S), 2 * rows);
    memset(s.from_k, 0, bytes), memset(s.from_q, 0, bytes);
    if (state) read_state(state, rows, n, s, ahead);
    delta_result<S>(token, n, decay, product, s);
    if (state) write_state<false>(state, rows, n, decay, s, out, ahead);
    else write_state<true>(out, rows, n, decay, s, out, ahead);
}

inline void delta_steps(const DeltaRule& args, const int64_t* sequences, int64_t pair, int64_t stop, void* scratch) {
    Carve carve{(uint8_t*)scratch};
    const StepVectors s(args, carve);
    const int group = args.value_heads / args.key_heads;
    with_type(args.type, [&](auto* type) {
        with_state_type(args.state_type, [&](auto* state_type) {
            using T = __typeof__(*type);
            using S = __typeof__(*state_type);
            const auto before = [&](int64_t pair) -> const S* {
                if (pair >= stop) return nullptr;
                const int64_t slot = args.slots.source[sequences[pair / args.value_heads]];
                return slot < 0 ? nullptr : delta_state<S>(args, slot, int(pair % args.value_heads));
            };
            float product = 0;
            for (int64_t first = pair; pair < stop; pair++) {
                const int64_t sequence = sequences[pair / args.value_heads];
                const int head = int(pair % args.value_heads);
                const DeltaToken<T> token(args, args.slots.starts[sequence], head);
                if (pair == first || head % group == 0) {
                    load_normed(token.q, args.key_dim, 1 / __builtin_sqrtf(float(args.key_dim)), s.q);
                    load_normed(token.k, args.key_dim, 1, s.k);
                    vf all = zero();
                    for (int i = 0; i < args.key_dim; i += W) all = fma(load(s.q + i), load(s.k + i), all);
                    product = sum(all);
                }
                delta_step(args, token, before(pair), delta_state<S>(args, args.slots.target[sequence], head),
                           before(pair + 1), product, s);
            }
        });
    });
}

}  // namespace
}  // namespace batchgen
