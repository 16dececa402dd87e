// RMSNorm and LayerNorm of rows.

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
