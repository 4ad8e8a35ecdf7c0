#include <errno.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "../dirty_bitmap/bits.h"
#include "../row_gather/rows.h"

namespace recpoint::RECPOINT_SET {
namespace {

// Words of a part of a bitmap. A step copies the rows of one part, or at most STEP_ROWS listed
// rows, so that a copier that is told to stop is done soon.
constexpr int64_t STEP_WORDS = 64;
constexpr int64_t STEP_ROWS = 32 * STEP_WORDS;

// --- the plan ----------------------------------------------------------------------------------

// The ids that a batch looks up, in the layout of Python's array: each field is an int64.
struct Batch {
    const void* ids;
    int64_t n;
    int64_t item_bytes;
};

// How many ids ahead a word of the bitmap is prefetched.
constexpr int64_t IDS_AHEAD = 64;

// Appends to the front of `ids[0 … at]` each id that is not set in `seen` yet, and sets it there.
// Returns the new front. An id out of range is a wrong prediction, and is left out. `ids` has room
// for one more id in front.
template <typename Id>
int64_t add_new(const Id* given, int64_t n, int64_t rows, uint32_t* seen, int64_t* ids, int64_t at) {
    const auto limit = static_cast<uint64_t>(rows);
    for (int64_t i = 0; i < n; ++i) {
        const auto later = static_cast<uint64_t>(static_cast<int64_t>(given[least(i + IDS_AHEAD, n - 1)]));
        if (later < limit) ask_for(seen + (later >> 5));
        const auto id = static_cast<uint64_t>(static_cast<int64_t>(given[i]));
        if (id >= limit) continue;
        const uint32_t bit = uint32_t{1} << (id & 31);
        uint32_t& word = seen[id >> 5];
        // Whether an id is new is random, so no branch depends on it.
        ids[at - 1] = static_cast<int64_t>(id);
        at -= (word & bit) == 0;
        word |= bit;
    }
    return at;
}

// Lists each id once, under the last batch that looks it up: the ids of batch b are
// ids[starts[b] … starts[b + 1]]. The list ends at `room`. Returns where it begins, 1 or more.
int64_t last_uses(
    const Batch* batches, int64_t count, int64_t rows, uint32_t* seen, int64_t* ids, int64_t room,
    int64_t* starts
) {
    int64_t at = starts[count] = room;
    for (int64_t b = count; b-- > 0; starts[b] = at) {
        const Batch& batch = batches[b];
        at = batch.item_bytes == 4
            ? add_new(static_cast<const int32_t*>(batch.ids), batch.n, rows, seen, ids, at)
            : add_new(static_cast<const int64_t*>(batch.ids), batch.n, rows, seen, ids, at);
    }
    return at;
}

// Writes how many rows are set in `a` or `b` before each part, and the number of all of them last.
void first_places(const uint32_t* a, const uint32_t* b, int64_t words, int64_t* first) {
    int64_t before = 0;
    for (int64_t start = 0; start < words; start += STEP_WORDS) {
        *first++ = before;
        for (int64_t w = start; w < least(start + STEP_WORDS, words); ++w) {
            before += __builtin_popcount(a[w] | b[w]);
        }
    }
    *first = before;
}

// The number of rows before `row` that are set in `a` or `b`.
int64_t place_of(const uint32_t* a, const uint32_t* b, const int64_t* first, int64_t row) {
    const int64_t word = row >> 5;
    const int64_t part = word / STEP_WORDS;
    int64_t place = first[part];
    for (int64_t w = part * STEP_WORDS; w < word; ++w) place += __builtin_popcount(a[w] | b[w]);
    const uint32_t before = (uint32_t{1} << (row & 31)) - 1;
    return place + __builtin_popcount((a[word] | b[word]) & before);
}

void places_of(
    const int64_t* ids, int64_t n, const uint32_t* a, const uint32_t* b, const int64_t* first,
    int64_t* places
) {
    for (int64_t i = 0; i < n; ++i) places[i] = place_of(a, b, first, ids[i]);
}

// --- the copier --------------------------------------------------------------------------------

// A table, in the layout of Python's array: each field is an int64.
struct Table {
    uint32_t* fresh;              // marks since the window opened
    uint32_t* taken;              // marks before, and marks of rows that were handed over
    const uint32_t* seen;         // rows that the window looks up
    int64_t words;
    int64_t rows;
    int64_t all_rows;             // 1: the checkpoint holds every row, and its place is its id
    const int64_t* first_places;  // of each part
    int64_t* ids_out;             // receives the ids of rows with a place; null if `all_rows`
    int64_t* ids;                 // rows of the window, in the order of their last uses
    int64_t* places;              // of these rows
    const int64_t* starts;        // of each batch, in these lists
    int64_t first_array;
    int64_t end_array;
};

// An array of a table, in the layout of Python's array: each field is an int64.
struct Array {
    const char* source;
    char* out;
    int64_t row_bytes;
    int64_t lines;  // set here
};

static_assert(sizeof(Batch) == 24 && sizeof(Table) == 104 && sizeof(Array) == 32);

// Rows that one thread copies at a time.
struct Step {
    const Table* table;
    const int64_t* ids;     // null: the rows of part n that no batch of the window looks up
    const int64_t* places;  // null: the ids, which are ascending; the rows were marked
    int64_t n;
};

struct Copier : Job {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed;
    Table* tables;
    int64_t table_count;
    Array* arrays;
    int64_t* handed;  // of each table: how many batches were handed over
    Step* steps = nullptr;
    int64_t step_count = 0;
    int64_t room = 0;
    int64_t next = 0;
    bool is_stopped = false;
    bool is_copying = false;  // the thread of `run_copier` is in a step
    int64_t rows_before = 0;
    int64_t bytes_before = 0;
    int64_t rows_after = 0;
    int64_t bytes_after = 0;
};

uint32_t look_at(const uint32_t& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); }

void copy_listed(
    const Copier& copier, const Table& table, const int64_t* ids, const int64_t* places, int64_t n
) {
    for (int64_t k = table.first_array; k < table.end_array; ++k) {
        const Array& array = copier.arrays[k];
        copy_rows(array.source, ids, array.out, places, array.row_bytes, array.lines, n);
    }
}

// Lists the rows of a part that no batch of the window looks up, and writes the ids of all rows of
// the part that have a place. Another thread may set bits of `taken` meanwhile, but only bits that
// are set in `seen`: they change no result.
int64_t list_part(const Table& table, int64_t part, int64_t* ids, int64_t* places) {
    int64_t place = table.all_rows ? part * STEP_ROWS : table.first_places[part];
    const int64_t end = least((part + 1) * STEP_WORDS, table.words);
    int64_t n = 0;
    for (int64_t w = part * STEP_WORDS; w < end; ++w) {
        const uint32_t seen = table.seen[w];
        uint32_t placed;
        if (table.all_rows) {
            const int64_t left = table.rows - 32 * w;
            placed = left >= 32 ? ~uint32_t{0} : (uint32_t{1} << left) - 1;
        } else {
            placed = look_at(table.taken[w]) | seen;
        }
        for (; placed != 0; placed &= placed - 1, ++place) {
            const int64_t bit = __builtin_ctz(placed);
            const int64_t row = 32 * w + bit;
            if (table.ids_out != nullptr) table.ids_out[place] = row;
            // Whether the window looks a row up is random, so no branch depends on it.
            ids[n] = row;
            places[n] = place;
            n += (seen >> bit & 1) == 0;
        }
    }
    return n;
}

// Returns the number of rows that were copied.
int64_t copy_step(const Copier& copier, const Step& step) {
    if (step.ids != nullptr) {
        const int64_t* places = step.places != nullptr ? step.places : step.ids;
        copy_listed(copier, *step.table, step.ids, places, step.n);
        return step.n;
    }
    int64_t ids[STEP_ROWS + 1], places[STEP_ROWS + 1];
    const int64_t n = list_part(*step.table, step.n, ids, places);
    copy_listed(copier, *step.table, ids, places, n);
    return n;
}

// Copies bytes through the kernel, which reports memory that is not mapped where a load would end
// the process. Where the kernel does not take the call, as in some containers, bytes are loaded.
// Returns whether all bytes were copied.
bool copy_mapped(char* to, const char* from, int64_t bytes) {
    static bool is_refused = false;
    int64_t done = 0;
    while (done < bytes && !__atomic_load_n(&is_refused, __ATOMIC_RELAXED)) {
        const iovec target = {to + done, static_cast<size_t>(bytes - done)};
        const iovec source = {const_cast<char*>(from) + done, static_cast<size_t>(bytes - done)};
        const ssize_t copied = process_vm_readv(getpid(), &target, 1, &source, 1, 0);
        if (copied > 0) {
            done += copied;
        } else if (copied < 0 && errno == EFAULT) {
            return false;
        } else if (copied == 0 || errno != EINTR) {
            __atomic_store_n(&is_refused, true, __ATOMIC_RELAXED);
        }
    }
    memcpy(to + done, from + done, bytes - done);
    return true;
}

// A row of an array that lies so near the next listed one is copied with it: the kernel takes about
// as long to begin a piece.
constexpr int64_t NEAR_BYTES = 2048;
constexpr int64_t PIECES = 256;  // of one call

// Copies rows, each to the place that is its id, as `copy_mapped` does. `ids` are ascending. Rows
// between them may be copied, too. Returns whether all bytes were copied.
bool copy_rows_mapped(const Array& array, const int64_t* ids, int64_t n) {
    iovec sources[PIECES], targets[PIECES];
    for (int64_t i = 0; i < n;) {
        int64_t pieces = 0;
        int64_t bytes = 0;
        for (; i < n && pieces < PIECES; ++pieces) {
            const int64_t first = ids[i];
            int64_t last = first;
            for (++i; i < n && (ids[i] - last) * array.row_bytes <= NEAR_BYTES; ++i) last = ids[i];
            const int64_t at = first * array.row_bytes;
            const auto size = static_cast<size_t>((last - first + 1) * array.row_bytes);
            sources[pieces] = {const_cast<char*>(array.source) + at, size};
            targets[pieces] = {array.out + at, size};
            bytes += (last - first + 1) * array.row_bytes;
        }
        const auto count = static_cast<unsigned long>(pieces);
        if (process_vm_readv(getpid(), targets, count, sources, count, 0) == bytes) continue;
        for (int64_t k = 0; k < pieces; ++k) {  // each by itself, which tells why
            const auto size = static_cast<int64_t>(sources[k].iov_len);
            auto* to = static_cast<char*>(targets[k].iov_base);
            if (!copy_mapped(to, static_cast<const char*>(sources[k].iov_base), size)) return false;
        }
    }
    return true;
}

// The rows of a part that lie in one piece in the table and at their places; 0: some are looked up
// by the window, or have other places.
int64_t rows_in_one_piece(const Step& step) {
    const Table& table = *step.table;
    if (step.ids != nullptr || !table.all_rows) return 0;
    const int64_t end = least((step.n + 1) * STEP_WORDS, table.words);
    for (int64_t w = step.n * STEP_WORDS; w < end; ++w) {
        if (table.seen[w] != 0) return 0;
    }
    return least(STEP_ROWS, table.rows - step.n * STEP_ROWS);
}

// Copies a step while training goes on, which may give the memory of a table back. Returns the
// number of rows that were copied, or -1: memory is gone.
int64_t copy_step_beside_training(const Copier& copier, const Step& step) {
    if (step.ids != nullptr && step.places == nullptr) {
        for (int64_t k = step.table->first_array; k < step.table->end_array; ++k) {
            if (!copy_rows_mapped(copier.arrays[k], step.ids, step.n)) return -1;
        }
        return step.n;
    }
    const int64_t n = rows_in_one_piece(step);
    if (n == 0) return copy_step(copier, step);
    for (int64_t k = step.table->first_array; k < step.table->end_array; ++k) {
        const Array& array = copier.arrays[k];
        const int64_t first = step.n * STEP_ROWS * array.row_bytes;
        if (!copy_mapped(array.out + first, array.source + first, n * array.row_bytes)) return -1;
    }
    return n;
}

int64_t row_bytes(const Copier& copier, const Table& table) {
    int64_t total = 0;
    for (int64_t k = table.first_array; k < table.end_array; ++k) {
        total += copier.arrays[k].row_bytes;
    }
    return total;
}

// The caller holds the lock, or is the only one to know the copier.
bool add_step(Copier& copier, const Step& step) {
    if (copier.step_count == copier.room) {
        const int64_t room = 2 * copier.room + 64;
        auto* steps = static_cast<Step*>(realloc(copier.steps, room * sizeof(Step)));
        if (steps == nullptr) return false;
        copier.steps = steps;
        copier.room = room;
    }
    copier.steps[copier.step_count++] = step;
    return true;
}

bool add_list(Copier& copier, const Table& table, const int64_t* ids, const int64_t* places, int64_t n) {
    for (int64_t at = 0; at < n; at += STEP_ROWS) {
        const int64_t* step_places = places != nullptr ? places + at : nullptr;
        if (!add_step(copier, {&table, ids + at, step_places, least(STEP_ROWS, n - at)})) {
            return false;
        }
    }
    return true;
}

// The condition is not destroyed: a forked child has no thread that would leave it, and would wait.
void free_copier(Copier* copier) {
    free(copier->steps);
    free(copier);
}

// Returns null if there is no memory. The arguments are copied; what they point to must live as
// long as the copier.
Copier* new_copier(const Table* tables, int64_t n, const Array* arrays, int64_t array_count) {
    const size_t size = sizeof(Copier) + n * sizeof(Table) + array_count * sizeof(Array) +
        n * sizeof(int64_t);
    char* memory = static_cast<char*>(calloc(1, size));
    if (memory == nullptr) return nullptr;
    auto* copier = reinterpret_cast<Copier*>(memory);
    *copier = Copier{};
    copier->tables = reinterpret_cast<Table*>(memory + sizeof(Copier));
    copier->table_count = n;
    copier->arrays = reinterpret_cast<Array*>(copier->tables + n);
    copier->handed = reinterpret_cast<int64_t*>(copier->arrays + array_count);
    memcpy(copier->tables, tables, n * sizeof(Table));
    memcpy(copier->arrays, arrays, array_count * sizeof(Array));
    // The time of a wait must not depend on the host's clock being set.
    pthread_condattr_t steady;
    pthread_condattr_init(&steady);
    pthread_condattr_setclock(&steady, CLOCK_MONOTONIC);
    pthread_cond_init(&copier->changed, &steady);
    pthread_condattr_destroy(&steady);
    for (int64_t t = 0; t < n; ++t) {
        const Table& table = copier->tables[t];
        const int64_t parts = (table.words + STEP_WORDS - 1) / STEP_WORDS;
        const int64_t placed = table.all_rows ? table.rows : table.first_places[parts];
        for (int64_t k = table.first_array; k < table.end_array; ++k) {
            Array& array = copier->arrays[k];
            array.lines = lines_to_stream(array.row_bytes, placed, array.out);
        }
        for (int64_t part = 0; part < parts; ++part) {
            const bool is_empty =
                !table.all_rows && table.first_places[part] == table.first_places[part + 1];
            if (!is_empty && !add_step(*copier, {&table, nullptr, nullptr, part})) {
                free_copier(copier);
                return nullptr;
            }
        }
    }
    return copier;
}

// Hands over the rows whose last use lies in the first `batches[t]` batches of the window: moves
// their marks from `fresh` to `taken`, and has the copier copy those that the checkpoint holds. The
// caller keeps the GIL, because another thread may merge marks into `fresh`. Returns whether there
// was memory.
bool hand_over(Copier* copier, const int64_t* batches) {
    for (int64_t t = 0; t < copier->table_count; ++t) {
        const Table& table = copier->tables[t];
        if (batches[t] <= copier->handed[t]) continue;
        const int64_t start = table.starts[copier->handed[t]];
        const int64_t end = table.starts[batches[t]];
        copier->handed[t] = batches[t];
        int64_t kept = start;
        for (int64_t i = start; i < end; ++i) {
            if (i + IDS_AHEAD < end) {
                const int64_t coming = table.ids[i + IDS_AHEAD] >> 5;
                ask_for(table.fresh + coming);
                ask_for(table.taken + coming);
            }
            const int64_t row = table.ids[i];
            const uint32_t bit = uint32_t{1} << (row & 31);
            uint32_t& fresh = table.fresh[row >> 5];
            const uint32_t taken = table.taken[row >> 5] | (fresh & bit);
            fresh &= ~bit;
            __atomic_store_n(&table.taken[row >> 5], taken, __ATOMIC_RELAXED);
            table.ids[kept] = row;
            table.places[kept] = table.places[i];
            kept += table.all_rows || (taken & bit) != 0;
        }
        pthread_mutex_lock(&copier->lock);
        const bool is_added =
            add_list(*copier, table, table.ids + start, table.places + start, kept - start);
        pthread_cond_broadcast(&copier->changed);
        pthread_mutex_unlock(&copier->lock);
        if (!is_added) return false;
    }
    return true;
}

// Hands over rows of table `t` that are set in `fresh`, at most `room` of them: moves their marks to
// `taken`, and has the copier copy them once more. The checkpoint holds every row of the table. The
// rows are listed in `ids`, which must live as long as the copier. The caller keeps the GIL, because
// another thread may merge marks into `fresh`. Returns the number of rows; -1: there is no memory.
int64_t hand_marked(Copier* copier, int64_t t, int64_t* ids, int64_t room) {
    const Table& table = copier->tables[t];
    int64_t n = 0;
    for (int64_t w = 0; w < table.words && n < room; ++w) {
        uint32_t fresh = table.fresh[w];
        if (fresh == 0) continue;
        uint32_t taken = table.taken[w];
        for (; fresh != 0 && n < room; fresh &= fresh - 1) {
            ids[n++] = 32 * w + __builtin_ctz(fresh);
            taken |= fresh & -fresh;
        }
        table.fresh[w] = fresh;
        __atomic_store_n(&table.taken[w], taken, __ATOMIC_RELAXED);
    }
    pthread_mutex_lock(&copier->lock);
    const bool is_added = add_list(*copier, table, ids, nullptr, n);
    pthread_cond_broadcast(&copier->changed);
    pthread_mutex_unlock(&copier->lock);
    return is_added ? n : -1;
}

// Lists the rows of table `t` that are still set in `fresh`: those that have a place, with their
// places, and those that have none. Each list has room for all rows that are set. Returns the number
// of rows with a place.
int64_t list_left(
    const Copier* copier, int64_t t, int64_t* ids, int64_t* places, int64_t* unplaced
) {
    const Table& table = copier->tables[t];
    int64_t n = 0;
    int64_t others = 0;
    for (int64_t w = 0; w < table.words; ++w) {
        for (uint32_t left = table.fresh[w]; left != 0; left &= left - 1) {
            const int64_t bit = __builtin_ctz(left);
            const int64_t row = 32 * w + bit;
            if (table.all_rows) {
                ids[n] = places[n] = row;
                ++n;
            } else if ((table.taken[w] | table.seen[w]) >> bit & 1) {
                ids[n] = row;
                places[n++] = place_of(table.taken, table.seen, table.first_places, row);
            } else {
                unplaced[others++] = row;
            }
        }
    }
    return n;
}

// Moves all marks to `taken`. Called after the last step: places are counted from `taken` as it was.
void move_marks(const Copier* copier, int64_t t) {
    const Table& table = copier->tables[t];
    for (int64_t w = 0; w < table.words; ++w) {
        if (table.fresh[w] == 0) continue;
        table.taken[w] |= table.fresh[w];
        table.fresh[w] = 0;
    }
}

bool add_rows(Copier* copier, int64_t t, const int64_t* ids, const int64_t* places, int64_t n) {
    return add_list(*copier, copier->tables[t], ids, places, n);
}

int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

// The caller holds the lock. Returns early if the copier is stopped.
void pause_for(Copier& copier, int64_t wait_ns) {
    const int64_t until = nanoseconds() + wait_ns;
    const timespec deadline = {until / 1000000000, until % 1000000000};
    while (!copier.is_stopped && nanoseconds() < until) {
        if (pthread_cond_timedwait(&copier.changed, &copier.lock, &deadline) != 0) break;
    }
}

// Copies step after step until the copier is stopped, on this thread. After each step it pauses, so
// that copying takes `share_ppm` of the time.
void run_copier(Copier* copier, int64_t share_ppm, int64_t niceness) {
    // Linux counts the niceness of each thread by itself. It is not restored, because the thread
    // ends after this. An error leaves it as it is, which is safe.
    setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + static_cast<int>(niceness));
    pthread_mutex_lock(&copier->lock);
    for (;;) {
        while (!copier->is_stopped && copier->next == copier->step_count) {
            pthread_cond_wait(&copier->changed, &copier->lock);
        }
        if (copier->is_stopped) break;
        const Step step = copier->steps[copier->next++];  // the list may move
        copier->is_copying = true;
        pthread_mutex_unlock(&copier->lock);
        const int64_t began = nanoseconds();
        const int64_t rows = copy_step_beside_training(*copier, step);
        const int64_t took = nanoseconds() - began;
        pthread_mutex_lock(&copier->lock);
        copier->is_copying = false;
        if (rows < 0) {  // the caller sees that the table lies elsewhere
            copier->is_stopped = true;
            --copier->next;
            pthread_cond_broadcast(&copier->changed);
            break;
        }
        copier->rows_before += rows;
        copier->bytes_before += rows * row_bytes(*copier, *step.table);
        pthread_cond_broadcast(&copier->changed);
        pause_for(*copier, took * (1000000 - share_ppm) / share_ppm);
    }
    pthread_mutex_unlock(&copier->lock);
}

