#include "bits.h"

namespace recpoint::RECPOINT_SET {
namespace {

// How many ids ahead a word is prefetched. The training step has pushed the words out of the
// caches.
constexpr int64_t IDS_AHEAD = 192;

template <typename Id>
struct Unsigned;
template <>
struct Unsigned<int32_t> {
    using type = uint32_t;
};
template <>
struct Unsigned<int64_t> {
    using type = uint64_t;
};

// The sign bit of `id | (last - id)` is set exactly if the id lies outside 0 … last.
template <typename Id>
bool all_inside(const Id* ids, int64_t n, int64_t stride, Id last) {
    using Word = typename Unsigned<Id>::type;
    Word signs = 0;
    // A stride known at compile time lets the compiler use vectors.
    if (stride == 1) {
        for (int64_t i = 0; i < n; ++i) {
            const Word id = static_cast<Word>(ids[i]);
            signs |= id | (static_cast<Word>(last) - id);
        }
    } else {
        for (int64_t i = 0; i < n; ++i) {
            const Word id = static_cast<Word>(ids[i * stride]);
            signs |= id | (static_cast<Word>(last) - id);
        }
    }
    return static_cast<Id>(signs) >= 0;
}

// The ids to mark in a table, `stride` entries apart.
template <typename Id>
struct Ids {
    uint32_t* words;
    const Id* ids;
    int64_t n;
    int64_t stride;
    int64_t rows;
};

template <typename Id>
void ask_for_word(const Ids<Id>& table, int64_t at) {
    // Counted in integers: an id out of range names memory that need not exist.
    const auto word = static_cast<uint64_t>(table.ids[at * table.stride] >> 5);
    const uint64_t address = reinterpret_cast<uintptr_t>(table.words) + 4 * word;
    __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 3);
}

// The position of the prefetch. It moves on from table to table, so that the first words of a table
// come from memory while the last ids of the table before are marked.
template <typename Id>
struct Ahead {
    const Ids<Id>* table;
    const Ids<Id>* end;
    int64_t at = 0;

