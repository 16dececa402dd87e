// The causal convolution of each channel over the tokens of a sequence, and the inputs that it keeps for later tokens.
//
// A state and the factors have the numbers of a channel side by side. They are loaded as vectors of channels, one for
// each tap: an input of the state, or a factor.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "simd/carve.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// Channels of a block, whose inputs lie side by side in a token's row; vectors of sums in registers; the largest
// kernel.
constexpr int kConvChannels = 256, kConvVectors = 4, kMostTaps = 16;

#if defined(__GNUC__) && !defined(__clang__)
typedef int lanes __attribute__((vector_size(4 * W)));
// Lane i is number `from(i)` of a and then b.
template <class F>
__attribute__((always_inline)) inline vf shuffled(vf a, vf b, F from) {
    lanes order;
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) order[i] = from(i);
    return (vf)__builtin_shuffle(a, b, order);
}

// The numbers of W channels, each Taps side by side, as a vector for each tap, and the other way.
template <int Taps>
__attribute__((always_inline)) inline void split_taps(const vf* numbers, vf* taps) {
#pragma GCC unroll 4
    for (int t = 0; t < Taps; t++) {
        vf all = numbers[0];
#pragma GCC unroll 4
        for (int v = 1; v < Taps; v++)  // lanes that are in later vectors are any until then
            all = shuffled(all, numbers[v], [=](int i) {
                const int at = i * Taps + t;
                return at / W == v ? W + at % W : v == 1 ? at % W : i;
            });
        taps[t] = Taps == 1 ? numbers[0] : all;
    }
}
template <int Taps>
__attribute__((always_inline)) inline void join_taps(const vf* taps, vf* numbers) {
#pragma GCC unroll 4
    for (int v = 0; v < Taps; v++) {
        vf all = taps[0];
#pragma GCC unroll 4
        for (int t = 1; t < Taps; t++)
            all = shuffled(all, taps[t], [=](int i) {
                const int at = v * W + i;
                return at % Taps == t ? W + at / Taps : t == 1 ? at / Taps : i;
            });
        numbers[v] = all;
    }
}
#else
template <int Taps>
inline void split_taps(const vf* numbers, vf* taps) {
    float all[Taps * W], of_tap[W];
    for (int v = 0; v < Taps; v++) store(all + v * W, numbers[v]);
    for (int t = 0; t < Taps; t++) {
        for (int i = 0; i < W; i++) of_tap[i] = all[i * Taps + t];
        taps[t] = load(of_tap);
    }
}
template <int Taps>
inline void join_taps(const vf* taps, vf* numbers) {
    float all[Taps * W], of_tap[W];
    for (int t = 0; t < Taps; t++) {
        store(of_tap, taps[t]);
        for (int i = 0; i < W; i++) all[i * Taps + t] = of_tap[i];
    }
    for (int v = 0; v < Taps; v++) numbers[v] = load(all + v * W);
}
#endif

// Loads numbers [channels, taps] as floats [taps, kConvChannels], for whole vectors of channels, and stores them. Both
// return the number of channels that are done.
template <int Taps, class T>
inline int load_whole_taps(const T* from, int channels, float* out) {
    int c = 0;
    for (; c + W <= channels; c += W) {
        vf numbers[Taps], of_tap[Taps];
#pragma GCC unroll 4
        for (int v = 0; v < Taps; v++) numbers[v] = load(from + c * Taps + v * W);
        split_taps<Taps>(numbers, of_tap);
#pragma GCC unroll 4
        for (int t = 0; t < Taps; t++) store(out + t * kConvChannels + c, of_tap[t]);
    }
    return c;
}
template <int Taps, class T>
inline int store_whole_taps(const float* from, int channels, T* out) {
    int c = 0;
    for (; c + W <= channels; c += W) {
        vf numbers[Taps], of_tap[Taps];
#pragma GCC unroll 4
        for (int t = 0; t < Taps; t++) of_tap[t] = load(from + t * kConvChannels + c);
        join_taps<Taps>(of_tap, numbers);
#pragma GCC unroll 4
        for (int v = 0; v < Taps; v++) store(out + c * Taps + v * W, numbers[v]);
    }
    return c;
}

// The same for any number of channels.
template <class T>
inline void load_taps(const T* from, int channels, int taps, float* out) {
    int done = 0;
    if (taps == 1) done = load_whole_taps<1>(from, channels, out);
    if (taps == 2) done = load_whole_taps<2>(from, channels, out);
    if (taps == 3) done = load_whole_taps<3>(from, channels, out);
    if (taps == 4) done = load_whole_taps<4>(from, channels, out);
    for (int c = done; c < channels; c++)
        for (int t = 0; t < taps; t++) out[t * kConvChannels + c] = value_of(from + c * taps + t);
}
template <class T>
inline void store_taps(const float* from, int channels, int taps, T* out) {
    int done = 0;
    if (taps == 1) done = store_whole_taps<1>(from, channels, out);
    if (taps == 2) done = store_whole_taps<2>(from, channels, out);
    if (taps == 3) done = store_whole_taps<3>(from, channels, out);
    for (int c = done; c < channels; c++)
        for (int t = 0; t < taps; t++) store_part(out + c * taps + t, set1(from[t * kConvChannels + c]), 1);
}

