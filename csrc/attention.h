// Attention of some query rows over paged KV, a tile of keys at a time, with a running softmax (online: the maximum and the
// sum are carried along). Prefill, decode and shared prefixes are the same work with more or fewer rows: the queries of all
// heads that share a KV head are rows of one product, so that K and V are read once for all of them.
//
// Of 4-bit KV the levels themselves are multiplied. With k = scale * level + minimum for each key,
//   q.k = scale * (q.level) + minimum * sum(q),   sum p v = sum (p scale) level + sum (p minimum).

constexpr int kKeys = 128;     // of a tile, at most: many rows share the work that there is for each of them
constexpr int kFewKeys = 64;   // with few rows: the next tile's KV has to fit a cache beside this one's
constexpr int kFewRows = 16;
constexpr int kGroups = kMaxHeadDim / kGroup;
constexpr float kLowest = -1e30f;  // below every score, and exp(kLowest - kLowest) is a number

constexpr int kRowsAtOnce = 12;

// exp(score - highest), to the precision of the products it goes into.
template <class M>
inline vf exp_share(vf score, vf highest) {
#ifdef BATCHGEN_FAST_BF16
    if constexpr (M::kPair == 2) return exp_rough(sub(score, highest));
#endif
    return exp(sub(score, highest));
}

template <class M>
struct AttentionScratch {
    int64_t depth, columns;  // head_dim in units of 32 bits, and in values, rounded up to vectors
    uint32_t *a, *p, *k, *v;
    float *s, *t, *acc, *highest, *change;
    float* total;  // [rows, W], to be added up
    float *query_sum, *least;                        // [rows, groups]: sum of q, sum of p * minimum
    float *k_scale, *k_minimum, *v_scale, *v_minimum;  // [groups, keys]
    int tile;                                          // keys of a tile, and from row to row of k's, s' and p's
    float* expanded;                                   // [W, columns + slack]
    int64_t expanded_stride;

    AttentionScratch(const Attention& args, Carve& carve) {
        columns = round_up(args.kv.head_dim, W);
        depth = round_up(args.kv.head_dim, W * M::kPair) / M::kPair;
        a = carve.take<uint32_t>(kTileRows * depth);
        p = carve.take<uint32_t>(kRowsAtOnce * kKeys / M::kPair);
        k = carve.take<uint32_t>(depth * kKeys);
        v = carve.take<uint32_t>(kKeys / M::kPair * columns + 2 * W);
        s = carve.take<float>(kRowsAtOnce * kKeys);
        t = carve.take<float>(kRowsAtOnce * kKeys);
        acc = carve.take<float>(kTileRows * columns);
        highest = carve.take<float>(kTileRows);
        total = carve.take<float>(kTileRows * W);
        change = carve.take<float>(kRowsAtOnce + W);
        query_sum = carve.take<float>(kTileRows * kGroups);
        least = carve.take<float>(kTileRows * kGroups);
        k_scale = carve.take<float>(kGroups * kKeys);
        k_minimum = carve.take<float>(kGroups * kKeys);
        v_scale = carve.take<float>(kGroups * kKeys);
        v_minimum = carve.take<float>(kGroups * kKeys);
        expanded_stride = columns + 2 * W;
        expanded = carve.take<float>(W * expanded_stride);
    }
};

inline vi load_bytes_part(const uint8_t* p, int n) {
    if (n >= W) return load_bytes(p);
    uint8_t part[W] = {};
    memcpy(part, p, n);
    return load_bytes(part);
}

// The levels of a 4-bit row as floats. Writes up to 2 W values too many.
inline void expand_levels(const uint8_t* row, int n, float* out) {
    for (int start = 0; start < n; start += kGroup) {
        int size = int(smaller(kGroup, n - start)), half = (size + 1) / 2;
        for (int i = 0; i < half; i += W) store(out + start + i, low_nibbles(load_bytes_part(row + i, half - i)));
        for (int i = 0; i < half; i += W)
            store(out + start + half + i, high_nibbles(load_bytes_part(row + i, half - i)));
        row += half;
    }
}

// A row as floats, its levels where it is 4-bit.
template <class T>
inline void expand_row(const T* row, int n, float* out) {
    for (int i = 0; i < n; i += W) store(out + i, load_part(row + i, n - i));
}
struct Packed4 {
    uint8_t byte;
};
inline void expand_row(const Packed4* row, int n, float* out) { expand_levels(&row->byte, n, out); }

