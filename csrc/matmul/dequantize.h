// Products with rows of a GGUF that are in panels (matmul/block_panels.h), where codes become numbers of the compute
// dtype.
//
// In registers a code becomes its number by one multiplication and one addition, rounded once, as in
// `dequantize_blocks`; a number may only be +0 where it is -0 there, which changes no sum. So sums are those of the
// unpacked weights, bit for bit.
#pragma once

#include <stdint.h>

#include "matmul/block_panels.h"
#include "matmul/micro_kernel.h"
#include "matmul/operands.h"
#include "quant/fp8.h"
#include "simd/target.h"

namespace batchgen {
namespace {

// Scales and minimums of 256 depths of a panel, as lanes of an operand take them. Scales are those of the four places
// in half a word: a code is not shifted down, its scale is smaller by as much.
template <class Mma>
struct PanelScales {
    static constexpr int kVectors = 2 * Mma::kPair;  // of an operand's columns at one depth
    vf scales[kChunkRuns][4], minimums[kChunkRuns][kVectors];
};

template <class Mma>
inline void spread_columns(vf own, int part, vf* out) {
    if constexpr (Mma::kPair == 1) out[part] = own;
    else Mma::twice(own, out[2 * part], out[2 * part + 1]);
}

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

// What a kind of codes is read with, whatever the format. `scales`: of some blocks.
template <class Mma>
struct PanelFormat {
    void (*scales)(const uint8_t* blocks, int64_t count, PanelScales<Mma>& out);
    const int8_t* table;
    int64_t block_bytes, scale_bytes, low_bytes;
    int quads_of_block, quads_of_run;  // powers of two, by their exponents
};

template <class Mma, class Format>
constexpr PanelFormat<Mma> panel_format(const int8_t* table) {
    using Block = typename Format::Block;
    return {panel_scales<Mma, Format>,
            table,
            Format::kBlockBytes,
            Format::kScaleBytes,
            Format::kLowBytes,
            __builtin_ctz(Block::kValues / kQuad),
            __builtin_ctz(Block::kRun / kQuad)};
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

// Numbers of a quad: sink(word of the quad's depth, vector of columns, operand).
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
        for (int word = 0; word < 4 / Mma::kPair; word++) {
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                const int slot = (2 * word + part) * Mma::kPair;
                vi operand;
                if constexpr (Mma::kPair == 2) {
                    operand = Mma::to_operand(number(slot), number(slot + 1));
                } else if constexpr (__is_same(T, float)) {
                    operand = as_int(number(slot));
                } else {
                    T rounded[W];
                    store(rounded, number(slot));
                    operand = as_int(load(rounded));
                }
                sink(group * 4 / Mma::kPair + word, part, operand);
            }
        }
    }
}

// Of 256 depths of a panel, or those that are left.
template <class Mma>
struct Chunk {
    const uint8_t *blocks, *ahead;  // ahead: what is read after them
    int64_t ahead_of_quad;          // bytes
    PanelScales<Mma> scales;

    void load(const PanelFormat<Mma>& format, const uint8_t* panel, int64_t k, int64_t at, const uint8_t* next) {
        const int64_t count = smaller(kChunkK, k - at) / kQuad >> format.quads_of_block;
        blocks = panel + (at / kQuad >> format.quads_of_block) * format.block_bytes;
        ahead = at + kChunkK < k ? blocks + count * format.block_bytes : next;
        ahead_of_quad = format.block_bytes >> format.quads_of_block;
        format.scales(blocks, count, scales);
    }
    template <class T, class Kind, class Sink>
    __attribute__((always_inline)) void quad(const PanelFormat<Mma>& format, int64_t i,
                                             const typename TableOf<Kind>::Of& table, Sink sink) const {
        for (int64_t line = 0; line < ahead_of_quad; line += 64) __builtin_prefetch(ahead + i * ahead_of_quad + line);
        constexpr int64_t kLowBytes = kPanelN * kQuad * Kind::kLow / 8, kHighBytes = kPanelN * kQuad * Kind::kHigh / 8;
        const int64_t block = i >> format.quads_of_block, within = i - (block << format.quads_of_block);
        const int64_t run = i >> format.quads_of_run;
        const uint8_t* low = blocks + block * format.block_bytes + format.scale_bytes;
        const uint8_t* high = low + format.low_bytes + within * kHighBytes;
        quad_numbers<Mma, T, Kind>(low + within * kLowBytes, high, scales.scales[run], scales.minimums[run], table,
                                   sink);
    }
};

