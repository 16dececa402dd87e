// The operations of state layers by all threads: batches of sequences cut into pieces for the kernels.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace batchgen {

// Runs the causal convolution of so many sequences.
void run_causal_conv(const Kernels& kernels, const CausalConv& args, int64_t sequences);

// Runs the gated delta rule of so many sequences.
void run_delta_rule(const Kernels& kernels, const DeltaRule& args, int64_t sequences);

}  // namespace batchgen
