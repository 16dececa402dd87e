// Which kernels this machine runs.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace batchgen {

// Those that both the library has and the machine can run, the fastest first.
std::vector<const Kernels*> usable_kernels();

// The one that BATCHGEN_ISA names, else the fastest. Throws std::invalid_argument for a name that is not among them.
const Kernels& active_kernels();

// For tests and measurements: from now on this one.
void use_kernels(const std::string& name);

}  // namespace batchgen
