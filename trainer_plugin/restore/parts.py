"""Names the parts of a checkpoint to load, and finds what names and patterns stand for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal

from recpoint.catalog.restore.order import Selection
from recpoint.errors import SettingsError

__all__ = ["Parts", "Seed", "near", "parts_of", "rows_without_ids", "resolve_dense"]

#: Whether the optimizer state of loaded parameters is loaded, too.
OptimizerStates = Literal["drop", "carry"]

_NEXT_OF_PARTS = "name what to load: recpoint seed URL lists what a checkpoint holds"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a checkpoint to load.

    Attributes:
        tables: name in the model -> name in the checkpoint.
        dense: dense parameters and buffers: name in the model -> name in the checkpoint; or names
            and patterns that hold for both.
        optimizer_states: "carry": also load their optimizer state.
    """

    tables: Mapping[str, str] = field(default_factory=dict)
    dense: Mapping[str, str] | Sequence[str] = ()
    optimizer_states: OptimizerStates = "drop"


@dataclass(frozen=True)
class Seed:
    """Names the parts of another run's checkpoint from which a new run starts.

        ckpt.restore(seed=Seed("s3://b/ranker", tables={"ads": "items"}, dense=["bottom.*"]))

    Or of a checkpoint that another tool wrote, from which a job begins that it has trained so far:

        ckpt.restore(seed=Seed("old.ckpt", tables=["*"], dense=["*"], names={"emb.*": "users.*"}))

    Such a checkpoint is a directory of `torch.distributed.checkpoint`, a file of `torch.save` or
    Lightning, or safetensors files, in a local path.

    Args:
        url: URL of the other run, or the path of a checkpoint of another tool.
        tables: names of tables; or name in this model -> name in the other checkpoint. Several
            tables here may come from the same table there. A keyed table takes the rows of raw ids
            of TorchRec's managed collisions.
        dense: names or patterns (`*`, `?`, `[…]`) of dense parameters and buffers, which must have
            the same names here and there; or name here -> name there.
        optimizer_states: "drop": the optimizers here begin anew. "carry": the optimizer state of
            every loaded parameter is loaded, too; the optimizers must be of the same class.
            Learning rates and other settings of the optimizers here never change.
        names: of another tool's checkpoint: name or pattern there -> name here, where they differ.
            A pattern has one `*`, and so has the name that it becomes. Names of `tables` and
            `dense` are those of this model then, and may all be patterns.
        step: step of the checkpoint; None: the newest good checkpoint.
        generation: with `step`: the generation of the checkpoint, which need not be on the live
            line.
        validated_only: skip newer checkpoints that nobody has validated.
        validated_within: skip them only if a validated checkpoint is at most this many batches
            older.

    Raises:
        SettingsError: nothing is named, or names have another form; or see `Selection`.
    """

    url: str
    tables: Mapping[str, str] | Sequence[str] = ()
    dense: Mapping[str, str] | Sequence[str] = ()
    optimizer_states: OptimizerStates = "drop"
    names: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    generation: int | None = None
    validated_only: bool = False
    validated_within: int | None = None

    def __post_init__(self) -> None:
        _ = self.selection  # raises if the selection is not valid
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
                expected='names, or {"name here": "name there"}, in at least one of the two',
                next_step=_NEXT_OF_PARTS,
            )
        if not _are_renames(self.names):
            raise SettingsError(
                "Seed(names=...)",
                found=f"{self.names!r:.200}",
                expected='{"old": "new"} or {"old.*": "new.*"}, with one * in both or none',
                next_step="recpoint import PATH lists the names of a checkpoint",
            )

    @property
    def selection(self) -> Selection:
        """The selection of a checkpoint of the other run."""
        return Selection(
            step=self.step,
            generation=self.generation,
            validated_only=self.validated_only,
            validated_within=self.validated_within,
        )

    @property
    def parts(self) -> Parts:
        """The parts to load."""
        return Parts(
            tables=_by_name(self.tables), dense=self.dense, optimizer_states=self.optimizer_states
        )


