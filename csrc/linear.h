// Linear layers: out = activation(x wᵀ + bias) + residual.
//
// w is worked on a panel of kPanel columns at a time, packed so that a vector of columns lies together at each depth: once
// beforehand, or, where weights pass through memory, when a panel is needed. An element's sum is taken in the order of depth,
// whatever rows are beside it: a row's result does not depend on its batch.

constexpr int64_t kDepthBlock = 1024;  // of 32 bits: a panel of it stays in a cache beside the rows

template <class F>
inline auto with_products(const Linear& args, F f) {
#ifdef BATCHGEN_FAST_BF16
    if (args.type == Type::BF16) return f.template operator()<Pairs, bf16>();
#endif
    switch (args.type) {
        case Type::BF16: return f.template operator()<Floats, bf16>();
        case Type::F16: return f.template operator()<Floats, f16>();
        default: return f.template operator()<Floats, float>();
    }
}

template <class M>
inline int64_t packed_depth(const Linear& args) {
    return (args.depth + M::kPair - 1) / M::kPair;
}

// The row of w that is column `c` of a panel; with SiluMul a vector of the gate is beside one of what it is multiplied with.
inline int64_t weight_row(const Linear& args, int64_t panel, int c) {
    if (args.activation != Activation::SiluMul) return panel * kPanel + c;
    const int64_t column = panel * W + c % W, half = args.columns / 2;
    return column < half ? column + (c / W) * half : args.columns;
}

// Depths [start, stop), in units of 32 bits, of a panel: out [stop - start, kPanel].
template <class M, class T>
inline void pack_panel(const Linear& args, int64_t panel, int64_t start, int64_t stop, uint32_t* out) {
    for (int c = 0; c < kPanel; c += W) {
        const T* rows[W];
        for (int i = 0; i < W; i++) {
            const int64_t row = weight_row(args, panel, c + i);
            rows[i] = row < args.columns ? (const T*)args.w + row * args.w_stride : nullptr;
        }
        for (int64_t d = start; d < stop; d += W) {
            const int64_t count = smaller(W, stop - d), values = smaller(count * M::kPair, args.depth - d * M::kPair);
            vi r[W];
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
            for (int i = 0; i < count; i++) store_int(out + (d - start + i) * kPanel + c, r[i]);
        }
    }
}

inline void pack_panels(const Linear& args, int64_t panel, int64_t stop, uint32_t* out) {
    with_products(args, [&]<class M, class T>() {
        const int64_t depth = packed_depth<M>(args);
        for (; panel < stop; panel++) pack_panel<M, T>(args, panel, 0, depth, out + panel * depth * kPanel);
    });
}

template <class M, class T>
inline constexpr bool direct() {
    return sizeof(typename M::Value) == sizeof(T) && (M::kPair == 2 || sizeof(T) == 4);
}

struct LinearScratch {
    uint32_t *a, *b;
    float* c;
    LinearScratch(int64_t depth, int64_t rows, Carve& carve) {
        a = carve.take<uint32_t>(rows * depth);
        b = carve.take<uint32_t>(kPanel * smaller(depth, kDepthBlock));
        c = carve.take<float>(rows * kPanel);
    }
};

// Rows of sums of one panel to where they go.
template <class T, class O>
inline void finish(const Linear& args, int64_t row, int64_t panel, int64_t rows, const float* c) {
    const bool gated = args.activation == Activation::SiluMul;
    const int64_t columns = gated ? args.columns / 2 : args.columns;
    for (int part = 0; part < (gated ? W : kPanel); part += W) {
        const int64_t column = panel * (gated ? W : kPanel) + part;
        if (column >= columns) return;
        const int n = int(smaller(W, columns - column));
        vf bias = zero(), second_bias = zero();
        if (args.bias) {
            bias = load_part((const T*)args.bias + column, n);
            if (gated) second_bias = load_part((const T*)args.bias + columns + column, n);
        }
        for (int64_t r = 0; r < rows; r++) {
            vf x = add(load(c + r * kPanel + part), bias);
            if (gated) x = mul(silu(x), add(load(c + r * kPanel + W), second_bias));
            else x = activate(args.activation, x);
            if (args.residual) x = add(x, load_part((const T*)args.residual + (row + r) * args.residual_stride + column, n));
            store_part((O*)args.out + (row + r) * args.out_stride + column, x, n);
        }
    }
}

