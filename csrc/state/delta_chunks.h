// The gated delta rule for sequences with many tokens: chunks of tokens as matrix products (Yang et al., Gated Delta
// Networks, 2024, section 3.3).
//
// With the log decay c_i from the chunk's begin to token i, and the state S before the chunk, what token i adds is
// k_i d_i^T with
//   d_i = beta_i (v_i - exp(c_i) S^T k_i - sum over j < i of exp(c_i - c_j) (k_i.k_j) d_j),
// a triangular system, which is solved a block of rows at a time. Then
//   out_i = exp(c_i) S^T q_i + sum over j <= i of exp(c_i - c_j) (q_i.k_j) d_j,
//   S becomes exp(c_last) S + sum over j of k_j (exp(c_last - c_j) d_j)^T.
// No exponent is above 0, so strong decay makes zeros and nothing else.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/micro_kernel.h"
#include "simd/numeric.h"
#include "state/delta_operands.h"
#include "state/delta_steps.h"

namespace batchgen {
namespace {

// A log decay since the begin of a chunk, in two floats: differences of large sums keep their precision.
struct LogDecay {
    float high[kDeltaChunk + W], low[kDeltaChunk + W];

    void add_up(const float* g, int tokens) {
        double all = 0;
        for (int i = 0; i < tokens; i++) {
            all += g[i] < -1000 ? -1000 : g[i];  // exp(-1000) is 0; -inf - -inf would be NaN
            high[i] = float(all), low[i] = float(all - high[i]);
        }
    }
    // exp(c_i - c_j) for W tokens j.
    vf since(int i, int j) const {
        return exp(add(sub(set1(high[i]), load(high + j)), sub(set1(low[i]), load(low + j))));
    }
    float until(int i) const { return exp_of(high[i] + low[i]); }
};

// The arrays of a chunk, in scratch memory. Strides are padded, so that rows do not share the sets of a cache.
struct ChunkArrays {
    int keys, values, key_stride, value_stride;  // dims rounded up to whole vectors; numbers from row to row
    static constexpr int kTokenStride = kDeltaChunk + W;
    float* kq;                       // [2 kDeltaChunk, key_stride]: keys of the chunk's tokens, then queries
    float* keys_by_dim;              // [keys, kTokenStride]: keys as columns
    float *k_products, *q_products;  // [kDeltaChunk, kTokenStride]: k_i.k_j and q_i.k_j
    float* factors;                  // [kDeltaChunk, kTokenStride]: these times decay, of one value head
    float* read;                     // [2 kDeltaChunk, value_stride]: what keys and queries read of the state
    float* added;                    // [kDeltaChunk, value_stride]: d
    float* scales;                   // [keys or kDeltaChunk]: a factor for each row of a product
    float* states[kDeltaHeads];      // each [key_dim, value_stride]

    ChunkArrays(const DeltaRule& args, Carve& carve)
        : keys(int(round_up(args.key_dim, W))), values(int(round_up(args.value_dim, W))) {
        key_stride = keys + W, value_stride = values + W;
        kq = carve.take<float>(2 * kDeltaChunk * key_stride);
        keys_by_dim = carve.take<float>(keys * kTokenStride);
        k_products = carve.take<float>(kDeltaChunk * kTokenStride);
        q_products = carve.take<float>(kDeltaChunk * kTokenStride);
        factors = carve.take<float>(kDeltaChunk * kTokenStride);
        read = carve.take<float>(2 * kDeltaChunk * value_stride);
        added = carve.take<float>(kDeltaChunk * value_stride);
        scales = carve.take<float>(keys > kDeltaChunk ? keys : kDeltaChunk);
        for (float*& state : states) state = carve.take<float>(args.key_dim * value_stride);
    }
};

inline int64_t delta_scratch(const DeltaRule& args) {
    Carve steps{nullptr}, chunks{nullptr};
    StepVectors step_vectors(args, steps);
    ChunkArrays chunk_arrays(args, chunks);
    return steps.used > chunks.used ? steps.used : chunks.used;
}

// c [rows, columns] = a b, or c * scale + a b with a scale for each row, in floats.
inline void float_product(const float* a, int64_t a_stride, int rows, const float* b, int64_t b_stride, int columns,
                          int k, float* c, int64_t c_stride, const float* scale) {
    product<FloatMma>(NoTiles(), (const uint32_t*)a, a_stride, rows, (const uint32_t*)b, b_stride, columns, k, c,
                      c_stride, scale);
}

// Solves (1 + L) d = d' in place for Rows rows of d and n columns, a multiple of W; `factors` are those of -L.
template <int Rows>
inline void solve_block(const float* factors, int64_t factor_stride, float* d, int64_t stride, int n) {
    constexpr int kVectors = kTileM == 12 ? 2 : 1;
    const auto columns = [&]<int Vectors>(float* at) __attribute__((always_inline)) {
        vf rows[Rows][Vectors];
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; v++) rows[r][v] = load(at + r * stride + v * W);
        }
#pragma GCC unroll 12
        for (int j = 0; j < Rows; j++) {
#pragma GCC unroll 12
            for (int r = j + 1; r < Rows; r++) {
                const vf factor = set1(factors[r * factor_stride + j]);
#pragma GCC unroll 2
                for (int v = 0; v < Vectors; v++) rows[r][v] = fma(factor, rows[j][v], rows[r][v]);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; v++) store(at + r * stride + v * W, rows[r][v]);
        }
    };
    int i = 0;
    for (; i + kVectors * W <= n; i += kVectors * W) columns.template operator()<kVectors>(d + i);
    for (; i < n; i += W) columns.template operator()<1>(d + i);
}

