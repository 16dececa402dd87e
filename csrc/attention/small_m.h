// Attention of few query rows, where packing K and V would be most of the work.

// Products in floats from the rows of K and V. Rows are whole vectors of 32 bits here. Sums are made in the order of
// `product` over packed tiles: results are the same, bit for bit.

// W keys as columns of 32-bit words: out [words, stride].
__attribute__((noinline)) void transpose_keys(const uint8_t* const* keys, int words, uint32_t* out, int64_t stride,
                                              Ahead& ahead) {
    for (int d = 0; d < words; d += W) {
        vi r[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) r[i] = load_int((const uint32_t*)keys[i] + d);
        transpose(r);
        ahead.fetch();
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store_int(out + (d + i) * stride, r[i]);
    }
}

// The values in each 32-bit word.
template <class T>
constexpr int kInWord = 4 / sizeof(T);
inline vf value_in_word(const float*, vi words, int) { return as_float(words); }
inline vf value_in_word(const bf16*, vi words, int i) {
    vf low, high;
    split_bf16(words, low, high);
    return i ? high : low;
}
inline vf value_in_word(const f16*, vi words, int i) {
    vf low, high;
    split_f16(words, low, high);
    return i ? high : low;
}

// Rows at once, and vectors of each whose sums are in registers: enough under way to hide a sum's latency.
constexpr int kFewAtOnce = kRowTile == 12 ? kFewest : 6;
constexpr int few_vectors(int rows) {
    const int fit = 2 * kRowTile / rows;
    return fit > 8 ? 8 : fit > 4 ? 4 : 2;
}

// Calls f<Rows>(r) for rows r.. of [0, count), as many each time but for one.
template <class F>
inline void each_few(int count, F f) {
    const int pieces = (count + kFewAtOnce - 1) / kFewAtOnce;
    for (int i = 0; i < pieces; i++) {
        const int r = i * count / pieces, stop = (i + 1) * count / pieces;
        with_count<kFewAtOnce>(stop - r, [&]<int Rows>() { f.template operator()<Rows>(r); });
    }
}

// Calls f<Step>(i) over [0, count), and f<1>(i) for what is left.
template <int Step, class F>
inline void in_steps(int count, F f) {
    int i = 0;
    for (; i + Step <= count; i += Step) f.template operator()<Step>(i);
    for (; i < count; i++) f.template operator()<1>(i);
}

// Scores of Vectors * W keys for Rows queries [Rows, a_stride] of `words` words: out [Rows, out_stride].
template <class T, int Rows, int Vectors>
__attribute__((noinline)) void transposed_scores(const float* a, int64_t a_stride, const uint32_t* keys, int64_t stride,
                                                 int words, float* out, int64_t out_stride) {
    vf all[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) all[r][v] = zero();
    }
    for (int d = 0; d < words; d++, keys += stride, a += kInWord<T>) {
#pragma GCC unroll 2
        for (int i = 0; i < kInWord<T>; i++) {
            vf values[Vectors];
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; v++) values[v] = value_in_word((const T*)nullptr, load_int(keys + v * W), i);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++) {
                const vf value = set1(a[r * a_stride + i]);
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; v++) all[r][v] = fma(value, values[v], all[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) store(out + r * out_stride + v * W, all[r][v]);
    }
}

constexpr int kFetchKeys = 4;  // rows of V between two fetches
static_assert(W % kFetchKeys == 0);

// acc [Rows, stride] * change + softmax weights [Rows, p_stride] of `keys` rows of V, for Vectors vectors of columns.
template <class T, int Rows, int Vectors>
__attribute__((noinline)) void row_values(const float* p, int64_t p_stride, const uint8_t* const* values, int keys,
                                          int column, float* acc, int64_t stride, const float* change, Ahead& ahead) {
    vf all[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) all[r][v] = mul(load(acc + r * stride + column + v * W), set1(change[r]));
    }
    for (int first = 0; first < keys; first += kFetchKeys) {
        ahead.fetch();
#pragma GCC unroll 4
        for (int i = first; i < first + kFetchKeys; i++) {
            vf row[Vectors];
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; v++) row[v] = load((const T*)values[i] + column + v * W);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++) {
                const vf weight = set1(p[r * p_stride + i]);
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; v++) all[r][v] = fma(weight, row[v], all[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) store(acc + r * stride + column + v * W, all[r][v]);
    }
}

