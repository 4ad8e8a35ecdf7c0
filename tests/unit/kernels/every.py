"""Loops over values of an argument inside a test, where `parametrize` would make a test of each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

__all__ = ["every"]

Test = Callable[..., None]


def every(name: str, values: Iterable[object]) -> Callable[[Test], Test]:
    """Call the decorated test with each value of the argument `name`.

    A failure names the value in a note below its error.
    """
    chosen = list(values)

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def for_every(*positional: object, **arguments: object) -> None:
            for value in chosen:
                try:
                    test(*positional, **arguments, **{name: value})
                except Exception as error:
                    error.add_note(f"with {name} {value!r}")
                    raise

        signature = inspect.signature(test)
        others = [p for p in signature.parameters.values() if p.name != name]
        # pytest reads from the signature which fixtures a test has.
        for_every.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return for_every

    return decorate
