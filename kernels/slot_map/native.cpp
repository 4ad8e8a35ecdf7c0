#include "../native/open_table.h"
#include "../native/radix_sort.h"

namespace recpoint::RECPOINT_SET {
namespace {

// A row that has a slot, in the table of the map. Keys are ~id, which is never 0, so 0 is empty.
struct Entry {
    int64_t key;
    int64_t slot;
};

// A map, in the layout of Python's array: each field is an int64. README.md tells of the queue.
struct Map {
    Entry* entries;
    int64_t mask;   // entries - 1: their number is a power of two, twice the capacity or more
    int64_t shift;  // of a hash, to the number of an entry
    int64_t* keys;  // of each slot: ~id of its row, or 0
    int64_t* last;  // of each slot: the last use of its row, or FREE
    int64_t* held;  // of each slot: the last use that `lower` does not lower
    int64_t* queue;  // slots in the order in which they can be given to other rows
    int64_t capacity;
    int64_t taken;    // slots that have a row
    int64_t low;      // all slots before this one are taken
    int64_t high;     // no slot from this one on was ever taken
    int64_t head;     // first entry of the queue that was not used
    int64_t counted;  // first entry of the queue that was not counted
    int64_t end;      // end of the queue
    int64_t known;    // the queue has all rows with a last use up to this one
    int64_t free_to;  // rows with a last use up to this one were counted
    int64_t ready;    // number of counted entries that are still right
};

static_assert(sizeof(Map) == 17 * 8 && sizeof(Entry) == 16);

constexpr int64_t FREE = INT64_MAX;
constexpr int64_t AHEAD = 64;  // ids whose memory is asked for before it is needed

// What `seek` returns instead of a number of rows.
constexpr int64_t NO_ROOM = -1;
constexpr int64_t NO_MEMORY = -2;
constexpr int64_t NOT_NEW = -3;
constexpr int64_t NEGATIVE = -4;  // minus the position of the negative id

// --- the table ---------------------------------------------------------------------------------

// The entry at which the search for an id begins.
int64_t home(const Map& map, int64_t id) {
    return static_cast<int64_t>(spread(static_cast<uint64_t>(id)) >> map.shift);
}

// The slot of a row, or -1. There are always empty entries, so the search ends.
int64_t slot_of(const Map& map, int64_t id) {
    const int64_t key = ~id;
    for (int64_t at = home(map, id);; at = (at + 1) & map.mask) {
        if (map.entries[at].key == key) return map.entries[at].slot;
        if (map.entries[at].key == 0) return -1;
    }
}

void insert(const Map& map, int64_t id, int64_t slot) {
    int64_t at = home(map, id);
    while (map.entries[at].key != 0) at = (at + 1) & map.mask;
    map.entries[at] = {~id, slot};
}

// Removes a row that is there. Entries behind it move up as far as their homes allow, so the table
// is as if the row had never been there, and no search grows longer.
void erase(const Map& map, int64_t id) {
    int64_t hole = home(map, id);
    while (map.entries[hole].key != ~id) hole = (hole + 1) & map.mask;
    for (int64_t at = hole;;) {
        at = (at + 1) & map.mask;
        const Entry entry = map.entries[at];
        if (entry.key == 0) break;
        // Steps from the entry's home to where it is; it may move back by that many.
        const int64_t steps = (at - home(map, ~entry.key)) & map.mask;
        if (steps >= ((at - hole) & map.mask)) {
            map.entries[hole] = entry;
            hole = at;
        }
    }
    map.entries[hole].key = 0;
}

// Calls `found(i, id, slot)` for each id in turn; the slot is -1 if the row has none. Meanwhile the
// entries of the next ids are on their way. `found` must not change the map.
//
// The search itself is left to branches. A processor that guesses them begins the next searches
// early; without branches, each search took twice as long.
template <typename Id, typename Found>
void search(const Map& given, const Id* ids, int64_t n, const Found& found) {
    const Map map = given;  // a copy, which no store of `found` can change
    for (int64_t i = 0; i < least(AHEAD, n); ++i) ask(map.entries + home(map, ids[i]));
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) ask(map.entries + home(map, ids[i + AHEAD]));
        const int64_t id = ids[i];
        found(i, id, id < 0 ? -1 : slot_of(map, id));
    }
}

template <typename Found>
void search_any(const Map& map, const void* ids, int64_t n, int64_t width, const Found& found) {
    if (width == 8) {
        search(map, static_cast<const int64_t*>(ids), n, found);
    } else {
        search(map, static_cast<const int32_t*>(ids), n, found);
    }
}

