// No instruction set in particular: four floats at a time in the compiler's own vectors, whatever it makes of them.

constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef uint32_t vi __attribute__((vector_size(16)));
typedef int32_t vs __attribute__((vector_size(16)));

inline vf set1(float x) { return vf{x, x, x, x}; }
inline vf zero() { return set1(0); }
inline vi set1_int(uint32_t x) { return vi{x, x, x, x}; }
inline vf add(vf a, vf b) { return a + b; }
inline vf sub(vf a, vf b) { return a - b; }
inline vf mul(vf a, vf b) { return a * b; }
inline vf div(vf a, vf b) { return a / b; }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vi as_int(vf a) { return (vi)a; }
inline vf as_float(vi a) { return (vf)a; }
inline vf select(vs mask, vf then, vf otherwise) {
    return as_float(((vi)mask & as_int(then)) | (~(vi)mask & as_int(otherwise)));
}
inline vf select_less(vf a, vf b, vf then, vf otherwise) { return select(a < b, then, otherwise); }
inline vf max(vf a, vf b) { return select(a > b, a, b); }
inline vf min(vf a, vf b) { return select(a < b, a, b); }
// Right for |a| < 2^22: adding and taking off 1.5 * 2^23 leaves no bits for fractions.
inline vf round_even(vf a) {
    vf magic = set1(12582912.0f);
    return (a + magic) - magic;
}
inline vf pow2(vf n) { return as_float((vi)(__builtin_convertvector(n, vs) + 127) << 23); }
inline float sum(vf a) { return (a[0] + a[1]) + (a[2] + a[3]); }
inline float largest(vf a) {
    float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}

inline float to_float(f16 h) {
    uint32_t sign = uint32_t(h.bits & 0x8000) << 16, magnitude = uint32_t(h.bits & 0x7fff) << 13, bits;
    float f;
    if (magnitude >= 0x0f800000) {  // infinities and no numbers
        bits = sign | magnitude | 0x7f800000;
        memcpy(&f, &bits, 4);
        return f;
    }
    memcpy(&f, &magnitude, 4);
    f *= 0x1p112f;  // the exponent's bias; right for subnormal numbers too
    memcpy(&bits, &f, 4);
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}
inline f16 to_f16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return f16{uint16_t(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return f16{uint16_t(sign | 0x7c00)};
    if (magnitude < 0x38800000) {  // subnormal: the sum's last bit is worth 2^-24
        float part, shift = 0.5f;
        memcpy(&part, &magnitude, 4);
        part += shift;
        memcpy(&magnitude, &part, 4);
        return f16{uint16_t(sign | (magnitude - 0x3f000000))};
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return f16{uint16_t(sign | ((magnitude - 0x38000000) >> 13))};
}
inline bf16 to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16{0x7fc0};
    return bf16{uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline vf load(const float* p) {
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}
inline vf load(const bf16* p) { return as_float(vi{p[0].bits, p[1].bits, p[2].bits, p[3].bits} << 16); }
inline vf load(const f16* p) { return vf{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}; }
inline vf load(const int8_t* p) { return vf{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
inline void store(float* p, vf a) { memcpy(p, &a, sizeof a); }
inline void store(f16* p, vf a) {
    for (int i = 0; i < W; i++) p[i] = to_f16(a[i]);
}
inline void store(bf16* p, vf a) {
    for (int i = 0; i < W; i++) p[i] = to_bf16(a[i]);
}

// There is no writing past the caches.
template <class T>
inline void stream(T* p, vf a) {
    store(p, a);
}
inline void end_streams() {}

inline vi load_int(const uint32_t* p) {
    vi a;
    memcpy(&a, p, sizeof a);
    return a;
}
// The first n, 0 < n <= W; zero beyond.
inline vi load_int_part(const uint32_t* p, int n) {
    vi a = set1_int(0);
    memcpy(&a, p, n * sizeof *p);
    return a;
}
inline void store_int(uint32_t* p, vi a) { memcpy(p, &a, sizeof a); }
inline vi load_bytes(const uint8_t* p) { return vi{p[0], p[1], p[2], p[3]}; }
inline vf low_nibbles(vi a) { return __builtin_convertvector((vs)(a & 15), vf); }
inline vf high_nibbles(vi a) { return __builtin_convertvector((vs)(a >> 4), vf); }
inline void store_nibbles(uint8_t* p, vf low, vf high) {
    for (int i = 0; i < W; i++) p[i] = uint8_t(int(low[i]) | int(high[i]) << 4);
}

// The halves of each 32 bits as floats of 16 bits.
inline void split_f16(vi words, vf& low, vf& high) {
    for (int i = 0; i < W; i++) {
        low[i] = to_float(f16{uint16_t(words[i])});
        high[i] = to_float(f16{uint16_t(words[i] >> 16)});
    }
}

inline void transpose(vi* r) {
    vi t[4];
    for (int i = 0; i < 4; i++) t[i] = vi{r[0][i], r[1][i], r[2][i], r[3][i]};
    for (int i = 0; i < 4; i++) r[i] = t[i];
}
