// Tiles of K and V, packed from the rows of paged KV into the layout that products read.
#pragma once

#include <stdint.h>
#include <string.h>

#include "attention/prefetch.h"
#include "attention/scratch.h"
#include "kernels.h"
#include "matmul/operands.h"
#include "quant/groups.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// The type of quantized rows whose values have so many bits, and the bits of a type; 0: its rows are numbers.
template <int Bits>
struct Codes {
    uint8_t byte;
};
template <class T>
constexpr int kBits = 0;
template <int Bits>
constexpr int kBits<Codes<Bits>> = Bits;

// What products are made of: codes of 4 and 5 bits are brought into bytes first, the rows of a tile at a time.
template <class T>
struct InTiles {
    using Type = T;
};
template <int Bits>
struct InTiles<Codes<Bits>> {
    using Type = Codes<8>;
};

// A row as floats; of a quantized row its quantized values.
template <class T>
inline void expand_row(const T* row, int n, float* out) {
    for (int i = 0; i < n; i += W) store(out + i, load_part(row + i, n - i));
}
inline void expand_row(const Codes<8>* row, int n, float* out) {
    for (int i = 0; i < n; i += W) store(out + i, to_float(load_bytes_part(&row->byte + i, n - i)));
}

// Has `count` rows of 4- or 5-bit codes taken from bytes [count, kByteRow] at `space`.
template <int Bits>
__attribute__((noinline)) void expand_tile(const uint8_t** rows, int count, int n, uint8_t* space) {
    for (int i = 0; i < count; i++, space += kByteRow) {
        expand_to_bytes<Bits>(rows[i], n, space);
        rows[i] = space;
    }
}

// Packs W keys into columns of the tile of K at `out` [depth, kKeys].
template <class T>
inline void pack_keys(FloatMma, const uint8_t* const* rows, int n, AttentionScratch<FloatMma>& s, uint32_t* out,
                      Ahead& ahead) {
    for (int i = 0; i < W; i++) {
        expand_row((const T*)rows[i], n, s.expanded + i * s.expanded_stride);
        for (int64_t j = n; j < s.columns; j++) s.expanded[i * s.expanded_stride + j] = 0;
    }
    for (int64_t d = 0; d < s.depth; d += W) {
        vi r[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) r[i] = load_int((const uint32_t*)s.expanded + i * s.expanded_stride + d);
        transpose(r);
        ahead.fetch();
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store_int(out + (d + i) * s.tile, r[i]);
    }
}

// Packs all keys into the tile of V: a row for each, values in their order.
template <class T>
inline void pack_values(FloatMma, const uint8_t* const* rows, int keys, int n, AttentionScratch<FloatMma>& s,
                        Ahead& ahead) {
    for (int i = 0; i < keys; i++) ahead.fetch(), expand_row((const T*)rows[i], n, (float*)s.v + i * s.columns);
}

// Reorders a query's values as `store_quants_as_pairs` orders those of K: 0, 2, 1, 3 of each four.
inline void code_order(const bf16* q, int n, bf16* out) {
    for (int i = 0; i < n; i += 4, out += 4) out[0] = q[i], out[1] = q[i + 2], out[2] = q[i + 1], out[3] = q[i + 3];
}

#ifdef BATCHGEN_FAST_BF16
// The integers in the low eight bits of each 16 as bf16, exactly.
inline vi bytes_to_bf16(vi a) {
    const vi low = as_int(to_float(and_bits(a, set1_int(0xff)))), high = as_int(to_float(shift_right<16>(a)));
    return add_int(shift_right<16>(low), and_bits(high, set1_int(0xffff0000)));
}
// Stores four quantized values of W keys as pairs, in the order of `code_order`.
inline void store_quants_as_pairs(vi words, uint32_t* out, int64_t stride) {
    const vi bytes = set1_int(0x00ff00ff);
    store_int(out, bytes_to_bf16(and_bits(words, bytes)));
    store_int(out + stride, bytes_to_bf16(and_bits(shift_right<8>(words), bytes)));
}

