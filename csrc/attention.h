// Attention of some query rows over paged KV, a tile of keys at a time, with a running softmax (online: the maximum and the
// sum are carried along). Prefill, decode and shared prefixes are the same work with more or fewer rows: the queries of all
// heads that share a KV head are rows of one product, so that K and V are read once for all of them.
//
// Of 4-bit KV the levels themselves are multiplied. With k = scale * level + minimum for each key,
//   q.k = scale * (q.level) + minimum * sum(q),   sum p v = sum (p scale) level + sum (p minimum).

constexpr int kRows = 6 * kRowTile > 48 ? 6 * kRowTile : 48;
constexpr int kKeys = 64;
constexpr int kGroups = kMaxHeadDim / kGroup;
constexpr float kLowest = -1e30f;  // below every score, and exp(kLowest - kLowest) is a number

template <class M>
struct AttentionScratch {
    int64_t depth, columns;  // head_dim in units of 32 bits, and in values, rounded up to vectors
    uint32_t *a, *p, *k, *v;
    float *s, *t, *acc, *highest, *total, *change;
    float *query_sum, *least;                        // [rows, groups]: sum of q, sum of p * minimum
    float *k_scale, *k_minimum, *v_scale, *v_minimum;  // [groups, keys]
    float* expanded;                                   // [W, columns + slack]
    int64_t expanded_stride;

