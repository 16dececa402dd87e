#include "cpu.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "targets.h"  // BATCHGEN_EACH_TARGET, which CMakeLists.txt writes

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace batchgen {

#define BATCHGEN_DECLARE(name) const Kernels& name##_kernels();
BATCHGEN_EACH_TARGET(BATCHGEN_DECLARE)

namespace {

struct Target {
    std::string_view name;
    const Kernels& (*kernels)();
};

// What this library was built with, the fastest first.
#define BATCHGEN_ROW(name) {#name, name##_kernels},
constexpr Target kTargets[] = {BATCHGEN_EACH_TARGET(BATCHGEN_ROW)};

std::atomic<const Kernels*> active{nullptr};

// Null: it is not there.
const Kernels* find(const std::string& name) {
    static const std::vector<const Kernels*> all = [] {
        std::vector<const Kernels*> found = usable_kernels();
        for (const Kernels* twin : plain_twins()) found.push_back(twin);
        return found;
    }();
    for (const Kernels* kernels : all)
        if (name == kernels->name) return kernels;
    return nullptr;
}

const Kernels& named(const std::string& name, const char* asked_by) {
    if (const Kernels* kernels = find(name)) return *kernels;
    std::string names;
    for (const Kernels* kernels : usable_kernels()) names += (names.empty() ? "" : ", ") + std::string(kernels->name);
    std::string why;
    for (const auto& [set, reason] : unavailable_kernels())
        if (name == set) why = " (" + reason + ")";
    throw std::invalid_argument(asked_by + name + " is not there" + why + "; this machine has " + names);
}

// Null: the library was built without. `kernels` of a target runs that target's instructions, so it is called only
// where the machine has them.
const Target* built(std::string_view name) {
    for (const Target& target : kTargets)
        if (name == target.name) return &target;
    return nullptr;
}

// Whether a product in tile registers comes out right, again and again: some virtual machines have lost what is in
// them. With small integers there is nothing to round, so all bits count. spoil: something is changed, for a test of
// this.
bool tiles_work(const Kernels& kernels, bool spoil) {
    constexpr int kRounds = 2000;  // a millisecond or so
    uint16_t a16[16][32], b16[16][32];
    int8_t a8[16][64], b8[16][64];
    float expected[16][16] = {}, sums[16][16];
    int32_t expected8[16][16] = {}, sums8[16][16];
    const auto to_bf16 = [](int value) {
        const float x = float(value);
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        return uint16_t(bits >> 16);
    };
    const auto left = [](int r, int i) { return (r * 7 + i * 5) % 17 - 8; };
    const auto right = [](int d, int i) { return (d * 11 + i * 3) % 19 - 9; };
    for (int r = 0; r < 16; r++) {
        for (int i = 0; i < 32; i++) a16[r][i] = to_bf16(left(r, i)), b16[r][i] = to_bf16(right(r, i));
        for (int i = 0; i < 64; i++) a8[r][i] = int8_t(left(r, i)), b8[r][i] = int8_t(right(r, i));
        for (int n = 0; n < 16; n++) {
            for (int i = 0; i < 32; i++) expected[r][n] += float(left(r, i) * right(i / 2, 2 * n + i % 2));
            for (int i = 0; i < 64; i++) expected8[r][n] += left(r, i) * right(i / 4, 4 * n + i % 4);
        }
    }
    for (int round = 0; round < kRounds; round++) {
        std::memset(sums, 0, sizeof sums);
        std::memset(sums8, 0, sizeof sums8);
        kernels.tile_dot(TileProduct::BF16, 16, a16, b16, sums);
        kernels.tile_dot(TileProduct::I8, 16, a8, b8, sums8);
        if (spoil && round == kRounds / 2) sums[15][15] += 1;
        for (int r = 0; r < 16; r++)
            for (int n = 0; n < 16; n++)
                if (sums[r][n] != expected[r][n] || sums8[r][n] != expected8[r][n]) return false;
    }
    return true;
}

#if defined(__aarch64__)
bool cpu_has_dot_products() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return false;
#endif
}
#endif

#if defined(__x86_64__)

// Asks Linux for tile registers, for this process and all threads to come; cheap. Not before 5.16, and some sandboxes
// refuse.
bool permit_tiles() {
#if defined(__linux__)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

bool cpu_has_tiles() {
    unsigned a, b, c, d;
    constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kNeeded) == kNeeded;
}

bool system_keeps_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27)) return false;  // no XGETBV
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low >> 17 & 3) == 3;  // XTILECFG, XTILEDATA
}

