// Products of bf16 with rows of blocks, where there are instructions for pairs of bf16: codes are the operand themselves.
//
// A code is an integer of at most 8 bits, or a number of FP8: bf16 has all of these exactly. So a run of 16 or 32 depths is
// multiplied in codes, and its scale and minimum are applied to its sum, in fp32:
//     sum += scale * (codes . x) + minimum * (1 . x)
// No weight is rounded, and a weight costs a shift and a look-up. The sums of x, (1 . x), are made once for all panels.
// Each element is summed up in the order of runs by these operations, wherever codes come from, and however many rows there
// are.

template <class M>
inline bool in_runs(const Linear& args) {
    return kInRuns<M> && args.packing != BlockType::F32;
}

#ifdef BATCHGEN_FAST_BF16
constexpr int kRunWords = 8;  // of x at 16 depths

// Depths of a run, and whether it has a minimum.
struct Runs {
    int depths;
    bool minimums;
};
inline Runs runs_of(BlockType type) {
    Runs runs{};
    with_panels(type, [&]<class Format>(const int8_t*) { runs = {Format::Block::kRun, Format::kMinimums}; });
    return runs;
}

// Scales and minimums of the runs of kTaken depths of a panel.
struct RunScales {
    vf scales[kTakenRuns][2], minimums[kTakenRuns][2];
};

// ---- codes as an operand -------------------------------------------------------------------------------------------

typedef uint16_t Halves __attribute__((vector_size(4 * W)));

// What codes of up to six bits stand for, as bf16; of FP8 the numbers that have no leading one.
template <class Format>
inline PairTable table_of(const int8_t* table) {
    alignas(64) bf16 numbers[64];
    for (int i = 0; i < 64; i++) {
        float number = float(i - Format::kOffset);
        if constexpr (Format::Kind::kFloat8) number = float(i % 8) * 0x1p-9f;
        // Of a code of four bits the bits above it are those of the next one.
        else if constexpr (Format::Kind::kInTable) number = float(table[i % 16]);
        else if constexpr (kInSlots<typename Format::Kind>) number = float(i % 16 - Format::kOffset);
        uint32_t bits;
        memcpy(&bits, &number, 4);
        numbers[i].bits = uint16_t(bits >> 16);
    }
    return PairTable(numbers);
}

// Whether codes of rows as they lie are nibbles or bytes there, and need not be put together (blocks.h).
template <class Format>
constexpr bool kPlain = Format::Block::kCodesAt > 0;

// The same of codes of five or six bits that `take_apart` has made; they may have a sign, above the bits that are looked up.
template <class Format>
inline PairTable table_of_taken() {
    constexpr int kCodes = Format::Kind::kLow + Format::Kind::kHigh == 6 ? 64 : 32, kSign = Format::kOffset ? kCodes / 2 : 0;
    alignas(64) bf16 numbers[64];
    for (int i = 0; i < 64; i++) {
        const float number = float((i % kCodes ^ kSign) - kSign);
        uint32_t bits;
        memcpy(&bits, &number, 4);
        numbers[i].bits = uint16_t(bits >> 16);
    }
    return PairTable(numbers);
}

// Each half of `codes` has one.
template <class Kind>
__attribute__((always_inline)) inline vi numbers_of_codes(Lanes codes, const PairTable& table) {
    if constexpr (Kind::kLow + Kind::kHigh <= 5) {
        return table.of_32((vi)codes);
    } else if constexpr (Kind::kLow + Kind::kHigh == 6) {
        return table.of_64((vi)codes);
    } else if constexpr (Kind::kFloat8) {
        // Exponents count from 7 there, from 127 in bf16.
        const Halves code = (Halves)codes, normal = ((code & 0x7f) << 4) + 0x3c00;
        const Halves number = (code & 0x78) == 0 ? (Halves)table.of_32((vi)codes) : normal;
        return (vi)(number | (code & 0x80) << 8);
    } else {  // 128 larger
        const Lanes flipped = codes ^ 0x00800080;
        const vf low = to_float((vi)((Words)(flipped << 24) >> 24)), high = to_float((vi)((Words)(flipped << 8) >> 24));
        return (vi)((Lanes)as_int(low) >> 16 | ((Lanes)as_int(high) & 0xffff0000));
    }
}