    // Moves `table` to the table of the next id. Returns how many of the next `wanted` ids belong
    // to it, or 0 if no id is left.
    int64_t stretch(int64_t wanted) {
        for (; table < end; ++table, at = 0) {
            if (at < table->n) return least(wanted, table->n - at);
        }
        return 0;
    }
};

// Marks the ids of a table. Returns -1. If an id is out of range, marks none and returns the
// position of the first such id.
template <typename Id>
int64_t mark_table(const Ids<Id>& table, Ahead<Id>& ahead) {
    const auto [words, ids, n, stride, rows] = table;
    const int64_t largest = static_cast<int64_t>((~uint64_t{0} >> 1) >> (64 - 8 * sizeof(Id)));
    const Id last = static_cast<Id>(least(rows - 1, largest));
    if (!all_inside(ids, n, stride, last)) {
        for (int64_t i = 0; i < n; ++i) {
            if (ids[i * stride] < 0 || ids[i * stride] > last) return i;
        }
    }
    const auto set = [=](int64_t i) {
        const auto row = static_cast<uint64_t>(ids[i * stride]);
        words[row >> 5] |= uint32_t{1} << (row & 31);
    };
    int64_t i = 0;
    for (int64_t stretch; (stretch = ahead.stretch(n - i)) > 0; ahead.at += stretch) {
        const Ids<Id> coming = *ahead.table;
        const int64_t shift = ahead.at - i;
        for (const int64_t end = i + stretch; i < end; ++i) {
            ask_for_word(coming, i + shift);
            set(i);
        }
    }
    for (; i < n; ++i) set(i);
    return -1;
}

// Marks the ids of several tables. Returns -1, or the index of the first table with an id out of
// range. That table and the tables after it are not marked.
template <typename Id>
int64_t mark_all_of(const Ids<Id>* tables, int64_t count, int64_t& position) {
    Ahead<Id> ahead = {tables, tables + count};
    int64_t asked = 0;
    for (int64_t stretch; (stretch = ahead.stretch(IDS_AHEAD - asked)) > 0; asked += stretch) {
        for (int64_t k = 0; k < stretch; ++k) ask_for_word(*ahead.table, ahead.at++);
    }
    for (int64_t t = 0; t < count; ++t) {
        position = mark_table(tables[t], ahead);
        if (position >= 0) return t;
    }
    return -1;
}

template <typename Id>
int64_t mark(uint32_t* words, const Id* ids, int64_t n, int64_t stride, int64_t rows) {
    const Ids<Id> table = {words, ids, n, stride, rows};
    int64_t position = -1;
    mark_all_of(&table, 1, position);
    return position;
}

// How many tables are marked together.
constexpr Py_ssize_t MOST_TABLES = 128;

// Marks int64 ids of several tables. Each table has four arguments: the addresses of its bitmap and
// of the ids, the number of ids, and the rows of the table.
PyObject* mark_tables(PyObject*, PyObject* const* given, Py_ssize_t count) {
    Ids<int64_t> tables[MOST_TABLES];
    for (Py_ssize_t done = 0; done < count / 4; done += MOST_TABLES) {
        const Py_ssize_t n = least(count / 4 - done, MOST_TABLES);
        for (Py_ssize_t t = 0; t < n; ++t) {
            PyObject* const* of_table = given + 4 * (done + t);
            tables[t] = {
                Argument<uint32_t*>::from(of_table[0]), Argument<const int64_t*>::from(of_table[1]),
                Argument<int64_t>::from(of_table[2]), 1, Argument<int64_t>::from(of_table[3]),
            };
        }
        if (PyErr_Occurred() != nullptr) return nullptr;
        int64_t position = -1;
        const int64_t refused = mark_all_of(tables, n, position);
        if (refused >= 0) return PyLong_FromLongLong(done + refused);
    }
    return PyLong_FromLong(-1);
}

// What one lookup asks of a table: its bitmap, its rows, and the bags of the feature.
struct Feature {
    int64_t words;
    int64_t rows;
    int64_t first_bag;
    int64_t end_bag;
};

// Marks row 0 in place of ids out of range, except -1, which marks nothing. FBGEMM trains these rows.
template <typename Id>
void mark_as_trained(const Ids<Id>& table) {
    for (int64_t i = 0; i < table.n; ++i) {
        const int64_t id = table.ids[i];
        if (id == -1) continue;
        const int64_t row = id >= 0 && id < table.rows ? id : 0;
        table.words[row >> 5] |= uint32_t{1} << (row & 31);
    }
}

template <typename Id, typename Offset>
void mark_lookup(
    const Feature* features, int64_t count, const Id* ids, int64_t n, const Offset* offsets
) {
    Ids<Id> tables[MOST_TABLES];
    for (int64_t done = 0; done < count; done += MOST_TABLES) {
        const int64_t many = least<int64_t>(count - done, MOST_TABLES);
        for (int64_t t = 0; t < many; ++t) {
            const Feature& feature = features[done + t];
            // Offsets come from the user's batch, so no id outside the tensor is read.
            const int64_t end = least<int64_t>(greatest<int64_t>(offsets[feature.end_bag], 0), n);
            const int64_t start =
                least<int64_t>(greatest<int64_t>(offsets[feature.first_bag], 0), end);
            tables[t] = {
                reinterpret_cast<uint32_t*>(feature.words), ids + start, end - start, 1,
                feature.rows,
            };
        }
        for (int64_t first = 0; first < many;) {
            int64_t position = -1;
            const int64_t refused = mark_all_of(tables + first, many - first, position);
            if (refused < 0) break;
            mark_as_trained(tables[first + refused]);
            first += refused + 1;
        }
    }
}

// Marks the ids of many features of one lookup. Ids and offsets are int32 or int64.
void mark_features(
    const Feature* features, int64_t count, const void* ids, bool wide_ids, int64_t n,
    const void* offsets, bool wide_offsets
) {
    const auto* ids64 = static_cast<const int64_t*>(ids);
    const auto* ids32 = static_cast<const int32_t*>(ids);
    const auto* offsets64 = static_cast<const int64_t*>(offsets);
    const auto* offsets32 = static_cast<const int32_t*>(offsets);
    if (wide_ids && wide_offsets) return mark_lookup(features, count, ids64, n, offsets64);
    if (wide_ids) return mark_lookup(features, count, ids64, n, offsets32);
    if (wide_offsets) return mark_lookup(features, count, ids32, n, offsets64);
    mark_lookup(features, count, ids32, n, offsets32);
}

// Marks n ids, or n rows from `first` on if `ids` is null. Writes the positions of the ids that
// were not marked before, and returns their number. If an id is out of range, marks none and
// returns -1.
int64_t mark_new(
    uint32_t* words, const int64_t* ids, int64_t first, int64_t n, int64_t rows, int64_t* positions
) {
    uint64_t largest = 0;
    if (ids != nullptr) {
        // A negative id becomes a huge unsigned id.
        for (int64_t i = 0; i < n; ++i) largest = greatest(largest, static_cast<uint64_t>(ids[i]));
        if (n > 0 && largest >= static_cast<uint64_t>(rows)) return -1;
    }
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) {
        const auto row = static_cast<uint64_t>(ids != nullptr ? ids[i] : first + i);
        const uint32_t word = words[row >> 5];
        const uint32_t bit = row & 31;
        // Every position is written. If its row is not new, the next position overwrites it. A
        // branch would be mispredicted, because new rows come at random.
        positions[found] = i;
        found += 1 - static_cast<int64_t>((word >> bit) & 1);
        words[row >> 5] = word | (uint32_t{1} << bit);
    }
    return found;
}

