// Attention over paged KV, a tile of keys at a time, with an online softmax: the maximum and the sum of weights are
// carried along.
//
// Prefill, decode and shared prefixes are the same work with more or fewer rows: the queries of all heads that share a
// KV head are rows of one product, so K and V are read once for all of them.
//
// Of quantized KV the quantized values are multiplied. With k = scale * code + minimum for each key,
//   q.k = scale * (q.code) + minimum * sum(q),   sum p v = sum (p scale) code + sum (p minimum).
#pragma once

#include <stdint.h>
#include <string.h>

#include "attention/kv_tiles.h"
#include "attention/prefetch.h"
#include "attention/scratch.h"
#include "attention/small_m_codes.h"
#include "attention/small_m_floats.h"
#include "attention/small_m_pairs.h"
#include "attention/small_m_tiles.h"
#include "kernels.h"
#include "matmul/micro_kernel.h"
#include "matmul/tile_registers.h"
#include "quant/groups.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// What a head's sink adds to the sum of softmax weights, whose largest score is `highest`.
inline float sink_weight(const Attention& args, int64_t head, float highest) {
    if (!args.sinks) return 0;
    float weight[W];
    store(weight, exp(set1(args.sinks[head] - highest)));
    return weight[0];
}

// exp(score - highest), as precise as the products it goes into; 0 for a score of kLowest.
template <class Mma>
struct SoftmaxWeight {
    static constexpr bool kRough = Mma::kPerWord == 2;
    vf highest;
    // A row that has seen no key has no score above kLowest.
    explicit SoftmaxWeight(float most) : highest(set1(most > kLowest ? (kRough ? most * -kLog2E : most) : 0)) {}
    vf operator()(vf score) const {
#ifdef BATCHGEN_FAST_BF16
        if constexpr (kRough) return exp2_rough(fma(score, set1(kLog2E), highest));
#endif
        return exp(sub(score, highest));
    }
};

// The attention of items, one after the other. Mma: the kind of products. T: the type of K and V.
template <class Mma, class T>
struct Attend {
    static constexpr bool kCodes = kBits<T> != 0;
    using Tile = typename InTiles<T>::Type;  // the type of rows in a tile of K or V
    const Attention& args;
    AttentionScratch<Mma> s;
    const int n, group, groups;
    AttentionItem item;
    AttentionSpan span;  // the current one
    // The span's rows of each head are [start, start + count) of the item's; row r is head r % group of token r /
    // group. What is carried along is kept for all heads, one after the other.
    int start, count;
    int at, rows_now;         // the rows of the span whose scores are in s.s: [at, at + rows_now)
    bool packs;               // whether the item has spans with too many rows for the small-M paths
    bool one_run[kKeys / W];  // whether the rows of each W keys of a tile lie one after the other
    typename Mma::Tiles tiles;
    Ahead ahead;

    Attend(const Attention& args, Carve carve)
        : args(args),
          s(args, carve),
          n(args.kv.head_dim),
          group(args.heads / args.kv.kv_heads),
          groups((args.kv.head_dim + kGroup - 1) / kGroup) {}

    // Query rows of a head.
    int rows() const { return item.num_tokens * group; }

    // Attends to all spans of an item and writes its results. next: the item that comes after it, or null.
    void run(const AttentionItem& given, const AttentionItem* next) {
        item = given;
        const int held = item.num_heads * rows();
        packs = false;
        for (int i = 0; i < item.num_spans; i++) packs |= !uses_small_m(item.spans[i].num_tokens * group);
        load_queries();
        for (int r = 0; r < held; r++) s.highest[r] = kLowest;
        memset(s.total, 0, held * W * sizeof(float));
        memset(s.acc, 0, held * s.columns * sizeof(float));
        if (kCodes) memset(s.least, 0, held * kGroups * sizeof(float));
        for (int i = 0; i < item.num_spans; i++) {
            span = item.spans[i];
            start = span.first_token * group, count = span.num_tokens * group;
            if (i + 1 < item.num_spans) see(item.spans + i + 1, item);
            else see(next ? next->spans : nullptr, next ? *next : item);
        }
        for (int h = 0; h < item.num_heads; h++) {
            if (item.partial_row < 0) write(h);
            else write_partial(h);
        }
    }

