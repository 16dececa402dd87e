// Tile registers and their products in plain C++, for machines without them. Shapes that the hardware would refuse trap
// here.
//
// In all of them row d of B has the values of four bytes that go with the d-th four bytes of a row of A.
//   dot_bf16: TDPBF16PS. The even and the odd values of a row of A are summed up on their own, from zero on, in order
//   of depth,
//     each product added in one rounding to nearest even; then the two sums are added up, and that to C. So a tile's
//     product is a sum by itself, of 32 depths, and which tiles a sum is made of matters; rows beside it do not.
//     Numbers below 2^-126, operands or sums, are zero to the hardware whatever the thread's MXCSR says; here they are
//     not. Products of two bf16 are exact in fp32, so that a product and a sum are rounded as the hardware's one step
//     is.
//   dot_i8, dot_u8: TDPBSSD, TDPBUSD. Bytes of A with a sign, or without one, times bytes of B with one; sums modulo
//   2^32.
#pragma once

#include <stdint.h>
#include <string.h>

#include "simd/tile_config.h"

namespace batchgen {
namespace {

struct Tiles {
    const TileConfig* config = nullptr;
    alignas(64) uint8_t tile[8][16][64];

    Tiles() = default;
    Tiles(const Tiles&) = delete;

    // For up to 32 rows of C. Registers are zero after it where it changes anything.
    void configure(int rows) {
        if (config == &kTileConfigs.of[rows]) return;
        config = &kTileConfigs.of[rows];
        memset(tile, 0, sizeof tile);
    }
    int rows(int n) const {
        if (!config) __builtin_trap();
        return config->rows[n];
    }
    template <int N>
    void zero() {
        memset(tile[N], 0, rows(N) * 64);
    }
    // Rows of 64 bytes, `stride` bytes from one to the next.
    template <int N>
    void load(const void* p, int64_t stride) {
        for (int r = 0; r < rows(N); r++) memcpy(tile[N][r], (const uint8_t*)p + r * stride, 64);
    }
    template <int N>
    void store(void* p, int64_t stride) {
        for (int r = 0; r < rows(N); r++) memcpy((uint8_t*)p + r * stride, tile[N][r], 64);
    }
    template <int C, int A, int B>
    void check() const {
        static_assert(C != A && C != B && A != B);
        if (rows(C) != rows(A) || rows(B) != 16) __builtin_trap();
    }

    template <int C, int A, int B>
    void dot_bf16() {
        check<C, A, B>();
        for (int r = 0; r < rows(C); r++) {
            uint32_t a[16], b[16];
            float even[16] = {}, odd[16] = {}, c[16];
            memcpy(a, tile[A][r], 64);
            for (int d = 0; d < 16; d++) {
                memcpy(b, tile[B][d], 64);
                const float a_even = number(a[d] << 16), a_odd = number(a[d] & 0xffff0000);
                for (int n = 0; n < 16; n++) {
                    even[n] += a_even * number(b[n] << 16);
                    odd[n] += a_odd * number(b[n] & 0xffff0000);
                }
            }
            memcpy(c, tile[C][r], 64);
            for (int n = 0; n < 16; n++) c[n] += even[n] + odd[n];
            memcpy(tile[C][r], c, 64);
        }
    }
    template <int C, int A, int B>
    void dot_i8() {
        dot_bytes_of<C, A, B, int8_t>();
    }
    template <int C, int A, int B>
    void dot_u8() {
        dot_bytes_of<C, A, B, uint8_t>();
    }

  private:
    __attribute__((always_inline)) static float number(uint32_t bits) {
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
    template <int C, int A, int B, class T>
    void dot_bytes_of() {
        check<C, A, B>();
        for (int r = 0; r < rows(C); r++) {
            uint32_t c[16];
            memcpy(c, tile[C][r], 64);
            for (int i = 0; i < 64; i++) {
                const int32_t a = T(tile[A][r][i]);
                for (int n = 0; n < 16; n++) c[n] += uint32_t(a * int8_t(tile[B][i / 4][4 * n + i % 4]));
            }
            memcpy(tile[C][r], c, 64);
        }
    }
};

}  // namespace
}  // namespace batchgen
