// What is around products: norms, rotary embedding and the way into the KV, 4-bit groups, rows of a table, the largest logit.

template <class T>
inline void norm_rows(const Norm& args, int64_t row, int64_t stop) {
    const int64_t n = args.columns;
    for (; row < stop; row++) {
        const T* x = (const T*)args.x + row * args.x_stride;
        T* out = (T*)args.out + row * args.out_stride;
        const T *weight = (const T*)args.weight, *bias = (const T*)args.bias;
        float mean = 0;
        if (bias) {
            vf all = zero();
            for (int64_t i = 0; i < n; i += W) all = add(all, load_part(x + i, int(smaller(W, n - i))));
            mean = sum(all) / float(n);
        }
        vf squares = zero();
        for (int64_t i = 0; i < n; i += W) {
            const int count = int(smaller(W, n - i));
            vf v = load_part(x + i, count);
            if (bias) {
                v = sub(v, set1(mean));
                if (count < W) {  // what is beyond the row is not mean's distance from zero
                    float part[W];
                    store(part, v);
                    for (int j = count; j < W; j++) part[j] = 0;
                    v = load(part);
                }
            }
            squares = fma(v, v, squares);
        }
        const vf scale = set1(1 / __builtin_sqrtf(sum(squares) / float(n) + args.eps));
        for (int64_t i = 0; i < n; i += W) {
            const int count = int(smaller(W, n - i));
            vf v = load_part(x + i, count);
            if (bias) v = sub(v, set1(mean));
            v = mul(mul(v, scale), load_part(weight + i, count));
            if (bias) v = add(v, load_part(bias + i, count));
            store_part(out + i, v, count);
        }
    }
}

inline void norm(const Norm& args, int64_t row, int64_t stop) {
    with_type(args.type, [&](auto* type) { norm_rows<__typeof__(*type)>(args, row, stop); });
}

// ---- 4-bit groups, as batchgen/quant.py has them -------------------------------------------------------------------

constexpr float kMaxF16 = 65504.0f;

inline float f16_value(f16 x) { return value_of(&x); }
inline f16 to_f16_value(float x) {
    f16 all[W];
    store(all, set1(x));
    return all[0];
}

// One row of floats, changed (brought within fp16's range). x has room for W values more.
inline void quantize_row(float* x, int64_t n, uint8_t* packed) {
    uint8_t* table = packed + nibble_bytes(int(n));
    for (int64_t start = 0; start < n; start += kGroup, table += 4) {
        float* group = x + start;
        const int size = int(smaller(kGroup, n - start)), half = (size + 1) / 2;
        float low = kMaxF16, high = -kMaxF16;
        bool number = true;
        for (int i = 0; i < size; i++) {
            float v = group[i];
            number &= v == v;
            v = v > kMaxF16 ? kMaxF16 : v < -kMaxF16 ? -kMaxF16 : v;
            group[i] = v;
            low = v < low ? v : low;
            high = v > high ? v : high;
        }
        const f16 minimum = to_f16_value(number ? low : __builtin_nanf(""));
        const float least = f16_value(minimum);
        f16 scale = to_f16_value(number && high > least ? (high - least) / 15 : number ? 0.0f : __builtin_nanf(""));
        float step = f16_value(scale);
        // Rounded up at the very end of the range, a scale would take the maximum beyond it: one step down then.
        if (least + 15 * step > kMaxF16) scale.bits--, step = f16_value(scale);
        memcpy(table, &scale, 2);
        memcpy(table + 2, &minimum, 2);
        const vf steps = set1(step > 0 ? 1 / step : 0), base = set1(number ? least : 0);
        float levels[kGroup + 2 * W] = {};
        for (int i = 0; i < size; i += W) {
            vf level = round_even(mul(sub(load_part(group + i, size - i), base), steps));
            store(levels + i, max(min(level, set1(15)), zero()));
        }
        for (int i = size; i < 2 * half; i++) levels[i] = 0;
        for (int i = 0; i < half; i += W) {
            uint8_t out[W];
            store_nibbles(out, load(levels + i), load(levels + half + i));
            memcpy(packed + i, out, smaller(W, half - i));
        }
        packed += half;
    }
}