    // Attends to the current span. next: the span that comes after it, of next_item, or null.
    void see(const AttentionSpan* next, const AttentionItem& next_item) {
        // The last key that the last row sees, and the first that the first row sees.
        const int64_t last = smaller(span.last_key, int64_t(span.causal) + span.num_tokens);
        int64_t first = int64_t(span.causal) - span.window + 1;
        first = first > span.first_key ? first : span.first_key;
        const uint8_t *now[kKeys], *coming[kKeys], *keys[kKeys], *values[kKeys];
        s.tile = count > kSmallMRows ? kKeys : kSmallMKeys;
        if (first < last) key_rows(args.kv, span, item.first_head, int(first), now);
        transpose_all_queries();
        for (int64_t key = first; key < last; key += s.tile) {
            const int count_keys = int(smaller(s.tile, last - key));
            const int whole = int(round_up(count_keys, uses_small_m(count) ? W : kKeyStep<Mma>));
            ahead.clear();
            if (key + s.tile < last) {
                key_rows(args.kv, span, item.first_head, int(key) + s.tile, coming);
                look_ahead(coming, int(smaller(s.tile, last - key - s.tile)), item.num_heads);
            } else if (next && next->first_key < next->last_key) {
                key_rows(args.kv, *next, next_item.first_head, next->first_key, coming);
                look_ahead(coming, int(smaller(s.tile, next->last_key - next->first_key)), next_item.num_heads);
            }
            for (int i = 0; i < whole && uses_small_m(count); i += W) one_run[i / W] = in_one_run(now + i);
            for (int h = 0; h < item.num_heads; h++) {
                const int held_row = h * rows() + start, left = 2 * (item.num_heads - h);
                if (uses_small_m(count) && !kCodes) {
                    at = 0, rows_now = count;
                    small_m_pairs(held_row, int(key), count_keys, whole, h, now, left);
                    continue;
                }
                for (int i = 0; i < round_up(whole, 2 * W); i++) {
                    keys[i] = now[i] + h * args.kv.head_bytes;
                    values[i] = keys[i] + args.kv.value_offset;
                }
                if (uses_small_m_tiles(count)) {
                    at = 0, rows_now = count;
                    small_m_tiles(held_row, int(key), count_keys, whole, h, keys, values, left);
                    continue;
                }
                if (uses_small_m_floats(count)) {
                    small_m_floats(held_row, int(key), count_keys, whole, keys, values, left);
                    continue;
                }
                if constexpr (kCodes) {
                    if (uses_small_m(count)) {
                        at = 0, rows_now = count;
                        small_m_codes(held_row, int(key), count_keys, whole, keys, values, left);
                        continue;
                    }
                }
                const int transposes = int(whole / W * (s.depth / W)), steps = whole / Mma::kPerWord;
                ahead.spread(left * transposes);
                if (kCodes) {
                    read_tables<kBits<T>>(keys, whole, n, s.k_scale, s.k_minimum);
                    read_tables<kBits<T>>(values, whole, n, s.v_scale, s.v_minimum);
                }
                in_bytes(keys, whole);
                for (int i = 0; i < whole; i += W) pack_keys<Tile>(Mma(), keys + i, n, s, s.k + i, ahead);
                ahead.spread((left - 1) * steps);
                in_bytes(values, whole);
                pack_values<Tile>(Mma(), values, whole, n, s, ahead);
                // Some rows at a time, so that their scores and weights stay in the first-level cache beside K and V.
                for (at = 0; at < count; at += kRowsAtOnce<Mma>) {
                    rows_now = int(smaller(kRowsAtOnce<Mma>, count - at));
                    const int64_t seen = int64_t(span.causal) + (at + rows_now - 1) / group + 1 - key;
                    if (seen <= 0) continue;
                    const int count_seen = int(smaller(count_keys, seen)),
                              whole_seen = int(round_up(count_seen, kKeyStep<Mma>));
                    scores(held_row + at, whole_seen);
                    mask(int(key), count_seen, whole_seen);
                    softmax(held_row + at, whole_seen);
                    add_values(held_row + at, whole_seen);
                }
            }
            memcpy(now, coming, sizeof now);
        }
    }

    // Whether W rows lie one after the other in memory.
    bool in_one_run(const uint8_t* const* rows) const {
        bool all = true;
        for (int i = 1; i < W; i++) all &= rows[i] - rows[i - 1] == args.kv.row_bytes;
        return all;
    }

