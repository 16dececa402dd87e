// Rows of a weight that is packed in panels, as numbers again: an output matrix that is the embeddings too is in memory
// once.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "matmul/block_panels.h"
#include "matmul/layout.h"
#include "matmul/operands.h"
#include "quant/blocks.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// Where the two parts of a code lie among the words of its four depths: the bits of the first plane, and those above.
struct CodePlace {
    int plane, lane, shift;
};

// Of a column of a panel. Nothing is known here of how a word's bits are laid out: of each part of a code, all ones, it
// is seen where `planes_of` puts it.
template <class M, class T, class Kind>
struct ColumnPlaces {
    CodePlace of[4][2];  // by depth and part

    explicit ColumnPlaces(int c) {
        for (int depth = 0; depth < 4; depth++) {
            of[depth][0] = find(c, ((1u << Kind::kLow) - 1) << (8 * depth));
            of[depth][1] = find(c, (((1u << Kind::kHigh) - 1) << Kind::kLow) << (8 * depth));
        }
    }
    static CodePlace find(int c, uint32_t ones) {
        Lanes codes[2] = {}, planes[2];
        codes[c / W][c % W] = ones;
        planes_of<M, T, Kind>(codes, planes);
        for (int plane = 0; plane < 2; plane++)
            for (int lane = 0; lane < W; lane++)
                if (planes[plane][lane]) return {plane, lane, __builtin_ctz(planes[plane][lane])};
        return {0, 0, 0};  // a part without bits
    }
};

// A part of a code of four depths, `bits` long; plane_bits: those that its plane has of a code.
inline uint32_t code_part(const uint8_t* plane, int plane_bits, int64_t group, CodePlace place, int bits) {
    uint32_t word;
    memcpy(&word, (const uint32_t*)plane + group * plane_bits / 4 * W + place.lane, sizeof word);
    return word >> (group % (4 / plane_bits) * plane_bits + place.shift) & ((1u << bits) - 1);
}

// A row of blocks, of the codes, scales and minimums that were put in order: numbers are those of `unpack_row`, bit for
// bit.
template <class M, class Format, class T>
__attribute__((noinline)) void row_of_blocks(const Linear& args, int64_t row, const int8_t* table, T* out) {
    using Block = typename Format::Block;
    using Kind = typename Format::Kind;
    const int c = int(row % kPanel);
    const ColumnPlaces<M, T, Kind> places(c);
    const uint8_t* block = block_panel(args, row / kPanel);
    for (int64_t done = 0; done < args.depth; done += Block::kValues, block += Format::kBlockBytes) {
        const uint8_t* planes[] = {block + Format::kScaleBytes, block + Format::kScaleBytes + Format::kLowBytes};
        alignas(64) int8_t codes[Block::kValues];
        for (int i = 0; i < Block::kValues; i++) {
            const auto part = [&](CodePlace place, int bits) {
                const int plane_bits = place.plane ? Kind::kHigh : Kind::kLow;
                return code_part(planes[place.plane], plane_bits, i / 4, place, bits);
            };
            uint32_t code = part(places.of[i % 4][0], Kind::kLow);
            if constexpr (Kind::kHigh) code |= part(places.of[i % 4][1], Kind::kHigh) << Kind::kLow;
            codes[i] = Kind::kInTable ? table[code] : int8_t(int(code) - Format::kOffset);
        }
        for (int run = 0; run < Format::kRuns; run++, out += Block::kRun) {
            vf scale, minimum;
            float scales[W], minimums[W];
            Format::Scales::get(block, run, c / W * W, scale, minimum);
            store(scales, scale), store(minimums, minimum);
            // What an offset makes of a scale is in the codes here.
            const float own_minimum = Format::kMinimums ? minimums[c % W] : -0.0f;
            put_run<Block>(codes + run * Block::kRun, set1(scales[c % W]), set1(own_minimum), out);
        }
    }
}

// A row of numbers.
template <class M, class T>
inline void row_of_numbers(const Linear& args, int64_t row, T* out) {
    const auto* column = packed_panel<M>(args, row / kPanel) + row % kPanel;
    if constexpr (M::kPair == 2) {
        for (int64_t d = 0; d < args.depth; d++) out[d].bits = uint16_t(column[d / 2 * kPanel] >> (d % 2 * 16));
    } else {
        for (int64_t d = 0; d < args.depth; d += W) {
            const int n = int(smaller(W, args.depth - d));
            uint32_t numbers[W] = {};
            for (int i = 0; i < n; i++) numbers[i] = column[(d + i) * kPanel];
            store_part(out + d, as_float(load_int(numbers)), n);
        }
    }
}

// Rows rows[first .. stop) of a packed weight, to where they are among all of them: out [rows, depth], of args.type.
inline void rows_of_panels(const Linear& args, const int64_t* rows, int64_t first, int64_t stop, void* out) {
    with_products(args, [&]<class M, class T>() {
        if constexpr (!kCoded<M>) {
            for (int64_t i = first; i < stop; i++) {
                T* to = (T*)out + i * args.depth;
                if (args.packing == BlockType::F32) row_of_numbers<M, T>(args, rows[i], to);
                else
                    with_panels(args.packing, [&]<class Format>(const int8_t* table) {
                        row_of_blocks<M, Format, T>(args, rows[i], table, to);
                    });
            }
        }
    });
}

}  // namespace
}  // namespace batchgen
