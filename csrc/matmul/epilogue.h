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

// Stores two vectors one after the other; where they are a line of memory, it is written at once.
template <class T>
inline void store_line(T* p, vf first, vf second) {
    store(p, first), store(p + W, second);
}
#ifdef BATCHGEN_FAST_BF16
inline void store_line(bf16* p, vf first, vf second) { store_int((uint32_t*)p, to_pairs(first, second)); }
#endif

// `finish` of a whole panel without an activation.
template <bool kResidual, class Mma, class T, class O>
__attribute__((noinline)) void finish_lines(const Linear& args, int64_t row, int64_t panel, int64_t rows,
                                            const void* c) {
    using A = typename Mma::Arithmetic;
    const auto sums = sums_of<Mma>(args, row, panel, c);
    const int64_t column = panel * kPanelN, residual_stride = args.residual_stride, out_stride = args.out_stride;
    const T* bias = (const T*)args.bias;
    const vf first_bias = bias ? load(bias + column) : zero(), second_bias = bias ? load(bias + column + W) : zero();
    const T* residual = kResidual ? (const T*)args.residual + row * residual_stride + column : nullptr;
    O* out = (O*)args.out + row * out_stride + column;
    for (int64_t r = 0; r < rows; r++, out += out_stride) {
        vf first = A::kept(add(sums(r, 0), first_bias)), second = A::kept(add(sums(r, W), second_bias));
        if constexpr (kResidual) {
            first = add(first, load(residual)), second = add(second, load(residual + W));
            residual += residual_stride;
        }
        store_line(out, first, second);
    }
}

// Finishes rows [row, row + rows) of one panel, whose sums are in c [rows, kPanelN].
template <class Mma, class T, class O>
inline void finish(const Linear& args, int64_t row, int64_t panel, int64_t rows, const void* c) {
    using A = typename Mma::Arithmetic;
    const auto sums = sums_of<Mma>(args, row, panel, c);
    const bool has_gate = is_gated(args.activation);
    const int64_t columns = has_gate ? args.n / 2 : args.n;
    if (args.activation == Activation::None && (panel + 1) * kPanelN <= columns) {
        if (args.residual) return finish_lines<true, Mma, T, O>(args, row, panel, rows, c);
        return finish_lines<false, Mma, T, O>(args, row, panel, rows, c);
    }
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