bool cpu_has_avx_vnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}

struct Found {
    bool avx2, avx_vnni, avx512, avx512_vnni, pairs, even_pairs, amx = false;
    std::map<std::string, std::string> unavailable;

    Found() {
        __builtin_cpu_init();
        avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        avx_vnni = avx2 && cpu_has_avx_vnni();
        avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
        pairs = avx512_vnni && __builtin_cpu_supports("avx512bf16");
        // Zen 4 and 5 have as many products of bf16 pairs in a cycle as of bytes, Intel's CPUs half as many.
        even_pairs = pairs && __builtin_cpu_is("amd");
        const Target *tiles = built("amx"), *twin = built("amx_plain");
        if (!tiles) return;
        // For tests, on any machine: AMX is there, but the system, its permission or the check is not. Takes it away
        // only.
        const char* lacking = std::getenv("BATCHGEN_AMX_WITHOUT");
        const std::string given = lacking ? lacking : "";
        const std::string without =
            given == "system" || given == "permission" || (given == "check" && twin) ? given : "";
        if (without.empty() && !(pairs && cpu_has_tiles())) return;
        std::string& reason = unavailable["amx"];
        if (without == "system" || (without.empty() && !system_keeps_tiles()))
            reason = "the operating system does not keep tile registers";
        else if (without == "permission" || (without.empty() && !permit_tiles()))
            reason = "the kernel refused permission for tile registers";
        else if (!tiles_work((without.empty() ? tiles : twin)->kernels(), without == "check"))
            reason = "products in tile registers came out wrong at the check at start";
        else if (without.empty()) amx = true, unavailable.clear();
    }
};

const Found& found() {
    static const Found once;
    return once;
}

#endif

bool machine_runs(std::string_view name) {
#if defined(__x86_64__)
    if (name == "amx") return found().amx;
    if (name == "zen4") return found().even_pairs;
    if (name == "avx512_bf16") return found().pairs;
    if (name == "avx512_vnni") return found().avx512_vnni;
    if (name == "avx512") return found().avx512;
    if (name == "avx_vnni") return found().avx_vnni;
    if (name == "avx2") return found().avx2;
#elif defined(__aarch64__)
    if (name == "neon_dot") return cpu_has_dot_products();
    if (name == "neon") return true;
#endif
    return name == "scalar";
}

}  // namespace

std::vector<std::string> built_kernels() {
    std::vector<std::string> names;
    for (const Target& target : kTargets) names.emplace_back(target.name);
    return names;
}

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> usable;
    for (const Target& target : kTargets)
        if (machine_runs(target.name)) usable.push_back(&target.kernels());
    return usable;
}

std::vector<const Kernels*> plain_twins() {
    std::vector<const Kernels*> twins;
    for (const Target& target : kTargets)
        if (target.name.ends_with("_plain")) twins.push_back(&target.kernels());
    return twins;
}

std::map<std::string, std::string> unavailable_kernels() {
#if defined(__x86_64__)
    return found().unavailable;
#else
    return {};
#endif
}

void prepare_thread() {
#if defined(__x86_64__)
    if (found().amx) permit_tiles();
#endif
}

const Kernels& active_kernels() {
    const Kernels* kernels = active.load(std::memory_order_acquire);
    if (!kernels) {
        const char* name = std::getenv("BATCHGEN_ISA");
        const std::vector<const Kernels*> usable = usable_kernels();
        if (usable.empty()) throw std::runtime_error("the kernels were built for no instruction set of this machine");
        try {
            kernels = name && *name ? &named(name, "BATCHGEN_ISA=") : usable.front();
        } catch (const std::invalid_argument& error) {
            throw WrongEnvironment(std::string(error.what()) + ": name one of these, or none");
        }
        active.store(kernels, std::memory_order_release);
    }
    return *kernels;
}

const Kernels& kernels_of(const std::string& name) {
    return name.empty() ? active_kernels() : named(name, "instruction set ");
}

void use_kernels(const std::string& name) { active.store(&named(name, "instruction set "), std::memory_order_release); }

}  // namespace batchgen
