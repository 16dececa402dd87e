// Tile registers and their products in plain C++, for machines without AMX. Shapes that the hardware refuses trap here.
//
// In every product, row i of B has the values of four bytes that meet the i-th four bytes of a row of A.
//   dot_bf16 (TDPBF16PS): the even and the odd values of a row of A have a sum each, which starts at zero and takes
//     products in the order of K, with one rounding to nearest even a step; the two sums are added, and the result is
//     added to C. So the product of a tile is a sum by itself, of 32 values of K: which tiles a sum is made of changes
//     its bits; the rows beside it do not. Whatever MXCSR says, operands, C among them, and results below 2^-126 are
//     zeros with their signs. A product is not rounded before it is added, so it may be beyond all floats; in doubles
//     it is exact, and the sum rounds to the same float as at once.
//   dot_i8, dot_u8 (TDPBSSD, TDPBUSD): signed or unsigned bytes of A times signed bytes of B; sums are modulo 2^32.
#pragma once

#include <stdint.h>
#include <string.h>

#include "simd/tile_config.h"

// The set around it is not optimised (CMakeLists.txt), but the products of tiles are most of what it does.
#ifndef __clang__
#pragma GCC push_options
#pragma GCC optimize("O2")
#endif

namespace batchgen {
namespace {

struct Tiles {
    const TileConfig* config = nullptr;
    alignas(64) uint8_t tile[8][16][64];

    Tiles() = default;
    Tiles(const Tiles&) = delete;

    // Sets the shapes for up to 32 rows of C, or for up to 32 columns. Registers become zero where shapes change.
    void configure(int rows) { use(&kTileConfigs.of[rows]); }
    void configure_columns(int columns) { use(&kTileConfigs.of_columns[columns]); }
    void use(const TileConfig* wanted) {
        if (config == wanted) return;
        config = wanted;
        memset(tile, 0, sizeof tile);
    }
    int rows(int n) const {
        if (!config) __builtin_trap();
        return config->rows[n];
    }
    int row_bytes(int n) const { return config->row_bytes[n]; }
    template <int N>
    void zero() {
        memset(tile[N], 0, rows(N) * 64);
    }
    // Loads rows, `stride` bytes from one to the next.
    template <int N>
    void load(const void* p, int64_t stride) {
        for (int r = 0; r < rows(N); r++) memcpy(tile[N][r], (const uint8_t*)p + r * stride, row_bytes(N));
    }
    template <int N>
    void load_once(const void* p, int64_t stride) {
        load<N>(p, stride);
    }
    template <int N>
    void store(void* p, int64_t stride) {
        for (int r = 0; r < rows(N); r++) memcpy((uint8_t*)p + r * stride, tile[N][r], row_bytes(N));
    }
    template <int C, int A, int B>
    void check() const {
        static_assert(C != A && C != B && A != B);
        if (rows(C) != rows(A) || row_bytes(C) != row_bytes(B) || 4 * rows(B) != row_bytes(A)) __builtin_trap();
    }

    template <int C, int A, int B>
    void dot_bf16() {
        check<C, A, B>();
        double b[2][16][16];  // the even and the odd values of K
        for (int d = 0; d < 16; d++) {
            uint32_t words[16];
            memcpy(words, tile[B][d], 64);
            for (int n = 0; n < 16; n++)
                b[0][d][n] = number(words[n] << 16), b[1][d][n] = number(words[n] & 0xffff0000);
        }
        for (int r = 0; r < rows(C); r++) {
            uint32_t a[16];
            float sums[2][16] = {}, c[16];
            memcpy(a, tile[A][r], 64);
            for (int d = 0; d < 16; d++) {
                const double values[2] = {number(a[d] << 16), number(a[d] & 0xffff0000)};
                for (int odd = 0; odd < 2; odd++)
                    for (int n = 0; n < 16; n++)
                        sums[odd][n] = flushed(float(sums[odd][n] + values[odd] * b[odd][d][n]));
            }
            memcpy(c, tile[C][r], 64);
            for (int n = 0; n < 16; n++) c[n] = flushed(flushed(c[n]) + flushed(sums[0][n] + sums[1][n]));
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
    // Zero for what is below 2^-126.
    __attribute__((always_inline)) static float flushed(float x) {
        return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x;
    }
    __attribute__((always_inline)) static float number(uint32_t bits) {
        float x;
        memcpy(&x, &bits, 4);
        return flushed(x);
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

#ifndef __clang__
#pragma GCC pop_options
#endif