// Lines of memory that the next tile will need, asked for a few at a time: all at once they would stop the work that they
// are to overlap with.
struct Ahead {
    struct Run {
        const uint8_t *start, *stop;
    };
    Run runs[2 * kKeys * kTileRows];
    int count, at;
    int64_t lines, each;

    void clear() { count = at = 0, lines = each = 0; }
    void add(const uint8_t* start, int64_t bytes) {
        runs[count++] = {start, start + bytes};
        lines += (bytes + 63) / 64;
    }
    // In so many calls to come, the share of all that is left.
    void spread(int64_t calls) { each = (lines + calls - 1) / calls; }
    void fetch() {
        for (int64_t left = each; left > 0 && at < count;) {
            Run& run = runs[at];
            const uint8_t* stop = run.start + 64 * left < run.stop ? run.start + 64 * left : run.stop;
            const int64_t n = (stop - run.start + 63) / 64;
            for (const uint8_t* line = run.start; line < stop; line += 64) __builtin_prefetch(line);
            left -= n, lines -= n;
            run.start = stop;
            if (stop == run.stop) at++;
        }
    }
};

// W keys as columns of K's tile at `out` [depth, kKeys].
template <class T>
inline void pack_keys(Floats, const uint8_t* const* rows, int n, AttentionScratch<Floats>& s, uint32_t* out, Ahead& ahead) {
    for (int i = 0; i < W; i++) {
        expand_row((const T*)rows[i], n, s.expanded + i * s.expanded_stride);
        for (int64_t j = n; j < s.columns; j++) s.expanded[i * s.expanded_stride + j] = 0;
    }
    for (int64_t d = 0; d < s.depth; d += W) {
        vi r[W];
        for (int i = 0; i < W; i++) r[i] = load_int((const uint32_t*)s.expanded + i * s.expanded_stride + d);
        transpose(r);
        ahead.fetch();
        for (int i = 0; i < W; i++) store_int(out + (d + i) * s.tile, r[i]);
    }
}

// All keys of V's tile: a row for each, values in their order.
template <class T>
inline void pack_values(Floats, const uint8_t* const* rows, int keys, int n, AttentionScratch<Floats>& s, Ahead& ahead) {
    for (int i = 0; i < keys; i++) ahead.fetch(), expand_row((const T*)rows[i], n, (float*)s.v + i * s.columns);
}

// Which values of a row are the pair at each depth of a 4-bit K tile: four pairs from each 32 bits.
inline void level_order(const bf16* q, int n, bf16* out) {
    for (int start = 0; start < n; start += kGroup) {
        int half = int(smaller(kGroup, n - start)) / 2;
        for (int j = 0; j < half; j += 4)
            for (int i = 0; i < 4; i++) {
                const bf16* first = q + start + j + i / 2 + i % 2 * half;
                *out++ = first[0];
                *out++ = first[2];
            }
    }
}

#ifdef BATCHGEN_FAST_BF16
template <class T>
inline void pack_keys(Pairs, const uint8_t* const* rows, int n, AttentionScratch<Pairs>& s, uint32_t* out, Ahead& ahead) {
    constexpr bool levels = sizeof(T) == sizeof(Packed4);
    const int words = levels ? n / 8 : n / 2;  // of 32 bits, of a row
    for (int d = 0; d < words; d += W) {
        int count = int(smaller(W, words - d));
        vi r[W];
        for (int i = 0; i < W; i++) r[i] = load_int_part((const uint32_t*)rows[i] + d, count);
        transpose(r);
        ahead.fetch();
        if constexpr (levels) {  // in the order of `level_order`
            for (int i = 0; i < count; i++, out += 4 * s.tile) {
                store_int(out, nibbles_to_bf16(r[i]));
                store_int(out + s.tile, nibbles_to_bf16(shift_right_16<4>(r[i])));
                store_int(out + 2 * s.tile, nibbles_to_bf16(shift_right_16<8>(r[i])));
                store_int(out + 3 * s.tile, nibbles_to_bf16(shift_right_16<12>(r[i])));
            }
        } else {
            for (int i = 0; i < W; i++) store_int(out + (d + i) * s.tile, r[i]);
        }
    }
}

