"""The pinned versions can be installed on every Python that pyproject.toml names.

They are checked against the metadata of the installed distributions, for the oldest patch of each
Python: Debian 12 has 3.11.2.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST_PATCHES = [
    f"{declared[1]}.0"
    for text in PROJECT["classifiers"]
    if (declared := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", text))
]

#: Requirements that `make install` replaces: it installs TorchRec without its dependencies.
REPLACED = {("torchrec", "fbgemm-gpu"), ("torchrec", "torchmetrics")}


@cache
def pins() -> dict[str, str]:
    """The pinned version of each distribution."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


@cache
def installed() -> dict[str, metadata.Distribution]:
    """Each pinned distribution that is installed; the first of a name is the one that is used."""
    distributions: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if name in pins():
            distributions.setdefault(name, distribution)
    return distributions


@cache
def conditional_requirements() -> list[tuple[str, Requirement]]:
    """What each pinned distribution requires somewhere without extras, beside its name."""
    return [
        (name, Requirement(text))
        for name, distribution in installed().items()
        for text in distribution.requires or ()
        if "extra ==" not in text
    ]


def requirements(python: str) -> Iterator[tuple[str, Requirement]]:
    """What each pinned distribution requires on a Python without extras, beside its name."""
    environment = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    for name, requirement in conditional_requirements():
        marker = requirement.marker
        if marker is None or marker.evaluate({**environment, "extra": ""}):
            yield name, requirement


def test_the_pythons_are_those_that_readme_promises() -> None:
    first, last = OLDEST_PATCHES[0], OLDEST_PATCHES[-1]
    assert f"Python {first[:-2]} to {last[:-2]}" in (ROOT / "README.md").read_text()
    supported = SpecifierSet(PROJECT["requires-python"])
    assert all(python in supported for python in OLDEST_PATCHES)
    assert len(OLDEST_PATCHES) > 1


def test_the_bounds_are_those_that_limits_promises() -> None:
    texts = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    bounds = {required.name: required.specifier for required in map(Requirement, texts)}
    page = (ROOT / "docs/understanding/limits.md").read_text()
    for name in ("torch", "TorchRec", "Lightning", "Prefect"):
        promised = re.search(
            rf"^\| {name} \| ([\d.]+) and newer(?:, below ([\d.]+))?\b", page, re.M
        )
        assert promised, name
        oldest, first_refused = promised.groups()
        expected = f">={oldest}" + (f",<{first_refused}" if first_refused else "")
        assert bounds[name.lower()] == SpecifierSet(expected)


@pytest.mark.parametrize("name", ["torch", "torchrec"])
def test_pip_is_never_asked_for_an_older_torch(name: str) -> None:
    """A user's torch stays, whatever extra is installed beside it."""
    texts = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    bounds = [
        bound.operator
        for required in map(Requirement, texts)
        if required.name == name
        for bound in required.specifier
    ]
    assert bounds and set(bounds) == {">="}


def test_the_installed_versions_are_the_pinned_ones() -> None:
    """Otherwise the tests below would look at the metadata of other versions."""
    versions = {name: found.version.partition("+")[0] for name, found in installed().items()}
    pinned = {name: pins()[name] for name in versions}
    assert versions == pinned, "Next: make install"
    assert len(versions) > 0.9 * len(pins())


def _asked_python(found: metadata.Distribution) -> str:
    """Return which Pythons a distribution asks for; "": any, because it does not say."""
    name = "Requires-Python"
    return found.metadata[name] if name in found.metadata else ""


@pytest.mark.parametrize("python", OLDEST_PATCHES)
def test_each_pin_holds_for_the_oldest_patch(python: str) -> None:
    refused = {
        f"{name}=={found.version}": asked
        for name, found in installed().items()
        if (asked := _asked_python(found)) and python not in SpecifierSet(asked)
    }
    assert not refused, f"not for Python {python}"


@pytest.mark.parametrize("python", OLDEST_PATCHES)
def test_what_pins_require_is_pinned_and_fits(python: str) -> None:
    """Some distributions are required by old patches alone, such as 3.11.2."""
    unfit = [
        f"{name} requires {requirement}; pinned: {pins().get(required)}"
        for name, requirement in requirements(python)
        if (name, required := canonicalize_name(requirement.name)) not in REPLACED
        and not requirement.specifier.contains(pins().get(required, ""), prereleases=True)
    ]
    assert not unfit, f"on Python {python}"
