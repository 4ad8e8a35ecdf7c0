#include "../native/open_table.h"
#include "../native/radix_sort.h"

namespace recpoint::RECPOINT_SET {
namespace {

// Entries of open addressing with linear probing. An entry has the high half of the key's hash (its
// tag) above the key's slot; 0 is an empty entry, because no key has slot 0. The tag says where an
// entry belongs, so entries move without a look at their keys.
struct Index {
    uint64_t* entries;
    int64_t count;  // below 2^32, so a tag times the count fits 64 bits
};

// A map, in the layout of Python's array: each field is an int64. README.md tells of growth.
struct Map {
    Index index;
    Index old;        // entries are null if the map does not grow
    int64_t start;    // of `old`: the entry before it is empty as long as the map grows
    int64_t moved;    // entries of `old` from `start` on that lie in `index` now
    int64_t* keys;    // of each slot: its key. The caller's memory
    uint64_t* taken;  // a bit for each slot; that of slot 0 is set
    int64_t capacity;
    int64_t size;
    int64_t low;  // all slots of words before this one are taken
    uint64_t first;
    uint64_t second;  // factors of the hash
    int64_t step;     // entries that a growing map moves in a call, at least
    int64_t passed;   // entries of `old` whose pages were not given back yet
};

static_assert(sizeof(Map) == 15 * 8);

constexpr int64_t BLOCK = 32;  // keys whose memory is asked for together
constexpr int64_t PACE = 8;    // entries that a growing map moves for each inserted key
constexpr int64_t RETURNED = 1 << 19;  // entries whose pages a growing map gives back at once

// What `insert_keys` returns instead of -1: a kind of error, and above it the position.
constexpr int64_t KINDS = 4;
constexpr int64_t OUTSIDE = 0;
constexpr int64_t TAKEN = 1;
constexpr int64_t PRESENT = 2;

uint32_t tag_of(const Map& map, int64_t key) {
    return spread_thrice(static_cast<uint64_t>(key), map.first, map.second) >> 32;
}

// --- one index ---------------------------------------------------------------------------------

uint32_t tag_in(uint64_t entry) { return entry >> 32; }
int64_t slot_in(uint64_t entry) { return entry & 0xFFFFFFFFu; }

// The entry at which the search for a tag begins. Homes are in the order of tags.
int64_t home(const Index& index, uint32_t tag) {
    return (static_cast<uint64_t>(tag) * static_cast<uint64_t>(index.count)) >> 32;
}

int64_t after(const Index& index, int64_t at) { return at + 1 == index.count ? 0 : at + 1; }
int64_t before(const Index& index, int64_t at) { return (at == 0 ? index.count : at) - 1; }

// Steps from one entry forward to another.
int64_t steps(const Index& index, int64_t from, int64_t to) {
    return to >= from ? to - from : to - from + index.count;
}

// From `at` on, the first entry with this tag, or the first empty one. There are always empty
// entries, so the search ends.
int64_t next_candidate(const Index& index, int64_t at, uint32_t tag) {
    while (index.entries[at] != 0 && tag_in(index.entries[at]) != tag) at = after(index, at);
    return at;
}

// From the candidate `at` on, the entry of the key, or the first empty one.
int64_t entry_of(const Map& map, const Index& index, int64_t at, uint32_t tag, int64_t key) {
    while (index.entries[at] != 0 && map.keys[slot_in(index.entries[at])] != key) {
        at = next_candidate(index, after(index, at), tag);
    }
    return at;
}

// Empties an entry. Entries behind it move up as far as their homes allow (Knuth, volume 3, 6.4,
// algorithm R), so the index is as if the key had never been there.
void erase(const Index& index, int64_t hole) {
    for (int64_t at = hole;;) {
        at = after(index, at);
        const uint64_t entry = index.entries[at];
        if (entry == 0) break;
        if (steps(index, home(index, tag_in(entry)), at) >= steps(index, hole, at)) {
            index.entries[hole] = entry;
            hole = at;
        }
    }
    index.entries[hole] = 0;
}

// --- growth ------------------------------------------------------------------------------------

// The index in which a tag belongs.
const Index& index_of(const Map& map, uint32_t tag) {
    if (map.old.entries == nullptr) return map.index;
    const bool is_moved = steps(map.old, map.start, home(map.old, tag)) < map.moved;
    return is_moved ? map.index : map.old;
}

// Copies an entry of the old index to the larger one.
void move_entry(const Map& map, uint64_t entry) {
    int64_t at = home(map.index, tag_in(entry));
    while (map.index.entries[at] != 0) at = after(map.index, at);
    map.index.entries[at] = entry;
}

void end_growth(Map& map) {
    ask_for_large_pages(map.index.entries, map.index.count * static_cast<int64_t>(sizeof(uint64_t)));
    map.old = {};
}

// Moves entries of the old index until `quota` have been passed and the last was empty. So each key
// whose home was passed has moved, and no other.
void move_entries(Map& map, int64_t quota) {
    if (map.old.entries == nullptr) return;
    int64_t at = map.start + map.moved;
    if (at >= map.old.count) at -= map.old.count;
    for (bool is_empty = false; map.moved < map.old.count && (quota > 0 || !is_empty); --quota) {
        const uint64_t entry = map.old.entries[at];
        is_empty = entry == 0;
        if (!is_empty) move_entry(map, entry);
        at = after(map.old, at);
        ++map.moved;
        // All pages at once would take the system milliseconds at the end.
        map.passed = at == 0 ? 0 : map.passed + 1;
        if (map.passed == RETURNED) {
            give_back_pages(map.old.entries + at - RETURNED, RETURNED * sizeof(uint64_t));
            map.passed = 0;
        }
    }
    if (map.moved == map.old.count) end_growth(map);
}

// Moves the entries before `start` too, back to an empty one: a new key needs the empty entry between
// them and `start`.
void move_back(Map& map) {
    for (;;) {
        map.start = before(map.old, map.start);
        if (++map.moved == map.old.count) return end_growth(map);
        const uint64_t entry = map.old.entries[before(map.old, map.start)];
        if (entry == 0) return;
        move_entry(map, entry);
    }
}

// Begins to grow: the index becomes the old one. `entries` are empty.
void grow_keys(
    Map* map, uint64_t* entries, int64_t count, int64_t* keys, uint64_t* taken, int64_t capacity
) {
    move_entries(*map, INT64_MAX);  // a growth that has not ended
    ask_for_small_pages(entries, count * static_cast<int64_t>(sizeof *entries));
    map->old = map->index;
    map->index = {entries, count};
    map->keys = keys;
    memcpy(taken, map->taken, (map->capacity / 64 + 1) * sizeof *taken);
    map->taken = taken;
    map->capacity = capacity;
    int64_t at = 0;
    while (map->old.entries[at] != 0) ++at;
    map->start = after(map->old, at);
    map->moved = map->passed = 0;
}

// --- calls -------------------------------------------------------------------------------------

// Makes the map empty. Its memory is written here, so no batch waits for the system's pages.
void clear_keys(Map* map) {
    const int64_t bytes = map->index.count * static_cast<int64_t>(sizeof(uint64_t));
    ask_for_large_pages(map->index.entries, bytes);
    memset(map->index.entries, 0, bytes);
    memset(map->taken, 0, (map->capacity / 64 + 1) * sizeof *map->taken);
    map->taken[0] = 1;
    map->size = map->low = 0;
}

// Calls `visit(i, index, at, tag)` for each key in turn, with its index, and the first entry of it
// that is empty or has the key's tag. Entries and keys of a block are on their way before they are
// needed. `visit` must not change the map.
template <typename Visit>
void search(const Map& given, const int64_t* keys, int64_t n, const Visit& visit) {
    const Map map = given;  // a copy, which no store of `visit` can change
    uint32_t tags[2][BLOCK];
    const Index* indices[2][BLOCK];
    int64_t places[2][BLOCK];
    const auto begin = [&](int64_t block) {
        const int64_t here = least(BLOCK, n - block * BLOCK);
        for (int64_t i = 0; i < here; ++i) {
            const uint32_t tag = tag_of(map, keys[block * BLOCK + i]);
            const Index& index = index_of(map, tag);
            tags[block & 1][i] = tag;
            indices[block & 1][i] = &index;
            places[block & 1][i] = home(index, tag);
            ask_for(index.entries + places[block & 1][i]);
        }
    };
    begin(0);
    for (int64_t block = 0; block * BLOCK < n; ++block) {
        const int64_t here = least(BLOCK, n - block * BLOCK);
        const int64_t turn = block & 1;
        for (int64_t i = 0; i < here; ++i) {
            const Index& index = *indices[turn][i];
            const int64_t at = next_candidate(index, places[turn][i], tags[turn][i]);
            places[turn][i] = at;
            ask_for(map.keys + slot_in(index.entries[at]));
        }
        if ((block + 1) * BLOCK < n) begin(block + 1);
        for (int64_t i = 0; i < here; ++i) {
            visit(block * BLOCK + i, *indices[turn][i], places[turn][i], tags[turn][i]);
        }
    }
}

// Writes the slot of each key, or 0.
void find_keys(const Map* map, const int64_t* keys, int64_t n, int64_t* slots) {
    search(*map, keys, n, [&](int64_t i, const Index& index, int64_t at, uint32_t tag) {
        slots[i] = slot_in(index.entries[entry_of(*map, index, at, tag, keys[i])]);
    });
}

// Writes the slot of each key, or 0, and to `room` the keys whose slot is 0, ascending, each once.
// Returns their number. `room` has room for 2 * n keys.
int64_t find_or_list(
    const Map* map, const int64_t* keys, int64_t n, int64_t* slots, uint64_t* room
) {
    constexpr uint64_t SIGN = uint64_t{1} << 63;  // turned, it makes the order that of integers
    find_keys(map, keys, n, slots);
    int64_t misses = 0;
    for (int64_t i = 0; i < n; ++i) {
        room[misses] = static_cast<uint64_t>(keys[i]) ^ SIGN;
        misses += slots[i] == 0;
    }
    sort(room, room + n, misses);
    int64_t count = 0;
    for (int64_t i = 0; i < misses; ++i) {
        const uint64_t key = room[i] ^ SIGN;
        count += i == 0 || room[count - 1] != key;
        room[count - 1] = key;
    }
    return count;
}

// Writes the slots of keys whose slot is 0.
void find_missing(const Map* map, const int64_t* keys, int64_t n, int64_t* slots) {
    for (int64_t i = 0; i < n; ++i) {
        if (slots[i] != 0) continue;
        const uint32_t tag = tag_of(*map, keys[i]);
        const Index& index = index_of(*map, tag);
        const int64_t candidate = next_candidate(index, home(index, tag), tag);
        slots[i] = slot_in(index.entries[entry_of(*map, index, candidate, tag, keys[i])]);
    }
}

bool is_taken(const Map& map, int64_t slot) { return map.taken[slot / 64] >> slot % 64 & 1; }

// Takes the slot from the key and returns it, or 0 if the key has none.
int64_t remove_key(Map& map, int64_t key) {
    const uint32_t tag = tag_of(map, key);
    const Index& index = index_of(map, tag);
    const int64_t candidate = next_candidate(index, home(index, tag), tag);
    const int64_t at = entry_of(map, index, candidate, tag, key);
    const int64_t slot = slot_in(index.entries[at]);
    if (slot == 0) return 0;
    erase(index, at);
    map.taken[slot / 64] &= ~(uint64_t{1} << slot % 64);
    map.low = least(map.low, slot / 64);
    --map.size;
    return slot;
}

// Gives one key a slot. Returns -1, or the kind of the error.
int64_t insert_key(Map& map, int64_t key, int64_t slot) {
    if (slot < 1 || slot > map.capacity) return OUTSIDE;
    if (is_taken(map, slot)) return TAKEN;
    const uint32_t tag = tag_of(map, key);
    const Index* index = &index_of(map, tag);
    const int64_t candidate = next_candidate(*index, home(*index, tag), tag);
    int64_t at = entry_of(map, *index, candidate, tag, key);
    if (index->entries[at] != 0) return PRESENT;
    // The entry before `start` stays empty, because it ends searches and moves.
    if (index == &map.old && after(map.old, at) == map.start) {
        move_back(map);
        index = &map.index;
        at = home(*index, tag);
        while (index->entries[at] != 0) at = after(*index, at);
    }
    index->entries[at] = static_cast<uint64_t>(tag) << 32 | static_cast<uint64_t>(slot);
    map.taken[slot / 64] |= uint64_t{1} << slot % 64;
    map.keys[slot] = key;
    ++map.size;
    return -1;
}

// Gives each key its slot. If one cannot have it, nothing has changed, and the result is the kind of
// the error plus KINDS times the position; else it is -1. `before` has room for n keys.
int64_t insert_keys(
    Map* map, const int64_t* keys, const int64_t* slots, int64_t n, int64_t* before
) {
    move_entries(*map, greatest(map->step, PACE * n));
    const auto expect = [&](int64_t i) {
        const uint32_t tag = tag_of(*map, keys[i]);
        const Index& index = index_of(*map, tag);
        ask(index.entries + home(index, tag));
        if (slots[i] >= 1 && slots[i] <= map->capacity) ask(map->keys + slots[i]);
    };
    for (int64_t i = 0; i < least(BLOCK, n); ++i) expect(i);
    for (int64_t i = 0; i < n; ++i) {
        if (i + BLOCK < n) expect(i + BLOCK);
        const int64_t slot = slots[i];
        if (slot >= 1 && slot <= map->capacity) before[i] = map->keys[slot];
        const int64_t error = insert_key(*map, keys[i], slot);
        if (error < 0) continue;
        for (int64_t k = i; k-- > 0;) {
            remove_key(*map, keys[k]);
            map->keys[slots[k]] = before[k];
        }
        return error + KINDS * i;
    }
    return -1;
}

// Takes the slots from the keys. Writes the slot that each key had, or 0, and 0 as the slot's key.
void remove_keys(Map* map, const int64_t* keys, int64_t n, int64_t* slots) {
    move_entries(*map, map->step);
    find_keys(map, keys, n, slots);  // brings entries and keys
    for (int64_t i = 0; i < n; ++i) {
        if (slots[i] != 0) slots[i] = remove_key(*map, keys[i]);
        if (slots[i] != 0) map->keys[slots[i]] = 0;
    }
}

// Writes the lowest free slots, up to n. Returns their number.
int64_t list_free(Map* map, int64_t n, int64_t* slots) {
    const int64_t words = map->capacity / 64 + 1;
    while (map->low < words && map->taken[map->low] == ~uint64_t{0}) ++map->low;
    int64_t count = 0;
    for (int64_t word = map->low; word < words && count < n; ++word) {
        for (uint64_t bits = ~map->taken[word]; bits != 0 && count < n; bits &= bits - 1) {
            const int64_t slot = 64 * word + __builtin_ctzll(bits);
            if (slot > map->capacity) return count;
            slots[count++] = slot;
        }
    }
    return count;
}

// Writes the slots of n new keys, ascending: the n_leaving ones that keys lose before, and the lowest
// free ones, of which there must be enough. `slots` has room for 2 * n.
void choose_slots(Map* map, const int64_t* leaving, int64_t n_leaving, int64_t n, int64_t* slots) {
    memcpy(slots, leaving, n_leaving * sizeof *slots);
    if (n > n_leaving) list_free(map, n - n_leaving, slots + n_leaving);
    sort(slots, slots + n, n);
}

// Writes all slots that have a key, ascending.
void list_taken(const Map* map, int64_t* slots) {
    for (int64_t word = 0; word <= map->capacity / 64; ++word) {
        uint64_t bits = map->taken[word];
        if (word == 0) bits &= ~uint64_t{1};
        for (; bits != 0; bits &= bits - 1) *slots++ = 64 * word + __builtin_ctzll(bits);
    }
}

}  // namespace

extern const Operation key_map[] = {
    {"clear_keys", call<clear_keys>},
    {"grow_keys", call<grow_keys>},
    {"find_keys", call<find_keys>},
    {"find_or_list", call<find_or_list>},
    {"find_missing", call<find_missing>},
    {"insert_keys", call<insert_keys>},
    {"remove_keys", call<remove_keys>},
    {"list_free", call<list_free>},
    {"choose_slots", call<choose_slots>},
    {"list_taken", call<list_taken>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
