"""Parts of a checkpoint that are asked for by name: of this run, or of another to start from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal

from recpoint.catalog.restoring.selection import Selection
from recpoint.errors import SettingsError

__all__ = ["OptimizerStates", "Parts", "Seed", "near", "parts_of", "resolve_dense"]

#: Whether the optimizers' state of what is loaded comes along.
OptimizerStates = Literal["drop", "carry"]

_NEXT = "name what to load: recpoint seed URL lists what a checkpoint holds"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What to load.

    Attributes:
        tables: name in the model -> name in the checkpoint.
        dense: of dense parameters and buffers the same; or names and patterns of both.
        optimizer_states: with "carry" also the optimizers' state of them.
    """

    tables: Mapping[str, str] = field(default_factory=dict)
    dense: Mapping[str, str] | Sequence[str] = ()
    optimizer_states: OptimizerStates = "drop"


@dataclass(frozen=True)
class Seed:
    """Another run, part of whose checkpoint a new run starts from.

        ckpt.restore(seed=Seed("s3://b/ranker", tables={"ads": "items"}, dense=["bottom.*"]))

    Args:
        url: the other run.
        tables: names of tables; or name in the model here -> name in the checkpoint there. Several
            tables here may come from one there.
        dense: names of dense parameters and buffers, or patterns of them (`*`, `?`, `[…]`), which
            must stand for the same names here and there; or name here -> name there.
        optimizer_states: "drop": the optimizers here begin anew. "carry": the state of every
            parameter that is loaded comes along; it has to be of an optimizer of the same class.
            Learning rates and other settings are always those of here.
        step: of the checkpoint; the newest good one if None.
        generation: with `step`: also one that is not on the live line.
        validated_only: pass over newer checkpoints that nobody has validated.
        validated_within: pass over them if one that was validated is at most so many batches older.

    Raises:
        SettingsError: nothing is named, or it is named in another way; or see `Selection`.
    """

    url: str
    tables: Mapping[str, str] | Sequence[str] = ()
    dense: Mapping[str, str] | Sequence[str] = ()
    optimizer_states: OptimizerStates = "drop"
    step: int | None = None
    generation: int | None = None
    validated_only: bool = False
    validated_within: int | None = None

    def __post_init__(self) -> None:
        _ = self.selection  # which refuses what cannot be
        if self.optimizer_states not in ("drop", "carry"):
            raise SettingsError(
                "Seed(optimizer_states=...)",
                found=f"{self.optimizer_states!r:.80}",
                expected='"drop" or "carry"',
                next_step="choose one of the two",
            )
        if not (_are_names(self.tables) and _are_names(self.dense) and (self.tables or self.dense)):
            raise SettingsError(
                "Seed(tables=..., dense=...)",
                found=f"{self.tables!r:.200}, {self.dense!r:.200}",
                expected='names, or {"name here": "name there"}, in one of the two or both',
                next_step=_NEXT,
            )

    @property
    def selection(self) -> Selection:
        """Which checkpoint of the other run."""
        return Selection(
            step=self.step,
            generation=self.generation,
            validated_only=self.validated_only,
            validated_within=self.validated_within,
        )

    @property
    def parts(self) -> Parts:
        """What to load."""
        return Parts(
            tables=_by_name(self.tables), dense=self.dense, optimizer_states=self.optimizer_states
        )


def parts_of(wanted: object) -> Parts:
    """What `restore(partial=...)` may be: names of tables, of dense tensors, or of both.

    Raises:
        SettingsError: something else.
    """
    fits = (
        isinstance(wanted, Mapping)
        and wanted.keys() <= {"tables", "dense"}
        and any(wanted.values())
        and all(_are_names(names) for names in wanted.values())
    )
    if not fits:
        raise SettingsError(
            "partial",
            found=f"{wanted!r:.200}",
            expected='{"tables": [names], "dense": [names]}, one of the two or both',
            next_step=_NEXT,
        )
    assert isinstance(wanted, Mapping)
    return Parts(tables=_by_name(wanted.get("tables", ())), dense=wanted.get("dense", ()))


def resolve_dense(
    wanted: Mapping[str, str] | Sequence[str], here: Collection[str], there: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """The dense tensors that names and patterns stand for: name here -> name there.

    Returns:
        Those that are on both sides, and a sentence for each name or pattern that is not.
    """
    if isinstance(wanted, Mapping):
        asked = dict(wanted)
        found: list[str] = []
    else:
        asked, found = _expanded(wanted, here, there)
    for new, old in asked.items():
        if old not in there:
            found.append(f"{old!r} is not in the checkpoint{near(old, there)}")
        elif new not in here:
            found.append(f"{new!r} is not in the model{near(new, here)}")
    return {n: o for n, o in asked.items() if n in here and o in there}, found


def near(name: str, names: Iterable[str]) -> str:
    """What to say after a name that is not there: those that look like it."""
    alike = get_close_matches(name, list(names), n=3)
    return f" (near it: {', '.join(map(repr, alike))})" if alike else ""


def _expanded(
    wanted: Sequence[str], here: Collection[str], there: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    asked: dict[str, str] = {}
    found = []
    for one in wanted:
        if one in here or one in there or not any(sign in one for sign in "*?["):
            asked[one] = one
            continue
        matches = [
            name
            for name in {**dict.fromkeys(there), **dict.fromkeys(here)}
            if fnmatchcase(name, one)
        ]
        if not matches:
            some = ", ".join(map(repr, sorted(there)))
            found.append(f"no dense tensor is called like {one!r}; the checkpoint has {some:.400}")
        asked.update((name, name) for name in matches)
    return asked, found


def _are_names(given: object) -> bool:
    if isinstance(given, Mapping):
        return all(type(name) is str for name in (*given.keys(), *given.values()))
    return isinstance(given, list | tuple) and all(type(name) is str for name in given)


def _by_name(names: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    return dict(names) if isinstance(names, Mapping) else {name: name for name in names}
