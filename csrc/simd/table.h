// Sixteen numbers by their index, for sets that have no permutation of floats.
struct Table {
    float numbers[16];
    explicit Table(const int8_t* values) {
        for (int i = 0; i < 16; i++) numbers[i] = values[i];
    }
    vf operator()(vi a) const {
        vf found = zero();
        for (int i = 0; i < W; i++) found[i] = numbers[a[i] & 15];
        return found;
    }
};