template <class T>
inline void pack_values(Pairs, const uint8_t* const* rows, int keys, int n, AttentionScratch<Pairs>& s, Ahead& ahead) {
    for (int i = 0; i < keys; i += 2) {
        ahead.fetch();
        uint32_t* out = s.v + i / 2 * s.columns;
        const uint8_t *a = rows[i], *b = rows[i + 1];
        if constexpr (sizeof(T) == sizeof(Packed4)) {
            for (int start = 0; start < n; start += kGroup) {
                int half = int(smaller(kGroup, n - start)) / 2;
                auto both = [&](int j) {
                    return pair_bytes(load_bytes_part(a + j, half - j), load_bytes_part(b + j, half - j));
                };
                if (half == kGroup / 2) {
                    for (int j = 0; j < kGroup / 2; j += W) {
                        const vi bytes = pair_bytes(load_bytes(a + j), load_bytes(b + j));
                        store_int(out + start + j, nibbles_to_bf16(bytes));
                        store_int(out + start + kGroup / 2 + j, nibbles_to_bf16(shift_right_16<4>(bytes)));
                    }
                } else {  // low halves first: they reach into the place of the high ones
                    for (int j = 0; j < half; j += W) store_int(out + start + j, nibbles_to_bf16(both(j)));
                    for (int j = 0; j < half; j += W)
                        store_int(out + start + half + j, nibbles_to_bf16(shift_right_16<4>(both(j))));
                }
                a += half, b += half;
            }
        } else {
            for (int j = 0; j < n; j += 2 * W) {
                int words = int(smaller(W, (n - j) / 2));
                vi first, second;
                interleave(load_int_part((const uint32_t*)(a + 2 * j), words),
                           load_int_part((const uint32_t*)(b + 2 * j), words), first, second);
                store_int(out + j, first);
                if (j + W < n) store_int(out + j + W, second);
            }
        }
    }
}
#endif

#ifdef BATCHGEN_FAST_BF16
// With few query rows, packing would be most of the work: products straight from the rows of K and V. Head sizes are
// multiples of 32 here.

constexpr int kFewest = 4;

// Scores of W keys for each row of a [rows, a_stride]: out [rows, out_stride].
template <int Chunks>
inline void few_scores(const uint32_t* a, int64_t a_stride, int rows, const uint8_t* const* keys, float* out,
                       int64_t out_stride) {
    for (int r = 0; r < rows; r++) {
        vi q[Chunks];
#pragma GCC unroll 8
        for (int c = 0; c < Chunks; c++) q[c] = load_int(a + r * a_stride + c * W);
        vf all[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            const uint32_t* key = (const uint32_t*)keys[i];
            all[i] = zero();
#pragma GCC unroll 8
            for (int c = 0; c < Chunks; c++) all[i] = dot_pairs(q[c], load_int(key + c * W), all[i]);
        }
        store(out + r * out_stride, sums(all));
    }
}

// acc [Rows, stride] * change + shares of `keys` rows of V, for Vectors vectors of columns from `column` on.
template <int Rows, int Vectors>
inline void few_values(const uint32_t* p, int64_t p_stride, const uint8_t* const* values, int keys, int column, float* acc,
                       int64_t stride, const float* change, Ahead& ahead) {
    vf all[Rows][Vectors];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) all[r][v] = mul(load(acc + r * stride + column + v * W), set1(change[r]));
    }
    for (int i = 0; i < keys; i += 2) {
        ahead.fetch();
        vi pairs[Vectors];
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; v += 2)
            interleave(load_int((const uint32_t*)(values[i] + 2 * (column + v * W))),
                       load_int((const uint32_t*)(values[i + 1] + 2 * (column + v * W))), pairs[v], pairs[v + 1]);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; r++) {
            const vi share = set1_int(p[r * p_stride + i / 2]);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; v++) all[r][v] = dot_pairs(share, pairs[v], all[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) store(acc + r * stride + column + v * W, all[r][v]);
    }
}
#endif

// Scales and minimums of `keys` rows (a multiple of W) as floats [groups, kKeys].
inline void read_tables(const uint8_t* const* rows, int keys, int n, float* scale, float* minimum) {
    const int start = nibble_bytes(n), groups = (n + kGroup - 1) / kGroup;
    for (int g = 0; g < groups; g++) {
        for (int i = 0; i < keys; i += W) {
            uint32_t words[W];
            for (int j = 0; j < W; j++) memcpy(words + j, rows[i + j] + start + 4 * g, 4);
            vf scales, minimums;
            split_f16(load_int(words), scales, minimums);
            store(scale + g * kKeys + i, scales);
            store(minimum + g * kKeys + i, minimums);
        }
    }
}

