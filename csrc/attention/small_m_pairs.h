// Attention of small M over bf16 KV with products of bf16 pairs, straight from the rows of K and V. Head sizes are
// multiples of 32 up to 256, or 512.
#pragma once

#include <stdint.h>

#include "attention/prefetch.h"
#include "attention/scratch.h"
#include "matmul/micro_kernel.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

#ifdef BATCHGEN_FAST_BF16

// Keys between two prefetches: the less there is to do for each, the more often, as memory drops requests that come all
// at once. Scores are made a row at a time, so many rows prefetch more often anyway.
constexpr int kFetchOfOne = 2, kFetchOfMany = 8;
constexpr int values_fetch(int rows) { return rows > 4 ? kFetchOfMany : rows > 2 ? 4 : kFetchOfOne; }

// Whether there is a path for heads of n values, and a call of f<n / 32>().
inline bool has_pair_chunks(int n) { return n % 32 == 0 && (n <= 256 || n == 512); }
template <class F>
inline void with_pair_chunks(int n, F f) {
    if (n == 512) return f.template operator()<16>();
    with_count<8>(n / 32, f);
}

// Scores of the rows of a [rows, a_stride] and of W keys whose rows lie one after the other: out [rows, out_stride].
// next: the distance to the rows that are read next, which are prefetched once more, because memory may have dropped
// the first request.
template <int Chunks>
__attribute__((noinline)) void small_m_scores(const uint32_t* a, int64_t a_stride, int rows, const uint8_t* keys,
                                              int64_t next, float* out, int64_t out_stride, Ahead& ahead) {
    const auto row = [&]<bool First, int FetchAt>(int r) __attribute__((always_inline)) {
        vi q[Chunks];
#pragma GCC unroll 8
        for (int c = 0; c < Chunks; c++) q[c] = load_int(a + r * a_stride + c * W);
        vf all[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (i % FetchAt == 0) ahead.fetch();
            const uint32_t* key = (const uint32_t*)keys + i * Chunks * W;
            all[i] = zero();
#pragma GCC unroll 8
            for (int c = 0; c < Chunks; c++) {
                if (First) __builtin_prefetch((const uint8_t*)(key + c * W) + next);
                all[i] = dot_pairs(q[c], load_int(key + c * W), all[i]);
            }
        }
        store(out + r * out_stride, sums(all));
    };
    if (rows == 1) return row.template operator()<true, kFetchOfOne>(0);
    row.template operator()<true, kFetchOfMany>(0);
    for (int r = 1; r < rows; r++) row.template operator()<false, kFetchOfMany>(r);
}

// acc [Rows, stride] = acc * change + softmax weights times `keys` rows of V, `offset` bytes after `values`, for
// Vectors vectors of columns from `column` on. next: as for `small_m_scores`.
template <int Rows, int Vectors>
__attribute__((noinline)) void small_m_values(const uint32_t* p, int64_t p_stride, const uint8_t* const* values,
                                              int64_t offset, int64_t next, int keys, int column, float* acc,
                                              int64_t stride, const float* change, Ahead& ahead) {
    vf all[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) all[r][v] = mul(load(acc + r * stride + column + v * W), set1(change[r]));
    }
    constexpr int kFetchAt = values_fetch(Rows);
    for (int first = 0; first < keys; first += kFetchAt) {
        ahead.fetch();
#pragma GCC unroll 8
        for (int i = first; i < first + kFetchAt; i += 2) {
            const uint8_t *even = values[i] + offset + 2 * column, *odd = values[i + 1] + offset + 2 * column;
            vi pairs[Vectors];
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; v += 2) {
                __builtin_prefetch(even + 2 * v * W + next);
                __builtin_prefetch(odd + 2 * v * W + next);
                interleave(load_int((const uint32_t*)(even + 2 * v * W)), load_int((const uint32_t*)(odd + 2 * v * W)),
                           pairs[v], pairs[v + 1]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++) {
                const vi weight = set1_int(p[r * p_stride + i / 2]);
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; v++) all[r][v] = dot_pairs(weight, pairs[v], all[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) store(acc + r * stride + column + v * W, all[r][v]);
    }
}
#endif

}  // namespace
}  // namespace batchgen
