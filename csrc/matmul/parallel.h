// Linear layers by all threads: cut into calls of the kernels, packing of x before products.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace batchgen {

// The number of panels that w has, prepacked for these kernels.
int64_t num_panels(const Kernels& kernels, const Linear& args);

// Rows [row, row + count) of x, of the residual and of the output of a linear layer.
Linear slice_rows(const Linear& args, int64_t row, int64_t count);

// Runs a linear layer.
void run_linear(const Kernels& kernels, const Linear& args);

// Runs layers of one shape, each with rows of its own, in one loop. Those with so many rows that each keeps all threads
// busy run one after the other.
void run_grouped(const Kernels& kernels, const std::vector<Linear>& layers);

}  // namespace batchgen
