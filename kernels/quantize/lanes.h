// Vectors of binary32 values with one row in each lane, as wide as this instruction set allows.
//
// A search does the same to every row. All its steps depend on sums over a row, and the order of
// these sums must not change. With a row in each lane the order stays. Each operation rounds once,
// as its scalar form does.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../native/operation.h"

namespace recpoint::RECPOINT_SET {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint32_t Marks __attribute__((vector_size(4 * LANES)));  // words without a sign
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

inline Floats spread(float value) { return value - Floats{}; }

inline Words bits_of(Floats value) { return reinterpret_cast<Words>(value); }
inline Floats float_of(Words bits) { return reinterpret_cast<Floats>(bits); }

// Both return `b` if the two are equal or one is NaN.
inline Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// a · b + c, if neither the product nor the sum needs rounding. Then it does not matter whether the
// machine rounds in between, so the faster form is used.
inline Floats exact_multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// The nearest integer, ties to even. For values from 0 to 2^23: from there on the last place is 1.
inline Floats rounded(Floats value) { return (value + 0x1p23f) - 0x1p23f; }

// The same for values from −2^22 to 2^22.
inline Floats rounded_signed(Floats value) { return (value + 0x1.8p23f) - 0x1.8p23f; }

// The value without its fraction. For magnitudes below 2^31.
inline Floats whole(Floats value) {
    return __builtin_convertvector(__builtin_convertvector(value, Words), Floats);
}

}  // namespace recpoint::RECPOINT_SET
