// Reductions of rows of logits: argmax, the log of the sum of exponentials, and softmax weights.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// The largest of n numbers. Where one of them is not finite, `watch` becomes NaN, if it is given.
inline float largest_of(const float* x, int64_t n, float* watch = nullptr) {
    const vf none = set1(-__builtin_inff());
    vf best[4] = {none, none, none, none};  // four chains, so that no comparison waits for the last one
    vf times_zero[4] = {zero(), zero(), zero(), zero()};
    int64_t at = 0;
    for (; at + 4 * W <= n; at += 4 * W)
        for (int c = 0; c < 4; c++) {
            const vf here = load(x + at + c * W);
            best[c] = max(here, best[c]);
            times_zero[c] = fma(here, zero(), times_zero[c]);
        }
    for (; at + W <= n; at += W) {
        const vf here = load(x + at);
        best[0] = max(here, best[0]);
        times_zero[0] = fma(here, zero(), times_zero[0]);
    }
    float highest = largest(max(max(best[0], best[1]), max(best[2], best[3])));
    float rest = 0;
    for (int64_t i = n / W * W; i < n; i++) highest = x[i] > highest ? x[i] : highest, rest += x[i] * 0;
    if (watch) *watch += rest + sum(add(add(times_zero[0], times_zero[1]), add(times_zero[2], times_zero[3])));
    return highest;
}

// The argmax of rows [row, stop), its value (NaN where a logit is not finite), and the log of the sum of exponentials.
inline void argmax(const Argmax& args, int64_t row, int64_t stop) {
    const int64_t n = args.columns;
    for (; row < stop; row++) {
        const float* x = args.logits + row * args.stride;
        constexpr int64_t kBlock = 1024;
        float highest = -__builtin_inff(), watch = 0;
        int64_t index = 0;  // of the first block with the largest, then of the largest itself
        for (int64_t i = 0; i < n; i += kBlock) {
            const float here = largest_of(x + i, smaller(kBlock, n - i), &watch);
            if (here > highest) highest = here, index = i;
        }
        while (index < n - 1 && !(x[index] == highest)) index++;
        args.index[row] = index;
        args.maximum[row] = highest + watch;
        if (!args.lse) continue;
        double total = 0;
        for (int64_t i = 0; i < n;) {  // in pieces: a long sum in fp32 would lose what is added last
            vf all = zero();
            for (const int64_t stop = smaller(n / W * W, i + 64 * W); i < stop; i += W)
                all = add(all, exp(sub(load(x + i), set1(highest))));
            for (; i < n && i >= n / W * W; i++) {
                float one[W];
                store(one, exp(set1(x[i] - highest)));
                total += one[0];
            }
            total += sum(all);
        }
        args.lse[row] = highest + float(__builtin_log(total));
    }
}

// out[i] = exp((logits[i] - the largest) / temperature) for a row of n; 0 for NaN.
inline void softmax_weights(const float* logits, int64_t n, float temperature, float* out) {
    const vf from = set1(largest_of(logits, n)), by = set1(1 / temperature);
    for (int64_t i = 0; i < n; i += W) {
        const int count = int(smaller(W, n - i));
        store_part(out + i, max(exp(mul(sub(load_part(logits + i, count), from), by)), zero()), count);
    }
}

}  // namespace
}  // namespace batchgen
