// Products with prepacked block-quantized weights whose values become numbers of x's type in registers.
//
// A number is one multiplication and one addition, rounded once, as in `dequantize_blocks`; it may be +0 where that has
// -0, which changes no sum. So sums are those of the dequantized weights, bit for bit.
#pragma once

#include <stdint.h>

#include "matmul/block_panels.h"
#include "matmul/micro_kernel.h"
#include "matmul/operands.h"
#include "quant/fp8.h"
#include "simd/target.h"

namespace batchgen {
namespace {

// Scales and minimums of a chunk of a panel, in the lanes of an operand. There is a scale for each of the four places
// in half a word: a value is not shifted down, its scale is smaller instead.
template <class Mma>
struct PanelScales {
    static constexpr int kVectors = 2 * Mma::kPerWord;  // vectors of an operand's columns at one word of K
    vf scales[kChunkRuns][4], minimums[kChunkRuns][kVectors];
};

// Stores one vector of columns' scales as an operand has them.
template <class Mma>
inline void spread_columns(vf own, int part, vf* out) {
    if constexpr (Mma::kPerWord == 1) out[part] = own;
    else Mma::twice(own, out[2 * part], out[2 * part + 1]);
}

// Loads the scales of `count` blocks of a panel.
template <class Mma, class Format>
__attribute__((noinline)) void panel_scales(const uint8_t* blocks, int64_t count, PanelScales<Mma>& out) {
    using Kind = typename Format::Kind;
    constexpr int kVectors = PanelScales<Mma>::kVectors;
    for (int64_t b = 0; b < count; b++, blocks += Format::kBlockBytes) {
        for (int run = 0; run < Format::kRuns; run++) {
            const int64_t i = b * Format::kRuns + run;
            vf scales[kVectors];
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                vf scale, minimum;
                Format::Scales::get(blocks, run, part * W, scale, minimum);
                spread_columns<Mma>(scale, part, scales), spread_columns<Mma>(minimum, part, out.minimums[i]);
            }
#pragma GCC unroll 4
            for (int place = 0; place < 4; place++) {
                const bool in_place = !Kind::kInTable && !Kind::kFloat8;
                const float smaller_by = in_place ? 1 / float(1 << bits_below<Kind>(place)) : 1;
                out.scales[i][place] = mul(scales[place % kVectors], set1(smaller_by));
            }
        }
    }
}

// A format's layout, and what makes the scales of some blocks.
template <class Mma>
struct PanelFormat {
    PanelLayout layout;
    void (*scales)(const uint8_t* blocks, int64_t count, PanelScales<Mma>& out);
};

template <class Mma, class Format>
constexpr PanelFormat<Mma> panel_format(const int8_t* table) {
    return {panel_layout<Format>(table), panel_scales<Mma, Format>};
}

struct NoTable {
    explicit NoTable(const int8_t*) {}
};
template <class Kind>
struct TableOf {
    using Of = NoTable;
};
template <int Low, int High>
struct TableOf<QuantKind<Low, High, QuantsAre::InTable>> {
    using Of = Table;
};

// Dequantizes a quad: sink(word of K in the quad, vector of columns, operand).
template <class Mma, class T, class Kind, class Sink>
__attribute__((always_inline)) inline void quad_numbers(const uint8_t* low, const uint8_t* high, const vf* scales,
                                                        const vf* minimums, const typename TableOf<Kind>::Of& table,
                                                        Sink sink) {
    constexpr int kVectors = PanelScales<Mma>::kVectors;
    vf scale[4], minimum[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) scale[i] = scales[i];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) minimum[i] = minimums[i];
#pragma GCC unroll 4
    for (int group = 0; group < 4; group++) {
        const Lanes slots = slots_at<Kind::kLow>(low, group);
        Lanes even = slots, odd = slots;
        if constexpr (Kind::kHigh) {
            const Lanes upper = slots_at<Kind::kHigh>(high, group);
            if constexpr (kInSlots<Kind>) {
                even |= upper << Kind::kLow, odd = even;
            } else {
                even = (slots & 0x0f0f0f0f) | (upper & 0x0f0f0f0f) << 4;
                odd = (slots >> 4 & 0x0f0f0f0f) | (upper & 0xf0f0f0f0);
            }
        }
        const Lanes words[2][2] = {{even, odd}, {even >> 16, odd >> 16}};
        const auto number = [&](int slot) __attribute__((always_inline)) {
            const int place = slot % 4;
            constexpr uint32_t kMask = kInSlots<Kind> ? 15 : 255;
            vf quant;
            if constexpr (Kind::kInTable) quant = table((vi)(even >> 4 * slot));
            else if constexpr (Kind::kFloat8) quant = from_e4m3((vi)((slot % 2 ? odd : even) >> 8 * (slot / 2)));
            else quant = to_float((vi)(words[slot / 4][slot % 2] & kMask << bits_below<Kind>(place)));
            return fma(quant, scale[place], minimum[slot % kVectors]);
        };
#pragma GCC unroll 4
        for (int word = 0; word < 4 / Mma::kPerWord; word++) {
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                const int slot = (2 * word + part) * Mma::kPerWord;
                vi operand;
                if constexpr (Mma::kPerWord == 2) {
                    operand = Mma::to_operand(number(slot), number(slot + 1));
                } else if constexpr (__is_same(T, float)) {
                    operand = as_int(number(slot));
                } else {
                    T rounded[W];
                    store(rounded, number(slot));
                    operand = as_int(load(rounded));
                }
                sink(group * 4 / Mma::kPerWord + word, part, operand);
            }
        }
    }
}

// A chunk of a panel with its scales.
template <class Mma>
struct Chunk : PanelChunk {
    PanelScales<Mma> scales;

