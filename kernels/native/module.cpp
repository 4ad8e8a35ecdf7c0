// The Python module. It has a table of functions for each instruction set of this processor.
#define RECPOINT_SET module
#include "operation.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <initializer_list>
#endif

#define DECLARE(set)                                                                             \
    namespace recpoint::set {                                                                    \
    extern const Operation allocation[], bit_packing[], copy_ahead[], dirty_bitmap[],            \
        dirty_rows[], erasure[], first_values[], key_map[], key_order[], key_sketch[],           \
        lookup_counts[], moments[], quantize[], residuals[], row_blocks[], row_digest[],         \
        row_gather[], row_map[], row_set[], slot_map[];                                          \
    }
#define TABLES(set)                                                                          \
    {                                                                                        \
        set::allocation, set::bit_packing, set::copy_ahead, set::dirty_bitmap,               \
            set::dirty_rows, set::erasure, set::first_values, set::key_map, set::key_order,  \
            set::key_sketch, set::lookup_counts, set::moments, set::quantize,                \
            set::residuals, set::row_blocks, set::row_digest, set::row_gather, set::row_map, \
            set::row_set, set::slot_map                                                      \
    }

DECLARE(baseline)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
#endif

namespace recpoint {
namespace {

constexpr int OPERATIONS = 20;

struct InstructionSet {
    const char* name;
    bool is_here;
    const Operation* tables[OPERATIONS];
};

#if defined(__x86_64__)

bool has_bits(unsigned word, std::initializer_list<int> bits) {
    for (int bit : bits) {
        if ((word >> bit & 1) == 0) return false;
    }
    return true;
}

// The level of the x86-64 ABI (x86-64-v3, -v4) that the processor and its system support: 4, 3, or
// 1 for any lower level. __builtin_cpu_supports is not used: it knows no processor when Zig
// compiles it.
int abi_level() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 1;
    // FMA, MOVBE, POPCNT, OSXSAVE, AVX, F16C.
    if (!has_bits(c, {12, 22, 23, 27, 28, 29})) return 1;
    if (!__get_cpuid(0x80000001, &a, &b, &c, &d) || !has_bits(c, {5})) return 1;  // LZCNT
    unsigned kept, high;  // the registers that the system saves when it switches threads
    __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    if (!has_bits(kept, {1, 2})) return 1;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 1;
    if (!has_bits(b, {3, 5, 8})) return 1;  // BMI1, AVX2, BMI2
    // AVX-512 F, DQ, CD, BW, VL.
    return has_bits(b, {16, 17, 28, 30, 31}) && has_bits(kept, {5, 6, 7}) ? 4 : 3;
}

#endif

bool add_function(PyObject* table, const Operation& operation) {
    // Never freed, because Python's function objects refer to it.
    auto* definition = static_cast<PyMethodDef*>(calloc(1, sizeof(PyMethodDef)));
    if (definition == nullptr) {
        PyErr_NoMemory();
        return false;
    }
    definition->ml_name = operation.name;
    definition->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(operation.call));
    definition->ml_flags = METH_FASTCALL;
    PyObject* function = PyCFunction_NewEx(definition, nullptr, nullptr);
    if (function == nullptr) return false;
    const bool is_added = PyDict_SetItemString(table, operation.name, function) == 0;
    Py_DECREF(function);
    return is_added;
}

bool add_set(PyObject* sets, const InstructionSet& set) {
    if (!set.is_here) return true;
    PyObject* table = PyDict_New();
    if (table == nullptr) return false;
    bool is_whole = PyDict_SetItemString(sets, set.name, table) == 0;
    for (const Operation* operation : set.tables) {
        for (; is_whole && operation->name != nullptr; ++operation) {
            is_whole = add_function(table, *operation);
        }
    }
    Py_DECREF(table);
    return is_whole;
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "The operations on embedding rows, in C++.", -1, nullptr,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

}  // namespace recpoint

PyMODINIT_FUNC PyInit__native() {
    using namespace recpoint;
    // Widest first.
    const InstructionSet sets[] = {
#if defined(__x86_64__)
        {"avx512", abi_level() >= 4, TABLES(avx512)},
        {"avx2", abi_level() >= 3, TABLES(avx2)},
#endif
        {"baseline", true, TABLES(baseline)},
    };
    PyObject* module = PyModule_Create(&definition);
    PyObject* tables = PyDict_New();
    if (module == nullptr || tables == nullptr) return nullptr;
    for (const InstructionSet& set : sets) {
        if (!add_set(tables, set)) return nullptr;
    }
    if (PyModule_AddObjectRef(module, "instruction_sets", tables) < 0) return nullptr;
    Py_DECREF(tables);
    if (PyModule_AddStringConstant(module, "sources", RECPOINT_SOURCES) < 0) return nullptr;
    if (PyModule_AddStringConstant(module, "compiler", RECPOINT_COMPILER) < 0) return nullptr;
    return module;
}