// Of kQuad depths of a panel: sink(word of the depth, vector of columns, operand).
template <class Kind, class Sink>
__attribute__((always_inline)) inline void quad_codes(const uint8_t* low, const uint8_t* high, const PairTable& table,
                                                      Sink sink) {
#pragma GCC unroll 4
    for (int group = 0; group < 4; group++) {
        Lanes slots = slots_at<Kind::kLow>(low, group), upper = {};
        if constexpr (Kind::kHigh) upper = slots_at<Kind::kHigh>(high, group);
        if constexpr (kInSlots<Kind>) slots |= upper << Kind::kLow;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            Lanes codes = slots >> (4 * i);
            if constexpr (Kind::kLow + Kind::kHigh == 8) codes = (i < 2 ? slots : upper) >> (8 * (i % 2)) & 0x00ff00ff;
            else if constexpr (!kInSlots<Kind>)
                codes = (codes & 0x000f000f) | ((i ? upper >> (4 * i - 4) : upper << 4) & 0x00f000f0);
            sink(2 * group + i / 2, i % 2, numbers_of_codes<Kind>(codes, table));
        }
    }
}

// Where a format's panels have what.
struct RunFormat {
    void (*scales)(const uint8_t* blocks, int64_t stride, int64_t count, RunScales& out);
    PairTable table;
    int64_t block_bytes, scale_bytes, low_bytes;
    int quads_of_block;  // a power of two, by its exponent
    int run;
    bool minimums;
};

template <class Format>
__attribute__((noinline)) void scales_of_runs(const uint8_t* blocks, int64_t stride, int64_t count, RunScales& out) {
    for (int64_t b = 0; b < count; b++, blocks += stride)
        for (int run = 0; run < Format::kRuns; run++)
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++)
                Format::Scales::get(blocks, run, part * W, out.scales[b * Format::kRuns + run][part],
                                    out.minimums[b * Format::kRuns + run][part]);
}

// in_panels: and not rows as they lie.
template <class Format>
inline RunFormat run_format(const int8_t* table, bool in_panels) {
    using Block = typename Format::Block;
    return {scales_of_runs<Format>,
            in_panels || kPlain<Format> ? table_of<Format>(table) : table_of_taken<Format>(),
            Format::kBlockBytes,
            Format::kScaleBytes,
            Format::kLowBytes,
            __builtin_ctz(Block::kValues / kQuad),
            Block::kRun,
            Format::kMinimums};
}

// Up to kTaken depths of a panel from `at` on.
struct RunStretch {
    const uint8_t *blocks, *ahead;  // ahead: what is read after them
    int64_t depths, ahead_of_quad;

    RunStretch(const RunFormat& format, const uint8_t* panel, int64_t depth, int64_t at, const uint8_t* next,
               RunScales& scales) {
        depths = smaller(kTaken, depth - at);
        const int64_t count = depths / kQuad >> format.quads_of_block;
        blocks = panel + (at / kQuad >> format.quads_of_block) * format.block_bytes;
        ahead = at + kTaken < depth ? blocks + count * format.block_bytes : next;
        ahead_of_quad = format.block_bytes >> format.quads_of_block;
        format.scales(blocks, format.block_bytes, count, scales);
    }
    // The codes of quad i.
    template <class Kind, class Sink>
    __attribute__((always_inline)) void quad(const RunFormat& format, int64_t i, const PairTable& table, Sink sink) const {
        constexpr int64_t kLowBytes = kPanel * kQuad * Kind::kLow / 8, kHighBytes = kPanel * kQuad * Kind::kHigh / 8;
        const int64_t block = i >> format.quads_of_block, within = i - (block << format.quads_of_block);
        for (int64_t line = 0; line < ahead_of_quad; line += 64) __builtin_prefetch(ahead + i * ahead_of_quad + line);
        const uint8_t* low = blocks + block * format.block_bytes + format.scale_bytes;
        quad_codes<Kind>(low + within * kLowBytes, low + format.low_bytes + within * kHighBytes, table, sink);
    }
};

// ---- sums of x -----------------------------------------------------------------------------------------------------