    void load(const PanelFormat<Mma>& format, const uint8_t* panel, int64_t k, int64_t at, const uint8_t* next) {
        seek(format.layout, panel, k, at, next);
        format.scales(blocks, num_blocks, scales);
    }
    // The numbers of quad i, as `quad_numbers` hands them to the sink.
    template <class T, class Kind, class Sink>
    __attribute__((always_inline)) void numbers(const PanelFormat<Mma>& format, int64_t i,
                                                const typename TableOf<Kind>::Of& table, Sink sink) const {
        const Planes planes = quad<Kind>(format.layout, i);
        const int64_t run = i >> format.layout.log2_quads_of_run;
        quad_numbers<Mma, T, Kind>(planes.low, planes.high, scales.scales[run], scales.minimums[run], table, sink);
    }
};

// Dequantizes the values [first, end) of K of a panel.
template <class Mma, class T, class Kind>
__attribute__((noinline)) void numbers_of_kind(const PanelFormat<Mma>& format, const uint8_t* panel,
                                               const uint8_t* next, int64_t k, int64_t first, int64_t end,
                                               typename Mma::Operand* out) {
    const typename TableOf<Kind>::Of table(format.layout.table);
    Chunk<Mma> chunk;
    for (int64_t at = first / kChunkK * kChunkK; at < end; at += kChunkK) {
        chunk.load(format, panel, k, at, next);
        const int64_t from = at < first ? first - at : 0, stop = smaller(kChunkK, end - at);
        for (int64_t kk = from; kk < stop; kk += kQuad) {
            typename Mma::Operand* to = out + (at + kk - first) / Mma::kPerWord * kPanelN;
            chunk.template numbers<T, Kind>(format, kk / kQuad, table,
                                            [&](int word, int part, vi operand) __attribute__((always_inline)) {
                                                store_int(to + word * kPanelN + part * W, operand);
                                            });
        }
    }
}

// Dequantizes the words [start, stop) of K of a panel, whole quads: out [stop - start, kPanelN]. next: the panel that
// is read after it.
template <class Mma, class T>
inline void numbers_of_panel(const Linear& args, int64_t panel, int64_t next, int64_t start, int64_t stop,
                             typename Mma::Operand* out) {
    with_panels(args.packing, [&]<class Format>(const int8_t* table) {
        numbers_of_kind<Mma, T, typename Format::Kind>(panel_format<Mma, Format>(table), block_panel(args, panel),
                                                       block_panel(args, next), args.k, start * Mma::kPerWord,
                                                       smaller(stop * Mma::kPerWord, args.k), out);
    });
}

// Rows of x, at most, that are multiplied with values as they are dequantized, in registers.
constexpr int kSmallM = W == 16 ? 4 : 2;
// Panels that are multiplied together: as many sums as stay in registers, and enough of them that none waits for
// itself.
constexpr int panels_at_once(int64_t rows) { return W == 16 && rows <= 2 ? 2 : 1; }

// Rows of x: word k of a row is at[row * row_stride + k * k_stride].
struct SmallMRows {
    const uint32_t* at;
    int64_t row_stride, k_stride;
};

// c [panels, MR, kPanelN] = x times panels; each operand is used as soon as it is dequantized. next: the panels that
// are read after these.
template <class Mma, class T, class Kind, int MR>
__attribute__((noinline)) void product_of_kind(const PanelFormat<Mma>& format, const uint8_t* const* panels,
                                               const uint8_t* const* next, int64_t k, SmallMRows x, float* c) {
    constexpr int kPanels = panels_at_once(MR);
    const typename TableOf<Kind>::Of table(format.layout.table);
    Chunk<Mma> chunk[kPanels];
    vf acc[kPanels][MR][2];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; p++)
#pragma GCC unroll 4
        for (int r = 0; r < MR; r++) acc[p][r][0] = acc[p][r][1] = zero();
    for (int64_t at = 0; at < k; at += kChunkK) {
        for (int p = 0; p < kPanels; p++) chunk[p].load(format, panels[p], k, at, next[p]);
        const int64_t quads = smaller(kChunkK, k - at) / kQuad;
        for (int64_t i = 0; i < quads; i++) {
            const uint32_t* from = x.at + (at + i * kQuad) / Mma::kPerWord * x.k_stride;
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; p++) {
                const auto use = [&](int word, int part, vi operand) __attribute__((always_inline)) {
#pragma GCC unroll 4
                    for (int r = 0; r < MR; r++) {
                        const vi value = set1_int(from[r * x.row_stride + word * x.k_stride]);
                        acc[p][r][part] = Mma::dot(value, operand, acc[p][r][part]);
                    }
                };
                chunk[p].template numbers<T, Kind>(format, i, table, use);
            }
        }
    }
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; p++)
#pragma GCC unroll 4
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) store(c + ((p * MR + r) * 2 + part) * W, acc[p][r][part]);
}

// x times `panels_at_once` panels; next: those that are read after them.
template <class Mma, class T>
inline void small_m_product(const Linear& args, int rows, const int64_t (&panels)[2], const int64_t (&next)[2],
                            SmallMRows x, float* c) {
    const uint8_t* at[] = {block_panel(args, panels[0]), block_panel(args, panels[1])};
    const uint8_t* after[] = {block_panel(args, next[0]), block_panel(args, next[1])};
    with_panels(args.packing, [&]<class Format>(const int8_t* table) {
        with_count<kSmallM>(rows, [&]<int MR>() {
            product_of_kind<Mma, T, typename Format::Kind, MR>(panel_format<Mma, Format>(table), at, after, args.k, x,
                                                               c);
        });
    });
}

}  // namespace
}  // namespace batchgen