template <class Mma, class T, class Kind>
__attribute__((noinline)) void numbers_of_kind(const PanelFormat<Mma>& format, const uint8_t* panel,
                                               const uint8_t* next, int64_t k, int64_t first, int64_t end,
                                               typename Mma::Operand* out) {
    const typename TableOf<Kind>::Of table(format.table);
    Chunk<Mma> chunk;
    for (int64_t at = first / kChunkK * kChunkK; at < end; at += kChunkK) {
        chunk.load(format, panel, k, at, next);
        const int64_t from = at < first ? first - at : 0, stop = smaller(kChunkK, end - at);
        for (int64_t kk = from; kk < stop; kk += kQuad) {
            typename Mma::Operand* to = out + (at + kk - first) / Mma::kPair * kPanelN;
            chunk.template quad<T, Kind>(format, kk / kQuad, table,
                                         [&](int word, int part, vi operand) __attribute__((always_inline)) {
                                             store_int(to + word * kPanelN + part * W, operand);
                                         });
        }
    }
}

// Depths [start, stop), in units of 32 bits and whole quads, of a panel: out [stop - start, kPanelN]. next: the panel
// after it.
template <class Mma, class T>
inline void numbers_of_panel(const Linear& args, int64_t panel, int64_t next, int64_t start, int64_t stop,
                             typename Mma::Operand* out) {
    with_panels(args.packing, [&]<class Format>(const int8_t* table) {
        numbers_of_kind<Mma, T, typename Format::Kind>(panel_format<Mma, Format>(table), block_panel(args, panel),
                                                       block_panel(args, next), args.k, start * Mma::kPair,
                                                       smaller(stop * Mma::kPair, args.k), out);
    });
}

constexpr int kSmallM = W == 16 ? 4 : 2;
// Panels at a time: as many sums as stay in registers, and enough of them not to wait for one another.
constexpr int panels_at_once(int64_t rows) { return W == 16 && rows <= 2 ? 2 : 1; }

// Rows whose value at depth d, in units of 32 bits, is at[row * row_stride + d * depth_stride].
struct SmallMRows {
    const uint32_t* at;
    int64_t row_stride, depth_stride;
};

// c [panels, MR, kPanelN] = rows of x times panels, each number used as soon as it is there. next: what is read after
// each panel.
template <class Mma, class T, class Kind, int MR>
__attribute__((noinline)) void product_of_kind(const PanelFormat<Mma>& format, const uint8_t* const* panels,
                                               const uint8_t* const* next, int64_t k, SmallMRows x, float* c) {
    constexpr int kPanels = panels_at_once(MR);
    const typename TableOf<Kind>::Of table(format.table);
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
            const uint32_t* from = x.at + (at + i * kQuad) / Mma::kPair * x.depth_stride;
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; p++) {
                const auto use = [&](int word, int part, vi operand) __attribute__((always_inline)) {
#pragma GCC unroll 4
                    for (int r = 0; r < MR; r++) {
                        const vi value = set1_int(from[r * x.row_stride + word * x.depth_stride]);
                        acc[p][r][part] = Mma::dot(value, operand, acc[p][r][part]);
                    }
                };
                chunk[p].template quad<T, Kind>(format, i, table, use);
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

// Of `panels_at_once` panels; next: those after them.
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
