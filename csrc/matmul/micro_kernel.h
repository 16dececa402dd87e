// The micro-kernel: a small matrix product whose sums stay in vector registers. Linear layers and attention are made of
// it.
//
// It reads A by rows, or in tiles in which the rows lie side by side, and of B at each word of K one or more vectors of
// columns (matmul/operands.h).
#pragma once

#include <stdint.h>

#include "matmul/operands.h"
#include "simd/carve.h"
#include "simd/target.h"

namespace batchgen {
namespace {

// acc += a b over K words. kBeside: the rows of A lie side by side, all of them at each word of K; else one after the
// other, `a_stride` words apart.
template <class Mma, int MR, int NR, bool kBeside>
__attribute__((always_inline)) inline void accumulate(typename Mma::Sum (&acc)[MR][NR], const uint32_t* a,
                                                      int64_t a_stride, const typename Mma::Operand* b,
                                                      int64_t b_stride, int64_t k, const uint8_t* ahead) {
    // One pointer for three rows: scaled-index addressing reaches the other two.
    constexpr int kPointers = (MR + 2) / 3;
    const uint32_t* row[kPointers];
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; i++) row[i] = a + 3 * i * a_stride;
#pragma GCC unroll 4
    for (int64_t kk = 0; kk < k; kk++) {
        vi columns[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++) columns[n] = Mma::load_b(b + n * W);
#pragma GCC unroll 12
        for (int r = 0; r < MR; r++) {
            vi value = set1_int(kBeside ? row[0][r] : row[r / 3][(r % 3) * a_stride]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; n++) acc[r][n] = Mma::dot(value, columns[n], acc[r][n]);
        }
        b += b_stride;
        if (ahead) __builtin_prefetch(ahead + 64 * kk, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < kPointers; i++) row[i] += kBeside ? MR : 1;
    }
}

// c [MR, NR * W] = a b, or c * scale + a b with a scale for each row. ahead: memory to prefetch, 64 bytes for each word
// of K; or null.
template <class Mma, int MR, int NR, bool kBeside = false>
inline void product_tile(const uint32_t* a, int64_t a_stride, const typename Mma::Operand* b, int64_t b_stride,
                         int64_t k, typename Mma::Number* c, int64_t c_stride, const float* scale,
                         const uint8_t* ahead = nullptr) {
    typename Mma::Sum acc[MR][NR];
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++)
            acc[r][n] = scale ? Mma::load_scaled(c + r * c_stride + n * W, scale[r]) : Mma::zero_sum();
    }
    accumulate<Mma, MR, NR, kBeside>(acc, a, a_stride, b, b_stride, k, ahead);
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++) Mma::store_sum(c + r * c_stride + n * W, acc[r][n]);
    }
}

// Calls f<N>() with N = n, for n in [1, Largest].
template <int Largest, class F>
inline void with_count(int n, F f) {
    if constexpr (Largest > 1) {
        if (n < Largest) return with_count<Largest - 1>(n, f);
    }
    f.template operator()<Largest>();
}

// c [rows, columns] = a b, or c * scale + a b with a scale for each row; columns is a multiple of W, and k counts
// words of K.
template <class Mma>
inline void product(NoTiles, const uint32_t* a, int64_t a_stride, int64_t rows, const uint32_t* b, int64_t b_stride,
                    int64_t columns, int64_t k, float* c, int64_t c_stride, const float* scale) {
    // With small M more columns are under way at once, so that no sum waits for itself.
    constexpr int kHalfTileM = kTileM / 2;
    for (int64_t n = 0; n < columns;) {
        int64_t left = columns - n;
        if (rows <= kHalfTileM && left >= 4 * W) {
            with_count<kHalfTileM>(int(rows), [&]<int MR>() {
                product_tile<Mma, MR, 4>(a, a_stride, b + n, b_stride, k, c + n, c_stride, scale);
            });
            n += 4 * W;
            continue;
        }
        for (int64_t r = 0; r < rows; r += kTileM) {
            with_count<kTileM>(int(smaller(kTileM, rows - r)), [&]<int MR>() {
                const float* s = scale ? scale + r : nullptr;
                if (left >= 2 * W) {
                    product_tile<Mma, MR, 2>(a + r * a_stride, a_stride, b + n, b_stride, k, c + r * c_stride + n,
                                             c_stride, s);
                } else {
                    product_tile<Mma, MR, 1>(a + r * a_stride, a_stride, b + n, b_stride, k, c + r * c_stride + n,
                                             c_stride, s);
                }
            });
        }
        n += left >= 2 * W ? 2 * W : W;
    }
}

}  // namespace
}  // namespace batchgen
