#include "../native/open_table.h"

namespace recpoint::RECPOINT_SET {
namespace {

// A row as it was when it became a candidate.
struct Candidate {
    int64_t score;  // what is compared first: its uses, or its last use
    int64_t last;   // its last use
    int64_t key;
    int64_t slot;
};

// Candidates of a table, in the layout of Python's array: each field is an int64. README.md says
// why they are enough.
struct Order {
    const int64_t* keys;   // of each slot: its key
    const int64_t* last;   // of each slot: its last use, or less than 0 if it has no key
    const int64_t* score;  // of each slot: what is compared first
    int64_t rows;
    Candidate* heap;  // its first is the least
    int64_t room;
    int64_t size;
    Candidate* bound;  // the greatest candidate of the scan
    int64_t has_all;   // 1: all rows are candidates, so there is no bound
    int64_t returned;  // the last candidates of the room, which left the heap in the last call
};

static_assert(sizeof(Candidate) == 4 * 8 && sizeof(Order) == 10 * 8);

bool is_less(const Candidate& a, const Candidate& b) {
    if (a.score != b.score) return a.score < b.score;
    if (a.last != b.last) return a.last < b.last;
    return a.key < b.key;
}

Candidate row_at(const Order& order, int64_t slot) {
    return {order.score[slot], order.last[slot], order.keys[slot], slot};
}

void swap(Candidate& a, Candidate& b) {
    const Candidate other = a;
    a = b;
    b = other;
}

// --- the heap ----------------------------------------------------------------------------------

void sink(Candidate* heap, int64_t size, int64_t at) {
    const Candidate candidate = heap[at];
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        child += child + 1 < size && is_less(heap[child + 1], heap[child]);
        if (!is_less(heap[child], candidate)) break;
        heap[at] = heap[child];
    }
    heap[at] = candidate;
}

void push(Order& order, const Candidate& candidate) {
    int64_t at = order.size++;
    for (int64_t parent; at > 0; at = parent) {
        parent = (at - 1) / 2;
        if (!is_less(candidate, order.heap[parent])) break;
        order.heap[at] = order.heap[parent];
    }
    order.heap[at] = candidate;
}

void pop(Order& order) {
    order.heap[0] = order.heap[--order.size];
    sink(order.heap, order.size, 0);
}

// --- the scan ----------------------------------------------------------------------------------

// Brings the `kept` least of n candidates to the front (Hoare's selection).
void select(Candidate* candidates, int64_t n, int64_t kept) {
    int64_t low = 0;
    int64_t high = n - 1;
    uint64_t turn = 0;
    while (low < high) {
        // A place that no order of rows is likely to make a bad one again and again.
        const auto place = low + static_cast<int64_t>(spread(++turn) % (high - low + 1));
        const Candidate pivot = candidates[place];
        int64_t i = low;
        int64_t k = high;
        while (i <= k) {
            while (is_less(candidates[i], pivot)) ++i;
            while (is_less(pivot, candidates[k])) --k;
            if (i <= k) swap(candidates[i++], candidates[k--]);
        }
        if (kept - 1 <= k) {
            high = k;
        } else if (kept - 1 >= i) {
            low = i;
        } else {
            return;
        }
    }
}

// Makes the candidates anew: up to room / 2 rows, the least of all.
void scan_rows(Order* order) {
    const int64_t kept = order->room / 2;
    int64_t n = 0;
    bool is_bounded = false;
    Candidate bound = {};
    for (int64_t slot = 1; slot < order->rows; ++slot) {
        if (order->last[slot] < 0) continue;
        const Candidate row = row_at(*order, slot);
        if (is_bounded && !is_less(row, bound)) continue;
        order->heap[n++] = row;
        if (n < order->room) continue;
        // Rows that are not among the least of these are not among the least of all.
        select(order->heap, n, kept);
        n = kept;
        bound = order->heap[kept - 1];
        is_bounded = true;
    }
    if (n > kept) {
        select(order->heap, n, kept);
        n = kept;
        is_bounded = true;
    }
    order->has_all = !is_bounded;
    if (is_bounded) *order->bound = order->heap[kept - 1];
    order->size = n;
    order->returned = 0;
    for (int64_t at = n / 2; at-- > 0;) sink(order->heap, n, at);
}

// --- calls -------------------------------------------------------------------------------------

// Writes the step as last use of the slots, and one use more unless `uses` is null; slot 0 is left
// out. Returns -1, or the position of a slot that is not below `rows`; then nothing has changed.
// `earlier` gets what `undo_use` needs: n last uses, and n uses behind them unless `uses` is null.
int64_t use_slots(
    const int64_t* slots, int64_t n, int64_t rows, int64_t step, int64_t* last, int64_t* uses,
    int64_t* earlier
) {
    for (int64_t i = 0; i < n; ++i) {
        if (slots[i] < 0 || slots[i] >= rows) return i;
        ask(last + slots[i]);
    }
    for (int64_t i = 0; i < n; ++i) earlier[i] = last[slots[i]];
    if (uses != nullptr) {
        // A slot that comes several times gets the same count each time.
        for (int64_t i = 0; i < n; ++i) earlier[n + i] = uses[slots[i]];
        for (int64_t i = 0; i < n; ++i) uses[slots[i]] = earlier[n + i] + (slots[i] != 0);
    }
    for (int64_t i = 0; i < n; ++i) {
        if (slots[i] != 0) last[slots[i]] = step;
    }
    return -1;
}

// Writes back what `use_slots` found.
void undo_use(
    const int64_t* slots, int64_t n, int64_t* last, int64_t* uses, const int64_t* earlier
) {
    for (int64_t i = 0; i < n; ++i) last[slots[i]] = earlier[i];
    if (uses == nullptr) return;
    for (int64_t i = 0; i < n; ++i) uses[slots[i]] = earlier[n + i];
}

// Makes candidates of the slots whose rows are not above the bound. Returns -1, the position of a
// slot that is not below the number of rows, or n if there is no room for them: candidates are
// missing then, and all rows have to be scanned. Before the first scan nothing is noted.
int64_t join_rows(Order* order, const int64_t* slots, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        if (slots[i] < 0 || slots[i] >= order->rows) return i;
    }
    for (int64_t i = 0; i < n; ++i) {
        if (order->last[slots[i]] < 0) continue;
        const Candidate row = row_at(*order, slots[i]);
        if (!order->has_all && is_less(*order->bound, row)) continue;
        if (order->size + order->returned == order->room) return n;
        push(*order, row);
    }
    return -1;
}