    AttentionScratch(const Attention& args, Carve& carve) {
        columns = round_up(args.kv.head_dim, W);
        depth = round_up(args.kv.head_dim, W * M::kPair) / M::kPair;
        a = carve.take<uint32_t>(kRows * depth);
        p = carve.take<uint32_t>(kRows * kKeys / M::kPair);
        k = carve.take<uint32_t>(depth * kKeys);
        v = carve.take<uint32_t>(kKeys / M::kPair * columns + 2 * W);
        s = carve.take<float>(kRows * kKeys);
        t = carve.take<float>(kRows * kKeys);
        acc = carve.take<float>(kRows * columns);
        highest = carve.take<float>(kRows);
        total = carve.take<float>(kRows);
        change = carve.take<float>(kRows);
        query_sum = carve.take<float>(kRows * kGroups);
        least = carve.take<float>(kRows * kGroups);
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

// W keys as columns of K's tile at `out` [depth, kKeys].
template <class T>
inline void pack_keys(Floats, const uint8_t* const* rows, int n, AttentionScratch<Floats>& s, uint32_t* out) {
    for (int i = 0; i < W; i++) {
        expand_row((const T*)rows[i], n, s.expanded + i * s.expanded_stride);
        for (int64_t j = n; j < s.columns; j++) s.expanded[i * s.expanded_stride + j] = 0;
    }
    for (int64_t d = 0; d < s.depth; d += W) {
        vi r[W];
        for (int i = 0; i < W; i++) r[i] = load_int((const uint32_t*)s.expanded + i * s.expanded_stride + d);
        transpose(r);
        for (int i = 0; i < W; i++) store_int(out + (d + i) * kKeys, r[i]);
    }
}

// All keys of V's tile: a row for each, values in their order.
template <class T>
inline void pack_values(Floats, const uint8_t* const* rows, int keys, int n, AttentionScratch<Floats>& s) {
    for (int i = 0; i < keys; i++) expand_row((const T*)rows[i], n, (float*)s.v + i * s.columns);
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
inline void pack_keys(Pairs, const uint8_t* const* rows, int n, AttentionScratch<Pairs>&, uint32_t* out) {
    constexpr bool levels = sizeof(T) == sizeof(Packed4);
    const int words = levels ? n / 8 : n / 2;  // of 32 bits, of a row
    for (int d = 0; d < words; d += W) {
        int count = int(smaller(W, words - d));
        vi r[W];
        for (int i = 0; i < W; i++) r[i] = load_int_part((const uint32_t*)rows[i] + d, count);
        transpose(r);
        if constexpr (levels) {  // in the order of `level_order`
            for (int i = 0; i < count; i++, out += 4 * kKeys) {
                store_int(out, nibbles_to_bf16(r[i]));
                store_int(out + kKeys, nibbles_to_bf16(shift_right_16<4>(r[i])));
                store_int(out + 2 * kKeys, nibbles_to_bf16(shift_right_16<8>(r[i])));
                store_int(out + 3 * kKeys, nibbles_to_bf16(shift_right_16<12>(r[i])));
            }
        } else {
            for (int i = 0; i < W; i++) store_int(out + (d + i) * kKeys, r[i]);
        }
    }
}

template <class T>
inline void pack_values(Pairs, const uint8_t* const* rows, int keys, int n, AttentionScratch<Pairs>& s) {
    for (int i = 0; i < keys; i += 2) {
        uint32_t* out = s.v + i / 2 * s.columns;
        const uint8_t *a = rows[i], *b = rows[i + 1];
        if constexpr (sizeof(T) == sizeof(Packed4)) {
            for (int start = 0; start < n; start += kGroup) {
                int half = int(smaller(kGroup, n - start)) / 2;
                auto both = [&](int j) {
                    return pair_bytes(load_bytes_part(a + j, half - j), load_bytes_part(b + j, half - j));
                };
                // Low halves first: where a group is short they reach into the place of the high ones.
                for (int j = 0; j < half; j += W) store_int(out + start + j, nibbles_to_bf16(both(j)));
                for (int j = 0; j < half; j += W)
                    store_int(out + start + half + j, nibbles_to_bf16(shift_right_16<4>(both(j))));
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

// Scales and minimums of `keys` rows (a multiple of W) as floats [groups, kKeys].
inline void read_tables(const uint8_t* const* rows, int keys, int n, float* scale, float* minimum) {
    const int start = nibble_bytes(n), groups = (n + kGroup - 1) / kGroup;
    for (int g = 0; g < groups; g++) {
        f16 scales[kKeys], minimums[kKeys];
        for (int i = 0; i < keys; i++) {
            memcpy(&scales[i], rows[i] + start + 4 * g, 2);
            memcpy(&minimums[i], rows[i] + start + 4 * g + 2, 2);
        }
        for (int i = 0; i < keys; i += W) {
            store(scale + g * kKeys + i, load(scales + i));
            store(minimum + g * kKeys + i, load(minimums + i));
        }
    }
}

// Addresses of K's rows of keys [key, key + kKeys); from `last` on that of the last one.
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
        row = kv.data + int64_t(item.blocks[at / kv.block_size]) * kv.block_bytes + item.kv_head * kv.head_bytes +
              offset * kv.row_bytes;
        for (int j = 0; j < count; j++, row += kv.row_bytes) rows[i++] = row;
        row -= kv.row_bytes;
    }
}

template <class M, class T>
struct Attend {
    static constexpr bool kLevels = sizeof(T) == sizeof(Packed4);
    const Attention& args;
    const AttentionItem& item;
    AttentionScratch<M> s;
    const int n, group, groups;

    Attend(const Attention& args, const AttentionItem& item, Carve carve)
        : args(args), item(item), s(args, carve), n(args.kv.head_dim), group(args.heads / args.kv.kv_heads),
          groups((args.kv.head_dim + kGroup - 1) / kGroup) {}

    void run() {
        for (int row = 0, all = item.num_tokens * group; row < all; row += kRows) rows(row, int(smaller(kRows, all - row)));
    }

    // Rows [start, start + count): row r is head r % group of token r / group.
    void rows(int start, int count) {
        load_queries(start, count);
        for (int r = 0; r < count; r++) s.highest[r] = kLowest, s.total[r] = 0;
        memset(s.acc, 0, count * s.columns * sizeof(float));
        if (kLevels) memset(s.least, 0, count * kGroups * sizeof(float));
        const int first_token = start / group, last_token = (start + count - 1) / group;
        // What the last row sees last, and the first row first.
        const int64_t last = smaller(item.last_key, int64_t(item.causal) + last_token + 1);
        int64_t first = int64_t(item.causal) + first_token - item.window + 1;
        first = first > item.first_key ? first : item.first_key;
        const uint8_t *now[kKeys], *next[kKeys], *values[kKeys];
        if (first < last) key_rows(args.kv, item, int(first), now);
        for (int64_t key = first; key < last; key += kKeys) {
            const int count_keys = int(smaller(kKeys, last - key)), keys = int(round_up(count_keys, W));
            const bool more = key + kKeys < last;
            if (more) key_rows(args.kv, item, int(key) + kKeys, next);
            for (int i = 0; i < keys; i++) values[i] = now[i] + args.kv.value_offset;
            for (int i = 0; i < keys; i += W) {
                if (more) fetch(next + i, 0);
                pack_keys<T>(M(), now + i, n, s, s.k + i);
            }
            scores(count, keys, now);
            mask(start, count, int(key), count_keys, keys);
            softmax(count, keys);
            for (int i = 0; more && i < keys; i += W) fetch(next + i, args.kv.value_offset);
            pack_values<T>(M(), values, keys, n, s);
            add_values(count, keys, values);
            if (more) memcpy(now, next, sizeof now);
        }
        if (item.partial_row < 0) write(start, count);
        else write_partial(start, count);
    }

    void fetch(const uint8_t** rows, int64_t offset) {
        for (int i = 0; i < W; i++)
            for (int64_t b = 0; b < args.kv.row_bytes; b += 64) __builtin_prefetch(rows[i] + offset + b);
    }

    void load_queries(int start, int count) {
        with_type(args.type, [&](auto* type) {
            for (int r = 0; r < count; r++) {
                const int64_t token = item.first_token + (start + r) / group, head = item.kv_head * group + (start + r) % group;
                load_query((decltype(type))args.q + token * args.q_stride + head * n, r);
            }
        });
    }
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

    void scores(int count, int keys, const uint8_t* const* rows) {
        if constexpr (!kLevels) {
            product<M>(s.a, s.depth, count, s.k, kKeys, keys, s.depth, s.s, kKeys, nullptr);
        } else {
            read_tables(rows, keys, n, s.k_scale, s.k_minimum);
            for (int g = 0; g < groups; g++) {
                const int from = g * kGroup / M::kPair, depth = int(smaller(kGroup, n - g * kGroup)) / M::kPair;
                product<M>(s.a + from, s.depth, count, s.k + from * kKeys, kKeys, keys, depth, s.t, kKeys, nullptr);
                for (int r = 0; r < count; r++) {
                    const vf all = set1(s.query_sum[r * kGroups + g]);
                    for (int i = 0; i < keys; i += W) {
                        vf score = mul(load(s.k_minimum + g * kKeys + i), all);
                        score = fma(load(s.k_scale + g * kKeys + i), load(s.t + r * kKeys + i), score);
                        float* out = s.s + r * kKeys + i;
                        store(out, g ? add(load(out), score) : score);
                    }
                }
            }
        }
    }

    // Keys that a row does not see.
    void mask(int start, int count, int key, int count_keys, int keys) {
        const int first_token = start / group, last_token = (start + count - 1) / group;
        const bool whole = key + count_keys - 1 <= int64_t(item.causal) + first_token &&
                           key > int64_t(item.causal) + last_token - item.window;
        if (whole && count_keys == keys) return;
        for (int r = 0; r < count; r++) {
            const int64_t own = int64_t(item.causal) + (start + r) / group;
            const int64_t stop = smaller(count_keys, own + 1 - key), from = own - item.window + 1 - key;
            float* row = s.s + r * kKeys;
            for (int64_t i = stop < 0 ? 0 : stop; i < keys; i++) row[i] = -__builtin_inff();
            for (int64_t i = 0; i < smaller(from, keys); i++) row[i] = -__builtin_inff();
        }
    }

    void softmax(int count, int keys) {
        for (int r = 0; r < count; r++) {
            float* row = s.s + r * kKeys;
            vf highest = set1(s.highest[r]);
            for (int i = 0; i < keys; i += W) highest = max(load(row + i), highest);
            const float now = largest(highest);
            float scale[W];
            store(scale, exp(set1(s.highest[r] - now)));
            s.change[r] = scale[0], s.highest[r] = now;
            vf all = zero();
            typename M::Value* p = (typename M::Value*)s.p + r * kKeys;
            for (int i = 0; i < keys; i += W) {
                vf share = exp(sub(load(row + i), set1(now)));
                all = add(all, share);
                if (kLevels) store(row + i, share);
                else store(p + i, share);
            }
            s.total[r] = s.total[r] * s.change[r] + sum(all);
        }
    }

    void add_values(int count, int keys, const uint8_t* const* values) {
        const int64_t stride = kKeys / M::kPair, depth = keys / M::kPair;
        if constexpr (!kLevels) {
            product<M>(s.p, stride, count, s.v, s.columns, s.columns, depth, s.acc, s.columns, s.change);
        } else {
            read_tables(values, keys, n, s.v_scale, s.v_minimum);
            for (int g = 0; g < groups; g++) {
                for (int r = 0; r < count; r++) {
                    typename M::Value* p = (typename M::Value*)s.p + r * kKeys;
                    vf all = zero();
                    for (int i = 0; i < keys; i += W) {
                        vf share = load(s.s + r * kKeys + i);
                        all = fma(share, load(s.v_minimum + g * kKeys + i), all);
                        store(p + i, mul(share, load(s.v_scale + g * kKeys + i)));
                    }
                    float* least = s.least + r * kGroups + g;
                    *least = *least * s.change[r] + sum(all);
                }
                const int64_t from = g * kGroup, columns = round_up(smaller(kGroup, n - from), W);
                product<M>(s.p, stride, count, s.v + from, s.columns, columns, depth, s.acc + from, s.columns, s.change);
            }
        }
    }

    float least(int r, int column) const { return kLevels ? s.least[r * kGroups + column / kGroup] : 0.0f; }

    void write(int start, int count) {
        with_type(args.type, [&](auto* type) {
            for (int r = 0; r < count; r++) {
                auto* out = (decltype(type))args.out + (item.first_token + (start + r) / group) * args.out_stride +
                            int64_t(item.kv_head * group + (start + r) % group) * n;
                // A row that sees nothing is zero, not 0 / 0.
                const vf scale = set1(s.total[r] > 0 ? 1 / s.total[r] : 0);
                for (int i = 0; i < n; i += W)
                    store_part(out + i, mul(add(load(s.acc + r * s.columns + i), set1(least(r, i))), scale), n - i);
            }
        });
    }

    void write_partial(int start, int count) {
        for (int r = 0; r < count; r++) {
            float* out = args.partial + (item.partial_row + start + r) * (n + 2);
            for (int i = 0; i < n; i += W)
                store_part(out + i, add(load(s.acc + r * s.columns + i), set1(least(r, i))), n - i);
            out[n] = s.highest[r], out[n + 1] = s.total[r];
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

inline void attend(const Attention& args, const AttentionItem& item, void* scratch) {
    with_attention(args, [&]<class M, class T>() { Attend<M, T>(args, item, Carve{(uint8_t*)scratch}).run(); });
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
