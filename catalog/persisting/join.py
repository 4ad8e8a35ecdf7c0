"""From the parts of all ranks to one manifest (format §6.1, P3): no reading, no writing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

from pydantic import ValidationError

from recpoint.errors import MalformedObject
from recpoint.format.manifest import Manifest, TableSpec
from recpoint.format.naming import PART_KEY
from recpoint.format.part import RankPart, Shard

__all__ = ["join_parts"]

#: What all parts have to say alike.
_ALIKE: Final = (
    "run", "step", "generation", "attempt", "ranks", "kind", "base", "parent", "chain_length",
    "policy",
)  # fmt: skip
_NEXT: Final = "nothing: the checkpoint is rejected, and the trainer writes another one"
_MOST_TEXT: Final = 255


def join_parts(parts: Sequence[RankPart], *, committed_ms: int, writer: str) -> Manifest:
    """The manifest of a checkpoint of several ranks.

    Args:
        parts: one of each rank, in any order.
        committed_ms, writer: of the manifest.

    Raises:
        MalformedObject: they are not the parts of one checkpoint; it names the rank, the field,
            what was found, and what was expected.
    """
    parts = sorted(parts, key=lambda part: part.rank)
    first = parts[0]
    for part in parts[1:]:
        for field in _ALIKE:
            found, expected = getattr(part, field), getattr(first, field)
            if found != expected:
                _refuse(part, f"{field} {found}", f"{field} {expected}, as rank {first.rank} has")
    if [part.rank for part in parts] != list(range(first.ranks)):
        there = ", ".join(str(part.rank) for part in parts)
        _refuse(first, f"parts of ranks {there:.200}", f"one of each of {first.ranks} ranks")
    tables = _tables(parts)
    implementations = sorted({part.quantized_by for part in parts if part.quantized_by})
    fields: dict[str, Any] = {field: getattr(first, field) for field in _ALIKE}
    try:
        return Manifest(
            **fields,
            stands_for=None,
            tables=tables,
            chunks=tuple(
                sorted((entry for part in parts for entry in part.chunks), key=lambda e: e.key)
            ),
            quantizers=tuple(
                sorted(
                    (one for part in parts for one in part.quantizers),
                    key=lambda one: (one.table, one.rank),
                )
            ),
            quantized_by="; ".join(implementations)[:_MOST_TEXT],
            state_bits=16 if any(part.state_bits for part in parts) else None,
            snapshot_ms=min(part.snapshot_ms for part in parts),
            staged_ms=max(part.staged_ms for part in parts),
            committed_ms=committed_ms,
            stall_us=max(part.stall_us for part in parts),
            dirty_rows=sum(part.dirty_rows for part in parts),
            full_bytes=sum(part.full_bytes for part in parts),
            history=first.history,
            writer=writer,
        )
    except ValidationError as error:
        found = str(error.errors(include_url=False, include_input=False)[0]["msg"])[:200]
        _refuse(first, f"with the parts of the other ranks: {found}", "parts of one checkpoint")


def _tables(parts: Sequence[RankPart]) -> tuple[TableSpec, ...]:
    first = parts[0]
    for part in parts[1:]:
        if len(part.tables) != len(first.tables):
            found, expected = f"{len(part.tables)} tables", f"{len(first.tables)}"
            _refuse(part, found, f"{expected}, as rank {first.rank} has")
    return tuple(
        _table(parts, [part.tables[index] for part in parts]) for index in range(len(first.tables))
    )


def _table(parts: Sequence[RankPart], shards: Sequence[Shard]) -> TableSpec:
    """What all ranks say of one table, whose rows they have to share among them."""
    name = f"{shards[0].spec.name!r:.80}"
    # Of no row one need not know the row states.
    known = next((at for at, shard in enumerate(shards) if shard.rows), None)
    if known is None:
        _refuse(parts[0], f"no row of table {name} in any part", f"{shards[0].spec.rows} rows")
    spec = shards[known].spec
    for part, shard in zip(parts, shards, strict=True):
        for field in ("name", "columns", "rows", "dim", "dtype", "row_states"):
            found, expected = getattr(shard.spec, field), getattr(spec, field)
            if found != expected and (field != "row_states" or shard.rows):
                what = f"table {name}: {field}"
                wanted = f"{what} {expected!s:.200}, as rank {parts[known].rank} has"
                _refuse(part, f"{what} {found!s:.200}", wanted)
    end = 0
    held = [(shard, part) for shard, part in zip(shards, parts, strict=True) if shard.rows]
    for shard, part in sorted(held, key=lambda pair: pair[0].first_row):
        if shard.first_row != end:
            rows = f"rows from {shard.first_row} of table {name}"
            _refuse(part, rows, f"from {end}: no row twice, and none left out")
        end += shard.rows
    if end != spec.rows:
        _refuse(held[-1][1], f"{end} rows of table {name} in all parts", f"{spec.rows}")
    return spec


def _refuse(part: RankPart, found: str, expected: str) -> NoReturn:
    raise MalformedObject(
        PART_KEY.of(part.step, part.generation, part.attempt, rank=part.rank),
        found=f"rank {part.rank}: {found}",
        expected=expected,
        next_step=_NEXT,
    )