// Has `run_copier` return after the step that it is in. Returns when that step is over.
void stop_copier(Copier* copier) {
    pthread_mutex_lock(&copier->lock);
    copier->is_stopped = true;
    pthread_cond_broadcast(&copier->changed);
    while (copier->is_copying) pthread_cond_wait(&copier->changed, &copier->lock);
    pthread_mutex_unlock(&copier->lock);
}

// Stops the copier and copies all steps that are left, on up to `threads` threads.
void finish_copier(Copier* copier, int64_t threads) {
    stop_copier(copier);  // from here on, `next` changes in this call only
    copier->work = [](Job* job) {
        auto& copier = *static_cast<Copier*>(job);
        int64_t rows = 0, bytes = 0;
        for (int64_t k; (k = take_turn(copier.next)) < copier.step_count;) {
            const int64_t copied = copy_step(copier, copier.steps[k]);
            rows += copied;
            bytes += copied * row_bytes(copier, *copier.steps[k].table);
        }
        __atomic_fetch_add(&copier.rows_after, rows, __ATOMIC_RELAXED);
        __atomic_fetch_add(&copier.bytes_after, bytes, __ATOMIC_RELAXED);
    };
    const int64_t left = copier->step_count - copier->next;
    if (left > 0) run_beside_torch(*copier, least(threads, left));
}

