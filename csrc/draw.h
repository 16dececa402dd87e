// A token from each row of logits, at random; and tokens that are not to be chosen at all.
#pragma once
#include <cstdint>

namespace batchgen {

// As SamplingParams: top_k 0, top_p 1 and min_p 0 leave all tokens in.
struct Filter {
    int64_t top_k;
    double top_p, min_p;
};

// The token at `uniform`, in [0, 1), of the cumulative softmax weights of those that the filter keeps: min-p, then
// top-k, then top-p of what is left. weights: [count], of each token in proportion to its probability, the largest 1;
// those left out become 0. Equal ones go by index.
int64_t draw(float* weights, int64_t count, const Filter& filter, double uniform);

// The logits [count] of tokens whose bit is not set, lowest bit first, become minus infinity.
void forbid(float* logits, int64_t count, const uint32_t* allowed);

}  // namespace batchgen