// Sums of the runs of a row of x: out[run * stride].
inline void sums_of_row(const bf16* x, int64_t depth, int run, int64_t stride, float* out) {
    alignas(64) uint32_t ones[2][W];
    for (int i = 0; i < W; i++) {
        const bool first = i < W / 2 || run == 2 * W;
        ones[0][i] = first ? 0x3f803f80 : 0, ones[1][i] = first ? 0 : 0x3f803f80;
    }
    const int64_t runs = depth / run;
    for (int64_t from = 0; from < runs; from += W) {
        vf r[W];
        for (int i = 0; i < W; i++) {
            r[i] = zero();
            if (from + i >= runs) continue;
            const int64_t d = (from + i) * run, half = d % (2 * W) ? 1 : 0;
            r[i] = dot_pairs(load_int((const uint32_t*)(x + d / (2 * W) * (2 * W))), load_int(ones[half]), r[i]);
        }
        float made[W];
        store(made, sums(r));
        for (int i = 0; i < smaller(W, runs - from); i++) out[(from + i) * stride] = made[i];
    }
}

// Floats of the sums of all rows; they lie behind the tiles of x (`pack_row_tiles`): [tiles, runs, rows of the tile].
inline int64_t run_sums(const Linear& args) {
    const Runs runs = runs_of(args.packing);
    return runs.minimums ? args.rows * (args.depth / runs.depths) : 0;
}

inline float* sums_of_tile(const Linear& args, const void* packed_x, int64_t row) {
    return (float*)packed_x + args.rows * args.depth / 2 + row * (args.depth / runs_of(args.packing).depths);
}

inline void pack_run_sums(const Linear& args, int64_t tile, int64_t stop, void* out) {
    const Runs runs = runs_of(args.packing);
    if (!runs.minimums) return;
    for (; tile < stop; tile++) {
        const int64_t row = tile * kRowTile, count = smaller(kRowTile, args.rows - row);
        float* to = sums_of_tile(args, out, row);
        for (int64_t r = 0; r < count; r++)
            sums_of_row((const bf16*)args.x + (row + r) * args.x_stride, args.depth, runs.depths, count, to + r);
    }
}

// ---- products ------------------------------------------------------------------------------------------------------

// sum += scale * (codes . x) + minimum * (1 . x) of a run; sums: null where there are no minimums.
template <int MR>
__attribute__((always_inline)) inline void apply_scales(const vf (&codes)[MR][2], const vf* scale, const vf* minimum,
                                                        const float* sums, float* c) {
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            float* at = c + (2 * r + part) * W;
            vf sum = fma(codes[r][part], scale[part], load(at));
            if (sums) sum = fma(set1(sums[r]), minimum[part], sum);
            store(at, sum);
        }
}

// c [MR, kPanel] = a tile of rows times a panel, each code used as soon as it is there. next: the panel after it.
template <class Kind, int Run, bool Minimums, int MR>
__attribute__((noinline)) void product_of_codes(const RunFormat& format, const uint8_t* panel, const uint8_t* next,
                                                int64_t depth, const uint32_t* x, const float* sums, float* c) {
    const PairTable table = format.table;
    RunScales scales;
    memset(c, 0, MR * kPanel * sizeof *c);
    for (int64_t at = 0; at < depth; at += kTaken) {
        const RunStretch stretch(format, panel, depth, at, next, scales);
        constexpr int kQuads = Run / kQuad;
        for (int64_t run = 0; run < stretch.depths / Run; run++) {
            vf acc[MR][2];
#pragma GCC unroll 12
            for (int r = 0; r < MR; r++) acc[r][0] = acc[r][1] = zero();
#pragma GCC unroll 2
            for (int quad = 0; quad < kQuads; quad++) {
                const auto use = [&](int word, int part, vi operand) __attribute__((always_inline)) {
#pragma GCC unroll 12
                    for (int r = 0; r < MR; r++) acc[r][part] = dot_pairs(set1_int(x[word * MR + r]), operand, acc[r][part]);
                };
                stretch.template quad<Kind>(format, run * kQuads + quad, table, use);
                x += kRunWords * MR;
            }
            apply_scales<MR>(acc, scales.scales[run], scales.minimums[run], Minimums ? sums : nullptr, c);
            if (Minimums) sums += MR;
        }
    }
}

// Depths [at, at + kTaken) of a panel, or those that are left, as an operand; and their scales.
template <class Kind>
__attribute__((noinline)) void operand_of_codes(const RunFormat& format, const uint8_t* panel, const uint8_t* next,
                                                int64_t depth, int64_t at, uint32_t* out, RunScales& scales) {
    const PairTable table = format.table;
    const RunStretch stretch(format, panel, depth, at, next, scales);
    for (int64_t i = 0; i < stretch.depths / kQuad; i++, out += kRunWords * kPanel)
        stretch.template quad<Kind>(format, i, table, [&](int word, int part, vi operand) __attribute__((always_inline)) {
            store_int(out + word * kPanel + part * W, operand);
        });
}