    // Has rows of 4- or 5-bit codes taken from bytes, until this is done for others.
    void in_bytes(const uint8_t** rows, int count) {
        if constexpr (kCodes && kBits<T> < 8) expand_tile<kBits<T>>(rows, count, n, s.bytes);
        else (void)rows, (void)count;
    }

    // Whether so many rows go to tile registers, which load K as it lies.
    bool uses_small_m_tiles(int count) const {
        return uses_tiles<Mma>() && !kCodes && count >= kMinSmallMInTiles && count <= kMaxSmallMInTiles &&
               n % (2 * W) == 0;
    }

    // Whether so many rows take the path of bf16 pairs, or of quantized values, that packs no K and V.
    bool uses_small_m(int count) const {
#ifdef BATCHGEN_FAST_BF16
        return Mma::kPerWord == 2 && !uses_small_m_tiles(count) && count <= kMaxSmallM &&
               (kCodes ? n % kGroup == 0 : has_pair_chunks(n));
#else
        (void)count;
        return false;
#endif
    }

    // Whether so many rows take the path in floats that packs no K and V.
    bool uses_small_m_floats(int count) const {
        return Mma::kPerWord == 1 && !kCodes && count <= kMaxSmallM && n * int(sizeof(T)) % (4 * W) == 0;
    }

    // A tile of one head on the path in floats, as many rows at a time as have their sums in registers.
    void small_m_floats(int held_row, int key, int count_keys, int whole, const uint8_t* const* keys,
                        const uint8_t* const* values, int left) {
        if constexpr (Mma::kPerWord == 1 && !kCodes) {
            const int words = n / kInWord<T>, passes = (count + kSmallMAtOnce - 1) / kSmallMAtOnce;
            at = 0, rows_now = count;
            ahead.spread(left * (whole / W) * (words / W));
            for (int i = 0; i < whole; i += W) transpose_keys(keys + i, words, s.k + i, s.tile, ahead);
            for_small_m(count, [&]<int Rows>(int r) {
                const float* a = (const float*)s.a + (held_row + r) * s.depth;
                in_steps<small_m_vectors(Rows)>(whole / W, [&]<int Vectors>(int v) {
                    transposed_scores<T, Rows, Vectors>(a, s.depth, s.k + v * W, s.tile, words,
                                                        s.s + r * s.tile + v * W, s.tile);
                });
            });
            mask(key, count_keys, whole);
            softmax(held_row, whole);
            const int columns = small_m_vectors((count + passes - 1) / passes) * W;
            ahead.spread((left - 1) * (whole / kFetchKeys) * passes * ((n + columns - 1) / columns));
            for_small_m(count, [&]<int Rows>(int r) {
                in_steps<small_m_vectors(Rows)>(n / W, [&]<int Vectors>(int v) {
                    row_values<T, Rows, Vectors>((const float*)s.p + r * s.tile, s.tile, values, whole, v * W,
                                                 s.acc + (held_row + r) * s.columns, s.columns, s.change + r, ahead);
                });
            });
        }
    }

    // Transposes the queries of all heads for the path in tile registers.
    void transpose_all_queries() {
#ifdef BATCHGEN_TILES
        if constexpr (uses_tiles<Mma>())
            for (int h = 0; h < item.num_heads && uses_small_m_tiles(count); h++)
                transpose_queries(s.a + (h * rows() + start) * s.depth, s.depth, count, s.depth,
                                  s.transposed + h * s.depth * W);
#endif
    }

    // A tile of one head on the path in tile registers.
    void small_m_tiles(int held_row, int key, int count_keys, int whole, int h, const uint8_t* const* keys,
                       const uint8_t* const* values, int left) {
#ifdef BATCHGEN_TILES
        if constexpr (uses_tiles<Mma>() && !kCodes) {
            tiles.configure(count);
            ahead.spread(left * (whole / Mma::kPerWord));
            for (int i = 0; i < whole; i += W) {
                ahead.fetch();
                tile_scores(tiles, keys + i, args.kv.row_bytes, count, s.transposed + h * s.depth * W, s.depth / W,
                            (uint8_t*)s.k, s.s + i, s.tile);
            }
            mask(key, count_keys, whole);
            softmax(held_row, whole);
            ahead.spread((left - 1) * (whole / Mma::kPerWord));
            pack_values<T>(Mma(), values, whole, n, s, ahead);
            add_values(held_row, whole);
        }
#else
        (void)held_row, (void)key, (void)count_keys, (void)whole, (void)h, (void)keys, (void)values, (void)left;
#endif
    }