// Addresses of the first head's rows of K for keys [key, key + kKeys); from last_key on that of the last one.
inline void key_rows(const KV& kv, const AttentionItem& item, int key, const uint8_t** rows) {
    const uint8_t* row = nullptr;
    for (int i = 0; i < kKeys;) {
        int at = key + i;
        if (at >= item.last_key) {
            for (; i < kKeys; i++) rows[i] = row;
            return;
        }
        int offset = at % kv.block_size;
        int count = int(smaller(smaller(kv.block_size - offset, item.last_key - at), kKeys - i));
        row = kv.data + int64_t(item.blocks[at / kv.block_size]) * kv.block_bytes + item.first_head * kv.head_bytes +
              offset * kv.row_bytes;
        for (int j = 0; j < count; j++, row += kv.row_bytes) rows[i++] = row;
        row -= kv.row_bytes;
    }
}

template <class M, class T>
struct Attend {
    static constexpr bool kLevels = sizeof(T) == sizeof(Packed4);
    const Attention& args;
    AttentionScratch<M> s;
    const int n, group, groups;
    AttentionItem item;
    // The rows under way: [start, start + count) of each head, row r being head r % group of token r / group. What is
    // carried along is kept for all heads, one after the other.
    int start, count;
    int at, rows_now;  // of those the ones whose scores there are
    Ahead ahead;

    Attend(const Attention& args, Carve carve)
        : args(args), s(args, carve), n(args.kv.head_dim), group(args.heads / args.kv.kv_heads),
          groups((args.kv.head_dim + kGroup - 1) / kGroup) {}

    int first_token() const { return start / group; }
    int last_token() const { return (start + count - 1) / group; }

    void run(const AttentionItem& given, const AttentionItem* next) {
        item = given;
        for (int all = item.num_tokens * group, row = 0; row < all; row += kTileRows) {
            start = row, count = int(smaller(kTileRows, all - row));
            rows(row + kTileRows < all ? nullptr : next);
        }
    }

    void rows(const AttentionItem* next) {
        const int held = item.num_heads * count;
        load_queries();
        for (int r = 0; r < held; r++) s.highest[r] = kLowest;
        memset(s.total, 0, held * W * sizeof(float));
        memset(s.acc, 0, held * s.columns * sizeof(float));
        if (kLevels) memset(s.least, 0, held * kGroups * sizeof(float));
        // What the last row sees last, and the first row first.
        const int64_t last = smaller(item.last_key, int64_t(item.causal) + last_token() + 1);
        int64_t first = int64_t(item.causal) + first_token() - item.window + 1;
        first = first > item.first_key ? first : item.first_key;
        const uint8_t *now[kKeys], *coming[kKeys], *keys[kKeys], *values[kKeys];
        s.tile = count > kFewRows ? kKeys : kFewKeys;
        if (first < last) key_rows(args.kv, item, int(first), now);
        for (int64_t key = first; key < last; key += s.tile) {
            const int count_keys = int(smaller(s.tile, last - key)), whole = int(round_up(count_keys, W));
            ahead.clear();
            if (key + s.tile < last) {
                key_rows(args.kv, item, int(key) + s.tile, coming);
                look_ahead(coming, int(smaller(s.tile, last - key - s.tile)), item.num_heads);
            } else if (next && next->first_key < next->last_key) {
                key_rows(args.kv, *next, next->first_key, coming);
                look_ahead(coming, int(smaller(s.tile, next->last_key - next->first_key)), next->num_heads);
            }
            for (int h = 0; h < item.num_heads; h++) {
                for (int i = 0; i < whole; i++) {
                    keys[i] = now[i] + h * args.kv.head_bytes;
                    values[i] = keys[i] + args.kv.value_offset;
                }
                const int held_row = h * count, left = 2 * (item.num_heads - h);
                if (few()) {
                    at = 0, rows_now = count;
                    few_rows(held_row, int(key), count_keys, whole, keys, values, left);
                    continue;
                }
                const int transposes = int(whole / W * (s.depth / W)), steps = whole / M::kPair;
                ahead.spread(left * transposes);
                for (int i = 0; i < whole; i += W) pack_keys<T>(M(), keys + i, n, s, s.k + i, ahead);
                ahead.spread((left - 1) * steps);
                pack_values<T>(M(), values, whole, n, s, ahead);
                if (kLevels) {
                    read_tables(keys, whole, n, s.k_scale, s.k_minimum);
                    read_tables(values, whole, n, s.v_scale, s.v_minimum);
                }
                // Some rows at a time, so that their scores and shares stay in the nearest cache beside K and V.
                for (at = 0; at < count; at += kRowsAtOnce) {
                    rows_now = int(smaller(kRowsAtOnce, count - at));
                    const int64_t seen = int64_t(item.causal) + (start + at + rows_now - 1) / group + 1 - key;
                    if (seen <= 0) continue;
                    const int count_seen = int(smaller(count_keys, seen)), whole_seen = int(round_up(count_seen, W));
                    scores(held_row + at, whole_seen);
                    mask(int(key), count_seen, whole_seen);
                    softmax(held_row + at, whole_seen);
                    add_values(held_row + at, whole_seen);
                }
            }
            memcpy(now, coming, sizeof now);
        }
        for (int h = 0; h < item.num_heads; h++) {
            if (item.partial_row < 0) write(h);
            else write_partial(h);
        }
    }