// The codes of four depths of W columns, in bytes of which those of nibbles have another code above them: two words.
template <class Kind>
__attribute__((always_inline)) inline void put_codes(Lanes codes, const PairTable& table, uint32_t* out) {
    Lanes pairs[2] = {(codes & 0xffff) | (codes << 8 & 0xffff0000), (codes >> 16) | (codes >> 8 & 0xffff0000)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {  // in each half there is another one above it, which a look-up passes over
        if constexpr (Kind::kLow + Kind::kHigh == 8) pairs[i] &= 0x00ff00ff;
        if constexpr (Kind::kLow + Kind::kHigh == 8 && !Kind::kFloat8) pairs[i] ^= 0x00800080;
        store_int(out + i * kPanel, numbers_of_codes<Kind>(pairs[i], table));
    }
}

// Where the row of column c is from depth `at` on; null: there is none. What is taken after it is fetched.
inline const uint8_t* row_at(const Linear& args, int64_t panel, int c, int64_t at, int64_t here_bytes) {
    const int64_t row = weight_row(args, panel, c);
    if (row >= args.columns) return nullptr;
    const uint8_t* packed = (const uint8_t*)args.w + row * args.w_stride + at * args.w_stride / args.depth;
    // More of the row, or the beginning of one of the next panel.
    const int64_t ahead = at + kTaken < args.depth ? here_bytes : (is_gated(args.activation) ? W : kPanel) * args.w_stride;
    for (int64_t line = 0; line < here_bytes; line += 64) __builtin_prefetch(packed + ahead + line);
    return packed;
}

// kTaken depths of W rows, or those that are left, as an operand's columns `out`; and what a panel has before its codes
// (block_panels.h), which is zeros where no row is: `heads` [blocks, Format::kScaleBytes].
template <class Format>
inline void put_plain_rows(const Linear& args, int64_t panel, int c, int64_t at, const PairTable& table, uint32_t* out,
                           uint8_t* heads) {
    using Block = typename Format::Block;
    constexpr int kNibbles = Block::kNibbles, kPiece = 16;
    constexpr int kCodeBytes = Block::kValues / (kNibbles ? 2 : 1), kPieces = kTaken / Block::kValues * kCodeBytes / kPiece;
    static const uint8_t nothing[kTaken / Block::kValues * Block::kBytes] = {};
    const int64_t here = smaller(kTaken, args.depth - at), blocks = here / Block::kValues;
    const uint8_t* rows[W];
    for (int i = 0; i < W; i++) {
        rows[i] = row_at(args, panel, c + i, at, blocks * Block::kBytes);
        if (!rows[i]) rows[i] = nothing;
        else
            for (int64_t b = 0; b < blocks; b++)
                Format::Scales::put(rows[i] + b * Block::kBytes, c + i, heads + b * Format::kScaleBytes);
    }
    for (int piece = 0; piece < kPieces; piece++) {
        const int byte = piece * kPiece, place = byte / kCodeBytes * Block::kBytes + Block::kCodesAt + byte % kCodeBytes;
        const int depth = kNibbles ? byte / (kNibbles + !kNibbles) * 2 * kNibbles + byte % (kNibbles + !kNibbles) : byte;
        if (depth >= here) break;
        vi r[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            r[i] = load_quarters(rows[i] + place, rows[i + 4] + place, rows[i + 8] + place, rows[i + 12] + place);
        transpose_quarters(r);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            uint32_t* to = out + (depth + 4 * i) / 2 * kPanel;
            put_codes<typename Format::Kind>((Lanes)r[i], table, to);
            if constexpr (kNibbles > 0) put_codes<typename Format::Kind>((Lanes)r[i] >> 4, table, to + kNibbles / 2 * kPanel);
        }
    }
}

// The same where codes have to be put together first.
template <class Format>
inline void put_taken_rows(const Linear& args, int64_t panel, int c, int64_t at, const PairTable& table, uint32_t* out,
                           TakenRows& taken) {
    using Block = typename Format::Block;
    const int64_t here = smaller(kTaken, args.depth - at), here_bytes = here / Block::kValues * Block::kBytes;
    for (int i = 0; i < W; i++) {
        if (const uint8_t* row = row_at(args, panel, c + i, at, here_bytes))
            take_runs_apart<Format>(row, here, taken.codes[i], taken.scales[i], taken.minimums[i]);
        else
            memset(taken.codes[i], 0, kTaken), memset(taken.scales[i], 0, sizeof taken.scales[i]),
                memset(taken.minimums[i], 0, sizeof taken.minimums[i]);
    }
    for (int64_t d = 0; d < here; d += 4 * W) {
        vi r[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) r[i] = load_int((const uint32_t*)(taken.codes[i] + d));
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++)
            if (d + 4 * i < here) put_codes<typename Format::Kind>((Lanes)r[i], table, out + (d / 2 + 2 * i) * kPanel);
    }
}

