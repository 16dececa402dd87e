// The epilogue of a linear layer: bias, activation, residual, and stores of the output.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "matmul/int8.h"
#include "matmul/operands.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// Sums that are numbers already.
struct PlainSums {
    const float* c;
    PlainSums(const Linear&, int64_t, int64_t, const float* c) : c(c) {}
    vf operator()(int64_t r, int part) const { return load(c + r * kPanelN + part); }
};

// The sums of a panel as floats.
template <class Mma>
inline auto sums_of(const Linear& args, int64_t row, int64_t panel, const void* c) {
    if constexpr (kIsInt8<Mma>) return ScaledSums(args, row, panel, c);
    else return PlainSums(args, row, panel, (const float*)c);
}

// Finishes rows [row, row + rows) of one panel, whose sums are in c [rows, kPanelN].
template <class Mma, class T, class O>
inline void finish(const Linear& args, int64_t row, int64_t panel, int64_t rows, const void* c) {
    using A = typename Mma::Arithmetic;
    const auto sums = sums_of<Mma>(args, row, panel, c);
    const bool has_gate = is_gated(args.activation);
    const int64_t columns = has_gate ? args.n / 2 : args.n;
    for (int part = 0; part < (has_gate ? W : kPanelN); part += W) {
        const int64_t column = panel * (has_gate ? W : kPanelN) + part;
        if (column >= columns) return;
        const int n = int(smaller(W, columns - column));
        vf bias = zero(), second_bias = zero();
        if (args.bias) {
            bias = load_part((const T*)args.bias + column, n);
            if (has_gate) second_bias = load_part((const T*)args.bias + columns + column, n);
        }
        for (int64_t r = 0; r < rows; r++) {
            vf x = add(sums(r, part), bias);
            if (has_gate) x = A::kept(gated<A>(args.activation, x, add(sums(r, W), second_bias)));
            else x = A::kept(activate<A>(args.activation, x));
            if (args.residual)
                x = add(x, load_part((const T*)args.residual + (row + r) * args.residual_stride + column, n));
            store_part((O*)args.out + (row + r) * args.out_stride + column, x, n);
        }
    }
}

}  // namespace
}  // namespace batchgen