    bool few() const {
#ifdef BATCHGEN_FAST_BF16
        return M::kPair == 2 && !kLevels && count <= kFewest && n % (2 * W) == 0;
#else
        return false;
#endif
    }

    // A tile of one head with few rows.
    void few_rows(int held_row, int key, int count_keys, int whole, const uint8_t* const* keys, const uint8_t* const* values,
                  int left) {
#ifdef BATCHGEN_FAST_BF16
        if constexpr (M::kPair == 2) {
            ahead.spread(left * (whole / W));
            const uint32_t* a = s.a + held_row * s.depth;
            for (int i = 0; i < whole; i += W) {
                ahead.fetch();
                with_count<kMaxHeadDim / 32>(n / 32, [&]<int Chunks>() {
                    few_scores<Chunks>(a, s.depth, count, keys + i, s.s + i, s.tile);
                });
            }
            mask(key, count_keys, whole);
            softmax(held_row, whole);
            ahead.spread((left - 1) * (whole / 2) * ((n + 63) / 64));
            for (int column = 0; column < n; column += 4 * W) {
                with_count<kFewest>(count, [&]<int Rows>() {
                    float* acc = s.acc + held_row * s.columns;
                    if (n - column >= 4 * W)
                        few_values<Rows, 4>(s.p, s.tile / 2, values, whole, column, acc, s.columns, s.change, ahead);
                    else
                        few_values<Rows, 2>(s.p, s.tile / 2, values, whole, column, acc, s.columns, s.change, ahead);
                });
            }
        }
#else
        (void)held_row, (void)key, (void)count_keys, (void)whole, (void)keys, (void)values, (void)left;
#endif
    }

    // The lines of a tile in the order in which they lie in memory: rows of a block are next to each other, and so are heads.
    void look_ahead(const uint8_t* const* rows, int count, int num_heads) {
        for (int i = 0, stop; i < count; i = stop) {
            for (stop = i + 1; stop < count && rows[stop] == rows[stop - 1] + args.kv.row_bytes;) stop++;
            const int64_t bytes = (stop - i) * args.kv.row_bytes;
            for (int half = 0; half < 2; half++) {
                const uint8_t* first = rows[i] + half * args.kv.value_offset;
                if (bytes == args.kv.head_bytes) ahead.add(first, num_heads * bytes);
                else
                    for (int h = 0; h < num_heads; h++) ahead.add(first + h * args.kv.head_bytes, bytes);
            }
        }
    }

    void load_queries() {
        with_type(args.type, [&](auto* type) {
            for (int h = 0; h < item.num_heads; h++)
                for (int r = 0; r < count; r++)
                    load_query((decltype(type))args.q + (item.first_token + (start + r) / group) * args.q_stride + head(h, r) * n,
                               h * count + r);
        });
    }
    int64_t head(int h, int r) const { return int64_t(item.first_head + h) * group + (start + r) % group; }

