// Linear layers: out = activation(x wᵀ + bias) + residual.
//
// w is worked on a panel of kPanel columns at a time, packed so that a vector of columns lies together at each depth:
// once beforehand, or, where weights pass through memory, when a panel is needed. An element's sum is taken in the
// order of depth, whatever rows are beside it: a row's result does not depend on its batch.

constexpr int64_t kPackedRows = 4;     // fewer are taken as they lie
constexpr int64_t kDepthBlock = 1024;  // of 32 bits: a panel of it stays in a cache beside the rows

template <class M>
inline int64_t packed_depth(const Linear& args) {
    return (round_up(args.depth, M::kWhole) + M::kPair - 1) / M::kPair;
}

// The row of w that is column `c` of a panel; with a gated one a vector of the gate is beside one of what it is
// multiplied with.
inline int64_t weight_row(const Linear& args, int64_t panel, int c) {
    if (!is_gated(args.activation)) return panel * kPanel + c;
    const int64_t column = panel * W + c % W, half = args.columns / 2;
    return column < half ? column + (c / W) * half : args.columns;
}

template <class M>
inline const typename M::Operand* packed_panel(const Linear& args, int64_t panel);

// r[i]: what rows c.. of a tile of `count` rows have at depth d + i; to where the rows lie beside each other.
inline void put_beside(const vi* r, uint32_t* tile, int64_t d, int64_t depth, int64_t c, int64_t count) {
    const int64_t lanes = smaller(W, count - c), depths = smaller(W, depth - d);
    uint32_t* at = tile + d * count + c;
    // A whole vector may run into the depths after it, which are written after it, but not beyond the tile.
    if (depths == W && (lanes == W || (c == 0 && (d + W - 1) * count + W <= depth * count))) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store_int(at + i * count, r[i]);
        return;
    }
    for (int64_t i = 0; i < depths; i++) {
        uint32_t all[W];
        store_int(all, r[i]);
        memcpy(at + i * count, all, lanes * 4);
    }
}

#include "matmul/int8.h"

template <class M>
constexpr bool kCoded = __is_same(M, Bytes);
inline bool in_digits(const Linear& args);
template <class M>
inline bool in_fp8(const Linear& args);
inline int64_t unpacked_panel_bytes(const Linear& args, int depths);

template <class M>
inline int64_t panel_bytes_of(const Linear& args) {
    if (in_digits(args)) return unpacked_panel_bytes(args, 4);
    if (in_fp8<M>(args)) return unpacked_panel_bytes(args, 2);
    return kPanel * (packed_depth<M>(args) * int64_t(sizeof(typename M::Operand)) + (kCoded<M> ? 4 : 0));
}

template <class M>
inline const typename M::Operand* packed_panel(const Linear& args, int64_t panel) {
    return (const typename M::Operand*)((const uint8_t*)args.w + panel * panel_bytes_of<M>(args));
}

// Calls f with the kind of product and x's type.
template <class F>
inline auto with_products(const Linear& args, F f) {
    if (args.codes)
        return with_type(args.type, [&](auto* type) { return f.template operator()<Bytes, __typeof__(*type)>(); });
#ifdef BATCHGEN_FAST_BF16
    if (args.type == Type::BF16) return f.template operator()<Pairs, bf16>();
#endif
    switch (args.type) {
        case Type::BF16: return f.template operator()<Floats, bf16>();
        case Type::F16: return f.template operator()<Floats, f16>();
        default: return f.template operator()<Floats, float>();
    }
}

// Depths [d, d + W) of W rows, in units of 32 bits, of which `values` are there: r[i] is what all rows have at depth d
// + i. A row that is null is zeros.
template <class M, class T>
inline void gather_depths(const T* const* rows, int64_t d, int64_t values, vi* r) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
        if (!rows[i]) r[i] = set1_int(0);
        else if constexpr (M::kPair == 1) r[i] = as_int(load_part(rows[i] + d, int(values)));
        else if (values == 2 * W) r[i] = load_int((const uint32_t*)(rows[i] + 2 * d));
        else {
            uint32_t part[W] = {};
            memcpy(part, rows[i] + 2 * d, values * 2);
            r[i] = load_int(part);
        }
    }
    transpose(r);
}

#include "matmul/row_blocks.h"
#include "matmul/block_panels.h"
#include "matmul/dequantize.h"
#include "matmul/code_panels.h"
#include "matmul/split_bytes.h"
#include "matmul/fp8.h"
#include "matmul/panel_rows.h"