#ifdef BATCHGEN_FAST_BF16
// Products of pairs straight from the rows of K and V. Head sizes are multiples of 32 here.

// Keys between two fetches: the less there is to do for each, the more often, as what is asked for at once may be too
// much. Scores are made a row at a time, so that many rows fetch more often anyway.
constexpr int kFetchOfOne = 2, kFetchOfMany = 8;
constexpr int values_fetch(int rows) { return rows > 4 ? kFetchOfMany : rows > 2 ? 4 : kFetchOfOne; }

// Scores of W keys, rows one after the other, for each row of a [rows, a_stride]: out [rows, out_stride]. next: how far
// behind them the rows lie that are read next, which are asked for once more: what memory is too busy for is not
// fetched the first time.
template <int Chunks>
__attribute__((noinline)) void few_scores(const uint32_t* a, int64_t a_stride, int rows, const uint8_t* keys,
                                          int64_t next, float* out, int64_t out_stride, Ahead& ahead) {
    const auto row = [&]<bool First, int FetchAt>(int r) __attribute__((always_inline)) {
        vi q[Chunks];
#pragma GCC unroll 8
        for (int c = 0; c < Chunks; c++) q[c] = load_int(a + r * a_stride + c * W);
        vf all[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (i % FetchAt == 0) ahead.fetch();
            const uint32_t* key = (const uint32_t*)keys + i * Chunks * W;
            all[i] = zero();
#pragma GCC unroll 8
            for (int c = 0; c < Chunks; c++) {
                if (First) __builtin_prefetch((const uint8_t*)(key + c * W) + next);
                all[i] = dot_pairs(q[c], load_int(key + c * W), all[i]);
            }
        }
        store(out + r * out_stride, sums(all));
    };
    if (rows == 1) return row.template operator()<true, kFetchOfOne>(0);
    row.template operator()<true, kFetchOfMany>(0);
    for (int r = 1; r < rows; r++) row.template operator()<false, kFetchOfMany>(r);
}

