// The gates of the delta rule: how much of a state is left at a token, and how strong the token's update is.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// log(1 + y) for y in [0, 1]: 2 artanh(s) with s = y / (2 + y) <= 1 / 3, by its series.
inline vf log1p(vf y) {
    const vf s = div(y, add(set1(2), y)), square = mul(s, s);
    vf p = set1(1.0f / 15);
    p = fma(p, square, set1(1.0f / 13));
    p = fma(p, square, set1(1.0f / 11));
    p = fma(p, square, set1(1.0f / 9));
    p = fma(p, square, set1(1.0f / 7));
    p = fma(p, square, set1(1.0f / 5));
    p = fma(p, square, set1(1.0f / 3));
    return mul(add(s, s), fma(p, square, set1(1)));
}

// log(1 + e^x)
inline vf softplus(vf x) {
    const vf least = min(x, sub(zero(), x));  // -|x|; NaN stays
    return add(max(zero(), x), log1p(exp(least)));
}

inline void delta_gates(const DeltaGates& args, int64_t token, int64_t stop) {
    with_type(args.type, [&](auto* type) {
        using T = __typeof__(*type);
        for (; token < stop; token++) {
            const T *a = (const T*)args.a + token * args.a_stride, *b = (const T*)args.b + token * args.b_stride;
            float *g = args.g + token * args.heads, *beta = args.beta + token * args.heads;
            for (int64_t i = 0; i < args.heads; i += W) {
                const int count = int(args.heads - i);
                const vf rate = exp(load_part(args.a_log + i, count));
                const vf step = softplus(add(load_part(a + i, count), load_part(args.dt_bias + i, count)));
                store_part(g + i, sub(zero(), mul(rate, step)), count);
                store_part(beta + i, sigmoid(load_part(b + i, count)), count);
            }
        }
    });
}

}  // namespace
}  // namespace batchgen
