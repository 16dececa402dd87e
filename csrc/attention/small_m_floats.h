// Attention of small M in floats, straight from the rows of K and V: packing these would be most of the work.
//
// Rows are whole vectors of words here. Sums are made in the order of `product` over packed tiles, so results are the
// same, bit for bit.
#pragma once

#include <stdint.h>

#include "attention/prefetch.h"
#include "attention/scratch.h"
#include "matmul/micro_kernel.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// Transposes the rows of W keys into columns of words: out [words, stride].
__attribute__((noinline)) void transpose_keys(const uint8_t* const* keys, int words, uint32_t* out, int64_t stride,
                                              Ahead& ahead) {
    for (int d = 0; d < words; d += W) {
        vi r[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) r[i] = load_int((const uint32_t*)keys[i] + d);
        transpose(r);
        ahead.fetch();
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store_int(out + (d + i) * stride, r[i]);
    }
}

// The number of values in a word, and value i of each word of a vector.
template <class T>
constexpr int kInWord = 4 / sizeof(T);
inline vf value_in_word(const float*, vi words, int) { return as_float(words); }
inline vf value_in_word(const bf16*, vi words, int i) {
    vf low, high;
    split_bf16(words, low, high);
    return i ? high : low;
}
inline vf value_in_word(const f16*, vi words, int i) {
    vf low, high;
    split_f16(words, low, high);
    return i ? high : low;
}

// Rows that are multiplied together, and vectors of each whose sums are in registers: enough under way to hide the
// latency of a sum.
constexpr int kSmallMAtOnce = kTileM == 12 ? kMaxSmallM : 6;
constexpr int small_m_vectors(int rows) {
    const int fit = 2 * kTileM / rows;
    return fit > 8 ? 8 : fit > 4 ? 4 : 2;
}

// Calls f<Rows>(r) for pieces of [0, count) that begin at r and differ by at most one row.
template <class F>
inline void for_small_m(int count, F f) {
    const int pieces = (count + kSmallMAtOnce - 1) / kSmallMAtOnce;
    for (int i = 0; i < pieces; i++) {
        const int r = i * count / pieces, stop = (i + 1) * count / pieces;
        with_count<kSmallMAtOnce>(stop - r, [&]<int Rows>() { f.template operator()<Rows>(r); });
    }
}

// Calls f<Step>(i) over [0, count), and f<1>(i) for the rest.
template <int Step, class F>
inline void in_steps(int count, F f) {
    int i = 0;
    for (; i + Step <= count; i += Step) f.template operator()<Step>(i);
    for (; i < count; i++) f.template operator()<1>(i);
}

// Scores of Rows queries [Rows, a_stride] and Vectors * W transposed keys of `words` words: out [Rows, out_stride].
template <class T, int Rows, int Vectors>
__attribute__((noinline)) void transposed_scores(const float* a, int64_t a_stride, const uint32_t* keys, int64_t stride,
                                                 int words, float* out, int64_t out_stride) {
    vf all[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) all[r][v] = zero();
    }
    for (int d = 0; d < words; d++, keys += stride, a += kInWord<T>) {
#pragma GCC unroll 2
        for (int i = 0; i < kInWord<T>; i++) {
            vf values[Vectors];
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; v++) values[v] = value_in_word((const T*)nullptr, load_int(keys + v * W), i);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++) {
                const vf value = set1(a[r * a_stride + i]);
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; v++) all[r][v] = fma(value, values[v], all[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) store(out + r * out_stride + v * W, all[r][v]);
    }
}

constexpr int kFetchKeys = 4;  // rows of V between two prefetches
static_assert(W % kFetchKeys == 0);

// acc [Rows, stride] = acc * change + softmax weights [Rows, p_stride] times `keys` rows of V, for Vectors vectors of
// columns.
template <class T, int Rows, int Vectors>
__attribute__((noinline)) void row_values(const float* p, int64_t p_stride, const uint8_t* const* values, int keys,
                                          int column, float* acc, int64_t stride, const float* change, Ahead& ahead) {
    vf all[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) all[r][v] = mul(load(acc + r * stride + column + v * W), set1(change[r]));
    }
    for (int first = 0; first < keys; first += kFetchKeys) {
        ahead.fetch();
#pragma GCC unroll 4
        for (int i = first; i < first + kFetchKeys; i++) {
            vf row[Vectors];
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; v++) row[v] = load((const T*)values[i] + column + v * W);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++) {
                const vf weight = set1(p[r * p_stride + i]);
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; v++) all[r][v] = fma(weight, row[v], all[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) store(acc + r * stride + column + v * W, all[r][v]);
    }
}

}  // namespace
}  // namespace batchgen
