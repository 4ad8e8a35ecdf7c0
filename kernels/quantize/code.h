// Computes codes from values and the parameters of their rows.
#pragma once

#include "lanes.h"
#include "plain.h"

namespace recpoint::RECPOINT_SET {

// The code of a value. If the inverse is 0, the code of every value is 0.
inline uint8_t code_of(float value, float inverse, float offset, float top) {
    float place = (value - offset) * inverse + 0.5f;
    // In this order, so that NaN becomes code 0. (A row with NaN is not quantized.)
    place = place > 0.0f ? place : 0.0f;
    place = place < top ? place : top;
    // The value is not negative, so dropping the fraction is floor.
    return static_cast<uint8_t>(static_cast<int32_t>(place));
}

inline Words codes_of(Floats values, Floats inverses, Floats offsets, Floats top) {
    const Floats places = maximum((values - offsets) * inverses + 0.5f, Floats{});
    return __builtin_convertvector(minimum(places, top), Words);
}

// The codes of GROUP values are converted to bytes together, by intrinsics on x86-64: compilers
// take twice as many steps for this.
#if defined(__AVX512F__)
constexpr int64_t GROUP = LANES;
#else
constexpr int64_t GROUP = 4 * LANES;
#endif

// Writes the codes of a group. `codes(i)` returns the codes of vector i, each from 0 to 255.
template <typename Codes>
void store_group(const Codes& codes, uint8_t* to) {
#if defined(__AVX512F__)
    store(to, _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(codes(0))));
#elif defined(__AVX2__)
    const auto word = [&](int i) { return reinterpret_cast<__m256i>(codes(i)); };
    const __m256i near = _mm256_packs_epi32(word(0), word(1));
    const __m256i far = _mm256_packs_epi32(word(2), word(3));
    // The instructions pack each half of a register on its own, so groups of four bytes are
    // reordered.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    store(to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(near, far), order));
#elif defined(__x86_64__)
    const auto word = [&](int i) { return reinterpret_cast<__m128i>(codes(i)); };
    const __m128i near = _mm_packs_epi32(word(0), word(1));
    store(to, _mm_packus_epi16(near, _mm_packs_epi32(word(2), word(3))));
#else
    for (int i = 0; i < 4; ++i) store(to + i * LANES, __builtin_convertvector(codes(i), Bytes));
#endif
}

// Writes the code of each value of a row, one a byte. DIM is 0 if not known at compile time.
template <int64_t DIM>
void code_row(
    const float* row, int64_t any_dim, float inverse, float offset, float top, uint8_t* codes
) {
    const int64_t dim = DIM > 0 ? DIM : any_dim;
    if (dim < GROUP) {
        for (int64_t k = 0; k < dim; ++k) codes[k] = code_of(row[k], inverse, offset, top);
        return;
    }
    const Floats inverses = spread(inverse);
    const Floats offsets = spread(offset);
    const Floats tops = spread(top);
    for (int64_t k = 0; k < dim; k += GROUP) {
        // If the length is no multiple of GROUP, the last group overlaps the group before.
        const int64_t first = least(k, dim - GROUP);
        const auto vector = [&](int i) {
            return codes_of(load<Floats>(row + first + i * LANES), inverses, offsets, tops);
        };
        store_group(vector, codes + first);
    }
}

// Writes the codes of COUNT values, a multiple of GROUP. Each value has parameters of its own.
template <int64_t COUNT>
void code_values(
    const float* values, const float* inverses, const float* offsets, float top, uint8_t* codes
) {
    static_assert(COUNT % GROUP == 0);
    const Floats tops = spread(top);
    for (int64_t first = 0; first < COUNT; first += GROUP) {
        const auto vector = [&](int i) {
            const int64_t at = first + i * LANES;
            return codes_of(
                load<Floats>(values + at), load<Floats>(inverses + at), load<Floats>(offsets + at),
                tops
            );
        };
        store_group(vector, codes + first);
    }
}

}  // namespace recpoint::RECPOINT_SET
