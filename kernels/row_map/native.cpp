#include "../native/open_table.h"

namespace recpoint::RECPOINT_SET {
namespace {

// A row and its place. Keys are ~id, which is never 0, so 0 is an empty entry.
struct Entry {
    int64_t key;
    int64_t place;
};

static_assert(sizeof(Entry) == 16);

constexpr int64_t AHEAD = 24;  // ids whose memory is asked for before it is needed

// The entry at which the search for an id begins.
int64_t begin(int64_t id, int64_t mask) {
    return static_cast<int64_t>(spread(static_cast<uint64_t>(id)) >> 20) & mask;
}

// The entry of a row, or the empty one where it belongs. There are always empty entries, so the
// search ends.
int64_t entry_of(const Entry* entries, int64_t mask, int64_t id) {
    int64_t at = begin(id, mask);
    while (entries[at].key != 0 && entries[at].key != ~id) at = (at + 1) & mask;
    return at;
}

// Gives the rows the places first, first + 1, …, and counts the new rows.
void put_places(
    Entry* entries, int64_t mask, const int64_t* ids, int64_t n, int64_t first, int64_t* count
) {
    for (int64_t i = 0; i < least(AHEAD, n); ++i) ask(entries + begin(ids[i], mask));
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) ask(entries + begin(ids[i + AHEAD], mask));
        Entry& entry = entries[entry_of(entries, mask, ids[i])];
        *count += entry.key == 0;
        entry = {~ids[i], first + i};
    }
}

// Writes the place of each row, or -1.
void find_places(
    const Entry* entries, int64_t mask, const int64_t* ids, int64_t n, int64_t* places
) {
    for (int64_t i = 0; i < least(AHEAD, n); ++i) ask(entries + begin(ids[i], mask));
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) ask(entries + begin(ids[i + AHEAD], mask));
        const Entry& entry = entries[entry_of(entries, mask, ids[i])];
        places[i] = entry.key == 0 ? -1 : entry.place;
    }
}

// Writes all rows and their places, in no order.
void list_places(const Entry* entries, int64_t mask, int64_t* ids, int64_t* places) {
    int64_t n = 0;
    for (int64_t at = 0; at <= mask; ++at) {
        if (entries[at].key == 0) continue;
        ids[n] = ~entries[at].key;
        places[n++] = entries[at].place;
    }
}

// Copies all entries to an empty, larger table.
void move_places(const Entry* entries, int64_t mask, Entry* larger, int64_t larger_mask) {
    for (int64_t at = 0; at <= mask; ++at) {
        if (at + AHEAD <= mask) ask(larger + begin(~entries[at + AHEAD].key, larger_mask));
        if (entries[at].key == 0) continue;
        larger[entry_of(larger, larger_mask, ~entries[at].key)] = entries[at];
    }
}

}  // namespace

extern const Operation row_map[] = {
    {"put_places", call<put_places>},
    {"find_places", call<find_places>},
    {"list_places", call<list_places>},
    {"move_places", call<move_places>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
