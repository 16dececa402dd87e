// Which kernels this machine runs.
#pragma once
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace batchgen {

// A variable of the environment that cannot be followed; Python's InputError.
struct WrongEnvironment : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// The names of all that the library was built with (CMake's BATCHGEN_TARGETS).
std::vector<std::string> built_kernels();

// Those that both the library has and the machine can run, the fastest first.
std::vector<const Kernels*> usable_kernels();

// Those that do in plain C++ what sets do that few machines have. Only by name.
std::vector<const Kernels*> plain_twins();

// Those whose instructions the CPU has but which are not usable, by name, and why.
std::map<std::string, std::string> unavailable_kernels();

// The one that BATCHGEN_ISA names, else the fastest. Throws WrongEnvironment for a name that is not among them.
const Kernels& active_kernels();

// The one of this name, a plain twin perhaps; "": the active one. Throws std::invalid_argument for one that is not
// there.
const Kernels& kernels_of(const std::string& name);

// For tests: from now on this one is the active one.
void use_kernels(const std::string& name);

// To be called in a thread before it runs kernels; those that call in before there are others need not.
void prepare_thread();

}  // namespace batchgen
