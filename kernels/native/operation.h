// What each operation's native.cpp is made with: how its functions are called from Python, and how
// they share their work between threads.
//
// A native.cpp is compiled once for each instruction set, with RECPOINT_SET as the set's name. All
// of it lies in a namespace of that name, and uses no template of the standard library: a linker
// keeps one copy of such a template, which might have instructions that this processor lacks.
#pragma once

// Before the libraries' own headers: it says which of their functions are wanted.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "pool.h"

namespace recpoint {

// A function of the Python module: entries of a table that ends with a null name.
struct Operation {
    const char* name;
    PyObject* (*call)(PyObject*, PyObject* const*, Py_ssize_t);
};

namespace RECPOINT_SET {

// --- calls from Python -------------------------------------------------------------------------

enum class Gil { kept, released };

// The result of a function that needs room for itself: it fails where there is none.
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

// `function` as Python calls it. Addresses and counts are plain integers: making an array object
// costs more than marking a whole batch. Whoever calls has checked dtypes, contiguity and bounds.
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

// Each value from the counter's own on comes up once, in whichever thread.
inline int64_t take_turn(int64_t& counter) {
    return __atomic_fetch_add(&counter, 1, __ATOMIC_RELAXED);
}

// Asks for a line to be brought into the second-level cache; the address need not exist.
inline void ask_for(const void* address) { __builtin_prefetch(address, 0, 2); }

// Room for each of so many threads, on lines of its own, from an address divisible by 64.
class Scratch {
  public:
    Scratch(int64_t threads, int64_t bytes)
        : step_((bytes + 127) / 64 * 64),
          memory_(static_cast<char*>(aligned_alloc(64, greatest<int64_t>(threads, 1) * step_))) {}
    ~Scratch() { free(memory_); }
    Scratch(const Scratch&) = delete;
    bool is_there() const { return memory_ != nullptr; }
    // A thread calls this once.
    char* take() { return memory_ + take_turn(taken_) * step_; }

  private:
    int64_t step_;
    int64_t taken_ = 0;
    char* memory_;
};

// --- threads -----------------------------------------------------------------------------------

using Runner = void (*)(Job&, int64_t);

inline void beside_torch(Job& job, int64_t threads) { run_beside_torch(job, threads); }

// Calls `work()` in up to so many threads at once, this one among them.
template <Runner run, typename Work>
void together(int64_t threads, Work& work) {
    struct Lent : Job {
        Work* own;
    } lent;
    lent.own = &work;
    lent.work = [](Job* job) { (*static_cast<Lent*>(job)->own)(); };
    run(lent, threads);
}

// More parts than threads: one that is late, or slow, holds the others up by a part at most.
constexpr int64_t PARTS_PER_THREAD = 4;

// Calls `part(start, stop, own)` so that the parts cover 0 … rows once; `own` is the thread's part of
// the scratch.
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