void find_any(const Map& map, const void* ids, int64_t n, int64_t width, int64_t* slots) {
    search_any(map, ids, n, width, [=](int64_t i, int64_t, int64_t slot) { slots[i] = slot; });
}

int64_t id_at(const void* ids, int64_t i, int64_t width) {
    return width == 8 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
}

// --- sorting -----------------------------------------------------------------------------------

struct Pair {
    int64_t id;
    int64_t slot;
};

uint64_t number_of(const Pair& pair) { return static_cast<uint64_t>(pair.id); }

// --- the queue ---------------------------------------------------------------------------------

void forget_queue(Map& map) {
    map.head = map.counted = map.end = map.ready = 0;
    map.known = map.free_to = -1;
}

// Called before a row gets `use` as its last use: the queue does not have this row at that place.
void expect_use(Map& map, int64_t use) {
    if (use > map.known) return;
    if (use > map.free_to) {
        map.known = use - 1;
    } else {
        forget_queue(map);
    }
}

// Counts the entries of the queue with a last use up to `released`, as far as the queue knows them.
void count_more(Map& map, int64_t released) {
    const int64_t to = least(released, map.known);
    if (to <= map.free_to) return;
    for (; map.counted < map.end; ++map.counted) {
        if (map.counted + AHEAD < map.end) ask(map.last + map.queue[map.counted + AHEAD]);
        const int64_t last = map.last[map.queue[map.counted]];
        if (last > map.known) continue;  // used again, or free
        if (last > to) break;
        ++map.ready;
    }
    map.free_to = to;
}

// Makes the queue anew, of all rows by (last use, slot). Returns false if there is no memory.
bool make_queue(Map& map, int64_t released) {
    int64_t lowest = FREE;
    int64_t highest = -1;
    for (int64_t slot = 0; slot < map.high; ++slot) {
        const int64_t last = map.last[slot];
        lowest = least(lowest, last);
        highest = greatest(highest, last == FREE ? -1 : last);
    }
    forget_queue(map);
    map.known = FREE - 1;
    map.free_to = released;
    if (highest < 0) return true;
    int64_t passes = 1;
    while (passes < 8 && (highest - lowest) >> 8 * passes != 0) ++passes;
    int64_t* other = nullptr;
    if (passes > 1) {
        other = static_cast<int64_t*>(malloc(map.taken * sizeof(int64_t)));
        if (other == nullptr) {
            forget_queue(map);
            return false;
        }
    }
    // The last pass writes to the queue. The first reads the slots in their order.
    for (int64_t pass = 0; pass < passes; ++pass) {
        const int64_t shift = 8 * pass;
        int64_t* const to = (passes - pass) % 2 == 1 ? map.queue : other;
        const int64_t* const from = pass == 0 ? nullptr : to == other ? map.queue : other;
        const int64_t n = pass == 0 ? map.high : map.taken;
        int64_t places[257] = {};
        for (int64_t slot = 0; slot < map.high; ++slot) {
            if (map.last[slot] == FREE) continue;
            ++places[((map.last[slot] - lowest) >> shift & 255) + 1];
        }
        for (int64_t digit = 0; digit < 256; ++digit) places[digit + 1] += places[digit];
        for (int64_t i = 0; i < n; ++i) {
            if (from != nullptr && i + AHEAD < n) ask(map.last + from[i + AHEAD]);
            const int64_t slot = from == nullptr ? i : from[i];
            if (map.last[slot] == FREE) continue;
            to[places[(map.last[slot] - lowest) >> shift & 255]++] = slot;
        }
    }
    free(other);
    map.end = map.taken;
    while (map.counted < map.end && map.last[map.queue[map.counted]] <= released) ++map.counted;
    map.ready = map.counted;
    return true;
}

// Counts rows with a last use up to `released` until there are `needed`, or all. Returns false if
// there is no memory.
bool count_ready(Map& map, int64_t released, int64_t needed) {
    if (released < map.free_to) forget_queue(map);  // too many are counted
    if (map.ready < needed) count_more(map, released);
    return map.ready >= needed || map.known >= released || make_queue(map, released);
}

// Returns the number of rows whose last use is `released` or before; NO_MEMORY if there is none.
int64_t count_evictable(Map* map, int64_t released) {
    return count_ready(*map, released, FREE) ? map->ready : NO_MEMORY;
}

