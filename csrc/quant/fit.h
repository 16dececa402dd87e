// Rows quantized in groups of 64 values to 4 bits, with scales and minimums fitted by least squares, as
// batchgen/ops/quant.py describes it.
//
// W rows are worked on at a time, one in each lane, and each lane adds up its columns one after the other. No product
// is contracted with a sum. So every instruction set gives the same bits, which are those of the reference in torch.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "quant/groups.h"
#include "simd/numeric.h"
#include "simd/target.h"

namespace batchgen {
namespace {

constexpr int kMostNibble = 15;
// Ranges that a fit starts from, as parts of a group's own, and its rounds from each.
constexpr double kNarrower[] = {1.0, 0.92, 0.84, 0.76};
constexpr int kFitRounds = 3;

// One group of each of W rows: column i of all lanes is at i * W.
struct GroupLanes {
    alignas(64) float x[kGroup * W];
    alignas(64) float centred[kGroup * W];  // x less its weighted mean
    const float* shares;                    // of each column's squared error in the whole; their sum is 1
    int size;
    vf mean;
};

// Scale and minimum of each lane's group, which fp16 has exactly.
struct Grid {
    vf scale, minimum;
};

inline vf product(vf a, vf b) { return rounded(mul(a, b)); }

inline vf to_half(vf a) {
    f16 halves[W];
    store(halves, a);
    return load(halves);
}

inline vf steps_of(vf scale) { return select_less(zero(), scale, div(set1(1), scale), zero()); }

inline vf nibble(vf x, vf minimum, vf steps) {
    return round_even(max(min(mul(sub(x, minimum), steps), set1(kMostNibble)), zero()));
}

// Loads columns [start, start + size) of `rows` rows, within the range of fp16; lanes without a row have zeros. Returns
// the largest magnitudes, NaN where a group has one.
template <class T>
inline vf load_lanes(const T* x, int64_t stride, int rows, int size, GroupLanes& group) {
    vf peak = zero();
    for (int column = 0; column < size; column += W) {
        vi block[W];
        for (int row = 0; row < W; row++)
            block[row] = as_int(row < rows ? load_part(x + row * stride + column, size - column) : zero());
        transpose(block);
        for (int i = 0; i < smaller(W, size - column); i++) {
            const vf value = as_float(block[i]);
            peak = max_or_nan(peak, value);
            store(group.x + (column + i) * W, max(min(value, set1(kMaxF16)), set1(-kMaxF16)));
        }
    }
    group.size = size;
    return peak;
}

inline void centre(GroupLanes& group) {
    vf mean = zero();
    for (int i = 0; i < group.size; i++) mean = add(mean, product(set1(group.shares[i]), load(group.x + i * W)));
    group.mean = mean;
    for (int i = 0; i < group.size; i++) store(group.centred + i * W, sub(load(group.x + i * W), mean));
}

// The scale and minimum by each group's range.
inline Grid grid_of_range(const GroupLanes& group) {
    vf low = set1(kMaxF16), high = set1(-kMaxF16);
    for (int i = 0; i < group.size; i++) {
        const vf value = load(group.x + i * W);
        low = min(low, value), high = max(high, value);
    }
    low = add(low, zero()), high = add(high, zero());  // of both zeros the positive one
    const vf minimum = to_half(low);
    f16 scales[W];
    store(scales, max(div(sub(high, minimum), set1(kMostNibble)), zero()));
    float beyond[W];
    store(beyond, add(minimum, product(load(scales), set1(kMostNibble))));
    for (int lane = 0; lane < W; lane++) scales[lane].bits -= beyond[lane] > kMaxF16;
    return {load(scales), minimum};
}

inline vf weighted_error(const GroupLanes& group, const Grid& grid) {
    const vf steps = steps_of(grid.scale);
    vf sum = zero();
    for (int i = 0; i < group.size; i++) {
        const vf x = load(group.x + i * W);
        const vf back = add(product(nibble(x, grid.minimum, steps), grid.scale), grid.minimum);
        const vf off = sub(back, x);
        sum = add(sum, product(mul(off, off), set1(group.shares[i])));
    }
    return sum;
}

// Codes for a scale and a minimum, then scale and minimum by least squares for these codes.
inline Grid refitted(const GroupLanes& group, const Grid& grid) {
    const vf steps = steps_of(grid.scale);
    const vf middle = mul(sub(group.mean, grid.minimum), steps);  // sums from here on lose no digits
    vf sum = zero(), squares = zero(), products = zero();
    for (int i = 0; i < group.size; i++) {
        const vf code = sub(nibble(load(group.x + i * W), grid.minimum, steps), middle);
        const vf share = product(set1(group.shares[i]), code);
        sum = add(sum, share);
        squares = add(squares, product(share, code));
        products = add(products, product(share, load(group.centred + i * W)));
    }
    const vf spread = sub(squares, product(sum, sum));
    const vf slope = div(products, max(spread, set1(1e-12f)));
    const vf start = sub(group.mean, product(slope, add(sum, middle)));
    const vf end = add(start, product(slope, set1(kMostNibble)));
    vf usable = select_less(set1(1e-6f), spread, set1(1), zero());
    usable = select_less(zero(), slope, usable, zero());
    usable = select_less(set1(-kMaxF16), start, usable, zero());
    usable = select_less(start, set1(kMaxF16), usable, zero());
    usable = select_less(end, set1(kMaxF16), usable, zero());
    return {to_half(select_less(zero(), usable, slope, grid.scale)),
            to_half(select_less(zero(), usable, start, grid.minimum))};
}

// The scale and minimum with the smallest weighted squared error of all that are tried.
inline Grid fitted(const GroupLanes& group, const Grid& range) {
    Grid best = range;
    vf least = weighted_error(group, best);
    const vf middle = add(range.minimum, product(range.scale, set1(kMostNibble / 2.0f)));
    for (const double narrower : kNarrower) {
        const vf below = product(range.scale, set1(float(narrower * kMostNibble / 2)));
        Grid tried = {to_half(mul(range.scale, set1(float(narrower)))), to_half(sub(middle, below))};
        for (int round = 0; round < kFitRounds; round++) tried = refitted(group, tried);
        const vf end = add(tried.minimum, product(tried.scale, set1(kMostNibble)));
        vf error = select_less(set1(kMaxF16), end, least, weighted_error(group, tried));
        best.scale = select_less(error, least, tried.scale, best.scale);
        best.minimum = select_less(error, least, tried.minimum, best.minimum);
        least = select_less(error, least, error, least);
    }
    return best;
}

// Writes codes, scale and minimum of each lane's group.
inline void pack_lanes(const GroupLanes& group, const Grid& grid, vf peak, int rows, uint8_t* codes, uint8_t* table,
                       int64_t row_bytes) {
    const int half = (group.size + 1) / 2;
    const vf steps = steps_of(grid.scale);
    uint8_t bytes[kGroup / 2 * W];
    auto code = [&](int i) { return i < group.size ? nibble(load(group.x + i * W), grid.minimum, steps) : zero(); };
    for (int i = 0; i < half; i++) store_nibbles(bytes + i * W, code(i), code(half + i));
    f16 scales[W], minimums[W];
    float peaks[W];
    store(scales, grid.scale), store(minimums, grid.minimum), store(peaks, peak);
    for (int lane = 0; lane < rows; lane++, codes += row_bytes, table += row_bytes) {
        const bool number = peaks[lane] == peaks[lane];
        for (int i = 0; i < half; i++) codes[i] = number ? bytes[i * W + lane] : 0;
        const f16 nan{0x7e00}, entry[2] = {number ? scales[lane] : nan, number ? minimums[lane] : nan};
        memcpy(table, entry, sizeof entry);
    }
}

__attribute__((noinline)) void fit_lanes(GroupLanes& group, vf peak, int rows, uint8_t* codes, uint8_t* table,
                                         int64_t row_bytes) {
    centre(group);
    pack_lanes(group, fitted(group, grid_of_range(group)), peak, rows, codes, table, row_bytes);
}

// Quantizes rows [row, stop), with shares of the error.
inline void quantize_fitted(const Quant& args, int64_t row, int64_t stop) {
    with_type(args.type, [&](auto* type) {
        using T = __typeof__(*type);
        GroupLanes group;
        for (; row < stop; row += W) {
            const int rows = int(smaller(W, stop - row));
            const T* x = (const T*)args.x + row * args.columns;
            uint8_t* packed = args.packed + row * args.row_bytes;
            uint8_t* table = packed + code_bytes(int(args.columns), 4);
            for (int64_t start = 0; start < args.columns; start += kGroup, table += 4) {
                group.shares = args.shares + start;
                const int size = int(smaller(kGroup, args.columns - start));
                const vf peak = load_lanes(x + start, args.columns, rows, size, group);
                fit_lanes(group, peak, rows, packed + code_bytes(int(start), 4), table, args.row_bytes);
            }
        }
    });
}

}  // namespace
}  // namespace batchgen