template <class T>
inline void pack_keys(Bf16Mma, const uint8_t* const* rows, int n, AttentionScratch<Bf16Mma>& s, uint32_t* out,
                      Ahead& ahead) {
    constexpr bool codes = kBits<T> != 0;
    const int words = codes ? n / 4 : n / 2;       // words of a row
    if constexpr (codes && uses_tiles<Bf16Mma>())  // zeros up to the last whole step of tile registers
        for (int64_t d = n / 2; d < s.depth; d++) store_int(out + d * s.tile, set1_int(0));
    for (int d = 0; d < words; d += W) {
        const int count = int(smaller(W, words - d));
        vi r[W];
        if (count == W) {
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) r[i] = load_int((const uint32_t*)rows[i] + d);
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) r[i] = load_int_part((const uint32_t*)rows[i] + d, count);
        }
        transpose(r);
        ahead.fetch();
        if constexpr (codes) {
#pragma GCC unroll 16
            for (int i = 0; i < W; i++)
                if (i < count) store_quants_as_pairs(r[i], out + 2 * i * s.tile, s.tile);
            out += 2 * count * s.tile;
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store_int(out + (d + i) * s.tile, r[i]);
        }
    }
}

template <class T>
inline void pack_values(Bf16Mma, const uint8_t* const* rows, int keys, int n, AttentionScratch<Bf16Mma>& s,
                        Ahead& ahead) {
    for (int i = 0; i < keys; i += 2) {
        ahead.fetch();
        uint32_t* out = s.v + i / 2 * s.columns;
        const uint8_t *a = rows[i], *b = rows[i + 1];
        if constexpr (kBits<T> == 8) {
            for (int j = 0; j < n; j += W)
                store_int(out + j,
                          bytes_to_bf16(pair_bytes(load_bytes_part(a + j, n - j), load_bytes_part(b + j, n - j))));
        } else {
            for (int j = 0; j < n; j += 2 * W) {
                int words = int(smaller(W, (n - j) / 2));
                vi first, second;
                interleave(load_int_part((const uint32_t*)(a + 2 * j), words),
                           load_int_part((const uint32_t*)(b + 2 * j), words), first, second);
                store_int(out + j, first);
                if (j + W < n) store_int(out + j + W, second);
            }
        }
    }
}
#endif

// Loads the scales and minimums of `keys` quantized rows, a multiple of W, as floats [groups, kKeys].
template <int Bits>
__attribute__((noinline)) void read_tables(const uint8_t* const* rows, int keys, int n, float* scale, float* minimum) {
    const int start = code_bytes(n, Bits), groups = (n + kGroup - 1) / kGroup;
    for (int g = 0; g < groups; g++) {
        for (int i = 0; i < keys; i += W) {
            uint32_t words[W];
            for (int j = 0; j < W; j++) memcpy(words + j, rows[i + j] + start + 4 * g, 4);
            vf scales, minimums;
            split_f16(load_int(words), scales, minimums);
            store(scale + g * kKeys + i, scales);
            store(minimum + g * kKeys + i, minimums);
        }
    }
}

// The addresses of a head's rows of K for keys [key, key + kKeys); from last_key on that of the last one.
inline void key_rows(const KV& kv, const AttentionSpan& span, int head, int key, const uint8_t** rows) {
    const uint8_t* row = nullptr;
    for (int i = 0; i < kKeys;) {
        int at = key + i;
        if (at >= span.last_key) {
            for (; i < kKeys; i++) rows[i] = row;
            return;
        }
        int offset = at % kv.block_size;
        int count = int(smaller(smaller(kv.block_size - offset, span.last_key - at), kKeys - i));
        row = kv.data + int64_t(span.blocks[at / kv.block_size]) * kv.block_bytes + head * kv.head_bytes +
              offset * kv.row_bytes;
        for (int j = 0; j < count; j++, row += kv.row_bytes) rows[i++] = row;
        row -= kv.row_bytes;
    }
}

}  // namespace
}  // namespace batchgen