// acc [Rows, stride] * change + softmax weights of `keys` rows of V, `offset` bytes after `values`, for Vectors vectors
// of columns from `column` on. next: as in `few_scores`.
template <int Rows, int Vectors>
__attribute__((noinline)) void few_values(const uint32_t* p, int64_t p_stride, const uint8_t* const* values,
                                          int64_t offset, int64_t next, int keys, int column, float* acc,
                                          int64_t stride, const float* change, Ahead& ahead) {
    vf all[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) all[r][v] = mul(load(acc + r * stride + column + v * W), set1(change[r]));
    }
    constexpr int kFetchAt = values_fetch(Rows);
    for (int first = 0; first < keys; first += kFetchAt) {
        ahead.fetch();
#pragma GCC unroll 8
        for (int i = first; i < first + kFetchAt; i += 2) {
            const uint8_t *even = values[i] + offset + 2 * column, *odd = values[i + 1] + offset + 2 * column;
            vi pairs[Vectors];
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; v += 2) {
                __builtin_prefetch(even + 2 * v * W + next);
                __builtin_prefetch(odd + 2 * v * W + next);
                interleave(load_int((const uint32_t*)(even + 2 * v * W)), load_int((const uint32_t*)(odd + 2 * v * W)),
                           pairs[v], pairs[v + 1]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++) {
                const vi weight = set1_int(p[r * p_stride + i / 2]);
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; v++) all[r][v] = dot_pairs(weight, pairs[v], all[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) store(acc + r * stride + column + v * W, all[r][v]);
    }
}

// Packed KV. Its codes, the quantized values, are bytes here, and there is an instruction that adds up four products of
// bytes. The other factor, a query or a weight, is split for it into two bytes, x ~ step (256 high + low): closer than
// bf16 is. Head sizes are multiples of kGroup. The larger functions are not inlined: in one function for all, vectors
// do not keep their registers.

constexpr float kFixedMost = 127 * 256;  // the largest number in fixed point

// Integers of W numbers. Those of what is no number, as of 0 / 0, are 0; where that is to be seen, the step is no
// number either.
inline void store_fixed(vf x, int8_t* high, int8_t* low) {
    const vi whole = to_int(x);
    store_low_bytes(low, whole);  // as a number of -128 .. 127, so that the high part may be one more
    store_low_bytes(high, shift_right<8>(add_int(whole, set1_int(128))));
}
inline vi join_fixed(vi high, vi low) { return add_int(shift_left<8>(high), low); }

// A query of n values: out [kFixedRow]. Returns the step.
template <class Q>
inline float fixed_query(const Q* q, int n, int8_t* out) {
    vf most = zero();
    for (int i = 0; i < n; i += W) most = max(max(load(q + i), sub(zero(), load(q + i))), most);
    const float highest = largest(most);
    const vf scale = set1(kFixedMost / highest);
    for (int i = 0; i < n; i += W) store_fixed(mul(load(q + i), scale), out + i, out + kMaxHeadDim + i);
    return highest / kFixedMost;
}

// The codes of 2 W keys, a row of words for each four of K: out [n / 4, kFewKeys].
__attribute__((noinline)) void transpose_codes(const uint8_t* const* keys, int n, uint32_t* out, Ahead& ahead) {
    ahead.fetch();
    for (int d = 0; d < n / 4; d += W, out += W * kFewKeys) {
        for (int half = 0; half < 2 * W; half += W) {
            vi r[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) r[i] = load_int((const uint32_t*)keys[half + i] + d);
            transpose(r);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store_int(out + half + i * kFewKeys, r[i]);
        }
    }
}

// Scores of Vectors * W keys for each of Rows queries.
template <int Rows, int Vectors>
__attribute__((noinline)) void code_scores(const int8_t* q, const float* steps, const float* query_sum, int groups,
                                           const uint32_t* words, const float* scale, const float* minimum,
                                           float* out) {
    for (int g = 0; g < groups; g++, q += kGroup, scale += kKeys, minimum += kKeys) {
        vi high[Rows][Vectors], low[Rows][Vectors];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; v++) high[r][v] = low[r][v] = set1_int(0);
        }
        for (int d = 0; d < kGroup; d += 4, words += kFewKeys) {
            vi codes[Vectors];
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; v++) codes[v] = load_int(words + v * W);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++) {
                const int8_t* row = q + r * kFixedRow + d;
#pragma GCC unroll 2
                for (int v = 0; v < Vectors; v++) {
                    high[r][v] = dot_bytes(codes[v], set1_bytes(row), high[r][v]);
                    low[r][v] = dot_bytes(codes[v], set1_bytes(row + kMaxHeadDim), low[r][v]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
            const vf step = set1(steps[r]), sum = set1(query_sum[r * kGroups + g]);
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; v++) {
                float* to = out + r * kFewKeys + v * W;
                const vf score = mul(sum, load(minimum + v * W));
                const vf products = mul(to_float(join_fixed(high[r][v], low[r][v])), step);
                store(to, fma(products, load(scale + v * W), g ? add(load(to), score) : score));
            }
        }
    }
}

// Bytes of four rows of V together, in their order: out [keys / 4, bytes] of 32 bits.
__attribute__((noinline)) void interleave_codes(const uint8_t* const* values, int keys, int bytes, uint32_t* out,
                                                Ahead& ahead) {
    for (int i = 0; i < keys; i += 4) {
        if (i % W == 0) ahead.fetch();
        for (int j = 0; j < bytes; j += 2 * W, out += 2 * W) {
            vi first, second;
            interleave_four(values[i] + j, values[i + 1] + j, values[i + 2] + j, values[i + 3] + j, first, second);
            store_int(out, first), store_int(out + W, second);
        }
    }
}

