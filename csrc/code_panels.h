// What products share in which codes are multiplied and scales applied to their sums: of integers (linear_digits.h) and of FP8
// (linear_fp8.h).

// Scales and minimums of the runs of kTaken depths of a panel.
struct RunScales {
    vf scales[kTakenRuns][2], minimums[kTakenRuns][2];
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

// Where a format's panels have what.
struct CodeFormat {
    void (*scales)(const uint8_t* blocks, int64_t stride, int64_t count, RunScales& out);
    const int8_t* table;
    int64_t block_bytes, scale_bytes, low_bytes;
    int quads_of_block;  // a power of two, by its exponent
};

template <class Format>
constexpr CodeFormat code_format(const int8_t* table) {
    return {scales_of_runs<Format>, table,
            Format::kBlockBytes,    Format::kScaleBytes,
            Format::kLowBytes,      __builtin_ctz(Format::Block::kValues / kQuad)};
}

// Up to kTaken depths of a panel from `at` on, and their scales.
struct CodeStretch {
    struct Planes {
        const uint8_t *low, *high;
    };
    const uint8_t *blocks, *ahead;  // ahead: what is read after them
    int64_t depths, ahead_of_quad;

    CodeStretch(const CodeFormat& format, const uint8_t* panel, int64_t depth, int64_t at, const uint8_t* next,
                RunScales& scales) {
        depths = smaller(kTaken, depth - at);
        const int64_t count = depths / kQuad >> format.quads_of_block;
        blocks = panel + (at / kQuad >> format.quads_of_block) * format.block_bytes;
        ahead = at + kTaken < depth ? blocks + count * format.block_bytes : next;
        ahead_of_quad = format.block_bytes >> format.quads_of_block;
        format.scales(blocks, format.block_bytes, count, scales);
    }
    // The codes of quad i. As much of what comes after the stretch is fetched.
    template <class Kind>
    __attribute__((always_inline)) Planes quad(const CodeFormat& format, int64_t i) const {
        constexpr int64_t kLowBytes = kPanel * kQuad * Kind::kLow / 8, kHighBytes = kPanel * kQuad * Kind::kHigh / 8;
        const int64_t block = i >> format.quads_of_block, within = i - (block << format.quads_of_block);
        for (int64_t line = 0; line < ahead_of_quad; line += 64) __builtin_prefetch(ahead + i * ahead_of_quad + line);
        const uint8_t* low = blocks + block * format.block_bytes + format.scale_bytes;
        return {low + within * kLowBytes, low + format.low_bytes + within * kHighBytes};
    }
};

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

// A panel that has been unpacked for many rows: an operand, words of so many depths, and then the scales of each stretch.
inline RunScales* unpacked_scales(const Linear& args, int depths, uint32_t* panel) {
    return (RunScales*)(panel + args.depth / depths * kPanel);
}
inline int64_t unpacked_panel_bytes(const Linear& args, int depths) {
    return args.depth / depths * kPanel * 4 + (args.depth + kTaken - 1) / kTaken * int64_t(sizeof(RunScales));
}