// Up to kConvChannels channels of the convolution.
template <class T>
struct ConvBlock {
    const CausalConv& args;
    const int64_t channel;
    const int channels, taps;  // taps: the inputs of a state
    int64_t begin, end;        // tokens of the current sequence
    float factors[kMostTaps][kConvChannels], bias[kConvChannels];
    float before[kMostTaps][kConvChannels];  // the inputs before the current sequence's first token

    ConvBlock(const CausalConv& args, int64_t channel, int64_t channel_stop)
        : args(args),
          channel(channel),
          channels(int(smaller(kConvChannels, channel_stop - channel))),
          taps(args.kernel - 1) {}

    T* state(int64_t slot) const { return (T*)args.states + slot * args.state_stride + channel * taps; }
    const T* input(int64_t token) const { return (const T*)args.x + token * args.x_stride + channel; }

    void load_factors() {
        load_taps((const T*)args.weight + channel * args.kernel, channels, args.kernel, factors[0]);
        memset(bias, 0, sizeof bias);
        for (int c = 0; args.bias && c < channels; c += W)
            store(bias + c, load_part((const T*)args.bias + channel + c, channels - c));
    }

    void begin_sequence(int64_t sequence) {
        begin = args.slots.starts[sequence], end = args.slots.starts[sequence + 1];
    }

    void load_state(int64_t sequence) {
        const int64_t slot = args.slots.source[sequence];
        if (slot < 0) memset(before, 0, taps * sizeof before[0]);
        else load_taps(state(slot), channels, taps, before[0]);
    }

    // Stores the last inputs.
    void store_state(int64_t sequence) const {
        float last[kMostTaps][kConvChannels];
        for (int t = 0; t < taps; t++) {
            const int64_t token = end - taps + t;
            for (int c = 0; c < channels; c += W)
                store(last[t] + c, token < begin ? load(before[taps + token - begin] + c)
                                                 : load_part(input(token) + c, channels - c));
        }
        store_taps(last[0], channels, taps, state(args.slots.target[sequence]));
    }

    // The results of a token for Vectors vectors of channels from channel c of the block on, of which `count` are
    // there.
    template <int Vectors>
    __attribute__((always_inline)) inline void some_channels(int64_t at, int c, int count) const {
        vf all[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) all[v] = load(bias + c + v * W);
        for (int t = 0; t <= taps; t++) {
            const int64_t token = at - taps + t;
            if (token < begin) {
                const float* x = before[taps + token - begin] + c;
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; v++) all[v] = fma(load(factors[t] + c + v * W), load(x + v * W), all[v]);
            } else {
                const T* x = input(token) + c;
#pragma GCC unroll 4
                for (int v = 0; v < Vectors; v++)
                    all[v] =
                        fma(load(factors[t] + c + v * W), Vectors > 1 ? load(x + v * W) : load_part(x, count), all[v]);
            }
        }
        T* out = (T*)args.out + at * args.out_stride + channel + c;
        if (args.silu) {
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; v++) all[v] = silu(all[v]);
        }
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) {
            if (Vectors > 1) store(out + v * W, all[v]);
            else store_part(out, all[v], count);
        }
    }
    // The results of a token.
    void token(int64_t at) const {
        int c = 0;
        for (; c + kConvVectors * W <= channels; c += kConvVectors * W)
            some_channels<kConvVectors>(at, c, channels - c);
        for (; c < channels; c += W) some_channels<1>(at, c, channels - c);
    }
};

// Calls f(block) for each block of channels of a piece.
template <class F>
inline void over_conv_blocks(const CausalConv& args, const ConvPiece& piece, F f) {
    with_type(args.type, [&](auto* type) {
        for (int64_t channel = piece.channel; channel < piece.channel_stop; channel += kConvChannels) {
            ConvBlock<__typeof__(*type)> block(args, channel, piece.channel_stop);
            f(block);
        }
    });
}

inline void causal_conv(const CausalConv& args, const ConvPiece& piece) {
    over_conv_blocks(args, piece, [&](auto& block) {
        block.load_factors();
        for (int64_t i = piece.sequence; i < piece.sequence_stop; i++) {
            block.begin_sequence(i);
            const int64_t first = piece.first > block.begin ? piece.first : block.begin;
            const int64_t stop = smaller(piece.stop, block.end);
            if (first - block.begin < block.taps) block.load_state(i);
            for (int64_t token = first; token < stop; token++) block.token(token);
            if (first == block.begin && stop == block.end) block.store_state(i);
        }
    });
}

inline void causal_conv_state(const CausalConv& args, const ConvPiece& piece) {
    over_conv_blocks(args, piece, [&](auto& block) {
        for (int64_t i = piece.sequence; i < piece.sequence_stop; i++) {
            block.begin_sequence(i);
            block.load_state(i);
            block.store_state(i);
        }
    });
}

}  // namespace
}  // namespace batchgen