// A piece of the delta rule, chunk by chunk.
template <class T>
struct DeltaChunks {
    const DeltaRule& args;
    const DeltaPiece& piece;
    const ChunkArrays s;
    int64_t first;  // of the current chunk's tokens
    int tokens;     // in it

    DeltaChunks(const DeltaRule& args, const DeltaPiece& piece, Carve carve)
        : args(args), piece(piece), s(args, carve) {}

    void run() {
        with_state_type(args.state_type, [&](auto* type) { load_states(type); });
        const int64_t begin = args.slots.starts[piece.sequence], end = args.slots.starts[piece.sequence + 1];
        for (first = begin; first < end; first += kDeltaChunk) {
            tokens = int(smaller(kDeltaChunk, end - first));
            load_keys();
            triangle(s.kq, s.k_products);
            triangle(s.kq + tokens * s.key_stride, s.q_products);
            for (int head = piece.head; head < piece.head_stop; head++) update(head);
        }
        with_state_type(args.state_type, [&](auto* type) { store_states(type); });
    }

    template <class S>
    void load_states(S*) {
        const int64_t slot = args.slots.source[piece.sequence];
        for (int head = piece.head; head < piece.head_stop; head++) {
            float* to = s.states[head - piece.head];
            const S* from = slot < 0 ? nullptr : delta_state<S>(args, slot, head);
            for (int r = 0; r < args.key_dim; r++, to += s.value_stride)
                for (int i = 0; i < s.values; i += W)
                    store(to + i, from ? load_part(from + r * args.value_dim + i, args.value_dim - i) : zero());
        }
    }
    template <class S>
    void store_states(S*) {
        for (int head = piece.head; head < piece.head_stop; head++) {
            const float* from = s.states[head - piece.head];
            S* to = delta_state<S>(args, args.slots.target[piece.sequence], head);
            for (int r = 0; r < args.key_dim; r++, from += s.value_stride, to += args.value_dim)
                for (int i = 0; i < args.value_dim; i += W) store_part(to + i, load(from + i), args.value_dim - i);
        }
    }

    // Loads the chunk's keys and queries, and transposes its keys; tokens up to whole vectors have zeros there.
    void load_keys() {
        const float scale = 1 / __builtin_sqrtf(float(args.key_dim));
        for (int i = 0; i < tokens; i++) {
            const DeltaToken<T> token(args, first + i, piece.head);
            load_normed(token.k, args.key_dim, 1, s.kq + i * s.key_stride);
            load_normed(token.q, args.key_dim, scale, s.kq + (tokens + i) * s.key_stride);
        }
        for (int i = 0; i < tokens; i += W) {
            for (int d = 0; d < s.keys; d += W) {
                vi r[W];
#pragma GCC unroll 16
                for (int j = 0; j < W; j++)
                    r[j] = i + j < tokens ? load_int((const uint32_t*)s.kq + (i + j) * s.key_stride + d) : set1_int(0);
                transpose(r);
#pragma GCC unroll 16
                for (int j = 0; j < W; j++)
                    store_int((uint32_t*)s.keys_by_dim + (d + j) * ChunkArrays::kTokenStride + i, r[j]);
            }
        }
    }

    // Calls f(row, rows) for blocks of the chunk's tokens.
    template <class F>
    void over_blocks(F f) const {
        for (int row = 0; row < tokens; row += kTileM) f(row, int(smaller(kTileM, tokens - row)));
    }

    // The products of each row of `a` and the keys up to it, and of some more.
    void triangle(const float* a, float* out) const {
        constexpr int stride = ChunkArrays::kTokenStride;
        over_blocks([&](int row, int rows) {
            float_product(a + row * s.key_stride, s.key_stride, rows, s.keys_by_dim, stride,
                          int(round_up(row + rows, W)), args.key_dim, out + row * stride, stride, nullptr);
        });
    }