// As `operand_of_codes`, of rows as they lie.
template <class Format>
__attribute__((noinline)) void operand_of_rows(const Linear& args, const RunFormat& format, int64_t panel, int64_t at,
                                               uint32_t* out, RunScales& scales) {
    const PairTable table = format.table;
    const int64_t here = smaller(kTaken, args.depth - at);
    if constexpr (kPlain<Format>) {
        uint8_t heads[kTaken / Format::Block::kValues * Format::kScaleBytes] = {};
        for (int part = 0; part < 2; part++) put_plain_rows<Format>(args, panel, part * W, at, table, out + part * W, heads);
        scales_of_runs<Format>(heads, Format::kScaleBytes, here / Format::Block::kValues, scales);
    } else {
        const int64_t runs = here / Format::Block::kRun;
        TakenRows taken;
        for (int part = 0; part < 2; part++) {
            put_taken_rows<Format>(args, panel, part * W, at, table, out + part * W, taken);
            vf of_runs[kTakenRuns];
            transpose_floats(taken.scales, of_runs);
            for (int64_t i = 0; i < runs; i++) scales.scales[i][part] = of_runs[i];
            if (!Format::kMinimums) continue;
            transpose_floats(taken.minimums, of_runs);
            for (int64_t i = 0; i < runs; i++) scales.minimums[i][part] = of_runs[i];
        }
    }
}

constexpr int kRowsOfRuns = kRowTile / 2;  // so that their sums stay in registers beside those of a run

// c [MR, kPanel] += rows of a tile of `count` times some runs of an operand.
template <int MR>
__attribute__((noinline)) void product_of_runs(const uint32_t* x, int64_t count, const uint32_t* b, int64_t runs, int64_t words,
                                               const RunScales& scales, const float* sums, float* c) {
    vf sum[MR][2];
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++) sum[r][0] = load(c + r * kPanel), sum[r][1] = load(c + r * kPanel + W);
    for (int64_t run = 0; run < runs; run++) {
        vf acc[MR][2];
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++) acc[r][0] = acc[r][1] = zero();
#pragma GCC unroll 4
        for (int64_t word = 0; word < words; word++) {
            const vi first = load_int(b), second = load_int(b + W);
#pragma GCC unroll 6
            for (int r = 0; r < MR; r++) {
                const vi value = set1_int(x[r]);
                acc[r][0] = dot_pairs(value, first, acc[r][0]), acc[r][1] = dot_pairs(value, second, acc[r][1]);
            }
            x += count, b += kPanel;
        }
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) sum[r][part] = fma(acc[r][part], scales.scales[run][part], sum[r][part]);
        if (!sums) continue;
#pragma GCC unroll 6
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) sum[r][part] = fma(set1(sums[r]), scales.minimums[run][part], sum[r][part]);
        sums += count;
    }
#pragma GCC unroll 6
    for (int r = 0; r < MR; r++) store(c + r * kPanel, sum[r][0]), store(c + r * kPanel + W, sum[r][1]);
}

// Rows that are multiplied with codes in registers; more are multiplied with an operand in the nearest cache. Fewer where
// scales are applied to sums twice as often.
template <class Format>
constexpr int kRowsOfCodes = Format::Block::kRun == 32 ? 8 : 4;

// The panel's scales where it has been unpacked for many rows: behind its operand.
inline RunScales* unpacked_scales(const Linear& args, uint32_t* panel) { return (RunScales*)(panel + args.depth / 2 * kPanel); }
inline int64_t unpacked_panel_bytes(const Linear& args) {
    return args.depth / 2 * kPanel * 4 + (args.depth + kTaken - 1) / kTaken * int64_t(sizeof(RunScales));
}