def parts_of(named: object) -> Parts:
    """Return the parts that `restore(partial=...)` names: tables, dense tensors, or both.

    Raises:
        SettingsError: the argument has another form.
    """
    fits = (
        isinstance(named, Mapping)
        and named.keys() <= {"tables", "dense"}
        and any(named.values())
        and all(_are_names(names) for names in named.values())
    )
    if not fits:
        raise SettingsError(
            "partial",
            found=f"{named!r:.200}",
            expected='{"tables": [names], "dense": [names]}, with at least one of the two',
            next_step=_NEXT_OF_PARTS,
        )
    assert isinstance(named, Mapping)
    return Parts(tables=_by_name(named.get("tables", ())), dense=named.get("dense", ()))


def resolve_dense(
    named: Mapping[str, str] | Sequence[str],
    names_here: Collection[str],
    names_stored: Collection[str],
) -> tuple[dict[str, str], list[str]]:
    """Find the dense tensors that names and patterns stand for.

    Args:
        named: names and patterns, or name here -> name in the checkpoint.
        names_here: names of the model's dense tensors.
        names_stored: names of the checkpoint's dense tensors.

    Returns:
        Name here -> name there, for tensors that exist on both sides; and a sentence for each name
        or pattern that does not.
    """
    if isinstance(named, Mapping):
        old_names = dict(named)
        faults: list[str] = []
    else:
        old_names, faults = _expanded(named, names_here, names_stored)
    for new, old in old_names.items():
        if old not in names_stored:
            faults.append(f"{old!r} is not in the checkpoint{near(old, names_stored)}")
        elif new not in names_here:
            faults.append(f"{new!r} is not in the model{near(new, names_here)}")
    return {n: o for n, o in old_names.items() if n in names_here and o in names_stored}, faults


def rows_without_ids(
    tables: Mapping[str, str], dense: Mapping[str, str], id_tensors: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a sentence for each table that would get rows without the raw ids of these rows.

    Args:
        tables, dense: what is loaded: name here -> name in the checkpoint.
        id_tensors: see `ModelState.id_tensors`.
    """
    texts = []
    for table, names in id_tensors.items():
        pattern = f"{names[0].rsplit('.', 1)[0]}.*"
        loaded_names = [name for name in names if name in dense]
        if table in tables and len(loaded_names) < len(names):
            texts.append(
                f"table {table!r} has managed collisions, and its rows would be those of other ids "
                f'without the dense tensors "{pattern}"'
            )
        elif table not in tables and loaded_names:
            texts.append(
                f'the dense tensors "{pattern}" say which ids the rows of table {table!r} have, '
                "and the table is not named"
            )
        elif loaded_names:
            # TorchRec gives a table and the module that maps its ids one name.
            stored_name = tables[table].removesuffix(".weight").rsplit(".", 1)[-1]
            if any(dense[name].split(".")[-2:-1] != [stored_name] for name in names):
                texts.append(
                    f"table {table!r} is loaded from {tables[table]!r}, and its raw ids are not "
                    f"({dense[names[0]]!r})"
                )
    return texts


def near(name: str, names: Iterable[str]) -> str:
    """Return names similar to one that does not exist, as the end of a sentence; may be empty."""
    alike = get_close_matches(name, list(names), n=3)
    return f" (near it: {', '.join(map(repr, alike))})" if alike else ""


def _expanded(
    patterns: Sequence[str], names_here: Collection[str], names_stored: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    old_names: dict[str, str] = {}
    faults = []
    for pattern in patterns:
        if (
            pattern in names_here
            or pattern in names_stored
            or not any(sign in pattern for sign in "*?[")
        ):
            old_names[pattern] = pattern
            continue
        matches = [
            name
            for name in {**dict.fromkeys(names_stored), **dict.fromkeys(names_here)}
            if fnmatchcase(name, pattern)
        ]
        if not matches:
            stored_names = ", ".join(map(repr, sorted(names_stored)))
            faults.append(
                f"no dense tensor matches {pattern!r}; the checkpoint has {stored_names:.400}"
            )
        old_names.update((name, name) for name in matches)
    return old_names, faults


def _are_names(names: object) -> bool:
    if isinstance(names, Mapping):
        return all(type(name) is str for name in (*names.keys(), *names.values()))
    return isinstance(names, list | tuple) and all(type(name) is str for name in names)


def _are_renames(names: object) -> bool:
    return (
        isinstance(names, Mapping)
        and _are_names(names)
        and all(old.count("*") == new.count("*") <= 1 for old, new in names.items())
    )


def _by_name(names: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    return dict(names) if isinstance(names, Mapping) else {name: name for name in names}
