// Packs and unpacks eight codes at a time, as the bytes of one u64. Addresses need no alignment.
#pragma once

#include "../native/operation.h"

namespace recpoint::RECPOINT_SET {

// Moves the second of two neighbours, `gap` bits further down, beside the first of `width` bits.
// `first` has the bits of all the first ones. Codes of at most 4 bits do not overlap while they move,
// so one mask is enough for both.
template <int BITS>
uint64_t moved_together(uint64_t word, uint64_t first, int width, int gap) {
    if (BITS <= 4) return (word | word >> gap) & (first | first << width);
    return (word & first) | (word >> gap & first << width);
}

// Undoes `moved_together`.
template <int BITS>
uint64_t moved_apart(uint64_t word, uint64_t first, int width, int gap) {
    if (BITS <= 4) return (word | word << gap) & (first | first << (width + gap));
    return (word & first) | (word & first << width) << gap;
}

// The masks of the first of two neighbouring codes, pairs and fours.
template <int BITS>
struct FirstOfTwo {
    static constexpr uint64_t code = (1 << BITS) - 1;
    static constexpr uint64_t two = code | code << BITS;
    static constexpr uint64_t codes = code * 0x0001000100010001;
    static constexpr uint64_t pairs = two * 0x0000000100000001;
    static constexpr uint64_t four = two | two << 2 * BITS;
};

// Joins eight codes, one in each byte, into one string of 8 · BITS bits: bytes to pairs, pairs to
// fours, fours to eight. Bits of a code above BITS are dropped.
template <int BITS>
uint64_t joined(uint64_t word) {
    using First = FirstOfTwo<BITS>;
    constexpr int gap = 8 - BITS;
    word &= First::code * 0x0101010101010101;
    word = moved_together<BITS>(word, First::codes, BITS, gap);
    word = moved_together<BITS>(word, First::pairs, 2 * BITS, 2 * gap);
    return moved_together<BITS>(word, First::four, 4 * BITS, 4 * gap);
}

// Undoes `joined`. Bits above 8 · BITS are ignored.
template <int BITS>
uint64_t parted(uint64_t word) {
    using First = FirstOfTwo<BITS>;
    constexpr int gap = 8 - BITS;
    word &= First::four | First::four << 4 * BITS;
    word = moved_apart<BITS>(word, First::four, 4 * BITS, 4 * gap);
    word = moved_apart<BITS>(word, First::pairs, 2 * BITS, 2 * gap);
    return moved_apart<BITS>(word, First::codes, BITS, gap);
}

// A word that holds the codes of one packed byte, of 2 or 4 bits each, with one code in each byte.
template <int BITS>
struct CodesOfByte;
template <>
struct CodesOfByte<2> {
    using type = uint32_t;
};
template <>
struct CodesOfByte<4> {
    using type = uint16_t;
};

// Packs codes into `n` bytes. Compilers vectorize this loop.
template <int BITS>
void pack_bytes(const uint8_t* codes, uint8_t* packed, int64_t n) {
    using Word = typename CodesOfByte<BITS>::type;
    for (int64_t i = 0; i < n; ++i) {
        Word word = load<Word>(codes + i * sizeof(Word));
        word &= static_cast<Word>(((1 << BITS) - 1) * 0x01010101);
        word |= static_cast<Word>(word >> (8 - BITS));
        if (BITS == 2) word |= static_cast<Word>(word >> 2 * (8 - BITS));
        packed[i] = static_cast<uint8_t>(word);
    }
}

// How many strings of eight codes may be read and written as eight bytes, all of them bytes of the
// `n` codes. That is far faster than BITS bytes.
template <int BITS>
int64_t wide_words(int64_t n) {
    const int64_t bytes = (n * BITS + 7) / 8;
    return bytes < 8 ? 0 : (bytes - 8) / BITS + 1;
}

template <int BITS>
void pack_words(const uint8_t* codes, uint8_t* packed, int64_t n) {
    const int64_t words = n / 8;
    if constexpr (8 % BITS != 0) {
        // The next string overwrites what a store wrote beyond its own.
        const int64_t wide = wide_words<BITS>(n);
        for (int64_t i = 0; i < wide; ++i) {
            store(packed + BITS * i, joined<BITS>(load<uint64_t>(codes + 8 * i)));
        }
        for (int64_t i = wide; i < words; ++i) {
            const uint64_t string = joined<BITS>(load<uint64_t>(codes + 8 * i));
            memcpy(packed + BITS * i, &string, BITS);
        }
    } else {
        pack_bytes<BITS>(codes, packed, words * BITS);
    }
    const int64_t left = n % 8;
    if (left > 0) {
        uint64_t word = 0;
        memcpy(&word, codes + 8 * words, left);
        const uint64_t string = joined<BITS>(word);
        memcpy(packed + BITS * words, &string, (left * BITS + 7) / 8);
    }
}

template <int BITS>
void unpack_words(const uint8_t* packed, uint8_t* codes, int64_t n) {
    const int64_t words = n / 8;
    const int64_t wide = wide_words<BITS>(n);
    for (int64_t i = 0; i < wide; ++i) {
        store(codes + 8 * i, parted<BITS>(load<uint64_t>(packed + BITS * i)));
    }
    for (int64_t i = wide; i < words; ++i) {
        uint64_t string = 0;
        memcpy(&string, packed + BITS * i, BITS);
        store(codes + 8 * i, parted<BITS>(string));
    }
    const int64_t left = n % 8;
    if (left > 0) {
        uint64_t string = 0;
        memcpy(&string, packed + BITS * words, (left * BITS + 7) / 8);
        const uint64_t word = parted<BITS>(string);
        memcpy(codes + 8 * words, &word, left);
    }
}

// Packs n codes into ceil(n · bits / 8) bytes. Bits of a code above `bits` are dropped.
inline void pack_codes(const uint8_t* codes, uint8_t* packed, int64_t n, int64_t bits) {
    switch (bits) {
        case 2: return pack_words<2>(codes, packed, n);
        case 3: return pack_words<3>(codes, packed, n);
        case 4: return pack_words<4>(codes, packed, n);
        case 5: return pack_words<5>(codes, packed, n);
        case 6: return pack_words<6>(codes, packed, n);
        default: memcpy(packed, codes, n);
    }
}

// Undoes `pack_codes`. The spare bits of the last byte are ignored.
inline void unpack_codes(const uint8_t* packed, uint8_t* codes, int64_t n, int64_t bits) {
    switch (bits) {
        case 2: return unpack_words<2>(packed, codes, n);
        case 3: return unpack_words<3>(packed, codes, n);
        case 4: return unpack_words<4>(packed, codes, n);
        case 5: return unpack_words<5>(packed, codes, n);
        case 6: return unpack_words<6>(packed, codes, n);
        default: memcpy(codes, packed, n);
    }
}

}  // namespace recpoint::RECPOINT_SET
