// Pages of keys, one for each KV block: the smallest and largest number of each key channel, and with them an upper
// bound of q.k over a page's keys (Quest, arXiv 2406.10774, section 3.3).
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/micro_kernel.h"
#include "quant/groups.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// A key as floats. `out` has W more numbers than a head.
template <class T>
inline void key_values(const T*, const uint8_t* row, int n, float* out) {
    for (int i = 0; i < n; i += W) store(out + i, load_part((const T*)row + i, n - i));
}
template <int Bits>
inline void coded_key_values(const uint8_t* row, int n, float* out) {
    uint8_t bytes[kMaxHeadDim + 8];
    const uint8_t *codes = row, *table = row + code_bytes(n, Bits);
    if constexpr (Bits < 8) expand_to_bytes<Bits>(row, n, bytes), codes = bytes;
    for (int i = 0; i < n; i += W) {
        f16 scale_and_minimum[2];
        memcpy(scale_and_minimum, table + i / kGroup * 4, 4);
        const vf scale = set1(f16_value(scale_and_minimum[0])), minimum = set1(f16_value(scale_and_minimum[1]));
        store(out + i, fma(scale, to_float(load_bytes_part(codes + i, n - i)), minimum));
    }
}
inline void key_values(const KV& kv, const uint8_t* row, float* out) {
    switch (kv.type) {
        case Type::Int4: return coded_key_values<4>(row, kv.head_dim, out);
        case Type::Int5: return coded_key_values<5>(row, kv.head_dim, out);
        case Type::Int8: return coded_key_values<8>(row, kv.head_dim, out);
        default: with_type(kv.type, [&](auto* type) { key_values(type, row, kv.head_dim, out); });
    }
}

// Pages [page, stop) of those to be summarised.
inline void summarise_pages(const PageSummaries& args, int64_t page, int64_t stop) {
    const KV& kv = args.kv;
    const int n = kv.head_dim;
    float key[kMaxHeadDim + W], low[kMaxHeadDim + W], high[kMaxHeadDim + W];
    with_type(args.type, [&](auto* type) {
        for (; page < stop; page++) {
            for (int h = 0; h < kv.kv_heads; h++) {
                const uint8_t* row = kv.data + args.blocks[page] * kv.block_bytes + h * kv.head_bytes;
                key_values(kv, row, low);
                memcpy(high, low, sizeof high);
                for (int i = 1; i < kv.block_size; i++) {
                    key_values(kv, row += kv.row_bytes, key);
                    for (int d = 0; d < n; d += W) {
                        store(low + d, min(load(low + d), load(key + d)));
                        store(high + d, max(load(high + d), load(key + d)));
                    }
                }
                auto* out = (decltype(type))args.out + (args.targets[page] * kv.kv_heads + h) * 2 * n;
                for (int d = 0; d < n; d += W) {
                    store_part(out + d, load(low + d), n - d);
                    store_part(out + n + d, load(high + d), n - d);
                }
            }
        }
    });
}

constexpr int kQueriesAtOnce = kPageQueries;  // queries whose bounds of a page are in registers

constexpr float kNoScore = -3e38f;  // the bound of a page that is not there

// Queries split by sign: the bound is the sum of positive numbers times the largest and of negative ones times the
// smallest number of each channel.
struct SignedQueries {
    float positive[kQueriesAtOnce][kMaxHeadDim + W], negative[kQueriesAtOnce][kMaxHeadDim + W];
};

// Bounds [Rows, stride] of q.k for Rows queries and `count` pages of a KV head.
template <int Rows, class T>
__attribute__((noinline)) void page_bounds(const SignedQueries& q, const T* summaries, int64_t page_numbers, int n,
                                           const int32_t* pages, int64_t count, float* bounds, int64_t stride) {
    for (int64_t p = 0; p < count; p++) {
        const T *low = summaries + pages[p] * page_numbers, *high = low + n;
        vf all[Rows];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) all[r] = zero();
        for (int d = 0; d < n; d += W) {
            const vf least = load_part(low + d, n - d), most = load_part(high + d, n - d);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++)
                all[r] = fma(load(q.positive[r] + d), most, fma(load(q.negative[r] + d), least, all[r]));
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) bounds[r * stride + p] = sum(all[r]);
    }
}

// Adds the softmax of one head's bounds, `stride` numbers whose last ones are kNoScore, to the scores of pages.
inline void add_softmax(float* bounds, int64_t stride, float* out) {
    float most = bounds[0];
    for (int64_t p = 1; p < stride; p++) most = bounds[p] > most ? bounds[p] : most;
    vf all = zero();
    for (int64_t p = 0; p < stride; p += W) {
        const vf weight = exp(sub(load(bounds + p), set1(most)));
        store(bounds + p, weight);
        all = add(all, weight);
    }
    const vf scale = set1(1 / sum(all));
    for (int64_t p = 0; p < stride; p += W) store(out + p, fma(load(bounds + p), scale, load(out + p)));
}

// Scores of `count` pages for a token: the softmax of each head's bounds, summed over heads.
// bounds [kQueriesAtOnce, count rounded up to vectors]; out as long as a row of it.
inline void page_scores(const PageScores& args, int64_t token, const int32_t* pages, int64_t count, float* bounds,
                        float* out) {
    const int n = args.head_dim, group = args.heads / args.kv_heads;
    const int64_t stride = round_up(count, W);
    for (int64_t p = 0; p < stride; p += W) store(out + p, zero());
    SignedQueries q;
    with_type(args.summary_type, [&](auto* summary) {
        with_type(args.type, [&](auto* type) {
            for (int head = 0; head < args.heads; head += kQueriesAtOnce) {
                // Queries that share a KV head are next to each other.
                for (int at = head, stop; at < args.heads && at < head + kQueriesAtOnce; at = stop) {
                    stop = int(smaller(smaller((at / group + 1) * group, head + kQueriesAtOnce), args.heads));
                    for (int r = 0; r < stop - at; r++) {
                        auto* x = (decltype(type))args.q + token * args.q_stride + int64_t(at + r) * n;
                        for (int d = 0; d < n; d += W) {
                            const vf values = load_part(x + d, n - d);
                            store(q.positive[r] + d, max(values, zero()));
                            store(q.negative[r] + d, min(values, zero()));
                        }
                    }
                    auto* of_head = (decltype(summary))args.summaries + int64_t(at / group) * 2 * n;
                    with_count<kQueriesAtOnce>(stop - at, [&]<int Rows>() {
                        page_bounds<Rows>(q, of_head, int64_t(args.kv_heads) * 2 * n, n, pages, count, bounds, stride);
                    });
                    for (int r = 0; r < stop - at; r++) {
                        for (int64_t p = count; p < stride; p++) bounds[r * stride + p] = kNoScore;
                        add_softmax(bounds + r * stride, stride, out);
                    }
                }
            }
        });
    });
}

}  // namespace
}  // namespace batchgen
