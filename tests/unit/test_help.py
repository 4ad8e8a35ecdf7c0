"""`help()` of what is public says what each parameter, field and method is for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest

import recpoint

#: Frameworks call these, and say what they are.
_OF_LIGHTNING = re.compile("on_.*")


def _public() -> Iterator[Any]:
    """What `recpoint` exports: classes, functions, and the methods of classes."""
    for name in recpoint.__all__:
        thing = getattr(recpoint, name)
        if inspect.ismodule(thing) or isinstance(thing, str):
            continue
        yield pytest.param(thing, id=name)
        if not inspect.isclass(thing):
            continue
        for key, value in inspect.getmembers(thing):
            ours = key in vars(thing) or type(thing) is not type
            if key.startswith("_") or not ours or (_OF_LIGHTNING.fullmatch(key)):
                continue
            if inspect.isroutine(value) or isinstance(value, property):
                yield pytest.param(value, id=f"{name}.{key}")


@pytest.mark.parametrize("thing", _public())
def test_help_says_what_it_is_and_what_it_takes(thing: Any) -> None:
    said = inspect.getdoc(thing)
    assert said
    if isinstance(thing, property):
        return
    taken = [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]
    # Under "Args" or "Attributes", alone or with others of its kind; or by name in the text.
    undescribed = [
        name for name in taken if not re.search(rf"(?m)^ *(\w+, )*{name}(, \w+)*:|`{name}`", said)
    ]
    assert not undescribed


def test_it_knows_its_version() -> None:
    assert recpoint.__version__ == version("recpoint")
    assert "__version__" in dir(recpoint)
