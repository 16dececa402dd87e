// What is multiplied with a gate: the heads of a state layer after an RMSNorm, and the output of attention.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "norm.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

template <class T>
inline void gated_row(const T* x, const T* gate, const T* weight, int64_t n, float eps, T* out) {
    vf scale = set1(1);
    if (weight) {
        const float squares = sum_over(x, n, [](vf v) { return v; }, [](vf all, vf v) { return fma(v, v, all); });
        scale = set1(1 / __builtin_sqrtf(squares / float(n) + eps));
    }
    for (int64_t i = 0; i < n; i += W) {
        const int count = int(smaller(W, n - i));
        const vf by = load_part(gate + i, count);
        vf v = load_part(x + i, count);
        v = weight ? mul(mul(mul(v, scale), load_part(weight + i, count)), silu(by)) : mul(v, sigmoid(by));
        store_part(out + i, v, count);
    }
}

inline void gated(const Gated& args, int64_t row, int64_t stop) {
    with_type(args.type, [&](auto* type) {
        using T = __typeof__(*type);
        for (; row < stop; row++) {
            const T* gate = (const T*)args.gate + row / args.heads * args.gate_stride + row % args.heads * args.columns;
            gated_row((const T*)args.x + row * args.columns, gate, (const T*)args.weight, args.columns, args.eps,
                      (T*)args.out + row * args.columns);
        }
    });
}

}  // namespace
}  // namespace batchgen
