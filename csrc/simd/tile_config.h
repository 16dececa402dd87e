// The shapes of the eight tile registers, as LDTILECFG reads them, for a block of up to 32 rows of C by 32 columns.
//
//   0 1 | C, rows 0..15: two tiles beside each other      4 | A, rows 0..15      6 7 | B, two tiles beside each other
//   2 3 | C, rows 16..31                                  5 | A, rows 16..31
//
// With 16 rows or fewer registers 2 and 3 are whole tiles of 16 rows, for B or anything else, and 5 has the shape of 4.
#pragma once

#include <stdint.h>

namespace batchgen {
namespace {

struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

struct TileConfigs {
    TileConfig of[33];  // by rows
    constexpr TileConfigs() : of{} {
        for (int rows = 1; rows <= 32; rows++) {
            TileConfig& config = of[rows];
            const uint8_t upper = uint8_t(rows < 16 ? rows : 16), lower = uint8_t(rows - upper), whole = 16;
            const uint8_t each[8] = {
                upper, upper, lower ? lower : whole, lower ? lower : whole, upper, lower ? lower : upper, whole, whole};
            config.palette = 1;
            for (int i = 0; i < 8; i++) config.rows[i] = each[i], config.row_bytes[i] = 64;
        }
    }
};
constexpr TileConfigs kTileConfigs;

}  // namespace
}  // namespace batchgen
