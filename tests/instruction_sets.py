"""A fixture that runs a test on one version of the native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recpoint.kernels import native

__all__ = ["instruction_set"]


@pytest.fixture(autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The version of the kernels that the test calls."""
    name = getattr(request, "param", native.instruction_set())
    with native.use(name):
        yield name