// Writes rows and bytes copied before `finish_copier`, and in it.
void copied(const Copier* copier, int64_t* counts) {
    counts[0] = copier->rows_before;
    counts[1] = copier->bytes_before;
    counts[2] = copier->rows_after;
    counts[3] = copier->bytes_after;
}

// Addresses are integers in Python.
int64_t new_copier_address(
    const Table* tables, int64_t n, const Array* arrays, int64_t array_count
) {
    return reinterpret_cast<intptr_t>(new_copier(tables, n, arrays, array_count));
}

int64_t is_handed_over(Copier* copier, const int64_t* batches) {
    return hand_over(copier, batches);
}

int64_t are_added(
    Copier* copier, int64_t t, const int64_t* ids, const int64_t* places, int64_t n
) {
    return add_rows(copier, t, ids, places, n);
}

}  // namespace

extern const Operation copy_ahead[] = {
    {"last_uses", call<last_uses>},
    {"first_places", call<first_places>},
    {"places_of", call<places_of>},
    {"new_copier", call<new_copier_address>},
    {"free_copier", call<free_copier>},
    {"hand_over", call<is_handed_over, Gil::kept>},
    {"hand_marked", call<hand_marked, Gil::kept>},
    {"list_left", call<list_left>},
    {"move_marks", call<move_marks, Gil::kept>},
    {"add_rows", call<are_added, Gil::kept>},
    {"run_copier", call<run_copier>},
    {"stop_copier", call<stop_copier>},
    {"finish_copier", call<finish_copier>},
    {"copied_rows", call<copied>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