    template <class Q>
    void load_query(const Q* q, int r) {
        uint32_t* a = s.a + r * s.depth;
        if constexpr (M::kPair == 2) {
            memset(a, 0, s.depth * 4);
            if constexpr (sizeof(Q) == sizeof(bf16)) {
                if (kLevels) level_order((const bf16*)q, n, (bf16*)a);
                else memcpy(a, q, n * sizeof(Q));
            }
        } else {
            for (int64_t i = n; i < s.depth; i++) ((float*)a)[i] = 0;
            for (int i = 0; i < n; i += W) store_part((float*)a + i, load_part(q + i, n - i), n - i);
        }
        for (int g = 0; kLevels && g < groups; g++) {
            float all = 0;
            for (int i = g * kGroup; i < n && i < (g + 1) * kGroup; i += W)
                all += sum(load_part(q + i, int(smaller(n, (g + 1) * kGroup)) - i));
            s.query_sum[r * kGroups + g] = all;
        }
    }

    // Of one head's rows, held from held_row on.
    void scores(int held_row, int keys) {
        const uint32_t* a = s.a + held_row * s.depth;
        if constexpr (!kLevels) {
            product<M>(a, s.depth, rows_now, s.k, s.tile, keys, s.depth, s.s, s.tile, nullptr);
        } else {
            for (int g = 0; g < groups; g++) {
                const int from = g * kGroup / M::kPair, depth = int(smaller(kGroup, n - g * kGroup)) / M::kPair;
                product<M>(a + from, s.depth, rows_now, s.k + from * s.tile, s.tile, keys, depth, s.t, s.tile, nullptr);
                for (int r = 0; r < rows_now; r++) {
                    const vf all = set1(s.query_sum[(held_row + r) * kGroups + g]);
                    for (int i = 0; i < keys; i += W) {
                        vf score = mul(load(s.k_minimum + g * kKeys + i), all);
                        score = fma(load(s.k_scale + g * kKeys + i), load(s.t + r * s.tile + i), score);
                        float* out = s.s + r * s.tile + i;
                        store(out, g ? add(load(out), score) : score);
                    }
                }
            }
        }
    }

    // Keys that a row does not see.
    void mask(int key, int count_keys, int keys) {
        const int first = start + at, last = first + rows_now - 1;
        const bool whole = key + count_keys - 1 <= int64_t(item.causal) + first / group &&
                           key > int64_t(item.causal) + last / group - item.window;
        if (whole && count_keys == keys) return;
        for (int r = 0; r < rows_now; r++) {
            const int64_t own = int64_t(item.causal) + (first + r) / group;
            const int64_t stop = smaller(count_keys, own + 1 - key), from = own - item.window + 1 - key;
            float* row = s.s + r * s.tile;
            for (int64_t i = stop < 0 ? 0 : stop; i < keys; i++) row[i] = -__builtin_inff();
            for (int64_t i = 0; i < smaller(from, keys); i++) row[i] = -__builtin_inff();
        }
    }

    void softmax(int held_row, int keys) {
        float *highest = s.highest + held_row, *totals = s.total + held_row * W;
        for (int r = 0; r < rows_now; r++) {
            vf most = set1(highest[r]);
            for (int i = 0; i < keys; i += W) most = max(load(s.s + r * s.tile + i), most);
            const float now = largest(most);
            s.change[r] = highest[r] - now;
            highest[r] = now;
        }
        for (int r = 0; r < rows_now; r += W) store(s.change + r, exp(load(s.change + r)));
        for (int r = 0; r < rows_now; r++) {
            float* row = s.s + r * s.tile;
            typename M::Value* p = (typename M::Value*)s.p + r * s.tile;
            const vf now = set1(highest[r]);
            vf all = mul(load(totals + r * W), set1(s.change[r]));
            for (int i = 0; i < keys; i += W) {
                vf share = exp_share<M>(load(row + i), now);
                all = add(all, share);
                if (kLevels) store(row + i, share);
                else store(p + i, share);
            }
            store(totals + r * W, all);
        }
    }

