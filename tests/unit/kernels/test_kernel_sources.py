"""What no kernel may do, since nothing says so where it goes wrong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import recpoint.kernels

KERNELS = Path(recpoint.kernels.__file__).parent


def _decorated(names: set[str]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for file in sorted(KERNELS.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                marks = {
                    name.id
                    for decorator in node.decorator_list
                    for name in ast.walk(decorator)
                    if isinstance(name, ast.Name)
                }
                if marks & names:
                    yield f"{file.relative_to(KERNELS)}: {node.name}", node


def _addressed(function: ast.FunctionDef) -> Iterator[str]:
    """What `.ctypes` is taken of."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr == "ctypes":
            yield ast.unparse(node.value)


def test_kernels_take_addresses_only_of_arrays_that_somebody_else_holds() -> None:
    """See `intrinsics.compiled`: an array of their own is gone before its address is used."""
    kernels = list(_decorated({"compiled", "compiled_team_work"}))
    assert len(kernels) > 30
    wrong, right = [], 0
    for name, kernel in kernels:
        held = {argument.arg for argument in kernel.args.args}
        for what in _addressed(kernel):
            right += what in held
            if what not in held:
                wrong.append(f"{name} takes the address of {what}")
    assert wrong == []
    assert right > 5


def test_parts_that_are_compiled_into_kernels_take_none() -> None:
    """There an argument is a variable of the kernel's own."""
    parts = list(_decorated({"inlined"}))
    assert parts
    assert [name for name, part in parts if list(_addressed(part))] == []
