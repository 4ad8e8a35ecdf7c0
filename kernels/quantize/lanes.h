// Vectors of binary32 values, one for each of several rows, as wide as this instruction set has them.
//
// A search does the same to every row, and all its steps depend on sums over a row, whose order must
// not change. With a row in each lane it does not have to. Each operation rounds once, as its scalar
// form does.
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

// The second one where the two are equal, or one of them is NaN.
inline Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// a · b + c, where neither the product nor the sum needs rounding: it does not matter whether the
// machine rounds in between, and the faster form is taken.
inline Floats exact_multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// The next integer, ties to the even one; for 0 to 2^23, above which the last place is 1.
inline Floats rounded(Floats value) { return (value + 0x1p23f) - 0x1p23f; }

// The value without its fraction; for magnitudes below 2^31.
inline Floats whole(Floats value) {
    return __builtin_convertvector(__builtin_convertvector(value, Words), Floats);
}

}  // namespace recpoint::RECPOINT_SET