// --- calls -------------------------------------------------------------------------------------

// Makes the map empty.
void clear_slots(Map* map) {
    const int64_t bytes = (map->mask + 1) * static_cast<int64_t>(sizeof(Entry));
    const int64_t slot_bytes = map->capacity * static_cast<int64_t>(sizeof(int64_t));
    ask_for_large_pages(map->entries, bytes);
    int64_t* const arrays[] = {map->keys, map->last, map->held, map->queue};
    for (int64_t* each : arrays) ask_for_large_pages(each, slot_bytes);
    memset(map->entries, 0, bytes);
    memset(map->keys, 0, slot_bytes);
    memset(map->held, 0, slot_bytes);
    for (int64_t slot = 0; slot < map->capacity; ++slot) map->last[slot] = FREE;
    map->taken = map->low = map->high = 0;
    forget_queue(*map);
}

void find_slots(const Map* map, const void* ids, int64_t n, int64_t width, int64_t* slots) {
    find_any(*map, ids, n, width, slots);
}

// `find_slots`, and the rows that are found have a last use of at least `use`. If `is_held`,
// `lower_uses` does not lower it.
void hold_slots(
    Map* map, const void* ids, int64_t n, int64_t width, int64_t use, bool is_held, int64_t* slots
) {
    find_any(*map, ids, n, width, slots);
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n && slots[i + AHEAD] >= 0) ask(map->last + slots[i + AHEAD]);
        if (slots[i] < 0) continue;
        int64_t& last = map->last[slots[i]];
        if (is_held) map->held[slots[i]] = greatest(map->held[slots[i]], use);
        if (last >= use) continue;
        expect_use(*map, use);
        map->ready -= last <= map->free_to;
        last = use;
    }
}

// Raises the last uses of the slots to `use`. Keeps the slots that this changed, and their last uses
// before. Returns their number.
int64_t raise_uses(Map& map, int64_t* slots, int64_t n, int64_t use, int64_t* before) {
    if (n > 0) expect_use(map, use);
    int64_t* const lasts = map.last;
    const int64_t free_to = map.free_to;
    int64_t gone = 0;
    int64_t changed = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) ask(lasts + slots[i + AHEAD]);
        const int64_t slot = slots[i];
        const int64_t last = lasts[slot];
        slots[changed] = slot;
        before[changed] = last;
        changed += last < use;
        gone += last <= free_to;
        lasts[slot] = greatest(last, use);
    }
    map.ready -= gone;
    return changed;
}

// Begins to give slots to rows: looks for them, and raises the last uses of those that have one. If
// there is room for the others, returns their number; they are the first of `scratch`, ascending.
// Otherwise nothing has changed. `scratch` has room for 4 * n numbers.
int64_t seek_slots(
    Map* map, const void* ids, int64_t n, int64_t width, int64_t use, int64_t released,
    bool all_new, int64_t* scratch
) {
    int64_t* const absent = scratch;
    int64_t* const slots = scratch + n;
    int64_t* const other = scratch + 2 * n;
    int64_t hits = 0;
    int64_t misses = 0;
    int64_t negative = 0;
    // Every id writes to both lists, and one of them grows. So there is no branch to predict.
    search_any(*map, ids, n, width, [&](int64_t, int64_t id, int64_t slot) {
        absent[misses] = id;
        slots[hits] = slot;
        misses += slot < 0;
        hits += slot >= 0;
        negative |= id;
    });
    if (negative < 0) {
        int64_t i = 0;
        while (id_at(ids, i, width) >= 0) ++i;
        return NEGATIVE - i;
    }
    sort(absent, other, misses);
    int64_t found = 0;
    for (int64_t i = 0; i < misses; ++i) {
        const int64_t id = absent[i];
        found += i == 0 || absent[found - 1] != id;
        absent[found - 1] = id;
    }
    if (all_new && found != n) return NOT_NEW;
    const int64_t needed = found - (map->capacity - map->taken);
    for (;;) {
        if (!count_ready(*map, released, needed)) return NO_MEMORY;
        if (map->ready < needed) return NO_ROOM;
        const int64_t raised = raise_uses(*map, slots, hits, use, other);
        if (map->ready >= needed) return found;
        // Some of the rows that could have left are looked up themselves.
        for (int64_t i = 0; i < raised; ++i) {
            map->last[slots[i]] = other[i];
            map->ready += other[i] <= map->free_to;
        }
        hits = raised;
        if (map->free_to >= released) return NO_ROOM;
        if (!count_ready(*map, released, FREE)) return NO_MEMORY;
    }
}

