// What every native.cpp uses: calls from Python, small tools, and the split of work over threads.
//
// A native.cpp is compiled once for each instruction set, with RECPOINT_SET as the name of the set.
// All its code lies in a namespace of that name. It uses no template of the standard library: a
// linker keeps one copy of such a template, and this copy might have instructions that the
// processor lacks.
#pragma once

// Python.h comes before the standard headers, because it selects which of their functions they
// declare.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "pool.h"

namespace recpoint {

// A function of the Python module. A table of them ends with a null name.
struct Operation {
    const char* name;
    PyObject* (*call)(PyObject*, PyObject* const*, Py_ssize_t);
};

namespace RECPOINT_SET {

// --- calls from Python -------------------------------------------------------------------------

enum class Gil { kept, released };

// The result of a function that allocates memory: Python gets a MemoryError if there was none.
struct Room {
    bool was_there;
};

template <typename T>
struct Argument;

template <>
struct Argument<int64_t> {
    static int64_t from(PyObject* given) { return PyLong_AsLongLong(given); }
};

template <>
struct Argument<uint64_t> {
    static uint64_t from(PyObject* given) { return PyLong_AsUnsignedLongLongMask(given); }
};

template <>
struct Argument<bool> {
    static bool from(PyObject* given) { return PyObject_IsTrue(given) == 1; }
};

template <>
struct Argument<float> {
    static float from(PyObject* given) { return static_cast<float>(PyFloat_AsDouble(given)); }
};

template <>
struct Argument<double> {
    static double from(PyObject* given) { return PyFloat_AsDouble(given); }
};

template <>
struct Argument<PyObject*> {
    static PyObject* from(PyObject* given) { return given; }
};

template <typename T>
struct Argument<T*> {
    static T* from(PyObject* given) { return static_cast<T*>(PyLong_AsVoidPtr(given)); }
};

inline PyObject* returned(int64_t result) { return PyLong_FromLongLong(result); }
inline PyObject* returned(uint64_t result) { return PyLong_FromUnsignedLongLong(result); }
inline PyObject* returned(PyObject* result) { return result; }
inline PyObject* returned(Room result) {
    if (!result.was_there) return PyErr_NoMemory();
    Py_INCREF(Py_None);
    return Py_None;
}

template <size_t... I>
struct Indices {};
template <size_t N, size_t... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <size_t... I>
struct MakeIndices<0, I...> {
    using type = Indices<I...>;
};

template <typename Result, typename... Given>
struct Caller {
    template <size_t... I>
    static PyObject* call(
        Result (*function)(Given...), Gil gil, PyObject* const* given, Py_ssize_t count,
        Indices<I...>
    ) {
        if (count != static_cast<Py_ssize_t>(sizeof...(Given))) {
            PyErr_Format(
                PyExc_TypeError, "%zd arguments, expected %zu", count, sizeof...(Given)
            );
            return nullptr;
        }
        return converted(function, gil, Argument<Given>::from(given[I])...);
    }

    static PyObject* converted(Result (*function)(Given...), Gil gil, Given... given) {
        if (PyErr_Occurred() != nullptr) return nullptr;
        PyThreadState* state = gil == Gil::released ? PyEval_SaveThread() : nullptr;
        if constexpr (__is_same(Result, void)) {
            function(given...);
            if (state != nullptr) PyEval_RestoreThread(state);
            Py_INCREF(Py_None);
            return Py_None;
        } else {
            const Result result = function(given...);
            if (state != nullptr) PyEval_RestoreThread(state);
            return returned(result);
        }
    }
};

template <typename Result, typename... Given>
PyObject* call_with(
    Result (*function)(Given...), Gil gil, PyObject* const* given, Py_ssize_t count
) {
    return Caller<Result, Given...>::call(
        function, gil, given, count, typename MakeIndices<sizeof...(Given)>::type{}
    );
}

// Wraps `function` for Python. Addresses and counts are plain integers, because creating an array
// object costs more than marking a whole batch. The caller has checked dtypes, contiguity and
// bounds.
template <auto function, Gil gil = Gil::released>
PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
    return call_with(function, gil, given, count);
}

// --- small tools -------------------------------------------------------------------------------

template <typename T>
T least(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
T greatest(T a, T b) {
    return a > b ? a : b;
}

// The value at an address of any alignment.
template <typename T>
T load(const void* from) {
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}

template <typename T>
void store(void* to, T value) {
    memcpy(to, &value, sizeof value);
}

// Returns the counter and increments it. No two threads get the same value.
inline int64_t take_turn(int64_t& counter) {
    return __atomic_fetch_add(&counter, 1, __ATOMIC_RELAXED);
}

// Prefetches a line into the second-level cache. The address need not be valid.
inline void ask_for(const void* address) { __builtin_prefetch(address, 0, 2); }

// Memory for each of `threads` threads, on cache lines of its own, from an address divisible by 64.
class Scratch {
  public:
    Scratch(int64_t threads, int64_t bytes)
        : step_((bytes + 127) / 64 * 64),
          memory_(static_cast<char*>(aligned_alloc(64, greatest<int64_t>(threads, 1) * step_))) {}
    ~Scratch() { free(memory_); }
    Scratch(const Scratch&) = delete;
    bool is_there() const { return memory_ != nullptr; }
    // Returns the memory of one thread. A thread calls this once.
    char* take() { return memory_ + take_turn(taken_) * step_; }

  private:
    int64_t step_;
    int64_t taken_ = 0;
    char* memory_;
};

// --- threads -----------------------------------------------------------------------------------

using Runner = void (*)(Job&, int64_t);

inline void beside_torch(Job& job, int64_t threads) { run_beside_torch(job, threads); }

// Calls `work()` on up to `threads` threads at once. The calling thread is one of them.
template <Runner run, typename Work>
void together(int64_t threads, Work& work) {
    struct Lent : Job {
        Work* own;
    } lent;
    lent.own = &work;
    lent.work = [](Job* job) { (*static_cast<Lent*>(job)->own)(); };
    run(lent, threads);
}

// There are more parts than threads, so a late or slow thread delays the others by one part at
// most.
constexpr int64_t PARTS_PER_THREAD = 4;

// Calls `part(start, stop, own)` for parts that together cover 0 … rows once. `own` is the thread's
// memory in the scratch.
template <Runner run = run_in_pool, typename Part>
void over_rows_with(int64_t rows, int64_t threads, Scratch& scratch, const Part& part) {
    const int64_t parts = threads <= 1 ? 1 : least(threads * PARTS_PER_THREAD, rows);
    int64_t turn = 0;
    auto work = [&] {
        int64_t k = take_turn(turn);
        if (k >= parts) return;
        char* own = scratch.take();
        for (; k < parts; k = take_turn(turn)) {
            part(rows * k / parts, rows * (k + 1) / parts, own);
        }
    };
    together<run>(threads, work);
}

// The same without scratch.
template <Runner run = run_in_pool, typename Part>
void over_rows(int64_t rows, int64_t threads, const Part& part) {
    const int64_t parts = threads <= 1 ? 1 : least(threads * PARTS_PER_THREAD, rows);
    int64_t turn = 0;
    auto work = [&] {
        for (int64_t k; (k = take_turn(turn)) < parts;) {
            part(rows * k / parts, rows * (k + 1) / parts);
        }
    };
    together<run>(threads, work);
}

}  // namespace RECPOINT_SET
}  // namespace recpoint