// A stretch of a panel in either form.
template <class Format>
inline void operand_of_panel(const Linear& args, const RunFormat& format, int64_t panel, int64_t next, int64_t at,
                             uint32_t* out, RunScales& scales) {
    if (!args.packed) return operand_of_rows<Format>(args, format, panel, at, out, scales);
    operand_of_codes<typename Format::Kind>(format, block_panel(args, panel), block_panel(args, next), args.depth, at, out,
                                            scales);
}

template <class M>
inline void unpack_run_panel(const Linear& args, int64_t panel, int64_t next, uint32_t* out) {
    with_panels(args.packing, [&]<class Format>(const int8_t* table) {
        const RunFormat format = run_format<Format>(table, args.packed);
        RunScales* scales = unpacked_scales(args, out);
        for (int64_t at = 0; at < args.depth; at += kTaken)
            operand_of_panel<Format>(args, format, panel, next, at, out + at / 2 * kPanel, scales[at / kTaken]);
    });
}

// Rows [row, row + rows) times some panels: finish(panel) takes the sums in c [rows, kPanel] of each.
template <class M, class Finish>
inline void products_in_runs(const Linear& args, int64_t row, int64_t rows, int64_t panel, int64_t panel_stop,
                             int64_t next_panel, uint32_t* space, float* c, Finish finish) {
    const uint32_t* x = (const uint32_t*)args.packed_x + row * args.depth / 2;
    with_panels(args.packing, [&]<class Format>(const int8_t* table) {
        const RunFormat format = run_format<Format>(table, args.packed);
        const int64_t runs = args.depth / format.run;
        const float* sums = format.minimums ? sums_of_tile(args, args.packed_x, row) : nullptr;
        for (; panel < panel_stop; panel++) {
            const int64_t next = panel + 1 < panel_stop ? panel + 1 : next_panel;
            if (args.packed && !args.unpacked && rows <= kRowsOfCodes<Format>) {
                with_count<kRowsOfCodes<Format>>(int(rows), [&]<int MR>() {
                    product_of_codes<typename Format::Kind, Format::Block::kRun, Format::kMinimums, MR>(
                        format, block_panel(args, panel), block_panel(args, next), args.depth, x, sums, c);
                });
                finish(panel);
                continue;
            }
            memset(c, 0, rows * kPanel * sizeof *c);
            for (int64_t at = 0; at < args.depth; at += kTaken) {
                RunScales own;
                const RunScales* scales = &own;
                uint32_t* b = space;
                if (args.unpacked) {
                    b = (uint32_t*)((uint8_t*)args.w + panel * unpacked_panel_bytes(args));
                    scales = unpacked_scales(args, b) + at / kTaken;
                    b += at / 2 * kPanel;
                } else {
                    operand_of_panel<Format>(args, format, panel, next, at, b, own);
                }
                const int64_t here = smaller(kTaken, args.depth - at) / format.run;
                for (int64_t r = 0; r < rows; r += kRowTile) {
                    const int64_t count = smaller(kRowTile, rows - r);
                    const uint32_t* tile = x + r * args.depth / 2 + at / 2 * count;
                    const float* tile_sums = sums ? sums + r * runs + at / format.run * count : nullptr;
                    // In two halves of about as many rows: one or two would wait for their own sums.
                    const int64_t half = count > kRowsOfRuns ? (count + 1) / 2 : count;
                    for (int64_t i = 0; i < count; i += half)
                        with_count<kRowsOfRuns>(int(smaller(half, count - i)), [&]<int MR>() {
                            product_of_runs<MR>(tile + i, count, b, here, format.run / 2, *scales,
                                                tile_sums ? tile_sums + i : nullptr, c + (r + i) * kPanel);
                        });
                }
            }
            finish(panel);
        }
    });
}
#else  // named, but never called
inline int64_t run_sums(const Linear&) { return 0; }
inline void pack_run_sums(const Linear&, int64_t, int64_t, void*) {}
inline int64_t unpacked_panel_bytes(const Linear&) { return 0; }
template <class M>
void unpack_run_panel(const Linear&, int64_t, int64_t, uint32_t*) {}
template <class M, class Finish>
void products_in_runs(const Linear&, int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t*, float*, Finish) {}
#endif