template <class T>
inline void dequantize_row(const uint8_t* packed, int64_t n, T* out) {
    const uint8_t* table = packed + nibble_bytes(int(n));
    for (int64_t start = 0; start < n; start += kGroup, table += 4) {
        const int size = int(smaller(kGroup, n - start)), half = (size + 1) / 2;
        f16 numbers[2];
        memcpy(numbers, table, 4);
        const vf scale = set1(f16_value(numbers[0])), minimum = set1(f16_value(numbers[1]));
        for (int i = 0; i < half; i += W) {
            const vi bytes = load_bytes_part(packed + i, half - i);
            store_part(out + start + i, fma(low_nibbles(bytes), scale, minimum), half - i);
            if (half + i < size)
                store_part(out + start + half + i, fma(high_nibbles(bytes), scale, minimum), size - half - i);
        }
        packed += half;
    }
}

inline void quantize(const Quant& args, int64_t row, int64_t stop) {
    with_type(args.type, [&](auto* type) {
        using T = __typeof__(*type);
        for (; row < stop; row++) {
            uint8_t* packed = args.packed + row * args.row_bytes;
            for (int64_t start = 0; start < args.columns; start += kGroup) {
                // A group at a time: its place among the nibbles, and in the table.
                float values[kGroup + W];
                const int size = int(smaller(kGroup, args.columns - start)), half = (size + 1) / 2;
                for (int i = 0; i < size; i += W)
                    store(values + i, load_part((const T*)args.x + row * args.columns + start + i, size - i));
                uint8_t group[kGroup / 2 + 4];
                quantize_row(values, size, group);
                memcpy(packed + start / 2, group, half);
                memcpy(packed + nibble_bytes(int(args.columns)) + start / kGroup * 4, group + half, 4);
            }
        }
    });
}

inline void dequantize(const Quant& args, int64_t row, int64_t stop) {
    with_type(args.type, [&](auto* type) {
        using T = __typeof__(*type);
        for (; row < stop; row++)
            dequantize_row(args.packed + row * args.row_bytes, args.columns, (T*)args.out + row * args.columns);
    });
}

// ---- rotary embedding, and K and V to their places -----------------------------------------------------------------

struct HeadBuffer {
    float x[kMaxHeadDim + W], y[kMaxHeadDim + W];
};

// A head's row turned by its position and scaled, where there is nothing else to do and its halves are whole vectors.
template <class T>
inline void rotate_only(const T* head, int n, const float* cos, const float* sin, float scale, T* out) {
    const vf by = set1(scale);
    for (int i = 0, half = n / 2; i < half; i += W) {
        const vf c = mul(load(cos + i), by), s = mul(load(sin + i), by);
        const vf first = load(head + i), second = load(head + half + i);
        store(out + i, sub(mul(first, c), mul(second, s)));
        store(out + half + i, fma(second, c, mul(first, s)));
    }
}

template <class T>
inline void copy_head(const T* head, int n, T* out) {
    int i = 0;
    for (; i + W <= n; i += W) store(out + i, load(head + i));
    if (i < n) memcpy(out + i, head + i, (n - i) * sizeof(T));
}

// A head's row in floats at b.x: normed, turned by its position, scaled.
template <class T>
inline void rotate_head(const RotaryStore& args, const T* head, const T* weight, const float* cos, const float* sin,
                        float scale, HeadBuffer& b) {
    const int n = args.kv.head_dim, half = n / 2;
    for (int i = 0; i < n; i += W) store(b.x + i, load_part(head + i, n - i));
    if (weight) {
        vf squares = zero();
        for (int i = 0; i < n; i += W) {
            const vf x = load_part(b.x + i, n - i);
            squares = fma(x, x, squares);
        }
        const float by = 1 / __builtin_sqrtf(sum(squares) / float(n) + args.eps);
        for (int i = 0; i < n; i += W)
            store_part(b.x + i, mul(mul(load(b.x + i), set1(by)), load_part(weight + i, n - i)), n - i);
    }
    if (cos) {
        for (int i = 0; i < half; i += W) {
            const int count = int(smaller(W, half - i));
            vf c = load_part(cos + i, count), s = load_part(sin + i, count);
            vf first = load_part(b.x + i, count), second = load_part(b.x + half + i, count);
            store_part(b.y + i, mul(sub(mul(first, c), mul(second, s)), set1(scale)), count);
            store_part(b.y + half + i, mul(fma(second, c, mul(first, s)), set1(scale)), count);
        }
        memcpy(b.x, b.y, n * sizeof(float));
    } else {
        for (int i = 0; i < n; i += W) store(b.x + i, mul(load(b.x + i), set1(scale)));
    }
}