template <class M, class T, class O>
inline void linear_block(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop,
                         int64_t next_panel, void* scratch) {
    const int64_t depth = packed_depth<M>(args), rows = row_stop - row;
    Carve carve{(uint8_t*)scratch};
    LinearScratch s(depth, rows, carve);
    const uint32_t* a = s.a;
    int64_t a_stride = depth;
    if (direct<M, T>() && args.depth % M::kPair == 0 && args.x_stride % M::kPair == 0 && uintptr_t(args.x) % 4 == 0) {
        a = (const uint32_t*)((const T*)args.x + row * args.x_stride);
        a_stride = args.x_stride / M::kPair;
    } else {
        for (int64_t r = 0; r < rows; r++) {
            const T* x = (const T*)args.x + (row + r) * args.x_stride;
            typename M::Value* out = (typename M::Value*)(s.a + r * depth);
            if (args.depth % M::kPair) out[args.depth] = typename M::Value{};
            for (int64_t i = 0; i < args.depth; i += W) {
                const int n = int(smaller(W, args.depth - i));
                store_part(out + i, load_part(x + i, n), n);
            }
        }
    }
    for (; panel < panel_stop; panel++) {
        for (int64_t d = 0; d < depth; d += kDepthBlock) {
            const int64_t stop = smaller(depth, d + kDepthBlock);
            const uint32_t* b = (const uint32_t*)args.w + (panel * depth + d) * kPanel;
            if (!args.packed) {
                pack_panel<M, T>(args, panel, d, stop, s.b);
                b = s.b;
            }
            // The same depths of the panel after this one, a part with each tile of rows.
            const uint8_t* ahead = nullptr;
            if (args.packed) {
                const int64_t next = panel + 1 < panel_stop ? panel + 1 : next_panel;
                ahead = (const uint8_t*)((const uint32_t*)args.w + (next * depth + d) * kPanel);
            }
            const int64_t ahead_bytes = (stop - d) * kPanel * 4;
            for (int64_t r = 0; r < rows; r += kRowTile) {
                const int64_t fetched = r / kRowTile * 64 * (stop - d);
                const uint8_t* fetch = ahead && fetched < ahead_bytes ? ahead + fetched : nullptr;
                with_count<kRowTile>(int(smaller(kRowTile, rows - r)), [&]<int MR>() {
                    static const float one[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
                    product_tile<M, MR, 2>(a + r * a_stride + d, a_stride, b, kPanel, stop - d, s.c + r * kPanel, kPanel,
                                           d ? one : nullptr, fetch);
                });
            }
        }
        finish<T, O>(args, row, panel, rows, s.c);
    }
}

#include "linear_tiles.h"

// What is done in tile registers where there are some: products of pairs.
template <class M>
constexpr bool in_tiles() {
    return kTiles && M::kPair == 2;
}

inline LinearCut linear_cut(const Linear& args) {
    return with_products(args, [&]<class M, class T>() {
        if constexpr (in_tiles<M>()) return tile_cut(args);
        // As many rows at once as stay in a core's cache beside a panel, 384 KiB, but enough for a panel to be worth fetching.
        const int64_t rows = 96 * 1024 / packed_depth<M>(args) / kRowTile * kRowTile;
        return LinearCut{kRowTile, rows > 480 ? 480 : rows < 192 ? 192 : rows, 1, INT32_MAX, 0};
    });
}

inline int64_t linear_scratch(const Linear& args, int64_t rows, int64_t panels) {
    return with_products(args, [&]<class M, class T>() {
        Carve carve{nullptr};
        if constexpr (in_tiles<M>()) TileScratch(args, rows, panels, carve);
        else LinearScratch(packed_depth<M>(args), rows, carve);
        return carve.used;
    });
}

template <class M, class T, class O>
inline void linear_of(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop, int64_t next_panel,
                      void* scratch) {
    if constexpr (in_tiles<M>()) linear_tiles<O>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
    else linear_block<M, T, O>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
}

inline void linear(const Linear& args, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop, int64_t next_panel,
                   void* scratch) {
    with_products(args, [&]<class M, class T>() {
        if (args.out_type == Type::F32) linear_of<M, T, float>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
        else linear_of<M, T, T>(args, row, row_stop, panel, panel_stop, next_panel, scratch);
    });
}
