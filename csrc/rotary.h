// Rotary embedding of fused QKV; K and V go to their slots in the KV.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "quant/groups.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

struct HeadBuffer {
    float x[kMaxHeadDim + W], y[kMaxHeadDim + W];
};

// Rotates a head's row by its position and scales it, where nothing else is to be done and its halves are whole
// vectors.
template <class T>
inline void rotate_only(const T* head, int n, const float* cos, const float* sin, float scale, T* out) {
    const vf by = set1(scale);
    for (int i = 0, half = n / 2; i < half; i += W) {
        const vf c = mul(load(cos + i), by), s = mul(load(sin + i), by);
        const vf first = load(head + i), second = load(head + half + i);
        store(out + i, sub(mul(first, c), mul(second, s)));
        store(out + half + i, fma(second, c, mul(first, s)));
    }
}

// Loads a head's row into b.x: normed, rotated by its position, scaled.
template <class T>
inline void rotate_head(const RotaryStore& args, const T* head, const T* weight, const float* cos, const float* sin,
                        float scale, HeadBuffer& b) {
    const int n = args.kv.head_dim, half = n / 2;
    for (int i = 0; i < n; i += W) store(b.x + i, load_part(head + i, n - i));
    if (weight) {
        vf squares = zero();
        for (int i = 0; i < n; i += W) {
            const vf x = load_part(b.x + i, n - i);
            squares = fma(x, x, squares);
        }
        const float by = 1 / __builtin_sqrtf(sum(squares) / float(n) + args.eps);
        for (int i = 0; i < n; i += W)
            store_part(b.x + i, mul(mul(load(b.x + i), set1(by)), load_part(weight + i, n - i)), n - i);
    }
    if (cos) {
        for (int i = 0; i < half; i += W) {
            const int count = int(smaller(W, half - i));
            vf c = load_part(cos + i, count), s = load_part(sin + i, count);
            vf first = load_part(b.x + i, count), second = load_part(b.x + half + i, count);
            store_part(b.y + i, mul(sub(mul(first, c), mul(second, s)), set1(scale)), count);
            store_part(b.y + half + i, mul(fma(second, c, mul(first, s)), set1(scale)), count);
        }
        memcpy(b.x, b.y, n * sizeof(float));
    } else {
        for (int i = 0; i < n; i += W) store(b.x + i, mul(load(b.x + i), set1(scale)));
    }
}

// x = x rotation: keys of quantized KV are rotated, and so are the queries that meet them.
inline void apply_rotation(const float* rotation, int n, HeadBuffer& b) {
    for (int j = 0; j < n; j += W) {
        const int count = int(smaller(W, n - j));
        vf all = zero();
        for (int i = 0; i < n; i++) all = fma(set1(b.x[i]), load_part(rotation + i * n + j, count), all);
        store(b.y + j, all);
    }
    memcpy(b.x, b.y, n * sizeof(float));
}

template <class T>
inline void write_head(const float* x, int n, T* out) {
    for (int i = 0; i < n; i += W) store_part(out + i, load_part(x + i, n - i), n - i);
}

// Tokens [token, stop).
template <class T>
inline void rotary_store_rows(const RotaryStore& args, int64_t token, int64_t stop) {
    const KV& kv = args.kv;
    const int n = kv.head_dim;
    const int codes = kv.data ? code_bits(kv.type) : 0;
    const bool plain = args.cos && !args.q_norm && !args.rotation && n / 2 % W == 0;
    HeadBuffer b;
    for (; token < stop; token++) {
        const T* qkv = (const T*)args.qkv + token * args.qkv_stride;
        const float* cos = args.cos ? args.cos + args.positions[token] * (n / 2) : nullptr;
        const float* sin = args.sin ? args.sin + args.positions[token] * (n / 2) : nullptr;
        for (int h = 0; h < args.heads; h++) {
            T* out = (T*)args.q_out + (token * args.heads + h) * n;
            if (plain) {
                rotate_only(qkv + h * n, n, cos, sin, args.scale, out);
                continue;
            }
            rotate_head(args, qkv + h * n, (const T*)args.q_norm, cos, sin, args.scale, b);
            if (args.rotation) apply_rotation(args.rotation, n, b);
            write_head(b.x, n, out);
        }
        const int64_t slot = kv.data ? args.slots[token] : 0;
        uint8_t* kv_row = kv.data + slot / kv.block_size * kv.block_bytes + slot % kv.block_size * kv.row_bytes;
        for (int h = 0; h < 2 * kv.kv_heads; h++) {
            const bool key = h < kv.kv_heads;
            const int head = key ? h : h - kv.kv_heads;
            const T* row = qkv + (args.heads + h) * n;
            uint8_t* out;
            if (kv.data) {
                out = kv_row + head * kv.head_bytes + (key ? 0 : kv.value_offset);
            } else {
                out = (uint8_t*)((T*)(key ? args.k_out : args.v_out) + (token * kv.kv_heads + head) * n);
            }
            if (!codes && !key) {
                memcpy(out, row, n * sizeof(T));
                continue;
            }
            if (!codes && plain) {
                rotate_only(row, n, cos, sin, 1.0f, (T*)out);
                continue;
            }
            if (key) {
                rotate_head(args, row, (const T*)args.k_norm, cos, sin, 1.0f, b);
                if (args.rotation) apply_rotation(args.rotation, n, b);
            } else {
                for (int i = 0; i < n; i += W) store(b.x + i, load_part(row + i, n - i));
            }
            if (codes == 4) quantize_row<4>(b.x, n, out);
            else if (codes == 5) quantize_row<5>(b.x, n, out);
            else if (codes == 8) quantize_row<8>(b.x, n, out);
            else write_head(b.x, n, (T*)out);
        }
    }
}

inline void rotary_store(const RotaryStore& args, int64_t token, int64_t stop) {
    with_type(args.type, [&](auto* type) { rotary_store_rows<__typeof__(*type)>(args, token, stop); });
}

}  // namespace
}  // namespace batchgen
