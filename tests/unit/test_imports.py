"""No module imports itself by way of others, and `make check` finds the tests of a change."""

from __future__ import annotations

from functools import cache
from graphlib import TopologicalSorter

import grimp
import pytest

from tests.changed import module_of, nearest_tests


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("recpoint", "tests", "benchmarks", cache_dir=None)


def test_there_is_no_circle_even_by_deferred_imports_or_for_types() -> None:
    graph = _graph()
    recpoint = {module for module in graph.modules if module.split(".")[0] == "recpoint"}
    assert len(recpoint) > 100
    needs = {module: graph.find_modules_directly_imported_by(module) for module in recpoint}
    TopologicalSorter(needs).prepare()  # CycleError names the modules of a circle


def test_a_circle_would_be_found() -> None:
    graph = grimp.build_graph("recpoint", cache_dir=None)
    graph.add_import(importer="recpoint.errors", imported="recpoint.loggers")
    graph.add_import(importer="recpoint.loggers", imported="recpoint.errors")
    needs = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    with pytest.raises(ValueError, match="recpoint.loggers"):
        TopologicalSorter(needs).prepare()


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("catalog/run/pins.py", "recpoint.catalog.run.pins"),
        ("src/recpoint/cli/__init__.py", "recpoint.cli"),
        ("tests/unit/test_imports.py", "tests.unit.test_imports"),
        ("benchmarks/all.py", "benchmarks.all"),
    ],
)
def test_a_file_is_known_by_the_module_it_is(path: str, module: str) -> None:
    assert module_of(path) == module
    assert module in _graph().modules


def test_a_change_runs_the_tests_that_import_it_and_names_those_further_away() -> None:
    near, far = nearest_tests(_graph(), ["recpoint.catalog.run.pins"])
    assert "tests.unit.catalog.test_pins_and_leases" in near
    assert far and not near & far


def test_a_changed_c_file_runs_the_tests_of_what_calls_it() -> None:
    assert module_of("kernels/row_set/native.cpp") == "recpoint.kernels.row_set.cpu"
    assert module_of("kernels/quantize/ends.h") == "recpoint.kernels.quantize.cpu"
    assert module_of("kernels/native/pool.cpp") == "recpoint.kernels.native"


def test_a_changed_test_runs_itself() -> None:
    near, _ = nearest_tests(_graph(), ["tests.unit.test_loggers"])
    assert near == {"tests.unit.test_loggers"}


def test_a_module_that_no_test_imports_is_tested_by_those_of_its_importers() -> None:
    graph = _graph()
    alone = next(
        module
        for module in sorted(graph.modules)
        if module.startswith("recpoint.")
        and (importers := graph.find_modules_that_directly_import(module))
        and all(importer.startswith("recpoint.") for importer in importers)
    )
    near, _ = nearest_tests(graph, [alone])
    assert near
