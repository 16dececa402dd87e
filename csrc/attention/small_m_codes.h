// Attention of small M over quantized KV with products of bytes.
//
// Quantized values are bytes here, and an instruction adds up four products of bytes. The other factor, a query or a
// softmax weight, is split into a high and a low byte, x ~ step (256 hi + lo), which is closer than bf16. Head sizes
// are multiples of kGroup. The larger functions are not inlined: in one function for all, vectors do not keep their
// registers.
#pragma once

#include <stdint.h>

#include "attention/prefetch.h"
#include "attention/scratch.h"
#include "matmul/micro_kernel.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

#ifdef BATCHGEN_FAST_BF16

constexpr float kFixedMost = 127 * 256;  // the largest integer that is split

// Splits W numbers into the high and low bytes of their integers. Those of NaN, as of 0 / 0, are 0; where that matters
// the step is NaN too.
inline void store_fixed(vf x, int8_t* high, int8_t* low) {
    const vi whole = to_int(x);
    store_low_bytes(low, whole);  // in [-128, 127], so the high byte may be one more
    store_low_bytes(high, shift_right<8>(add_int(whole, set1_int(128))));
}
inline vi join_fixed(vi high, vi low) { return add_int(shift_left<8>(high), low); }

// Splits a query of n values: out [kFixedRow]. Returns the step.
template <class Q>
inline float fixed_query(const Q* q, int n, int8_t* out) {
    vf most = zero();
    for (int i = 0; i < n; i += W) most = max(max(load(q + i), sub(zero(), load(q + i))), most);
    const float highest = largest(most);
    const vf scale = set1(kFixedMost / highest);
    for (int i = 0; i < n; i += W) store_fixed(mul(load(q + i), scale), out + i, out + kMaxHeadDim + i);
    return highest / kFixedMost;
}

// Transposes the values of 2 W keys into words of four values of K: out [n / 4, kSmallMKeys].
__attribute__((noinline)) void transpose_codes(const uint8_t* const* keys, int n, uint32_t* out, Ahead& ahead) {
    ahead.fetch();
    for (int d = 0; d < n / 4; d += W, out += W * kSmallMKeys) {
        for (int half = 0; half < 2 * W; half += W) {
            vi r[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) r[i] = load_int((const uint32_t*)keys[half + i] + d);
            transpose(r);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store_int(out + half + i * kSmallMKeys, r[i]);
        }
    }
}

// Scores of Rows split queries and Vectors * W keys.
template <int Rows, int Vectors>
__attribute__((noinline)) void code_scores(const int8_t* q, const float* steps, const float* query_sum, int groups,
                                           const uint32_t* words, const float* scale, const float* minimum,
                                           float* out) {
    for (int g = 0; g < groups; g++, q += kGroup, scale += kKeys, minimum += kKeys) {
        vi high[Rows][Vectors], low[Rows][Vectors];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; v++) high[r][v] = low[r][v] = set1_int(0);
        }
        for (int d = 0; d < kGroup; d += 4, words += kSmallMKeys) {
            vi codes[Vectors];
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; v++) codes[v] = load_int(words + v * W);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++) {
                const int8_t* row = q + r * kFixedRow + d;
#pragma GCC unroll 2
                for (int v = 0; v < Vectors; v++) {
                    high[r][v] = dot_bytes(codes[v], set1_bytes(row), high[r][v]);
                    low[r][v] = dot_bytes(codes[v], set1_bytes(row + kMaxHeadDim), low[r][v]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
            const vf step = set1(steps[r]), sum = set1(query_sum[r * kGroups + g]);
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; v++) {
                float* to = out + r * kSmallMKeys + v * W;
                const vf score = mul(sum, load(minimum + v * W));
                const vf products = mul(to_float(join_fixed(high[r][v], low[r][v])), step);
                store(to, fma(products, load(scale + v * W), g ? add(load(to), score) : score));
            }
        }
    }
}