    // s.factors [i, j] = factor_i exp(c_i - c_j) products [i, j] for tokens j before `stop(i)`; zeros after them, up to
    // the end of i's block.
    template <class F, class G>
    void decayed(const float* products, const LogDecay& decay, F factor, G stop) const {
        constexpr int stride = ChunkArrays::kTokenStride;
        float lanes[W];
        for (int i = 0; i < W; i++) lanes[i] = float(i);
        for (int i = 0; i < tokens; i++) {
            const vf by = set1(factor(i));
            for (int j = 0; j < round_up(i + 1, kTileM); j += W) {
                const vf number = mul(mul(by, decay.since(i, j)), load(products + i * stride + j));
                store(s.factors + i * stride + j, select_less(load(lanes), set1(float(stop(i) - j)), number, zero()));
            }
        }
    }

    void update(int head) const {
        constexpr int stride = ChunkArrays::kTokenStride;
        float* state = s.states[head - piece.head];
        float g[kDeltaChunk], beta[kDeltaChunk], from_start[kDeltaChunk];
        for (int i = 0; i < tokens; i++) {
            const int64_t at = (first + i) * args.value_heads + head;
            g[i] = args.g[at], beta[i] = args.beta[at];
        }
        LogDecay decay;
        decay.add_up(g, tokens);
        for (int i = 0; i < tokens; i++) from_start[i] = decay.until(i);

        // What keys and queries read of the state.
        float_product(s.kq, s.key_stride, 2 * tokens, state, s.value_stride, s.values, args.key_dim, s.read,
                      s.value_stride, nullptr);
        for (int i = 0; i < tokens; i++) {
            const DeltaToken<T> token(args, first + i, head);
            const vf strength = set1(beta[i]), left = set1(from_start[i]);
            for (int j = 0; j < s.values; j += W) {
                const vf missing =
                    sub(load_part(token.v + j, args.value_dim - j), mul(left, load(s.read + i * s.value_stride + j)));
                store(s.added + i * s.value_stride + j, mul(strength, missing));
            }
        }
        solve(decay, beta);
        results(head, decay, from_start);

        for (int i = 0; i < tokens; i++) {
            const vf left =
                set1(exp_of((decay.high[tokens - 1] - decay.high[i]) + (decay.low[tokens - 1] - decay.low[i])));
            float* row = s.added + i * s.value_stride;
            for (int j = 0; j < s.values; j += W) store(row + j, mul(left, load(row + j)));
        }
        for (int i = 0; i < args.key_dim; i++) s.scales[i] = from_start[tokens - 1];
        float_product(s.keys_by_dim, stride, args.key_dim, s.added, s.value_stride, s.values, tokens, state,
                      s.value_stride, s.scales);
    }

    // Takes from each row of s.added what the rows before it add.
    void solve(const LogDecay& decay, const float* beta) const {
        constexpr int stride = ChunkArrays::kTokenStride;
        decayed(s.k_products, decay, [&](int i) { return -beta[i]; }, [](int i) { return i; });
        for (int i = 0; i < kDeltaChunk; i++) s.scales[i] = 1;
        over_blocks([&](int row, int rows) {
            const float* factors = s.factors + row * stride;
            float* d = s.added + row * s.value_stride;
            if (row)
                float_product(factors, stride, rows, s.added, s.value_stride, s.values, row, d, s.value_stride,
                              s.scales);
            with_count<kTileM>(
                rows, [&]<int Rows>() { solve_block<Rows>(factors + row, stride, d, s.value_stride, s.values); });
        });
    }

    // Writes the results of the chunk's tokens.
    void results(int head, const LogDecay& decay, const float* from_start) const {
        constexpr int stride = ChunkArrays::kTokenStride;
        decayed(s.q_products, decay, [](int) { return 1.0f; }, [](int i) { return i + 1; });
        over_blocks([&](int row, int rows) {
            float* out = s.read + (tokens + row) * s.value_stride;
            float_product(s.factors + row * stride, stride, rows, s.added, s.value_stride, s.values, row + rows, out,
                          s.value_stride, from_start + row);
            for (int i = 0; i < rows; i++) {
                const DeltaToken<T> token(args, first + row + i, head);
                for (int j = 0; j < args.value_dim; j += W)
                    store_part(token.out + j, load(out + i * s.value_stride + j), args.value_dim - j);
            }
        });
    }
};

inline void delta_chunks(const DeltaRule& args, const DeltaPiece& piece, void* scratch) {
    with_type(args.type,
              [&](auto* type) { DeltaChunks<__typeof__(*type)>(args, piece, Carve{(uint8_t*)scratch}).run(); });
}

}  // namespace
}  // namespace batchgen
