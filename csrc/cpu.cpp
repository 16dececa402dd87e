#include "cpu.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace batchgen {
namespace {

std::atomic<const Kernels*> active{nullptr};

const Kernels& named(const std::string& name) {
    std::string names;
    for (const Kernels* kernels : usable_kernels()) {
        if (name == kernels->name) return *kernels;
        names += (names.empty() ? "" : ", ") + std::string(kernels->name);
    }
    throw std::invalid_argument("BATCHGEN_ISA=" + name + " is not there; this machine has " + names);
}

}  // namespace

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool products = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (avx512 && products) found.push_back(&avx512_bf16_kernels());
    if (avx512) found.push_back(&avx512_kernels());
    if (avx2) found.push_back(&avx2_kernels());
#elif defined(__aarch64__)
    found.push_back(&neon_kernels());
#endif
    found.push_back(&scalar_kernels());
    return found;
}

const Kernels& active_kernels() {
    const Kernels* kernels = active.load(std::memory_order_acquire);
    if (!kernels) {
        const char* name = std::getenv("BATCHGEN_ISA");
        kernels = name && *name ? &named(name) : usable_kernels().front();
        active.store(kernels, std::memory_order_release);
    }
    return *kernels;
}

void use_kernels(const std::string& name) { active.store(&named(name), std::memory_order_release); }

}  // namespace batchgen
