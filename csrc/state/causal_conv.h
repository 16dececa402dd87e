// The causal convolution of each channel over the tokens of a sequence, and the inputs that it keeps for later tokens.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "simd/carve.h"
#include "simd/numeric.h"

namespace batchgen {
namespace {

// Channels whose factors and first inputs are transposed at once, and the largest kernel.
constexpr int kConvChannels = 4 * W;
constexpr int kMostTaps = 16;

// Rows of a state or of factors, [channels, taps], as floats [taps, kConvChannels].
template <class T>
inline void transpose_taps(const T* from, int channels, int taps, float* out) {
    float row[kConvChannels * kMostTaps];
    const int count = channels * taps;
    for (int i = 0; i < count; i += W) store_part(row + i, load_part(from + i, count - i), count - i);
    for (int tap = 0; tap < taps; tap++)
        for (int c = 0; c < channels; c++) out[tap * kConvChannels + c] = row[c * taps + tap];
}

// Stores the last inputs [taps, kConvChannels] as a state.
template <class T>
inline void store_taps(const float* from, int channels, int taps, T* out) {
    float row[kConvChannels * kMostTaps];
    for (int tap = 0; tap < taps; tap++)
        for (int c = 0; c < channels; c++) row[c * taps + tap] = from[tap * kConvChannels + c];
    const int count = channels * taps;
    for (int i = 0; i < count; i += W) store_part(out + i, load(row + i), count - i);
}

// The convolution of up to kConvChannels channels of a sequence.
template <class T>
struct ConvBlock {
    const CausalConv& args;
    const int64_t sequence, channel;
    const int channels, taps;  // taps: the inputs of a state
    float before[kMostTaps][kConvChannels];

    ConvBlock(const CausalConv& args, const ConvPiece& piece, int64_t channel)
        : args(args),
          sequence(piece.sequence),
          channel(channel),
          channels(int(smaller(kConvChannels, piece.channel_stop - channel))),
          taps(args.kernel - 1) {}

    int64_t begin() const { return args.slots.starts[sequence]; }
    int64_t end() const { return args.slots.starts[sequence + 1]; }
    T* state(int64_t slot) const { return (T*)args.states + slot * args.state_stride + channel * taps; }
    const T* input(int64_t token) const { return (const T*)args.x + token * args.x_stride + channel; }

    void load_state() {
        const int64_t slot = args.slots.source[sequence];
        if (slot < 0) memset(before, 0, sizeof before);
        else transpose_taps(state(slot), channels, taps, before[0]);
    }

    // The last inputs; `before` has those from before the first token.
    void store_state() {
        float last[kMostTaps][kConvChannels];
        const int64_t tokens = end() - begin();
        for (int tap = 0; tap < taps; tap++) {
            const int64_t token = tokens - taps + tap;  // counted from the sequence's first
            if (token < 0) {
                memcpy(last[tap], before[taps + token], sizeof last[tap]);
                continue;
            }
            const T* x = input(begin() + token);
            for (int c = 0; c < channels; c += W) store(last[tap] + c, load_part(x + c, channels - c));
        }
        store_taps(last[0], channels, taps, state(args.slots.target[sequence]));
    }

    // The results of a token; factors [kernel, kConvChannels], those of the oldest input first.
    void token(int64_t at, const float (*factors)[kConvChannels], const float* bias) const {
        T* out = (T*)args.out + at * args.out_stride + channel;
        const int64_t oldest = at - begin() - taps;  // counted from the sequence's first token
        for (int c = 0; c < channels; c += W) {
            vf all = load(bias + c);
            for (int tap = 0; tap <= taps; tap++) {
                const int64_t token = oldest + tap;
                const vf value =
                    token < 0 ? load(before[taps + token] + c) : load_part(input(begin() + token) + c, channels - c);
                all = fma(load(factors[tap] + c), value, all);
            }
            store_part(out + c, args.silu ? silu(all) : all, channels - c);
        }
    }
};

// Calls f<T>(channel) for each block of channels of a piece.
template <class F>
inline void over_conv_blocks(const CausalConv& args, const ConvPiece& piece, F f) {
    with_type(args.type, [&](auto* type) {
        for (int64_t channel = piece.channel; channel < piece.channel_stop; channel += kConvChannels)
            f.template operator()<__typeof__(*type)>(channel);
    });
}

inline void causal_conv(const CausalConv& args, const ConvPiece& piece) {
    over_conv_blocks(args, piece, [&]<class T>(int64_t channel) {
        ConvBlock<T> block(args, piece, channel);
        float factors[kMostTaps][kConvChannels] = {}, bias[kConvChannels] = {};
        transpose_taps((const T*)args.weight + channel * args.kernel, block.channels, args.kernel, factors[0]);
        for (int c = 0; args.bias && c < block.channels; c += W)
            store(bias + c, load_part((const T*)args.bias + channel + c, block.channels - c));
        if (piece.first - block.begin() < block.taps) block.load_state();
        for (int64_t token = piece.first; token < piece.stop; token++) block.token(token, factors, bias);
        if (piece.first == block.begin() && piece.stop == block.end()) block.store_state();
    });
}

inline void causal_conv_state(const CausalConv& args, const ConvPiece& piece) {
    over_conv_blocks(args, piece, [&]<class T>(int64_t channel) {
        ConvBlock<T> block(args, piece, channel);
        block.load_state();
        block.store_state();
    });
}

}  // namespace
}  // namespace batchgen
