// The instruction set that a translation unit is compiled for: its vectors, and its tile registers where it has some.
//
// CMakeLists.txt names the set by BATCHGEN_TARGET, the header of its vectors by BATCHGEN_SIMD and that of its tile
// registers by BATCHGEN_TILES. Where it names none, as in an editor, the set is `scalar`.
//
// All that is written on these vectors is in an unnamed namespace, and includes only C's headers: an inline function of
// the C++ standard library that is compiled with a set's flags could be the one that the whole library is linked with,
// and then runs on machines that lack the instructions.
#pragma once

#ifndef BATCHGEN_TARGET
#define BATCHGEN_TARGET scalar
#define BATCHGEN_SIMD "simd/scalar.h"
#endif

#include BATCHGEN_SIMD
#ifdef BATCHGEN_TILES
#include BATCHGEN_TILES
#endif

namespace batchgen {
namespace {

// Whether the set has products of bf16 pairs.
#ifdef BATCHGEN_FAST_BF16
constexpr bool kFastBF16 = true;
#else
constexpr bool kFastBF16 = false;
#endif

// Whether the set has tile registers.
#ifdef BATCHGEN_TILES
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif

}  // namespace
}  // namespace batchgen
