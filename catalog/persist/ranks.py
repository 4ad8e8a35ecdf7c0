"""Writes, awaits, joins and removes the parts of a checkpoint that has several (format §6.1).

Parts are of ranks and of embedding servers. Each agent persists the jobs of its own host, and
learns of the others only through the store. An agent that finds all parts commits. Several may try,
because only one creates the manifest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pydantic import ValidationError

from recpoint.catalog.run.commit import commit
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.stored_chunks import not_there_of_parts
from recpoint.catalog.staging.cancels import raise_if_cancelled
from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.deletes import delete_objects
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import (
    CommitConflict,
    ForeignObject,
    FormatError,
    MalformedObject,
    ObjectNotFound,
    RanksMissing,
    RecordTooLarge,
    StoreError,
)
from recpoint.format.job import Job
from recpoint.format.keyed_use import joined_uses
from recpoint.format.manifest import (
    CacheUse,
    CheckedStripes,
    ChunkEntry,
    Manifest,
    TableSpec,
    least_bits,
)
from recpoint.format.naming import PART_KEY, AttemptName, PartName
from recpoint.format.part import RankPart, Shard
from recpoint.format.record_kinds import PART
from recpoint.format.records import (
    MAX_RECORD_BYTES,
    CheckpointRef,
    pack_record,
)
from recpoint.units import counted

if TYPE_CHECKING:  # a reader of the catalog needs neither
    from recpoint.catalog.persist.quantize import Quantization
    from recpoint.catalog.staging.job import StagedJob

__all__ = [
    "MAX_PARTS_BYTES",
    "commit_parts",
    "first_part",
    "join_parts",
    "missing_ranks",
    "missing_text",
    "own_part",
    "parts_text",
    "parts_there",
    "ranks_missing",
    "remove_parts",
    "stored_fields",
    "write_part",
]

#: Most stored bytes of all parts of a checkpoint; each part repeats the tables.
MAX_PARTS_BYTES: Final = 4 * MAX_RECORD_BYTES


#: Fields that are equal in a job, in all parts of its checkpoint, and in their manifest.
_ALIKE: Final = (
    "run", "step", "generation", "attempt", "ranks", "servers", "kind", "base", "parent",
    "chain_length", "policy",
)  # fmt: skip
#: Fields of a job that describe its part alone; the part, or a manifest without parts, repeats
#: them.
_OF_ONE_PART: Final = (
    "snapshot_ms", "staged_ms", "stall_us", "cache", "stripes", "dirty_rows", "full_bytes",
    "history",
)  # fmt: skip


def stored_fields(
    job: Job, entries: list[ChunkEntry], quantization: Quantization
) -> dict[str, Any]:
    """Return the fields that a part and a manifest without parts share."""
    return {field: getattr(job, field) for field in (*_ALIKE, *_OF_ONE_PART)} | {
        "chunks": tuple(sorted(entries, key=lambda entry: entry.key)),
        "quantizers": quantization.quantizers,
        "quantized_by": quantization.implementation,
        "state_bits": least_bits(table.least_state_bits for table in job.tables),
        "writer": f"recpoint {version('recpoint')}",
    }


def parts_there(run: Run, ref: CheckpointRef) -> dict[int, int]:
    """Return the bytes of the stored parts of a checkpoint, by number.

    Raises:
        StoreError: the store cannot be read.
    """
    parts = run.records(PART).listed(*_identity(ref))
    return {name.rank: info.size_bytes for name, info in parts}


def first_part(run: Run, attempt: AttemptName, numbers: Iterable[int]) -> RankPart | None:
    """Return the part of the lowest of these numbers; None: it is damaged, or removed meanwhile.

    Raises:
        StoreError: the store cannot be read.
    """
    try:
        return run.records(PART).read(*attempt, min(numbers))
    except (FormatError, ObjectNotFound):
        return None


def own_part(run: Run, job: Job) -> RankPart | None:
    """Return the part that an agent has already written for a job, or None.

    After a part is written other agents may join it, so none of its chunks may be written again.

    Raises:
        CommitConflict: the part is of another snapshot of this step.
        FormatError: the part is damaged.
        StoreError: the store cannot be read.
    """
    try:
        part = run.records(PART).read(*_name_of(job))
    except ObjectNotFound:
        return None
    _check_same_cut(job, part)
    return part


def write_part(
    run: Run, staged: StagedJob, entries: list[ChunkEntry], quantization: Quantization
) -> RankPart:
    """Write the part that declares all chunks of a job durable; may be called again.

    Raises:
        MalformedObject: the job's part does not keep to the format.
        RecordTooLarge: the part is larger than readers accept.
        CommitConflict: the store has a part of another snapshot of this step.
        StoreError: the part could not be written.
    """
    job = staged.job
    try:
        part = _part(job, entries, quantization)
    except ValueError as error:
        raise MalformedObject(
            str(staged.path),
            found=str(error)[:200],
            expected="a job whose part keeps to the format",
            next_step="nothing: the job is rejected, and the trainer stages its rows again",
        ) from error
    try:
        data = pack_record(part)
    except ValueError as error:
        raise RecordTooLarge(
            PART_KEY.of(*_name_of(job)),
            found=f"a part of {len(entries):,} chunks: {error!s:.200}",
            expected=f"at most {MAX_RECORD_BYTES} bytes",
            next_step="fewer bits, or fewer tables",
        ) from error
    name = _name_of(job)
    durable.step(f"part {PART_KEY.of(*name)}")
    if run.records(PART).create_packed(data, *name) == "created":
        return part
    stored_part = run.records(PART).read(*name)
    _check_same_cut(job, stored_part)
    return stored_part


def missing_ranks(run: Run, job: Job) -> tuple[int, ...]:
    """Return the numbers of the parts that are not stored; after a commit these may be all.

    Raises:
        StoreError: the store cannot be read.
    """
    present = parts_there(run, job.ref)
    return tuple(number for number in range(job.parts) if number not in present)


def commit_parts(run: Run, job: Job, job_file: Path | str) -> Manifest:
    """Commit a checkpoint whose parts are all stored, then remove the parts.

    Raises:
        RanksMissing: a part is missing; or chunks of a part are missing, and the part was removed.
        CommitError, ChainError, FormatError: the checkpoint can never be committed.
        CheckpointCancelled: the trainer has cancelled the job.
        StoreError: the store cannot be read or written; try again later.
    """
    parts = _read_all(run, job)
    writer = f"recpoint {version('recpoint')}"
    manifest = join_parts(parts, committed_ms=now_ms(), writer=writer)
    if manifest.ref != job.ref:
        raise ValueError(f"parts of {manifest.ref} for {job.ref}")
    raise_if_cancelled(job_file, job)
    _withdraw_without_chunks(run, job, parts)
    if commit(run, manifest) == "already":
        manifest = run.manifest(job.step, job.generation)
    with suppress(StoreError):  # a sweep removes what is left
        remove_parts(run, job.ref)
    return manifest


def remove_parts(run: Run, ref: CheckpointRef, *, rank: int | None = None) -> None:
    """Remove the parts of a checkpoint, or only the part of `rank`.

    Raises:
        StoreError: not all of them could be removed.
    """
    if rank is not None:
        run.records(PART).delete(*_identity(ref), rank=rank)
        return
    delete_objects(run.store, [info.key for _, info in run.records(PART).listed(*_identity(ref))])


def _read_all(run: Run, job: Job) -> list[RankPart]:
    present = parts_there(run, job.ref)
    missing = [number for number in range(job.parts) if number not in present]
    if missing:
        raise ranks_missing(job, missing)
    prefix = PART_KEY.under(*_identity(job.ref))
    foreign = sorted(present.keys() - set(range(job.parts)))
    if foreign:
        raise ForeignObject(
            prefix,
            found=f"parts of {parts_text(foreign, job.ranks)}",
            expected=f"parts of the {_owners_text(job)} that "
            f"{parts_text([job.rank], job.ranks)} knows of",
            next_step=PART.next_step,
        )
    total = sum(present.values())
    if total > MAX_PARTS_BYTES:
        raise RecordTooLarge(
            prefix,
            found=f"parts of {total} bytes",
            expected=f"at most {MAX_PARTS_BYTES}",
            next_step="fewer bits, or fewer tables or ranks: each part repeats all tables",
        )
    parts = []
    records = run.records(PART)
    with ReadScheduler.of_records() as reads:
        for number, outcome in reads.in_order(
            range(job.parts),
            lambda number: records.read(*_identity(job.ref), number),
            size_bytes=lambda number: present[number],
        ):
            try:
                parts.append(outcome.result())
            except ObjectNotFound:
                # Another agent has committed the checkpoint, or the trainer has cancelled it.
                raise ranks_missing(job, [number]) from None
    return parts


def _withdraw_without_chunks(run: Run, job: Job, parts: list[RankPart]) -> None:
    """Remove the parts whose chunks are not all stored; their agents write both again."""
    chunks = [entry for part in parts for entry in part.chunks]
    attempt = AttemptName(*_identity(job.ref))
    absent = not_there_of_parts(run.store, attempt, chunks, parts=job.parts)
    if not absent:
        return
    missing = {entry.key for entry in absent}
    ranks = [part.rank for part in parts if any(entry.key in missing for entry in part.chunks)]
    for rank in ranks:
        remove_parts(run, job.ref, rank=rank)
    raise ranks_missing(job, ranks)


def ranks_missing(job: Job, numbers: Collection[int]) -> RanksMissing:
    """Return the error that says that the parts of these numbers are missing."""
    owners = "ranks" if job.servers is None else "ranks and embedding servers"
    return RanksMissing(
        PART_KEY.under(*_identity(job.ref)),
        found=f"no part of {missing_text(numbers, job)}",
        expected=f"one of each of the {_owners_text(job)}, of step {job.step}",
        next_step=f"read the logs of the agents and trainers on the hosts of these {owners}",
        ranks=tuple(sorted(numbers)),
    )


def _part(job: Job, entries: list[ChunkEntry], quantization: Quantization) -> RankPart:
    return RankPart(
        **stored_fields(job, entries, quantization),
        rank=job.rank,
        loss=job.loss,
        keyed=job.keyed,
        tables=tuple(
            Shard(
                spec=table.spec,
                first_row=table.first_row,
                rows=table.shard_rows,
                scattered=table.scattered,
            )
            for table in job.tables
        ),
        written_ms=now_ms(),
    )


def _check_same_cut(job: Job, part: RankPart) -> None:
    """Check that a part is of the job's snapshot.

    After a step was dropped it may be staged again, and its chunks may then differ.
    """
    if (part.snapshot_ms, part.staged_ms, part.ranks, part.servers) != (
        job.snapshot_ms,
        job.staged_ms,
        job.ranks,
        job.servers,
    ):
        raise CommitConflict(
            PART_KEY.of(part.step, part.generation, part.attempt, rank=part.rank),
            found=f"the part of a snapshot taken at {part.snapshot_ms}",
            expected=f"none, or that of the snapshot taken at {job.snapshot_ms}",
            next_step="nothing: the job is rejected, and the next checkpoint takes its rows",
        )


def _name_of(job: Job) -> PartName:
    return PartName(job.step, job.generation, job.attempt, job.rank)


def _identity(ref: CheckpointRef) -> tuple[int, int, str]:
    return ref.step, ref.generation, ref.attempt


_MOST_TEXT: Final = 255


def join_parts(parts: Sequence[RankPart], *, committed_ms: int, writer: str) -> Manifest:
    """Return the manifest of a checkpoint that has several parts.

    Args:
        parts: one part of each rank and of each embedding server, in any order.
        committed_ms: time of the commit, in milliseconds since the epoch.
        writer: the program that commits, with its version.

    Raises:
        MalformedObject: the parts are not of one checkpoint; the error names the part, the field,
            what was found, and what was expected.
    """
    parts = sorted(parts, key=lambda part: part.rank)
    first = parts[0]
    for part in parts[1:]:
        for field in _ALIKE:
            actual, expected = getattr(part, field), getattr(first, field)
            if actual != expected:
                _refuse(part, f"{field} {actual}", f"{field} {expected}, as {_owner(first)} has")
    if [part.rank for part in parts] != list(range(first.parts)):
        ranks_text = ", ".join(str(part.rank) for part in parts)
        _refuse(first, f"parts {ranks_text:.200}", f"one of each of {_owners_text(first)}")
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
                    (quantizer for part in parts for quantizer in part.quantizers),
                    key=lambda quantizer: (quantizer.table, quantizer.rank),
                )
            ),
            quantized_by="; ".join(implementations)[:_MOST_TEXT],
            state_bits=least_bits(part.state_bits for part in parts),
            snapshot_ms=min(part.snapshot_ms for part in parts),
            staged_ms=max(part.staged_ms for part in parts),
            committed_ms=committed_ms,
            stall_us=max(part.stall_us for part in parts),
            cache=CacheUse.joined(part.cache for part in parts),
            stripes=CheckedStripes.joined(part.stripes for part in parts),
            loss=first.loss,
            keyed=joined_uses(part.keyed for part in parts),
            dirty_rows=sum(part.dirty_rows for part in parts),
            full_bytes=sum(part.full_bytes for part in parts),
            history=first.history,
            writer=writer,
        )
    except ValidationError as error:
        actual = str(error.errors(include_url=False, include_input=False)[0]["msg"])[:200]
        _refuse(first, f"with the other parts: {actual}", "parts of one checkpoint")


def _tables(parts: Sequence[RankPart]) -> tuple[TableSpec, ...]:
    first = parts[0]
    for part in parts[1:]:
        if len(part.tables) != len(first.tables):
            count_text, expected = f"{len(part.tables)} tables", f"{len(first.tables)}"
            _refuse(part, count_text, f"{expected}, as {_owner(first)} has")
    return tuple(
        _table(parts, [part.tables[index] for part in parts]) for index in range(len(first.tables))
    )


def _table(parts: Sequence[RankPart], shards: Sequence[Shard]) -> TableSpec:
    """Check that the parts agree on one table and that their shards have each of its rows once.

    Of scattered rows this checks how many there are. That no two parts have the same row is checked
    where rows are read (format §4, invariants 2 and 3).
    """
    name = f"{shards[0].spec.name!r:.80}"
    # A part without rows of the table may not know its row states.
    first_number = next((number for number, shard in enumerate(shards) if shard.rows), None)
    if first_number is None:
        _refuse(parts[0], f"no row of table {name} in any part", f"{shards[0].spec.rows} rows")
    spec = shards[first_number].spec
    for part, shard in zip(parts, shards, strict=True):
        for field in ("name", "columns", "rows", "dim", "dtype", "row_states"):
            actual, expected = getattr(shard.spec, field), getattr(spec, field)
            if actual != expected and (field != "row_states" or shard.rows):
                label = f"table {name}: {field}"
                expected_text = f"{label} {expected!s:.200}, as {_owner(parts[first_number])} has"
                _refuse(part, f"{label} {actual!s:.200}", expected_text)
    with_rows = [(shard, part) for shard, part in zip(shards, parts, strict=True) if shard.rows]
    scattered = [part for shard, part in with_rows if shard.scattered]
    ranges = [(shard, part) for shard, part in with_rows if not shard.scattered]
    if scattered and ranges:
        actual = f"a range of rows of table {name}"
        _refuse(ranges[0][1], actual, f"scattered rows, as {_owner(scattered[0])} has")
    end = 0
    for shard, part in sorted(ranges, key=lambda pair: pair[0].first_row):
        if shard.first_row != end:
            rows = f"rows from {shard.first_row} of table {name}"
            _refuse(part, rows, f"from {end}: no row twice, and none left out")
        end += shard.rows
    total = sum(shard.rows for shard, _ in with_rows)
    if total != spec.rows:
        _refuse(with_rows[-1][1], f"{total} rows of table {name} in all parts", f"{spec.rows}")
    return spec


def _refuse(part: RankPart, found: str, expected: str) -> NoReturn:
    raise MalformedObject(
        PART_KEY.of(part.step, part.generation, part.attempt, rank=part.rank),
        found=f"{_owner(part)}: {found}",
        expected=expected,
        next_step=PART.next_step,
    )


_MOST_NAMED: Final = 20


def parts_text(numbers: Collection[int], ranks: int) -> str:
    """Return whose parts these are, at most 20 of a kind named: `ranks 1, 2`, `embedding server 3`.

    Args:
        numbers: of the parts, at least one.
        ranks: ranks of the checkpoint; the parts after theirs are of embedding servers, which
            people count from 1.
    """
    of_ranks = [number for number in numbers if number < ranks]
    of_servers = [number - ranks + 1 for number in numbers if number >= ranks]
    named = [("rank", of_ranks), ("embedding server", of_servers)]
    return " and ".join(_named(label, numbers) for label, numbers in named if numbers)


def missing_text(numbers: Collection[int], job: Job | RankPart) -> str:
    """Return whose parts are missing of all parts of a checkpoint: `rank 1 of 2`."""
    text = parts_text(numbers, job.ranks)
    return f"{text} of {job.ranks if job.servers is None else _owners_text(job)}"


def _owners_text(job: Job | RankPart) -> str:
    ranks = counted(job.ranks, "rank")
    return (
        ranks if job.servers is None else f"{ranks} and {counted(job.servers, 'embedding server')}"
    )


def _owner(part: RankPart) -> str:
    return parts_text([part.rank], part.ranks)


def _named(noun: str, numbers: Collection[int]) -> str:
    named = ", ".join(str(number) for number in sorted(numbers)[:_MOST_NAMED])
    more = f" and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else ""
    return f"{noun} {named}" if len(numbers) == 1 else f"{noun}s {named}{more}"