// Depths [start, stop), in units of 32 bits, of a panel: out [stop - start, kPanel]. next: the panel after it, if it
// has been put in order, as rows of a GGUF are.
template <class M, class T>
inline void pack_panel(const Linear& args, int64_t panel, int64_t next, int64_t start, int64_t stop,
                       typename M::Operand* out) {
    if constexpr (kCoded<M>) {
        return pack_codes(args, panel, start, stop, out);
    } else {
        if constexpr (!kHasFp8<M>) {  // where blocks are multiplied as codes
            if (args.packing != BlockType::F32) {
                if (args.packed) return numbers_of_panel<M, T>(args, panel, next, start, stop, out);
                return unpack_panel<M, T>(args, panel, start, stop, out);
            }
        }
        for (int c = 0; c < kPanel; c += W) {
            const T* rows[W];
            for (int i = 0; i < W; i++) {
                const int64_t row = weight_row(args, panel, c + i);
                rows[i] = row < args.columns ? (const T*)args.w + row * args.w_stride : nullptr;
            }
            for (int64_t d = start; d < stop; d += W) {
                const int64_t count = smaller(W, stop - d);
                vi r[W];
                gather_depths<M>(rows, d, smaller(count * M::kPair, args.depth - d * M::kPair), r);
#pragma GCC unroll 16
                for (int i = 0; i < W; i++)
                    if (i < count) store_int(out + (d - start + i) * kPanel + c, r[i]);
            }
        }
    }
}

// Tiles [tile, stop) of kRowTile rows of x, the rows of a tile beside each other at each depth: [tiles, depth, rows of
// the tile]. Rows as they lie, far apart, take each other's places in the nearest cache.
template <class M, class T>
inline void pack_row_tiles(const Linear& args, int64_t tile, int64_t stop, void* out) {
    const int64_t depth = packed_depth<M>(args);
    for (; tile < stop; tile++) {
        const int64_t row = tile * kRowTile, count = smaller(kRowTile, args.rows - row);
        uint32_t* to = (uint32_t*)out + row * depth;
        for (int64_t c = 0; c < count; c += W) {
            const int64_t lanes = smaller(W, count - c);
            const T* rows[W];
            for (int i = 0; i < W; i++)
                rows[i] = i < lanes ? (const T*)args.x + (row + c + i) * args.x_stride : nullptr;
            for (int64_t d = 0; d < depth; d += W) {
                const int64_t depths = smaller(W, depth - d);
                vi r[W];
                gather_depths<M>(rows, d, smaller(depths * M::kPair, args.depth - d * M::kPair), r);
                put_beside(r, to, d, depth, c, count);
            }
        }
    }
}

inline void pack_panels(const Linear& args, int64_t panel, int64_t stop, void* out) {
    with_products(args, [&]<class M, class T>() {
        const int64_t depth = packed_depth<M>(args);
        for (; panel < stop; panel++) {
            auto* to = (typename M::Operand*)((uint8_t*)out + panel * panel_bytes_of<M>(args));
            const int64_t next = panel + 1 < stop ? panel + 1 : panel;
            if (in_digits(args) || in_fp8<M>(args)) {
                const auto unpack = [&](const auto& products) {
                    unpack_panel_of_codes(args, products, panel, next, (uint32_t*)to);
                };
                in_digits(args) ? with_digits(args, 0, unpack) : with_fp8(args, 0, unpack);
                continue;
            }
            pack_panel<M, T>(args, panel, next, 0, depth, to);
            if constexpr (kCoded<M>) gather_scales(args, panel, (float*)(to + depth * kPanel));
        }
    });
}

// Rows of a GGUF to panels of as many bytes.
inline void arrange_panels(const Linear& args, int64_t panel, int64_t stop, void* out) {
    with_products(args, [&]<class M, class T>() {
        if constexpr (!kCoded<M>)
            with_panels(args.packing, [&]<class Format>(const int8_t*) {
                for (; panel < stop; panel++)
                    arrange_panel<M, T, Format>(args, panel, (uint8_t*)out + panel * block_panel_bytes(args));
            });
    });
}

inline int64_t panel_bytes(const Linear& args) {
    return with_products(args, [&]<class M, class T>() { return panel_bytes_of<M>(args); });
}

template <class M, class T>
inline constexpr bool direct() {
    return sizeof(typename M::Value) == sizeof(T) && (M::kPair == 2 || sizeof(T) == 4);
}

template <class M>
struct LinearScratch {
    uint32_t* a;
    typename M::Operand* b;
    typename M::Number* c;
    LinearScratch(int64_t depth, int64_t rows, Carve& carve) {
        a = carve.take<uint32_t>(kCoded<M> ? 0 : rows * depth);
        b = carve.take<typename M::Operand>(kPanel * smaller(depth, kDepthBlock));
        c = carve.take<typename M::Number>(panels_at_once(rows) * rows * kPanel);
    }
};

