// Sampling from softmax weights, and masking of forbidden tokens.
#pragma once
#include <cstdint>

namespace batchgen {

// The filter of SamplingParams: top_k 0, top_p 1 and min_p 0 keep all tokens.
struct Filter {
    int64_t top_k;
    double top_p, min_p;
};

// Draws the token at `uniform`, in [0, 1), of the cumulative weights of the tokens that the filter keeps: min-p, then
// top-k, then top-p of the rest. Equal weights are ordered by index. weights [count] are proportional to probabilities,
// the largest is 1; those that are filtered out become 0.
int64_t draw(float* weights, int64_t count, const Filter& filter, double uniform);

// Sets the logits [count] of tokens whose bit in `allowed` is not set, lowest bit first, to minus infinity.
void forbid(float* logits, int64_t count, const uint32_t* allowed);

}  // namespace batchgen
