// The choice of the instruction set whose kernels run.
#pragma once
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace batchgen {

// A variable of the environment with a wrong value; Python's InputError.
struct WrongEnvironment : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// The names of all sets that the library was built with (CMake's BATCHGEN_TARGETS).
std::vector<std::string> built_kernels();

// The sets that both the library has and the machine can run, the fastest first.
std::vector<const Kernels*> usable_kernels();

// Sets that do in plain C++ what few machines have instructions for. They run only by name.
std::vector<const Kernels*> plain_twins();

// The sets whose instructions the CPU has but which cannot be used, by name, and why.
std::map<std::string, std::string> unavailable_kernels();

// The set that BATCHGEN_ISA names, else the fastest. Throws WrongEnvironment where there is no such set.
const Kernels& active_kernels();

// The set of this name, which may be a plain twin; "": the active one. Throws std::invalid_argument where there is no
// such set.
const Kernels& kernels_of(const std::string& name);

// Makes a set the active one, for tests.
void use_kernels(const std::string& name);

// Prepares a new thread for kernels: to be called before it runs any.
void prepare_thread();

}  // namespace batchgen
