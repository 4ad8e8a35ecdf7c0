#include "../row_gather/rows.h"

namespace recpoint::RECPOINT_SET {
namespace {

#if defined(__AVX512BW__)
constexpr int64_t REGISTER_BYTES = 64;
#elif defined(__AVX2__)
constexpr int64_t REGISTER_BYTES = 32;
#else
constexpr int64_t REGISTER_BYTES = 16;
#endif

// Elements of GF(2^8), one a byte.
typedef uint8_t Elements __attribute__((vector_size(REGISTER_BYTES)));
typedef int8_t SignedElements __attribute__((vector_size(REGISTER_BYTES)));

// x^4 + x^3 + x^2 + 1, which is x^8 in this field.
constexpr uint8_t REDUCTION = 0x1D;

// The most members of a stripe: 255 data members, P and Q.
constexpr int64_t MOST_MEMBERS = 257;

// A thread takes multiples of this many bytes. Its start keeps the alignment of the output.
constexpr int64_t BLOCK_BYTES = 4096;

inline uint8_t doubled(uint8_t element) {
    return static_cast<uint8_t>((element << 1) ^ (element >> 7) * REDUCTION);
}

inline Elements doubled(Elements elements) {
    const Elements overflow =
        reinterpret_cast<Elements>(reinterpret_cast<SignedElements>(elements) < 0);
    return (elements + elements) ^ (overflow & REDUCTION);
}

// g^position for the position of a data member. A constant: no product is looked up.
struct Coefficients {
    uint8_t of[255];
    constexpr Coefficients() : of() {
        unsigned power = 1;
        for (uint8_t& coefficient : of) {
            coefficient = static_cast<uint8_t>(power);
            power = power << 1 ^ (power >> 7) * (0x100 | REDUCTION);
        }
    }
};
constexpr Coefficients COEFFICIENTS;

// Writes elements to `to`. If `streams`, whole registers go past the cache, and `to` is divisible
// by REGISTER_BYTES.
template <bool streams>
inline void put(char* to, uint8_t element) {
    store(to, element);
}

template <bool streams>
inline void put(char* to, Elements elements) {
#if defined(__AVX512BW__)
    if (streams) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)elements);
#elif defined(__AVX2__)
    if (streams) return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)elements);
#elif defined(__x86_64__)
    if (streams) return _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)elements);
#endif
    store(to, elements);
}

// --- a sum of products -------------------------------------------------------------------------

// Members in the order in which Horner's rule adds them: first those whose coefficient has the
// highest bit, then those that have the next. A member appears once for each bit that is set.
struct Sum {
    const char* members[8 * MOST_MEMBERS];
    int64_t ends[8];
    int64_t bits;

    Sum(const char* const* given, const uint8_t* coefficients, int64_t count) : bits(0) {
        for (int64_t k = 0; k < count; ++k) {
            while (coefficients[k] >> bits != 0) ++bits;
        }
        int64_t listed = 0;
        for (int64_t step = 0; step < bits; ++step) {
            for (int64_t k = 0; k < count; ++k) {
                if (coefficients[k] >> (bits - 1 - step) & 1) members[listed++] = given[k];
            }
            ends[step] = listed;
        }
    }
};

// Computes `out` from `at` on, as far as whole steps of REGISTERS · V reach. Returns where it ends.
template <typename V, int REGISTERS, bool streams>
inline int64_t sum_from(int64_t at, int64_t stop, const Sum& sum, char* out) {
    constexpr int64_t WIDTH = sizeof(V);
    for (; at + REGISTERS * WIDTH <= stop; at += REGISTERS * WIDTH) {
        V total[REGISTERS] = {};
        int64_t i = 0;
        for (int64_t step = 0; step < sum.bits; ++step) {
            if (step > 0) {
                for (V& one : total) one = doubled(one);
            }
            for (; i < sum.ends[step]; ++i) {
                const char* from = sum.members[i] + at;
                for (int r = 0; r < REGISTERS; ++r) total[r] ^= load<V>(from + r * WIDTH);
            }
        }
        for (int r = 0; r < REGISTERS; ++r) put<streams>(out + at + r * WIDTH, total[r]);
    }
    return at;
}

template <bool streams>
void sum_part(int64_t start, int64_t stop, const Sum& sum, char* out) {
    int64_t at = sum_from<Elements, 4, streams>(start, stop, sum, out);
    at = sum_from<Elements, 1, streams>(at, stop, sum, out);
    sum_from<uint8_t, 1, streams>(at, stop, sum, out);
    if (streams) end_streams();
}

// --- P and Q at once ---------------------------------------------------------------------------

// P is the sum of the members. Q is the sum of g^k times member k, by Horner's rule from the last
// member to the first.
template <typename V, int REGISTERS, bool streams>
inline int64_t both_from(
    int64_t at, int64_t stop, const char* const* members, int64_t count, char* p, char* q
) {
    constexpr int64_t WIDTH = sizeof(V);
    for (; at + REGISTERS * WIDTH <= stop; at += REGISTERS * WIDTH) {
        V in_p[REGISTERS] = {};
        V in_q[REGISTERS] = {};
        for (int64_t k = count - 1; k >= 0; --k) {
            const char* from = members[k] + at;
            for (int r = 0; r < REGISTERS; ++r) {
                const V element = load<V>(from + r * WIDTH);
                in_p[r] ^= element;
                in_q[r] = doubled(in_q[r]) ^ element;
            }
        }
        for (int r = 0; r < REGISTERS; ++r) put<streams>(p + at + r * WIDTH, in_p[r]);
        for (int r = 0; r < REGISTERS; ++r) put<streams>(q + at + r * WIDTH, in_q[r]);
    }
    return at;
}

