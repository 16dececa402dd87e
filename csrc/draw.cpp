#include "draw.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

namespace batchgen {
namespace {

constexpr int64_t kBlock = 256;  // softmax weights summed together: the token is then looked for in one block only

double sum(const float* weights, int64_t count) {
    double all = 0;
    for (int64_t i = 0; i < count; i++) all += weights[i];
    return all;
}

void keep_largest(float* weights, int64_t count, int64_t kept) {
    std::vector<float> ordered(weights, weights + count);
    std::nth_element(ordered.begin(), ordered.begin() + (kept - 1), ordered.end(), std::greater<>());
    const float least = ordered[kept - 1];
    int64_t equal = kept - std::count_if(weights, weights + count, [&](float weight) { return weight > least; });
    for (int64_t i = 0; i < count; i++)
        if (weights[i] < least || (weights[i] == least && --equal < 0)) weights[i] = 0;
}

// The smallest set of most probable tokens that has top_p of all.
void keep_nucleus(float* weights, int64_t count, double top_p) {
    const double wanted = top_p * sum(weights, count);
    // All tokens below this together have less than what is left out.
    const double least = 0.999 * (1 - top_p) * wanted / top_p / double(count);
    std::vector<int64_t> likely;
    for (int64_t i = 0; i < count; i++)
        if (weights[i] > 0 && weights[i] >= least) likely.push_back(i);
    const auto less = [&](int64_t a, int64_t b) {
        return weights[a] < weights[b] || (weights[a] == weights[b] && a > b);
    };
    std::make_heap(likely.begin(), likely.end(), less);
    auto end = likely.end();
    for (double before = 0; end != likely.begin() && before < wanted; end--) {
        before += weights[likely.front()];
        std::pop_heap(likely.begin(), end, less);
    }
    std::vector<float> kept;
    for (auto i = end; i != likely.end(); i++) kept.push_back(weights[*i]);
    std::fill(weights, weights + count, 0.0f);
    for (auto i = end; i != likely.end(); i++) weights[*i] = kept[i - end];
}

}  // namespace

int64_t draw(float* weights, int64_t count, const Filter& filter, double uniform) {
    if (filter.min_p > 0)
        std::replace_if(weights, weights + count, [&](float weight) { return weight < filter.min_p; }, 0.0f);
    if (filter.top_k > 0 && filter.top_k < count) keep_largest(weights, count, filter.top_k);
    if (filter.top_p < 1) keep_nucleus(weights, count, filter.top_p);
    std::vector<double> blocks((count + kBlock - 1) / kBlock);
    for (size_t i = 0; i < blocks.size(); i++)
        blocks[i] = sum(weights + i * kBlock, std::min(kBlock, count - int64_t(i) * kBlock));
    const double wanted = uniform * std::accumulate(blocks.begin(), blocks.end(), 0.0);
    double before = 0;
    int64_t last = 0;  // that can be drawn: rounding may put what is wanted past all of them
    for (size_t i = 0; i < blocks.size(); i++) {
        const int64_t start = int64_t(i) * kBlock, stop = std::min(count, start + kBlock);
        if (before + blocks[i] > wanted) {
            double all = before;
            for (int64_t j = start; j < stop; j++) {
                all += weights[j];
                if (weights[j] > 0) last = j;
                if (all > wanted && weights[j] > 0) return j;
            }
        } else if (blocks[i] > 0) {
            for (last = stop - 1; !(weights[last] > 0);) last--;
        }
        before += blocks[i];
    }
    return last;
}

void forbid(float* logits, int64_t count, const uint32_t* allowed) {
    constexpr float none = -std::numeric_limits<float>::infinity();
    for (int64_t start = 0; start < count; start += 32, allowed++) {
        const int64_t stop = std::min<int64_t>(count, start + 32);
        if (*allowed == 0) {  // the usual ones: all of a word, or none
            std::fill(logits + start, logits + stop, none);
        } else {
            for (uint32_t bits = ~*allowed; bits; bits &= bits - 1)
                if (const int64_t i = start + std::countr_zero(bits); i < stop) logits[i] = none;
        }
    }
}

}  // namespace batchgen
