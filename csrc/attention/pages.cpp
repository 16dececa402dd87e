#include "attention/pages_parallel.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"

namespace batchgen {
namespace {

// Writes the chosen blocks of one sequence, in the order of its tokens, to its row of the table.
void choose(const Kernels& kernels, const PageScores& scores, const PageChoice& choice, int64_t i) {
    const int64_t start = choice.starts[i], blocks = choice.starts[i + 1] - start;
    const int64_t first = kFirstPages, candidates = blocks - kFirstPages - kRecentPages;
    const int64_t wanted = choice.num_pages[i] - kFirstPages - kRecentPages, stride = (candidates + 15) / 16 * 16;
    float* bounds = (float*)scratch((kPageQueries + 1) * stride * sizeof(float), 1);
    float* score = bounds + kPageQueries * stride;
    kernels.page_scores(scores, choice.tokens[i], choice.summary_blocks + start + first, candidates, bounds, score);
    std::vector<int32_t> order(candidates);
    for (int64_t p = 0; p < candidates; p++) {
        order[p] = int32_t(p);
        if (std::isnan(score[p])) score[p] = -INFINITY;
    }
    std::nth_element(order.begin(), order.begin() + wanted, order.end(),
                     [&](int32_t a, int32_t b) { return score[a] != score[b] ? score[a] > score[b] : a < b; });
    std::sort(order.begin(), order.begin() + wanted);
    int32_t* row = choice.table + i * choice.stride;
    for (int64_t p = 0; p < first; p++) *row++ = choice.blocks[start + p];
    for (int64_t p = 0; p < wanted; p++) *row++ = choice.blocks[start + first + order[p]];
    for (int64_t p = blocks - kRecentPages; p < blocks; p++) *row++ = choice.blocks[start + p];
}

}  // namespace

void choose_pages(const Kernels& kernels, const PageScores& scores, const PageChoice& choice) {
    run(choice.sequences, [&](int64_t i) { choose(kernels, scores, choice, i); });
}

}  // namespace batchgen
