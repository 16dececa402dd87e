// The shapes of the eight tile registers, as LDTILECFG reads them, for a block of up to 32 rows of C by 32 columns.
//
//   0 1 | C, rows 0..15: two tiles beside each other      4 | A, rows 0..15      6 7 | B, two tiles beside each other
//   2 3 | C, rows 16..31                                  5 | A, rows 16..31
//
// With 16 rows or fewer registers 2 and 3 are whole tiles of 16 rows, for B or anything else, and 5 has the shape of 4.
//
// Or for a block of 32 rows of C by up to 32 columns: 0, 2 and 6 have up to 16 of these, 1, 3 and 7 the others.
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
    TileConfig of[33], of_columns[33];  // by rows, and by columns
    constexpr TileConfigs() : of{}, of_columns{} {
        for (int rows = 1; rows <= 32; rows++) {
            TileConfig& config = of[rows];
            const uint8_t upper = uint8_t(rows < 16 ? rows : 16), lower = uint8_t(rows - upper), whole = 16;
            const uint8_t each[8] = {
                upper, upper, lower ? lower : whole, lower ? lower : whole, upper, lower ? lower : upper, whole, whole};
            config.palette = 1;
            for (int i = 0; i < 8; i++) config.rows[i] = each[i], config.row_bytes[i] = 64;
        }
        for (int columns = 1; columns <= 32; columns++) {
            TileConfig& config = of_columns[columns];
            const uint16_t first = uint16_t(4 * (columns < 16 ? columns : 16)), other = uint16_t(4 * columns - first);
            const uint16_t second = other ? other : first, whole = 64;
            const uint16_t each[8] = {first, second, first, second, whole, whole, first, second};
            config.palette = 1;
            for (int i = 0; i < 8; i++) config.rows[i] = 16, config.row_bytes[i] = each[i];
        }
    }
};
constexpr TileConfigs kTileConfigs;

}  // namespace
}  // namespace batchgen