struct PlainSums {
    const float* c;
    PlainSums(const Linear&, int64_t, int64_t, const float* c) : c(c) {}
    vf operator()(int64_t r, int part) const { return load(c + r * kPanel + part); }
};

template <class M>
inline auto sums_of(const Linear& args, int64_t row, int64_t panel, const void* c) {
    if constexpr (kCoded<M>) return CodeSums(args, row, panel, c);
    else return PlainSums(args, row, panel, (const float*)c);
}

// Rows of sums of one panel to where they go.
template <class M, class T, class O>
inline void finish(const Linear& args, int64_t row, int64_t panel, int64_t rows, const void* c) {
    using A = typename M::Arithmetic;
    const auto sums = sums_of<M>(args, row, panel, c);
    const bool has_gate = is_gated(args.activation);
    const int64_t columns = has_gate ? args.columns / 2 : args.columns;
    for (int part = 0; part < (has_gate ? W : kPanel); part += W) {
        const int64_t column = panel * (has_gate ? W : kPanel) + part;
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

// Rows of A, from `row` on: one after the other, or in tiles whose rows lie beside each other (`pack_row_tiles`).
struct Rows {
    const uint32_t* at;
    int64_t stride;
    bool in_tiles;
};

template <class M, class T>
inline Rows rows_as_operand(const Linear& args, int64_t row, int64_t rows, uint32_t* space) {
    const int64_t depth = packed_depth<M>(args);
    if constexpr (kCoded<M>) {
        return {(const uint32_t*)CodedRows(args, args.packed_x).codes + row * depth, depth, true};
    } else {
        if (args.packed_x) return {(const uint32_t*)args.packed_x + row * depth, depth, true};
        if (direct<M, T>() && args.depth % M::kPair == 0 && args.x_stride % M::kPair == 0 && uintptr_t(args.x) % 4 == 0)
            return {(const uint32_t*)((const T*)args.x + row * args.x_stride), args.x_stride / M::kPair, false};
        for (int64_t r = 0; r < rows; r++) {
            const T* x = (const T*)args.x + (row + r) * args.x_stride;
            typename M::Value* out = (typename M::Value*)(space + r * depth);
            if (args.depth % M::kPair) out[args.depth] = typename M::Value{};
            for (int64_t i = 0; i < args.depth; i += W) {
                const int n = int(smaller(W, args.depth - i));
                store_part(out + i, load_part(x + i, n), n);
            }
        }
        return {space, depth, false};
    }
}

// Rows of x, at most kRowsOfPacked, times weights that are rows of a GGUF in panels.
template <class M, class T, class O>
inline void few_rows(const Linear& args, int64_t row, int64_t rows, Rows a, int64_t panel, int64_t panel_stop,
                     int64_t next_panel, float* c) {
    const FewRows x{a.at, a.in_tiles ? 1 : a.stride, a.in_tiles ? rows : 1};
    const int64_t step = panels_at_once(rows);
    for (; panel < panel_stop; panel += step) {
        // The last one goes twice where two go at once and none is beside it.
        const int64_t last = smaller(panel + step, panel_stop) - 1;
        const auto after = [&](int64_t p) { return p + step < panel_stop ? p + step : next_panel; };
        product_of_few<M, T>(args, int(rows), {panel, last}, {after(panel), after(last)}, x, c);
        for (int64_t p = panel; p <= last; p++) finish<M, T, O>(args, row, p, rows, c + (p - panel) * rows * kPanel);
    }
}

template <class M, class T, class O>
inline void linear_block(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                         int64_t next_panel, void* scratch) {
    const int64_t depth = packed_depth<M>(args), rows = row_stop - row;
    Carve carve{(uint8_t*)scratch};
    LinearScratch<M> s(depth, rows, carve);
    if constexpr (__is_same(T, bf16) && !kCoded<M>) {
        const auto multiply = [&](const auto& products) {
            products_of_panels(args, products, rows, panel, panel_stop, next_panel, (uint32_t*)s.b, s.c,
                               [&](int64_t p) { finish<M, T, O>(args, row, p, rows, s.c); });
        };
        if (in_digits(args)) return with_digits(args, row, multiply);
        if (in_fp8<M>(args)) return with_fp8(args, row, multiply);
    }
    const Rows a = rows_as_operand<M, T>(args, row, rows, s.a);
    if constexpr (direct<M, T>() && !kCoded<M> && !kHasFp8<M>) {
        if (args.packed && args.packing != BlockType::F32 && rows <= kRowsOfPacked)
            return few_rows<M, T, O>(args, row, rows, a, panel, panel_stop, next_panel, s.c);
    }
    // Numbers of packed ones stay in the nearest cache.
    const int64_t block = args.packed && args.packing != BlockType::F32 ? kTaken / M::kPair : kDepthBlock;
    for (; panel < panel_stop; panel++) {
        const int64_t next = panel + 1 < panel_stop ? panel + 1 : next_panel;
        for (int64_t d = 0; d < depth; d += block) {
            const int64_t stop = smaller(depth, d + block);
            const typename M::Operand* b = packed_panel<M>(args, panel) + d * kPanel;
            if (!is_operand(args)) {
                pack_panel<M, T>(args, panel, next, d, stop, s.b);
                b = s.b;
            }
            // The same depths of the panel after this one, a part with each tile of rows.
            const uint8_t* ahead = nullptr;
            if (is_operand(args)) {
                ahead = (const uint8_t*)(packed_panel<M>(args, next) + d * kPanel);
            }
            const int64_t ahead_bytes = (stop - d) * kPanel * int64_t(sizeof *b);
            for (int64_t r = 0; r < rows; r += kRowTile) {
                const int64_t fetched = r / kRowTile * 64 * (stop - d);
                const uint8_t* fetch = ahead && fetched < ahead_bytes ? ahead + fetched : nullptr;
                with_count<kRowTile>(int(smaller(kRowTile, rows - r)), [&]<int MR>() {
                    static const float one[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
                    const uint32_t* at = a.at + r * a.stride + (a.in_tiles ? d * MR : d);
                    const auto product = a.in_tiles ? product_tile<M, MR, 2, true> : product_tile<M, MR, 2, false>;
                    product(at, a.stride, b, kPanel, stop - d, s.c + r * kPanel, kPanel, d ? one : nullptr, fetch);
                });
            }
        }
        finish<M, T, O>(args, row, panel, rows, s.c);
    }
}

#include "matmul/tile_driver.h"

// What is done in tile registers where there are some: products of pairs, and of bytes.
template <class M>
constexpr bool in_tiles() {
    return kTiles && M::kPair > 1;
}

inline LinearCut linear_cut(const Linear& args) {
    return with_products(args, [&]<class M, class T>() {
        if constexpr (in_tiles<M>()) return tile_cut<M>(args);
        // As many rows at once as stay in a core's cache beside a panel, 384 KiB, but enough for a panel to be worth
        // fetching.
        const int64_t depth = packed_depth<M>(args), rows = 96 * 1024 / depth / kRowTile * kRowTile;
        const int64_t tiled = round_up(args.rows, kRowTile) * depth * 4;
        int64_t packed = args.rows >= kPackedRows ? tiled : 0;
        if (kCoded<M>) packed = CodedRows::bytes_beside(args) + tiled;
        else if (in_digits(args)) packed = args.rows * args.depth * 2 + 4 * digit_factors(args);
        else if (in_fp8<M>(args)) packed = tiled;
        return LinearCut{kRowTile, rows > 480 ? 480 : rows < 192 ? 192 : rows, 1, INT32_MAX, packed,
                         kRowTile, in_digits(args) || in_fp8<M>(args)};
    });
}

// Groups [group, stop) of rows of x, to where they are among all of them.
inline void pack_rows(const Linear& args, int64_t group, int64_t stop, void* out) {
    with_products(args, [&]<class M, class T>() {
        if constexpr (in_tiles<M>()) pack_tile_rows<M, T>(args, group, stop, out);
        else if constexpr (kCoded<M>) pack_coded_rows<T>(args, group, stop, out);
        else if (in_digits(args)) pack_digits(args, group, stop, out);
        else pack_row_tiles<M, T>(args, group, stop, out);
    });
}

inline int64_t linear_scratch(const Linear& args, int64_t rows, int64_t panels) {
    return with_products(args, [&]<class M, class T>() {
        Carve carve{nullptr};
        if constexpr (in_tiles<M>()) TileScratch<M>(args, rows, panels, carve);
        else LinearScratch<M>(packed_depth<M>(args), rows, carve);
        return carve.used;
    });
}

template <class M, class T, class O>
inline void linear_of(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                      int64_t next_panel, void* scratch) {
    if constexpr (in_tiles<M>()) linear_tiles<M, T, O>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
    else linear_block<M, T, O>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
}

inline void linear(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                   int64_t next_panel, void* scratch) {
    with_products(args, [&]<class M, class T>() {
        if (args.out_type == Type::F32)
            linear_of<M, T, float>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
        else linear_of<M, T, T>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
    });
}