template <bool streams>
void both_part(
    int64_t start, int64_t stop, const char* const* members, int64_t count, char* p, char* q
) {
    int64_t at = both_from<Elements, 4, streams>(start, stop, members, count, p, q);
    at = both_from<Elements, 1, streams>(at, stop, members, count, p, q);
    both_from<uint8_t, 1, streams>(at, stop, members, count, p, q);
    if (streams) end_streams();
}

// Whether an output of so many bytes is to be streamed.
inline bool is_streamed(const char* out, int64_t bytes) {
    return bytes >= STREAM_BYTES && reinterpret_cast<uintptr_t>(out) % REGISTER_BYTES == 0;
}

// Calls `part(start, stop)` for parts that cover 0 … bytes.
template <typename Part>
void over_bytes(int64_t bytes, int64_t threads, const Part& part) {
    const int64_t blocks = (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
    over_rows(blocks, threads, [&](int64_t start, int64_t stop) {
        part(start * BLOCK_BYTES, least(stop * BLOCK_BYTES, bytes));
    });
}

// out = the sum of coefficients[k] · members[k], each of `bytes` bytes. `out` may be a member.
void combine_members(
    const char* const* members, const uint8_t* coefficients, int64_t count, char* out,
    int64_t bytes, int64_t threads
) {
    const Sum sum(members, coefficients, count);
    const bool streams = is_streamed(out, bytes);
    over_bytes(bytes, threads, [&](int64_t start, int64_t stop) {
        (streams ? sum_part<true> : sum_part<false>)(start, stop, sum, out);
    });
}

// P and Q of the data members, each of `bytes` bytes, in one pass over them.
void encode_members(
    const char* const* members, int64_t count, char* p, char* q, int64_t bytes, int64_t threads
) {
    const bool streams = is_streamed(p, bytes) && is_streamed(q, bytes);
    over_bytes(bytes, threads, [&](int64_t start, int64_t stop) {
        (streams ? both_part<true> : both_part<false>)(start, stop, members, count, p, q);
    });
}

// --- differences -------------------------------------------------------------------------------

// Adds coefficient · difference to `row`. The coefficient is not 0.
template <typename V, int REGISTERS>
inline int64_t add_from(
    int64_t at, int64_t stop, char* row, const char* difference, uint8_t coefficient, int bits
) {
    constexpr int64_t WIDTH = sizeof(V);
    for (; at + REGISTERS * WIDTH <= stop; at += REGISTERS * WIDTH) {
        V given[REGISTERS], product[REGISTERS];
        for (int r = 0; r < REGISTERS; ++r) {
            product[r] = given[r] = load<V>(difference + at + r * WIDTH);
        }
        for (int bit = bits - 2; bit >= 0; --bit) {
            for (V& one : product) one = doubled(one);
            if (coefficient >> bit & 1) {
                for (int r = 0; r < REGISTERS; ++r) product[r] ^= given[r];
            }
        }
        for (int r = 0; r < REGISTERS; ++r) {
            char* place = row + at + r * WIDTH;
            store(place, static_cast<V>(load<V>(place) ^ product[r]));
        }
    }
    return at;
}

// Adds g^positions[i] · differences[i] to row slots[i] of the parity. Without positions, all
// coefficients are 1.
//
// Differences with the same slot must not meet on two threads. So the slots are dealt out, in runs
// of some 4 KiB of rows, and a thread takes all differences of its slots.
void apply_differences(
    char* parity, const int64_t* slots, const char* differences, const int64_t* positions,
    int64_t row_bytes, int64_t n, int64_t threads
) {
    int64_t shares = 1;
    while (threads > 1 && shares < threads * PARTS_PER_THREAD) shares *= 2;
    int run = 0;
    while (row_bytes << run < BLOCK_BYTES) ++run;
    const int64_t ahead = shares * greatest<int64_t>(1, AHEAD_BYTES / greatest(row_bytes, LINE));
    const int64_t reach = least(row_bytes, REACH_BYTES);
    over_rows(shares, threads, [=](int64_t start, int64_t stop) {
        const auto is_ours = [=](int64_t i) {
            const int64_t share = slots[i] >> run & (shares - 1);
            return start <= share && share < stop;
        };
        for (int64_t i = 0; i < n; ++i) {
            if (i + ahead < n && is_ours(i + ahead)) {
                const char* coming = parity + slots[i + ahead] * row_bytes;
                for (int64_t at = 0; at < reach; at += LINE) ask_for(coming + at);
            }
            if (!is_ours(i)) continue;
            char* row = parity + slots[i] * row_bytes;
            const char* difference = differences + i * row_bytes;
            const uint8_t coefficient = positions == nullptr ? 1 : COEFFICIENTS.of[positions[i]];
            const int bits = 32 - __builtin_clz(coefficient);
            int64_t at = add_from<Elements, 4>(0, row_bytes, row, difference, coefficient, bits);
            at = add_from<Elements, 1>(at, row_bytes, row, difference, coefficient, bits);
            add_from<uint8_t, 1>(at, row_bytes, row, difference, coefficient, bits);
        }
    });
}

}  // namespace

extern const Operation erasure[] = {
    {"combine_members", call<combine_members>},
    {"encode_members", call<encode_members>},
    {"apply_differences", call<apply_differences>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