    // A tile of one head on the path of bf16 pairs. rows: the rows of K of the item's first head. left: what is left of
    // this tile, in halves of heads.
    void small_m_pairs(int held_row, int key, int count_keys, int whole, int h, const uint8_t* const* rows, int left) {
#ifdef BATCHGEN_FAST_BF16
        if constexpr (Mma::kPerWord == 2 && !kCodes) {
            const int64_t head = h * args.kv.head_bytes, value = head + args.kv.value_offset;
            const int64_t next = left > 2 ? args.kv.head_bytes : 0;
            ahead.spread(left * (whole / (count == 1 ? kFetchOfOne : kFetchOfMany)) * count);
            const uint32_t* a = s.a + held_row * s.depth;
            with_pair_chunks(n, [&]<int Chunks>() {
                for (int i = 0; i < whole; i += W) {
                    const uint8_t* from = rows[i] + head;
                    if (!one_run[i / W]) {
                        for (int j = 0; j < W; j++) memcpy(s.k + j * s.depth, rows[i + j] + head, s.depth * 4);
                        from = (const uint8_t*)s.k;
                    }
                    small_m_scores<Chunks>(a, s.depth, count, from, next, s.s + i, s.tile, ahead);
                }
            });
            mask(key, count_keys, whole);
            softmax(held_row, whole);
            float* acc = s.acc + held_row * s.columns;
            with_count<kMaxSmallM>(count, [&]<int Rows>() {
                constexpr int kVectors = Rows > 4 ? 2 : 4;  // as many sums as fit in registers
                ahead.spread((left - 1) * (whole / values_fetch(Rows)) * ((n + kVectors * W - 1) / (kVectors * W)));
                int column = 0;
                for (; column + kVectors * W <= n; column += kVectors * W)
                    small_m_values<Rows, kVectors>(s.p, s.tile / 2, rows, value, next, whole, column, acc, s.columns,
                                                   s.change, ahead);
                if (column < n)
                    small_m_values<Rows, 2>(s.p, s.tile / 2, rows, value, next, whole, column, acc, s.columns, s.change,
                                            ahead);
            });
        }
#else
        (void)held_row, (void)key, (void)count_keys, (void)whole, (void)h, (void)rows, (void)left;
#endif
    }

    // A tile of one head on the path over quantized KV, at these rows of K and V.
    void small_m_codes(int held_row, int key, int count_keys, int whole, const uint8_t** keys, const uint8_t** values,
                       int left) {
#ifdef BATCHGEN_FAST_BF16
        if constexpr (Mma::kPerWord == 2) {
            // Prefetches are spread over the products, too: many at once would evict lines that are about to be read.
            constexpr int kRowsOfValues = kMaxSmallM / 2;
            const int turns = (whole + 2 * W - 1) / (2 * W), passes = (count + kRowsOfValues - 1) / kRowsOfValues;
            ahead.spread(left * (1 + passes) * turns);
            read_tables<kBits<T>>(keys, whole, n, s.k_scale, s.k_minimum);
            in_bytes(keys, int(round_up(whole, 2 * W)));
            for (int i = 0; i < whole; i += 2 * W) transpose_codes(keys + i, n, s.k + i, ahead);
            with_count<kMaxSmallM>(count, [&]<int Rows>() {
                constexpr int kVectors = Rows > 4 ? 1 : 2;
                for (int i = 0; i < whole; i += kVectors * W) {
                    ahead.fetch();
                    code_scores<Rows, kVectors>(s.fixed_q + held_row * kFixedRow, s.q_step + held_row,
                                                s.query_sum + held_row * kGroups, groups, s.k + i, s.k_scale + i,
                                                s.k_minimum + i, s.s + i);
                }
            });
            mask(key, count_keys, whole);
            softmax(held_row, whole);
            ahead.spread((left - 1) * (whole / W + passes * groups));
            read_tables<kBits<T>>(values, whole, n, s.v_scale, s.v_minimum);
            in_bytes(values, whole);
            interleave_codes(values, whole, n, s.v, ahead);
            fixed_weights(s.s, count, groups, s.v_scale, s.v_minimum, whole, s.fixed_p, s.p_step,
                          s.least + held_row * kGroups, s.change);
            for (int r = 0; r < count; r += kRowsOfValues) {
                with_count<kRowsOfValues>(int(smaller(kRowsOfValues, count - r)), [&]<int Rows>() {
                    constexpr int kVectors = Rows > 3 ? 2 : 4;  // as many sums as fit in registers
                    for (int column = 0; column < n; column += kVectors * W) {
                        const int g = column / kGroup;
                        if (column % kGroup == 0) ahead.fetch();
                        code_values<Rows, kVectors>(
                            s.fixed_p + (r * kGroups + g) * kFixedWeights, s.p_step + r * kGroups + g, s.v + column, n,
                            whole, s.acc + (held_row + r) * s.columns + column, s.columns, s.change + r);
                    }
                });
            }
        }
#else
        (void)held_row, (void)key, (void)count_keys, (void)whole, (void)keys, (void)values, (void)left;
#endif
    }

