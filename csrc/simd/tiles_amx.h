// Tile registers of AMX and their products. simd/tiles_plain.h does the same in C++ and says what each operation means.
//
// The instructions are written as assembly: intrinsics take register numbers as literals only, not from template
// parameters, and GCC's do not tell the compiler that they read and write memory, so it might reorder them.
#pragma once

#include <stdint.h>

#include "simd/tile_config.h"

namespace batchgen {
namespace {

struct Tiles {
    const TileConfig* config = nullptr;

    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() {
        if (config) asm volatile("tilerelease");
    }

    void configure(int rows) { use(&kTileConfigs.of[rows]); }
    void configure_columns(int columns) { use(&kTileConfigs.of_columns[columns]); }
    void use(const TileConfig* wanted) {
        if (config == wanted) return;
        config = wanted;
        asm volatile("ldtilecfg %0" ::"m"(*config));
    }
    template <int N>
    void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(N));
    }
    template <int N>
    void load(const void* p, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(N) : "memory");
    }
    // What is loaded leaves the first-level cache first.
    template <int N>
    void load_once(const void* p, int64_t stride) {
        asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(N) : "memory");
    }
    template <int N>
    void store(void* p, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(N) : "memory");
    }
    template <int C, int A, int B>
    void dot_bf16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
    template <int C, int A, int B>
    void dot_i8() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
    template <int C, int A, int B>
    void dot_u8() {
        asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};

}  // namespace
}  // namespace batchgen