// Takes the `count` least rows with a last use before `before` from the candidates, and writes their
// slots. Returns their number; it is less than `count` if there are no more candidates. All
// candidates that it saw become candidates again at the next call.
int64_t take_least(Order* order, int64_t count, int64_t before, int64_t* slots) {
    for (; order->returned > 0; --order->returned) {
        const Candidate candidate = order->heap[order->room - order->returned];
        push(*order, candidate);
    }
    int64_t taken = 0;
    int64_t previous = 0;
    while (taken < count && order->size > 0) {
        const Candidate candidate = order->heap[0];
        const int64_t slot = candidate.slot;
        if (order->last[slot] < 0 || slot == previous) {
            pop(*order);  // free now, or a second candidate of the same row
            continue;
        }
        const Candidate row = row_at(*order, slot);
        if (row.key != candidate.key || is_less(row, candidate)) {
            pop(*order);  // the slot got a key since, or went down, and joined with it
            continue;
        }
        if (is_less(candidate, row)) {
            // The row was used since, so it belongs further behind.
            order->heap[0] = row;
            if (!order->has_all && is_less(*order->bound, row)) {
                pop(*order);
            } else {
                sink(order->heap, order->size, 0);
            }
            continue;
        }
        pop(*order);
        order->heap[order->room - ++order->returned] = row;
        previous = slot;
        if (row.last < before) slots[taken++] = slot;
    }
    return taken;
}

}  // namespace

extern const Operation key_order[] = {
    {"scan_rows", call<scan_rows>},
    {"use_slots", call<use_slots>},
    {"undo_use", call<undo_use>},
    {"join_rows", call<join_rows>},
    {"take_least", call<take_least>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
