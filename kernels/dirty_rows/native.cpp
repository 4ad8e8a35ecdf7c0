#include "../dirty_bitmap/bits.h"
#include "../row_gather/rows.h"

namespace recpoint::RECPOINT_SET {
namespace {

// A table as Python gives it: int64 each.
struct Table {
    const uint32_t* bitmap;
    int64_t words;
    int64_t rows;
};

// Where the dirty rows of a table go, as Python gives it: int64 each.
struct Destination {
    int64_t* ids;  // null: no row is wanted
    int64_t first_array;
    int64_t end_array;
};

// An array of a table, as Python gives it: int64 each.
struct Array {
    const char* source;
    char* out;
    int64_t row_bytes;
};

static_assert(sizeof(Table) == 24 && sizeof(Destination) == 24 && sizeof(Array) == 24);

// Dirty rows that a thread copies before it takes the next, or more where they lie close.
constexpr int64_t TASK_ROWS = 1 << 14;

// Writes how many bits of each part of each table are set, table after table, and of each table.
void count_tables(
    const Table* tables, int64_t n, int64_t* part_counts, int64_t* counts, int64_t threads
) {
    int64_t turn = 0;
    auto work = [&] {
        int64_t mine = COUNTED_PARTS * take_turn(turn);
        int64_t before = 0;
        for (int64_t t = 0; t < n; ++t) {
            const int64_t parts = parts_of(tables[t].words);
            while (mine < before + parts) {
                const int64_t end = least(mine + COUNTED_PARTS, before + parts);
                // A table's last parts may be fewer: the next table's first are taken with them.
                for (int64_t part = greatest(mine, before); part < end; ++part) {
                    const int64_t first = (part - before) * PART_WORDS;
                    part_counts[part] = count_bits(
                        tables[t].bitmap + first, least(PART_WORDS, tables[t].words - first)
                    );
                }
                if (mine + COUNTED_PARTS > before + parts) break;
                mine = COUNTED_PARTS * take_turn(turn);
            }
            before += parts;
        }
    };
    together<beside_torch>(threads, work);
    for (int64_t t = 0; t < n; ++t) {
        counts[t] = 0;
        for (int64_t part = 0; part < parts_of(tables[t].words); ++part) {
            counts[t] += *part_counts++;
        }
    }
}

// A stretch of a table whose ids and rows one thread writes.
struct Task {
    const uint32_t* words;
    int64_t word_count;
    int64_t first_row;
    int64_t rows;  // of the table, from the first one on
    int64_t count;
    int64_t before;  // dirty rows of the table before it
    const Destination* to;
};

struct Copy : Job {
    Task* tasks = nullptr;
    const Array* arrays = nullptr;
    int64_t* lines = nullptr;  // of each array, where they are streamed
    int64_t task_count = 0;
    int64_t turn = 0;
    int64_t changed = 0;
};

// Writes ids and rows of a task, or counts it as changed. Nothing is written outside its room, and
// no row of a task that has changed is copied.
void copy_task(Copy& copy, const Task& task) {
    int64_t* ids = task.to->ids + task.before;
    const int64_t found =
        write_ids(task.words, task.word_count, task.first_row, ids, task.count);
    if (found != task.count || ids[task.count - 1] - task.first_row >= task.rows) {
        take_turn(copy.changed);
        return;
    }
    for (int64_t k = task.to->first_array; k < task.to->end_array; ++k) {
        const Array& array = copy.arrays[k];
        char* out = array.out + task.before * array.row_bytes;
        copy_rows(array.source, ids, out, nullptr, array.row_bytes, copy.lines[k], task.count);
    }
}

// Adds the tasks of a table of `marked` dirty rows. Neighbouring parts become one task, so that each
// has TASK_ROWS dirty rows or is one part: small ones would spend most of their time waiting for
// their first rows.
void add_tasks(
    Copy& copy, const Table& table, const int64_t* part_counts, int64_t marked,
    const Destination& to
) {
    int64_t before = 0;
    int64_t full = -1;
    for (int64_t part = 0; part < parts_of(table.words); ++part) {
        const int64_t first = part * PART_WORDS;
        const int64_t words = least(PART_WORDS, table.words - first);
        const int64_t count = part_counts[part];
        // What comes behind the last dirty row joins the task before: alone it would have no id.
        if (before / TASK_ROWS != full && before < marked) {
            full = before / TASK_ROWS;
            copy.tasks[copy.task_count++] = {
                table.bitmap + first, words, 32 * first, table.rows - 32 * first, count, before, &to
            };
        } else {
            copy.tasks[copy.task_count - 1].word_count += words;
            copy.tasks[copy.task_count - 1].count += count;
        }
        before += count;
    }
}

// Calls a function of Python.
struct Call : Errand {
    PyObject* function;
    PyThreadState* state;  // of this thread while it does not hold the GIL
    bool has_failed = false;
};

void call_python(Errand* errand) {
    Call& call = *static_cast<Call*>(errand);
    PyEval_RestoreThread(call.state);
    PyObject* result = PyObject_CallNoArgs(call.function);
    call.has_failed = result == nullptr;
    Py_XDECREF(result);
    call.state = PyEval_SaveThread();
}

// Copies the dirty rows of tables that `count_tables` counted. Calls `meanwhile`, unless it is None,
// once in this thread while others copy. Returns how many tasks have changed since they were counted,
// or null with the error of `meanwhile` set; the rows are copied then too.
PyObject* copy_tables(
    const Table* tables, int64_t n, const int64_t* part_counts, const int64_t* counts,
    const Destination* destinations, const Array* arrays, int64_t array_count, int64_t threads,
    PyObject* meanwhile
) {
    int64_t parts = 0;
    for (int64_t t = 0; t < n; ++t) parts += parts_of(tables[t].words);
    const size_t task_bytes = parts * sizeof(Task);
    char* memory = static_cast<char*>(malloc(task_bytes + array_count * sizeof(int64_t) + 1));
    if (memory == nullptr) return PyErr_NoMemory();
    Copy copy;
    copy.tasks = reinterpret_cast<Task*>(memory);
    copy.arrays = arrays;
    copy.lines = reinterpret_cast<int64_t*>(memory + task_bytes);
    for (int64_t t = 0; t < n; part_counts += parts_of(tables[t].words), ++t) {
        const Destination& to = destinations[t];
        if (to.ids == nullptr || counts[t] == 0) continue;
        add_tasks(copy, tables[t], part_counts, counts[t], to);
        for (int64_t k = to.first_array; k < to.end_array; ++k) {
            copy.lines[k] = lines_to_stream(arrays[k].row_bytes, counts[t], arrays[k].out);
        }
    }
    copy.work = [](Job* job) {
        auto& copy = *static_cast<Copy*>(job);
        for (int64_t k; (k = take_turn(copy.turn)) < copy.task_count;) {
            copy_task(copy, copy.tasks[k]);
        }
    };
    Call call;
    call.run = call_python;
    call.function = meanwhile;
    call.state = PyEval_SaveThread();
    Errand* const errand = Py_IsNone(meanwhile) ? nullptr : &call;
    run_beside_torch(copy, least(threads, copy.task_count), errand);
    PyEval_RestoreThread(call.state);
    free(memory);
    return call.has_failed ? nullptr : PyLong_FromLongLong(copy.changed);
}

}  // namespace

extern const Operation dirty_rows[] = {
    {"count_tables", call<count_tables>},
    {"copy_tables", call<copy_tables, Gil::kept>},
    {nullptr, nullptr},
};

}  // namespace recpoint::RECPOINT_SET
