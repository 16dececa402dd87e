// Operations that AVX2 and AVX-512 have in common: on numbers and on 16 bytes.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels.h"

namespace batchgen {
namespace {

inline float to_float(f16 a) { return _cvtsh_ss(a.bits); }

// Ends a run of `stream` stores: other threads see them from here on.
inline void end_streams() { _mm_sfence(); }

// out[i] = table[index[i]] of 16 numbers, by 16 indexes below 16.
inline void look_up(const int8_t* table, const uint8_t* index, int8_t* out) {
    const __m128i values =
        _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)table), _mm_loadu_si128((const __m128i*)index));
    _mm_storeu_si128((__m128i*)out, values);
}

}  // namespace
}  // namespace batchgen