// x = x rotation, for what 4-bit keys are compared with.
inline void turn(const float* rotation, int n, HeadBuffer& b) {
    for (int j = 0; j < n; j += W) {
        const int count = int(smaller(W, n - j));
        vf all = zero();
        for (int i = 0; i < n; i++) all = fma(set1(b.x[i]), load_part(rotation + i * n + j, count), all);
        store(b.y + j, all);
    }
    memcpy(b.x, b.y, n * sizeof(float));
}

template <class T>
inline void write_head(const float* x, int n, T* out) {
    for (int i = 0; i < n; i += W) store_part(out + i, load_part(x + i, n - i), n - i);
}

template <class T>
inline void rotary_store_rows(const RotaryStore& args, int64_t token, int64_t stop) {
    const KV& kv = args.kv;
    const int n = kv.head_dim;
    const bool levels = kv.data && kv.type == Type::Int4;
    const bool plain = args.cos && !args.q_norm && !args.rotation && n / 2 % W == 0;
    HeadBuffer b;
    for (; token < stop; token++) {
        const T* qkv = (const T*)args.qkv + token * args.qkv_stride;
        const float* cos = args.cos ? args.cos + args.positions[token] * (n / 2) : nullptr;
        const float* sin = args.sin ? args.sin + args.positions[token] * (n / 2) : nullptr;
        for (int h = 0; h < args.heads; h++) {
            T* out = (T*)args.q_out + (token * args.heads + h) * n;
            if (plain) {
                rotate_only(qkv + h * n, n, cos, sin, args.scale, out);
                continue;
            }
            rotate_head(args, qkv + h * n, (const T*)args.q_norm, cos, sin, args.scale, b);
            if (args.rotation) turn(args.rotation, n, b);
            write_head(b.x, n, out);
        }
        const int64_t slot = kv.data ? args.slots[token] : 0;
        for (int h = 0; h < 2 * kv.kv_heads; h++) {
            const bool key = h < kv.kv_heads;
            const int head = key ? h : h - kv.kv_heads;
            const T* row = qkv + (args.heads + h) * n;
            uint8_t* out;
            if (kv.data) {
                out = kv.data + slot / kv.block_size * kv.block_bytes + head * kv.head_bytes +
                      slot % kv.block_size * kv.row_bytes + (key ? 0 : kv.value_offset);
            } else {
                out = (uint8_t*)((T*)(key ? args.k_out : args.v_out) + (token * kv.kv_heads + head) * n);
            }
            if (!levels && !key) {
                copy_head(row, n, (T*)out);
                continue;
            }
            if (!levels && plain) {
                rotate_only(row, n, cos, sin, 1.0f, (T*)out);
                continue;
            }
            if (key) {
                rotate_head(args, row, (const T*)args.k_norm, cos, sin, 1.0f, b);
                if (args.rotation) turn(args.rotation, n, b);
            } else {
                for (int i = 0; i < n; i += W) store(b.x + i, load_part(row + i, n - i));
            }
            if (levels) quantize_row(b.x, n, out);
            else write_head(b.x, n, (T*)out);
        }
    }
}

inline void rotary_store(const RotaryStore& args, int64_t token, int64_t stop) {
    with_type(args.type, [&](auto* type) { rotary_store_rows<__typeof__(*type)>(args, token, stop); });
}

// ---- logits --------------------------------------------------------------------------------------------------------

inline void argmax(const Argmax& args, int64_t row, int64_t stop) {
    const int64_t n = args.columns;
    for (; row < stop; row++) {
        const float* x = args.logits + row * args.stride;
        float highest = -__builtin_inff();
        int64_t i = 0;
        vf best = set1(highest);
        for (; i + W <= n; i += W) best = max(load(x + i), best);
        highest = largest(best);
        for (; i < n; i++) highest = x[i] > highest ? x[i] : highest;
        int64_t index = 0;
        while (index < n - 1 && !(x[index] == highest)) index++;
        args.index[row] = index;
        args.maximum[row] = highest;
        if (!args.lse) continue;
        double total = 0;
        for (i = 0; i < n;) {  // some at a time: a long sum in fp32 would lose what is added last
            vf all = zero();
            for (const int64_t stop = smaller(n / W * W, i + 64 * W); i < stop; i += W)
                all = add(all, exp(sub(load(x + i), set1(highest))));
            for (; i < n && i >= n / W * W; i++) {
                float one[W];
                store(one, exp(set1(x[i] - highest)));
                total += one[0];
            }
            total += sum(all);
        }
        args.lse[row] = highest + float(__builtin_log(total));
    }
}
