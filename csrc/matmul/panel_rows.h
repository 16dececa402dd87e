// Rows of a prepacked weight as numbers: an output matrix that is the embedding too is in memory once.
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

// The place of a part of a quantized value among the words of its group: the plane, the lane, and the bits below it.
struct BitPlace {
    int plane, lane, shift;
};

// The places of the values of one column of a panel. They follow from `planes_of`: it is given a part of all ones, and
// the place is where they come out.
template <class Mma, class T, class Kind>
struct ColumnPlaces {
    BitPlace of[4][2];  // by value of the group and part

    explicit ColumnPlaces(int c) {
        for (int k = 0; k < 4; k++) {
            of[k][0] = find(c, ((1u << Kind::kLow) - 1) << (8 * k));
            of[k][1] = find(c, (((1u << Kind::kHigh) - 1) << Kind::kLow) << (8 * k));
        }
    }
    static BitPlace find(int c, uint32_t ones) {
        Lanes quants[2] = {}, planes[2];
        quants[c / W][c % W] = ones;
        planes_of<Mma, T, Kind>(quants, planes);
        for (int plane = 0; plane < 2; plane++)
            for (int lane = 0; lane < W; lane++)
                if (planes[plane][lane]) return {plane, lane, __builtin_ctz(planes[plane][lane])};
        return {0, 0, 0};  // a part without bits
    }
};

// A part of the value of a group, `bits` bits; plane_bits: the bits of a value in its plane.
inline uint32_t bits_at(const uint8_t* plane, int plane_bits, int64_t group, BitPlace place, int bits) {
    uint32_t word;
    memcpy(&word, (const uint32_t*)plane + group * plane_bits / 4 * W + place.lane, sizeof word);
    return word >> (group % (4 / plane_bits) * plane_bits + place.shift) & ((1u << bits) - 1);
}

// A row of block-quantized weights as numbers: those of `dequantize_blocks`, bit for bit.
template <class Mma, class Format, class T>
__attribute__((noinline)) void row_of_blocks(const Linear& args, int64_t row, const int8_t* table, T* out) {
    using Block = typename Format::Block;
    using Kind = typename Format::Kind;
    const int c = int(row % kPanelN);
    const ColumnPlaces<Mma, T, Kind> places(c);
    const uint8_t* block = block_panel(args, row / kPanelN);
    for (int64_t done = 0; done < args.k; done += Block::kValues, block += Format::kBlockBytes) {
        const uint8_t* planes[] = {block + Format::kScaleBytes, block + Format::kScaleBytes + Format::kLowBytes};
        alignas(64) int8_t quants[Block::kValues];
        for (int i = 0; i < Block::kValues; i++) {
            if constexpr (kInRows<Mma, Format>) {
                const uint8_t quant = value_in_rows<Kind>(planes[0], i, c);
                quants[i] = Kind::kInTable ? table[quant] : int8_t(int(quant) - Format::kOffset);
                continue;
            }
            const auto part = [&](BitPlace place, int bits) {
                const int plane_bits = place.plane ? Kind::kHigh : Kind::kLow;
                return bits_at(planes[place.plane], plane_bits, i / 4, place, bits);
            };
            uint32_t quant = part(places.of[i % 4][0], Kind::kLow);
            if constexpr (Kind::kHigh) quant |= part(places.of[i % 4][1], Kind::kHigh) << Kind::kLow;
            quants[i] = Kind::kInTable ? table[quant] : int8_t(int(quant) - Format::kOffset);
        }
        for (int run = 0; run < Format::kRuns; run++, out += Block::kRun) {
            vf scale, minimum;
            float scales[W], minimums[W];
            Format::Scales::get(block, run, c / W * W, scale, minimum);
            store(scales, scale), store(minimums, minimum);
            // The offset is in the values here, not in a minimum.
            const float own_minimum = Format::kMinimums ? minimums[c % W] : -0.0f;
            store_run<Block>(quants + run * Block::kRun, set1(scales[c % W]), set1(own_minimum), out);
        }
    }
}

// A row of a weight that is prepacked as numbers.
template <class Mma, class T>
inline void row_of_numbers(const Linear& args, int64_t row, T* out) {
    const auto* column = packed_panel<Mma>(args, row / kPanelN) + row % kPanelN;
    if constexpr (Mma::kPerWord == 2) {
        for (int64_t kk = 0; kk < args.k; kk++) out[kk].bits = uint16_t(column[kk / 2 * kPanelN] >> (kk % 2 * 16));
    } else {
        for (int64_t kk = 0; kk < args.k; kk += W) {
            const int n = int(smaller(W, args.k - kk));
            uint32_t numbers[W] = {};
            for (int i = 0; i < n; i++) numbers[i] = column[(kk + i) * kPanelN];
            store_part(out + kk, as_float(load_int(numbers)), n);
        }
    }
}

// Writes rows rows[first], ..., rows[stop - 1] of a prepacked weight to out [rows, K], of args.type.
inline void rows_of_panels(const Linear& args, const int64_t* rows, int64_t first, int64_t stop, void* out) {
    with_mma(args, [&]<class Mma, class T>() {
        if constexpr (!kIsInt8<Mma>) {
            for (int64_t i = first; i < stop; i++) {
                T* to = (T*)out + i * args.k;
                if (args.packing == BlockType::F32) row_of_numbers<Mma, T>(args, rows[i], to);
                else
                    with_panels(args.packing, [&]<class Format>(const int8_t* table) {
                        row_of_blocks<Mma, Format, T>(args, rows[i], table, to);
                    });
            }
        }
    });
}

}  // namespace
}  // namespace batchgen
