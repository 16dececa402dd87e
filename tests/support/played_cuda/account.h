// What is counted: calls, operations and bytes; and faults, which a real card would not have survived or not noticed.
#pragma once

#include <cstdlib>
#include <string>

#define PLAYED_API extern "C" __attribute__((visibility("default")))

namespace played {

// An option of the runtime: the number in the environment variable PLAYED_CUDA_<name>.
inline long option(const char* name, long otherwise) {
    const char* text = std::getenv(("PLAYED_CUDA_" + std::string(name)).c_str());
    return text && *text ? std::atol(text) : otherwise;
}

void count(const char* what, long by = 1);
void fault(const std::string& what);

}  // namespace played
