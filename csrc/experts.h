// The weighted sums of experts' outputs for each token of a mixture of experts.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// One token's sum of its rows, in the order of its choices.
template <class T, class O>
inline void weighted_sum_of_rows(const WeightedSums& args, int64_t token, O* out) {
    const int64_t* rows = args.rows + token * args.choices;
    const float* shares = args.shares + token * args.choices;
    for (int64_t i = 0; i < args.columns; i += W) {
        const int n = int(smaller(W, args.columns - i));
        vf sum = zero();
        for (int j = 0; j < args.choices; j++)
            sum = fma(load_part((const T*)args.made + rows[j] * args.columns + i, n), set1(shares[j]), sum);
        store_part(out + i, sum, n);
    }
}

// The sums of tokens [token, stop).
inline void weighted_sums(const WeightedSums& args, int64_t token, int64_t stop) {
    with_type(args.type, [&](auto* type) {
        using T = __typeof__(*type);
        for (; token < stop; token++) {
            if (args.in_fp32) weighted_sum_of_rows<T>(args, token, (float*)args.out + token * args.columns);
            else weighted_sum_of_rows<T>(args, token, (T*)args.out + token * args.columns);
        }
    });
}

}  // namespace
}  // namespace batchgen
