// The choice of the pages that decoding sequences attend to, shared among threads.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace batchgen {

// Pages that are always attended to: those of the first tokens, and those of the newest.
constexpr int64_t kFirstPages = 1, kRecentPages = 2;

// The sequences that choose. Blocks of sequence i are [starts[i], starts[i + 1]) of both lists, more than it chooses.
struct PageChoice {
    int64_t sequences;
    const int64_t* tokens;          // of each, its row of the queries
    const int32_t* summary_blocks;  // numbers of blocks among the summaries
    const int32_t* blocks;          // and in the KV that is attended to
    const int64_t* starts;
    const int64_t* num_pages;  // pages of each that are attended to
    int32_t* table;            // [sequences, stride], its chosen blocks of the KV
    int64_t stride;
};

void choose_pages(const Kernels& kernels, const PageScores& scores, const PageChoice& choice);

}  // namespace batchgen