    void add_values(int held_row, int keys) {
        const int64_t stride = s.tile / M::kPair, depth = keys / M::kPair;
        float* acc = s.acc + held_row * s.columns;
        if constexpr (!kLevels) {
            product<M>(s.p, stride, rows_now, s.v, s.columns, s.columns, depth, acc, s.columns, s.change);
        } else {
            for (int g = 0; g < groups; g++) {
                for (int r = 0; r < rows_now; r++) {
                    typename M::Value* p = (typename M::Value*)s.p + r * s.tile;
                    vf all = zero();
                    for (int i = 0; i < keys; i += W) {
                        vf share = load(s.s + r * s.tile + i);
                        all = fma(share, load(s.v_minimum + g * kKeys + i), all);
                        store(p + i, mul(share, load(s.v_scale + g * kKeys + i)));
                    }
                    float* least = s.least + (held_row + r) * kGroups + g;
                    *least = *least * s.change[r] + sum(all);
                }
                const int64_t from = g * kGroup, columns = round_up(smaller(kGroup, n - from), W);
                product<M>(s.p, stride, rows_now, s.v + from, s.columns, columns, depth, acc + from, s.columns, s.change);
            }
        }
    }

    vf result(int held_row, int column) const {
        vf x = load(s.acc + held_row * s.columns + column);
        return kLevels ? add(x, set1(s.least[held_row * kGroups + column / kGroup])) : x;
    }

    void write(int h) {
        with_type(args.type, [&](auto* type) {
            for (int r = 0; r < count; r++) {
                auto* out = (decltype(type))args.out + (item.first_token + (start + r) / group) * args.out_stride + head(h, r) * n;
                const int held_row = h * count + r;
                // A row that sees nothing is zero, not 0 / 0.
                const float total = sum(load(s.total + held_row * W));
                const vf scale = set1(total > 0 ? 1 / total : 0);
                for (int i = 0; i < n; i += W) store_part(out + i, mul(result(held_row, i), scale), n - i);
            }
        });
    }

    void write_partial(int h) {
        for (int r = 0; r < count; r++) {
            float* out = args.partial + (item.partial_row + h * item.num_tokens * group + start + r) * (n + 2);
            const int held_row = h * count + r;
            for (int i = 0; i < n; i += W) store_part(out + i, result(held_row, i), n - i);
            out[n] = s.highest[held_row], out[n + 1] = sum(load(s.total + held_row * W));
        }
    }
};

// Calls f<M, T>() for products and KV of these arguments.
template <class F>
inline auto with_attention(const Attention& args, F f) {
#ifdef BATCHGEN_FAST_BF16
    if (args.type == Type::BF16 && args.kv.type == Type::BF16) return f.template operator()<Pairs, bf16>();
    if (args.type == Type::BF16 && args.kv.type == Type::Int4) return f.template operator()<Pairs, Packed4>();
#endif
    switch (args.kv.type) {
        case Type::BF16: return f.template operator()<Floats, bf16>();
        case Type::F16: return f.template operator()<Floats, f16>();
        case Type::Int4: return f.template operator()<Floats, Packed4>();
        default: return f.template operator()<Floats, float>();
    }
}

inline int64_t attention_scratch(const Attention& args) {
    return with_attention(args, [&]<class M, class T>() {
        Carve carve{nullptr};
        AttentionScratch<M> scratch(args, carve);
        return carve.used;
    });
}

// Items one after the other: while one ends, the next one's KV comes in.
inline void attend(const Attention& args, const AttentionItem* items, int64_t count, void* scratch) {
    with_attention(args, [&]<class M, class T>() {
        Attend<M, T> attend(args, Carve{(uint8_t*)scratch});
        for (int64_t i = 0; i < count; i++) attend.run(items[i], i + 1 < count ? items + i + 1 : nullptr);
    });
}

// Puts the parts of one row together, in their order.
inline void merge(const Attention& args, const Merge& m, const int64_t* rows) {
    const int n = args.kv.head_dim;
    auto part = [&](int i) { return args.partial + rows[m.first + i] * (n + 2); };
    float highest = kLowest, total = 0;
    for (int i = 0; i < m.count; i++) highest = part(i)[n] > highest ? part(i)[n] : highest;
    float acc[kMaxHeadDim + W] = {};
    for (int i = 0; i < m.count; i++) {
        float scale[W];
        store(scale, exp(set1(part(i)[n] - highest)));
        total += part(i)[n + 1] * scale[0];
        for (int j = 0; j < n; j += W)
            store(acc + j, fma(load_part(part(i) + j, n - j), set1(scale[0]), load(acc + j)));
    }
    with_type(args.type, [&](auto* type) {
        auto* out = (decltype(type))args.out + m.token * args.out_stride + int64_t(m.head) * n;
        const vf scale = set1(total > 0 ? 1 / total : 0);
        for (int j = 0; j < n; j += W) store_part(out + j, mul(load(acc + j), scale), n - j);
    });
}