    // Adds the memory of a tile to what is prefetched, in the order of addresses: rows of a block are next to each
    // other, and so are heads.
    void look_ahead(const uint8_t* const* rows, int count, int num_heads) {
        for (int i = 0, stop; i < count; i = stop) {
            for (stop = i + 1; stop < count && rows[stop] == rows[stop - 1] + args.kv.row_bytes;) stop++;
            const int64_t bytes = (stop - i) * args.kv.row_bytes;
            for (int half = 0; half < 2; half++) {
                const uint8_t* first = rows[i] + half * args.kv.value_offset;
                if (bytes == args.kv.head_bytes) ahead.add(first, num_heads * bytes);
                else
                    for (int h = 0; h < num_heads; h++) ahead.add(first + h * args.kv.head_bytes, bytes);
            }
        }
    }

    // Loads the queries of the item, all heads.
    void load_queries() {
        with_type(args.type, [&](auto* type) {
            for (int h = 0; h < item.num_heads; h++)
                for (int r = 0; r < rows(); r++)
                    load_query((decltype(type))args.q + (item.first_token + r / group) * args.q_stride + head(h, r) * n,
                               h * rows() + r);
        });
    }
    // The query head of row r of the item's head h.
    int64_t head(int h, int r) const { return int64_t(item.first_head + h) * group + r % group; }

    // Loads one query as row r of A; for quantized KV also its sums.
    template <class Q>
    void load_query(const Q* q, int r) {
        uint32_t* a = s.a + r * s.depth;
        if constexpr (Mma::kPerWord == 2) {
            memset(a, 0, s.depth * 4);
            if constexpr (sizeof(Q) == sizeof(bf16)) {
                if (!kCodes) memcpy(a, q, n * sizeof(Q));
                else if (packs) code_order((const bf16*)q, n, (bf16*)a);
            }
        } else {
            for (int64_t i = n; i < s.depth; i++) ((float*)a)[i] = 0;
            for (int i = 0; i < n; i += W) store_part((float*)a + i, load_part(q + i, n - i), n - i);
        }
#ifdef BATCHGEN_FAST_BF16
        if constexpr (Mma::kPerWord == 2 && kCodes)
            if (uses_small_m(group)) s.q_step[r] = fixed_query(q, n, s.fixed_q + r * kFixedRow);
#endif
        for (int g = 0; kCodes && g < groups; g++) {
            float all = 0;
            for (int i = g * kGroup; i < n && i < (g + 1) * kGroup; i += W)
                all += sum(load_part(q + i, int(smaller(n, (g + 1) * kGroup)) - i));
            s.query_sum[r * kGroups + g] = all;
        }
    }

    // Scores of one head's rows, which are kept from held_row on.
    void scores(int held_row, int keys) {
        const uint32_t* a = s.a + held_row * s.depth;
        if constexpr (!kCodes) {
            product<Mma>(tiles, a, s.depth, rows_now, s.k, s.tile, keys, s.depth, s.s, s.tile, nullptr);
        } else {
            for (int g = 0; g < groups; g++) {
                const int from = g * kGroup / Mma::kPerWord,
                          depth = int(smaller(kGroup, n - g * kGroup)) / Mma::kPerWord;
                product<Mma>(tiles, a + from, s.depth, rows_now, s.k + from * s.tile, s.tile, keys, depth, s.t, s.tile,
                             nullptr);
                for (int r = 0; r < rows_now; r++) {
                    const vf all = set1(s.query_sum[(held_row + r) * kGroups + g]);
                    for (int i = 0; i < keys; i += W) {
                        vf score = mul(load(s.k_minimum + g * kKeys + i), all);
                        score = fma(load(s.k_scale + g * kKeys + i), load(s.t + r * s.tile + i), score);
                        float* out = s.s + r * s.tile + i;
                        store(out, g ? add(load(out), score) : score);
                    }
                }
            }
        }
    }