bool has_bit(const char* row, int64_t bytes) {
    uint64_t seen = 0;
    int64_t i = 0;
    for (; i + 8 <= bytes; i += 8) seen |= load<uint64_t>(row + i);
    for (; i < bytes; ++i) seen |= static_cast<unsigned char>(row[i]);
    return seen != 0;
}

// Writes one bit a row to the words of a bitmap: 1 if any bit of the row is set.
void find_nonzero(
    const char* values, int64_t row_bytes, int64_t rows, uint32_t* words, int64_t threads
) {
    over_rows((rows + 31) / 32, threads, [=](int64_t start, int64_t stop) {
        for (int64_t word = start; word < stop; ++word) {
            uint32_t bits = 0;
            const int64_t count = least<int64_t>(32, rows - 32 * word);
            for (int64_t k = 0; k < count; ++k) {
                const char* row = values + (32 * word + k) * row_bytes;
                bits |= static_cast<uint32_t>(has_bit(row, row_bytes)) << k;
            }
            words[word] = bits;
        }
    });
}

void merge(uint32_t* into, const uint32_t* other, int64_t n) {
    for (int64_t i = 0; i < n; ++i) into[i] |= other[i];
}

void clear(uint32_t* words, int64_t n) { memset(words, 0, 4 * n); }

// Writes the number of set bits of each part. Returns the number of all set bits.
int64_t count(const uint32_t* words, int64_t n, int64_t* part_counts, int64_t threads) {
    const int64_t parts = parts_of(n);
    over_rows(parts, threads, [=](int64_t start, int64_t stop) {
        for (int64_t part = start; part < stop; ++part) {
            const int64_t first = part * PART_WORDS;
            part_counts[part] = count_bits(words + first, least(PART_WORDS, n - first));
        }
    });
    int64_t total = 0;
    for (int64_t part = 0; part < parts; ++part) total += part_counts[part];
    return total;
}

// Writes the ids of the marked rows. `part_counts` holds the counts that `count` wrote; each is
// replaced by the number of ids before its part. Returns how many parts have changed since they
// were counted.
int64_t collect(
    const uint32_t* words, int64_t n, int64_t* part_counts, int64_t* ids, int64_t threads
) {
    const int64_t parts = parts_of(n);
    int64_t before = 0;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t room = part_counts[part];
        part_counts[part] = before;
        before += room;
    }
    int64_t changed = 0;
    over_rows(parts, threads, [&](int64_t start, int64_t stop) {
        for (int64_t part = start; part < stop; ++part) {
            const int64_t first = part * PART_WORDS;
            const int64_t to = part_counts[part];
            const int64_t room = (part + 1 < parts ? part_counts[part + 1] : before) - to;
            const int64_t found = write_ids(
                words + first, least(PART_WORDS, n - first), 32 * first, ids + to, room
            );
            if (found != room) take_turn(changed);
        }
    });
    return changed;
}

}  // namespace

// Functions that change a bitmap keep the GIL. So no bit is lost if the trainer's thread marks
// while a background thread merges a refused checkpoint back.
extern const Operation dirty_bitmap[] = {
    {"mark64", call<mark<int64_t>, Gil::kept>},
    {"mark32", call<mark<int32_t>, Gil::kept>},
    {"mark_tables", mark_tables},
    {"mark_features", call<mark_features, Gil::kept>},
    {"mark_new", call<mark_new, Gil::kept>},
    {"merge_bits", call<merge, Gil::kept>},
    {"clear_bits", call<clear, Gil::kept>},
    {"find_nonzero", call<find_nonzero>},
    {"count_bits", call<count>},
    {"collect_bits", call<collect>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