// Ends what `seek_slots` began for n rows: m rows lose their slots, and the n rows get free slots,
// lowest first, then the slots of these m. `scratch` is what `seek_slots` left. Writes the n rows,
// their slots, the m rows and their slots, one after another.
void fill_slots(
    Map* map, int64_t use, bool is_held, int64_t* ids, int64_t n, int64_t m, int64_t* room
) {
    int64_t* const slots = ids + n;
    int64_t* const evicted_ids = slots + n;
    int64_t* const evicted_slots = evicted_ids + m;
    memcpy(ids, room, n * sizeof(int64_t));
    auto* const scratch = reinterpret_cast<Pair*>(room);  // 4 * m numbers are used
    int64_t* const reused = slots + (n - m);
    for (int64_t found = 0; found < m; ++map->head) {
        if (map->head + AHEAD < map->end) {
            const int64_t coming = map->queue[map->head + AHEAD];
            ask(map->last + coming);
            ask(map->keys + coming);
        }
        const int64_t slot = map->queue[map->head];
        if (map->last[slot] > map->free_to) continue;
        const int64_t id = ~map->keys[slot];
        ask(map->entries + home(*map, id));
        scratch[found] = {id, slot};
        reused[found++] = slot;
    }
    map->ready -= m;
    for (int64_t i = 0; i < m; ++i) {
        if (i + AHEAD < m) ask(map->entries + home(*map, scratch[i + AHEAD].id));
        erase(*map, scratch[i].id);
    }
    sort(scratch, scratch + m, m);
    for (int64_t i = 0; i < m; ++i) {
        evicted_ids[i] = scratch[i].id;
        evicted_slots[i] = scratch[i].slot;
    }
    for (int64_t i = 0; i < n - m; ++i) {
        while (map->keys[map->low] != 0) ++map->low;
        slots[i] = map->low++;
    }
    map->high = greatest(map->high, map->low);
    map->taken += n - m;
    if (n > 0) expect_use(*map, use);
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) ask(map->entries + home(*map, ids[i + AHEAD]));
        insert(*map, ids[i], slots[i]);
        map->keys[slots[i]] = ~ids[i];
        map->last[slots[i]] = use;
        if (is_held) map->held[slots[i]] = use;
    }
}

// Lowers each last use to `use`, or to the use until which the row is held if that is later. Rows of
// the queue that were counted must have an earlier last use.
void lower_uses(Map* map, int64_t use) {
    for (int64_t slot = 0; slot < map->high; ++slot) {
        int64_t& last = map->last[slot];
        if (last != FREE && last > use) last = greatest(use, map->held[slot]);
    }
    forget_queue(*map);
}

// Takes the slots from the rows, and writes the slot that each row had, or -1.
void drop_slots(Map* map, const void* ids, int64_t n, int64_t width, int64_t* slots) {
    for (int64_t i = 0; i < n; ++i) {
        const int64_t id = id_at(ids, i, width);
        const int64_t slot = id < 0 ? -1 : slot_of(*map, id);
        slots[i] = slot;
        if (slot < 0) continue;
        erase(*map, id);
        map->ready -= map->last[slot] <= map->free_to;
        map->keys[slot] = 0;
        map->last[slot] = FREE;
        map->held[slot] = 0;
        map->low = least(map->low, slot);
        --map->taken;
    }
}

// Writes all rows that have a slot, ascending, and their slots. `scratch` has room for two numbers
// a row, twice.
void list_slots(const Map* map, int64_t* ids, int64_t* slots, Pair* scratch) {
    int64_t n = 0;
    for (int64_t slot = 0; slot < map->high; ++slot) {
        if (map->keys[slot] != 0) scratch[n++] = {~map->keys[slot], slot};
    }
    sort(scratch, scratch + n, n);
    for (int64_t i = 0; i < n; ++i) {
        ids[i] = scratch[i].id;
        slots[i] = scratch[i].slot;
    }
}

}  // namespace

extern const Operation slot_map[] = {
    {"clear_slots", call<clear_slots>},
    {"find_slots", call<find_slots>},
    {"hold_slots", call<hold_slots>},
    {"seek_slots", call<seek_slots>},
    {"fill_slots", call<fill_slots>},
    {"lower_uses", call<lower_uses>},
    {"drop_slots", call<drop_slots>},
    {"list_slots", call<list_slots>},
    {"count_evictable", call<count_evictable>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