    // Caps scores to +-softcap (Gemma 2), before keys are masked.
    void cap(int keys) {
        const vf by = set1(1 / args.softcap), most = set1(args.softcap);
        for (int r = 0; r < rows_now; r++) {
            float* row = s.s + r * s.tile;
            for (int i = 0; i < keys; i += W) store(row + i, mul(most, tanh(mul(load(row + i), by))));
        }
    }

    // Masks the keys that a row does not see.
    void mask(int key, int count_keys, int keys) {
        if (args.softcap > 0) cap(keys);
        const int last = at + rows_now - 1;
        const bool whole = key + count_keys - 1 <= int64_t(span.causal) + at / group &&
                           key > int64_t(span.causal) + last / group - span.window;
        if (whole && count_keys == keys) return;
        for (int r = 0; r < rows_now; r++) {
            const int64_t own = int64_t(span.causal) + (at + r) / group;
            const int64_t stop = smaller(count_keys, own + 1 - key), from = own - span.window + 1 - key;
            float* row = s.s + r * s.tile;
            for (int64_t i = stop < 0 ? 0 : stop; i < keys; i++) row[i] = kLowest;
            for (int64_t i = 0; i < smaller(from, keys); i++) row[i] = kLowest;
        }
    }

    // Turns scores into softmax weights, and updates the maximum and the sum of each row.
    void softmax(int held_row, int keys) {
        float *highest = s.highest + held_row, *totals = s.total + held_row * W;
        for (int first = 0; first < rows_now; first += W) {
            const int some = int(smaller(W, rows_now - first));
            vf most[W];
            for (int r = 0; r < W; r++) {
                most[r] = r < some ? set1(highest[first + r]) : zero();
                for (int i = 0; r < some && i < keys; i += W)
                    most[r] = max(load(s.s + (first + r) * s.tile + i), most[r]);
            }
            const vf before = load_part(highest + first, some), now = largest_of(most, some);
            store_part(highest + first, now, some);
            store(s.change + first, exp(sub(before, now)));
        }
        for (int r = 0; r < rows_now; r++) {
            float* row = s.s + r * s.tile;
            typename Mma::Value* p = (typename Mma::Value*)s.p + r * s.tile;
            const SoftmaxWeight<Mma> weight_of(highest[r]);
            vf all = mul(load(totals + r * W), set1(s.change[r]));
            for (int i = 0; i < keys; i += W) {
                vf weight = weight_of(load(row + i));
                all = add(all, weight);
                if (kCodes) store(row + i, weight);
                else store(p + i, weight);
            }
            store(totals + r * W, all);
        }
    }

    // Adds the weighted values of a tile to the results.
    void add_values(int held_row, int keys) {
        const int64_t stride = s.tile / Mma::kPerWord, depth = keys / Mma::kPerWord;
        float* acc = s.acc + held_row * s.columns;
        if constexpr (!kCodes) {
            product<Mma>(tiles, s.p, stride, rows_now, s.v, s.columns, s.columns, depth, acc, s.columns, s.change);
        } else {
            for (int g = 0; g < groups; g++) {
                for (int r = 0; r < rows_now; r++) {
                    typename Mma::Value* p = (typename Mma::Value*)s.p + r * s.tile;
                    vf all = zero();
                    for (int i = 0; i < keys; i += W) {
                        vf weight = load(s.s + r * s.tile + i);
                        all = fma(weight, load(s.v_minimum + g * kKeys + i), all);
                        store(p + i, mul(weight, load(s.v_scale + g * kKeys + i)));
                    }
                    float* least = s.least + (held_row + r) * kGroups + g;
                    *least = *least * s.change[r] + sum(all);
                }
                const int64_t from = g * kGroup, columns = round_up(smaller(kGroup, n - from), W);
                product<Mma>(tiles, s.p, stride, rows_now, s.v + from, s.columns, columns, depth, acc + from, s.columns,
                             s.change);
            }
        }
    }

    // The result of a row before it is normalised, W columns from `column` on.
    vf result(int held_row, int column) const {
        vf x = load(s.acc + held_row * s.columns + column);
        return kCodes ? add(x, set1(s.least[held_row * kGroups + column / kGroup])) : x;
    }