// Interleaves the bytes of four rows of V: out [keys / 4, bytes] words.
__attribute__((noinline)) void interleave_codes(const uint8_t* const* values, int keys, int bytes, uint32_t* out,
                                                Ahead& ahead) {
    for (int i = 0; i < keys; i += 4) {
        if (i % W == 0) ahead.fetch();
        for (int j = 0; j < bytes; j += 2 * W, out += 2 * W) {
            vi first, second;
            interleave_four(values[i] + j, values[i + 1] + j, values[i + 2] + j, values[i + 3] + j, first, second);
            store_int(out, first), store_int(out + W, second);
        }
    }
}

// Splits the softmax weights of `keys` keys and some rows, times V's scales: out [rows, kGroups, kFixedWeights], with a
// step for each row and group [rows, kGroups]. least [rows, kGroups] = least * change + weights times minimums.
__attribute__((noinline)) void fixed_weights(const float* weights, int rows, int groups, const float* scale,
                                             const float* minimum, int keys, int8_t* out, float* step, float* least,
                                             const float* change) {
    const int lanes = groups <= kGroups / 2 ? kGroups / 2 : kGroups;  // of a row: each group has one
    const int at_once = W / lanes;
    for (int first = 0; first < rows; first += at_once) {
        const int count = int(smaller(at_once, rows - first));
        vf most[W], all[W];
        for (int i = 0; i < W; i++) most[i] = all[i] = zero();
        for (int r = 0; r < count; r++) {
            for (int g = 0; g < groups; g++) {
                vf largest = zero(), sum = zero();
                for (int i = 0; i < keys; i += W) {
                    const vf weight = load(weights + (first + r) * kSmallMKeys + i);
                    sum = fma(weight, load(minimum + g * kKeys + i), sum);
                    largest = max_or_nan(largest, mul(weight, load(scale + g * kKeys + i)));
                }
                most[r * lanes + g] = largest, all[r * lanes + g] = sum;
            }
        }
        float of_step[W], to_fixed[W], added[W];
        const vf highest = across(most, [](vf a, vf b) { return max_or_nan(a, b); });
        store(of_step, mul(highest, set1(1 / kFixedMost)));
        store(to_fixed, div(set1(kFixedMost), highest));
        store(added, sums(all));
        for (int r = 0; r < count; r++) {
            for (int g = 0; g < groups; g++) {
                const int at = (first + r) * kGroups + g, lane = r * lanes + g;
                step[at] = of_step[lane];
                least[at] = least[at] * change[first + r] + added[lane];
                const vf fixed = set1(to_fixed[lane]);
                for (int i = 0; i < keys; i += W) {
                    const vf x = mul(load(weights + (first + r) * kSmallMKeys + i), load(scale + g * kKeys + i));
                    store_fixed(mul(x, fixed), out + at * kFixedWeights + i,
                                out + at * kFixedWeights + kSmallMKeys + i);
                }
            }
        }
    }
}

// acc [Rows, stride] = acc * change + weights of keys, four at a time, times values of V, for Vectors * W columns of
// one group.
template <int Rows, int Vectors>
__attribute__((noinline)) void code_values(const int8_t* weights, const float* steps, const uint32_t* codes,
                                           int64_t codes_stride, int keys, float* acc, int64_t stride,
                                           const float* change) {
    vi sums[Rows][Vectors][2];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) sums[r][v][0] = sums[r][v][1] = set1_int(0);
    }
    for (int i = 0; i < keys; i += 4, codes += codes_stride) {
        vi four[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) four[v] = load_int(codes + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
            const int8_t* row = weights + r * kGroups * kFixedWeights + i;
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                const vi weight = set1_bytes(row + part * kSmallMKeys);
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; v++) sums[r][v][part] = dot_bytes(four[v], weight, sums[r][v][part]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
        const vf changed = set1(change[r]), step = set1(steps[r * kGroups]);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) {
            float* out = acc + r * stride + v * W;
            store(out, fma(to_float(join_fixed(sums[r][v][0], sums[r][v][1])), step, mul(load(out), changed)));
        }
    }
}
#endif

}  // namespace
}  // namespace batchgen
