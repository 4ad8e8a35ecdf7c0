#include "../dirty_bitmap/bits.h"
#include "../row_gather/rows.h"

namespace recpoint::RECPOINT_SET {
namespace {

// A table, in the layout of Python's array: each field is an int64.
struct Table {
    const uint32_t* bitmap;
    int64_t words;
    int64_t rows;
};

// Where the dirty rows of a table go, in the layout of Python's array: each field is an int64.
struct Destination {
    int64_t* ids;  // null: no row of the table is wanted
    int64_t first_array;
    int64_t end_array;
};

// An array of a table, in the layout of Python's array: each field is an int64.
struct Array {
    const char* source;
    char* out;
    int64_t row_bytes;
};

static_assert(sizeof(Table) == 24 && sizeof(Destination) == 24 && sizeof(Array) == 24);

// About how many dirty rows a task has. A task of a single part may have more.
constexpr int64_t TASK_ROWS = 1 << 14;

// Writes the number of set bits of each part, table after table, and of each table.
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
                // If the table ends within these parts, the next table's first parts are taken too.
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

// A stretch of a table. One thread writes its ids and rows.
struct Task {
    const uint32_t* words;
    int64_t word_count;
    int64_t first_row;
    int64_t rows;    // rows of the table from `first_row` on
    int64_t count;   // dirty rows of the task
    int64_t before;  // dirty rows of the table before the task
    const Destination* to;
};

struct Copy : Job {
    Task* tasks = nullptr;
    const Array* arrays = nullptr;
    int64_t* lines = nullptr;  // of each array: lines of a row to stream, 0 if rows are not streamed
    int64_t task_count = 0;
    int64_t turn = 0;
    int64_t changed = 0;
};

// Writes the ids and rows of a task, or counts the task as changed. Nothing is written outside the
// room of the task. If the task has changed, no row is copied.
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

// Adds the tasks of a table that has `marked` dirty rows. Neighbouring parts with few dirty rows
// become one task of some TASK_ROWS rows: a small task would spend most of its time waiting for its
// first rows.
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
        // Parts behind the last dirty row join the task before, because a task must have an id.
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

// Calls a Python function.
struct Call : Errand {
    PyObject* function;
    PyThreadState* state;  // the state of this thread while it does not hold the GIL
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

// Copies the dirty rows of tables that `count_tables` counted. Unless `meanwhile` is None, this
// thread calls it once while other threads copy. Returns how many tasks have changed since they
// were counted. If `meanwhile` raised, returns null with that error set; the rows are copied in
// this case too.
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
    Copy copy{};
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
    Call call{};
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