    // Writes the normalised results of a head.
    void write(int h) {
        with_type(args.type, [&](auto* type) {
            for (int r = 0; r < rows(); r++) {
                auto* out =
                    (decltype(type))args.out + (item.first_token + r / group) * args.out_stride + head(h, r) * n;
                const int held_row = h * rows() + r;
                // A row that sees no key is zero, not 0 / 0.
                const float total =
                    sum(load(s.total + held_row * W)) + sink_weight(args, head(h, r), s.highest[held_row]);
                const vf scale = set1(total > 0 ? 1 / total : 0);
                for (int i = 0; i < n; i += W) store_part(out + i, mul(result(held_row, i), scale), n - i);
            }
        });
    }

    // Writes the results of a head that `merge` puts together with others.
    void write_partial(int h) {
        for (int r = 0; r < rows(); r++) {
            const int held_row = h * rows() + r;
            float* out = args.partial + (item.partial_row + held_row) * (n + 2);
            for (int i = 0; i < n; i += W) store_part(out + i, result(held_row, i), n - i);
            out[n] = s.highest[held_row], out[n + 1] = sum(load(s.total + held_row * W));
        }
    }
};

// Calls f<Mma, T>() with the Mma of the queries and the type of the KV.
template <class F>
inline auto with_attention(const Attention& args, F f) {
#ifdef BATCHGEN_FAST_BF16
    if (args.type == Type::BF16 && args.kv.type == Type::BF16) return f.template operator()<Bf16Mma, bf16>();
    if (args.type == Type::BF16 && args.kv.type == Type::Int4) return f.template operator()<Bf16Mma, Codes<4>>();
    if (args.type == Type::BF16 && args.kv.type == Type::Int5) return f.template operator()<Bf16Mma, Codes<5>>();
    if (args.type == Type::BF16 && args.kv.type == Type::Int8) return f.template operator()<Bf16Mma, Codes<8>>();
#endif
    switch (args.kv.type) {
        case Type::BF16: return f.template operator()<FloatMma, bf16>();
        case Type::F16: return f.template operator()<FloatMma, f16>();
        case Type::Int4: return f.template operator()<FloatMma, Codes<4>>();
        case Type::Int5: return f.template operator()<FloatMma, Codes<5>>();
        case Type::Int8: return f.template operator()<FloatMma, Codes<8>>();
        default: return f.template operator()<FloatMma, float>();
    }
}

// Bytes of scratch memory of a call.
inline int64_t attention_scratch(const Attention& args) {
    return with_attention(args, [&]<class Mma, class T>() {
        Carve carve{nullptr};
        AttentionScratch<Mma> scratch(args, carve);
        return carve.used;
    });
}

// Attends to items one after the other: while one ends, the KV of the next is prefetched.
inline void attend(const Attention& args, const AttentionItem* items, int64_t count, void* scratch) {
    with_attention(args, [&]<class Mma, class T>() {
        Attend<Mma, T> attend(args, Carve{(uint8_t*)scratch});
        for (int64_t i = 0; i < count; i++) attend.run(items[i], i + 1 < count ? items + i + 1 : nullptr);
    });
}

// Merges the parts of one row, in their order.
inline void merge(const Attention& args, const Merge& m, const int64_t* rows) {
    const int n = args.kv.head_dim;
    auto part = [&](int i) { return args.partial + rows[m.first + i] * (n + 2); };
    float highest = kLowest, total = 0;
    for (int i = 0; i < m.count; i++) highest = part(i)[n] > highest ? part(i)[n] : highest;
    float acc[kMaxHeadDim + W] = {};
    for (int i = 0; i < m.count; i++) {
        float scale[W];
        store(scale, exp(set1(part(i)[n] - highest)));
        total += part(i)[n + 1] * scale[0];
        for (int j = 0; j < n; j += W)
            store(acc + j, fma(load_part(part(i) + j, n - j), set1(scale[0]), load(acc + j)));
    }
    total += sink_weight(args, m.head, highest);
    with_type(args.type, [&](auto* type) {
        auto* out = (decltype(type))args.out + m.token * args.out_stride + int64_t(m.head) * n;
        const vf scale = set1(total > 0 ? 1 / total : 0);
        for (int j = 0; j < n; j += W) store_part(out + j, mul(load(acc + j), scale), n - j);
    });
}

}  // namespace
}  // namespace batchgen