// Softmax weights of `keys` keys of some rows times V's scales, in fixed point: out [rows, kGroups, kFixedWeights],
// with a step for each row and group [rows, kGroups]. least [rows, kGroups] * change + weights times minimums.
__attribute__((noinline)) void fixed_weights(const float* weights, int rows, int groups, const float* scale,
                                             const float* minimum, int keys, int8_t* out, float* step, float* least,
                                             const float* change) {
    constexpr int kAtOnce = W / kGroups;  // rows: a vector of numbers for a row and group
    for (int first = 0; first < rows; first += kAtOnce) {
        const int count = int(smaller(kAtOnce, rows - first));
        vf most[W], all[W];
        for (int i = 0; i < W; i++) most[i] = all[i] = zero();
        for (int r = 0; r < count; r++) {
            for (int g = 0; g < groups; g++) {
                vf largest = zero(), sum = zero();
                for (int i = 0; i < keys; i += W) {
                    const vf weight = load(weights + (first + r) * kFewKeys + i);
                    sum = fma(weight, load(minimum + g * kKeys + i), sum);
                    largest = max_or_nan(largest, mul(weight, load(scale + g * kKeys + i)));
                }
                most[r * kGroups + g] = largest, all[r * kGroups + g] = sum;
            }
        }
        float to_fixed[W], added[W];
        const vf highest = across(most, [](vf a, vf b) { return max_or_nan(a, b); });
        store(step + first * kGroups, mul(highest, set1(1 / kFixedMost)));
        store(to_fixed, div(set1(kFixedMost), highest));
        store(added, sums(all));
        for (int r = 0; r < count; r++) {
            for (int g = 0; g < groups; g++) {
                const int at = (first + r) * kGroups + g;
                least[at] = least[at] * change[first + r] + added[r * kGroups + g];
                const vf fixed = set1(to_fixed[r * kGroups + g]);
                for (int i = 0; i < keys; i += W) {
                    const vf x = mul(load(weights + (first + r) * kFewKeys + i), load(scale + g * kKeys + i));
                    store_fixed(mul(x, fixed), out + at * kFixedWeights + i, out + at * kFixedWeights + kFewKeys + i);
                }
            }
        }
    }
}

// acc [Rows, stride] * change + weights of keys, four at a time, times codes of V, for Vectors * W of one group's
// columns.
template <int Rows, int Vectors>
__attribute__((noinline)) void code_values(const int8_t* weights, const float* steps, const uint32_t* codes,
                                           int64_t codes_stride, int keys, float* acc, int64_t stride,
                                           const float* change) {
    vi sums[Rows][Vectors][2];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) sums[r][v][0] = sums[r][v][1] = set1_int(0);
    }
    for (int i = 0; i < keys; i += 4, codes += codes_stride) {
        vi four[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) four[v] = load_int(codes + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
            const int8_t* row = weights + r * kGroups * kFixedWeights + i;
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                const vi weight = set1_bytes(row + part * kFewKeys);
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; v++) sums[r][v][part] = dot_bytes(four[v], weight, sums[r][v][part]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
        const vf changed = set1(change[r]), step = set1(steps[r * kGroups]);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) {
            float* out = acc + r * stride + v * W;
            store(out, fma(to_float(join_fixed(sums[r][v][0], sums[r][v][1])), step, mul(load(out), changed)));
        }
    }
}
#endif

#ifdef BATCHGEN_TILES
// Few rows over bf16 KV: keys are the rows of a product in tile registers, straight from K, and queries its columns.

// Queries [rows, stride] as columns: out [depth, 16].
inline void transpose_queries(const uint32_t* q, int64_t stride, int rows, int64_t depth, uint32_t* out) {
    for (int64_t d = 0; d < depth; d += W) {
        vi r[W];
        for (int i = 0; i < W; i++) r[i] = i < rows ? load_int(q + i * stride + d) : set1_int(0);
        transpose(r);
        for (int i = 0; i < W; i++) store_int(out + (d + i) * W, r[i]);
    }
}

// Scores of 16 keys for the rows that registers are configured for: out [rows, out_stride]. Keys that do not lie one
// after the other are brought together in `space`.
inline void tile_scores(Tiles& tiles, const uint8_t* const* keys, int64_t row_bytes, int rows, const uint32_t* queries,
                        int64_t steps, uint8_t* space, float* out, int64_t out_stride) {
    const uint8_t* k = keys[0];
    int64_t stride = row_bytes;
    bool together = true;
    for (int i = 1; i < W; i++) together &= keys[i] - keys[i - 1] == row_bytes;
    if (!together) {
        k = space, stride = steps * 64;
        for (int i = 0; i < W; i++) memcpy(space + i * stride, keys[i], stride);
    }
    tiles.zero<2>();
    for (int64_t step = 0; step < steps; step++) {
        tiles.load<3>(k + step * 64, stride);
        tiles.load<6>(queries + step * kStep * W, 64);
        tiles.dot_bf16<2, 3, 6>();
    }
    alignas(64) uint32_t by_key[W][W];
    tiles.store<2>(by_key, 64);
    vi r[W];
    for (int i = 0; i < W; i++) r[i] = load_int(by_key[i]);
    transpose(r);
    for (int i = 0; i < rows; i++) store(out + i * out_stride, as_float(r[i]));
}
#endif
