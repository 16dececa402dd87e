// RMSNorm and LayerNorm of rows.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// The first n lanes; the others become zero.
inline vf first_lanes(vf a, int n) {
    float all[W], part[W] = {};
    store(all, a);
    memcpy(part, all, n * sizeof(float));
    return load(part);
}

// Sums add_to(sum, of(values)) over a row, in four chains: an addition takes as long as loading several vectors.
template <class T, class F, class G>
inline float sum_over(const T* x, int64_t n, F of, G add_to) {
    vf sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int c = 0; c < 4; c++) sums[c] = add_to(sums[c], of(load(x + i + c * W)));
    for (; i < n; i += W) {
        const int count = int(smaller(W, n - i));
        const vf values = of(load_part(x + i, count));
        sums[0] = add_to(sums[0], count < W ? first_lanes(values, count) : values);
    }
    return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// Normalises one row; kLayer: LayerNorm, else RMSNorm.
template <bool kLayer, class T>
inline void norm_row(const T* x, const T* weight, const T* bias, int64_t n, float eps, T* out) {
    vf mean = zero();
    const auto centred = [&](vf v) { return kLayer ? sub(v, mean) : v; };
    if (kLayer)
        mean = set1(sum_over(x, n, [](vf v) { return v; }, [](vf all, vf v) { return add(all, v); }) / float(n));
    const float squares = sum_over(x, n, centred, [](vf all, vf v) { return fma(v, v, all); });
    const vf scale = set1(1 / __builtin_sqrtf(squares / float(n) + eps));
    const auto vector = [&](int64_t i, int count) {
        vf v = mul(mul(centred(load_part(x + i, count)), scale), load_part(weight + i, count));
        if (kLayer) v = add(v, load_part(bias + i, count));
        store_part(out + i, v, count);
    };
    int64_t i = 0;
    for (; i + W <= n; i += W) vector(i, W);
    if (i < n) vector(i, int(n - i));
}

// Normalises rows [row, stop).
inline void norm(const Norm& args, int64_t row, int64_t stop) {
    with_type(args.type, [&](auto* type) {
        using T = __typeof__(*type);
        const T *weight = (const T*)args.weight, *bias = (const T*)args.bias;
        for (; row < stop; row++) {
            const T* x = (const T*)args.x + row * args.x_stride;
            T* out = (T*)args.out + row * args.out_stride;
            if (bias) norm_row<true>(x, weight, bias, args.columns, args.eps, out);
            else norm_row<false>(x, weight, bias, args.columns, args.eps, out);
        }
    });
}

}  // namespace
}  // namespace batchgen
