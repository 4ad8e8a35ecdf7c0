"""Stages a server's rows of a checkpoint on the server's own host (format §6.1, §7).

A trainer says which checkpoint it is, and how many rows of each table it will name (`open`). Once
all trainers have, a slot is laid out for them. Each trainer then names its rows, piece by piece,
from the frozen rows that it reads (`put`), and sends records of rows that the server does not have
(`put_new`). When all rows are there, the stager draws a sample, writes the job file, and the agent
of this host takes over (`seal`).

Slots are laid out, and sealed, by a thread, because that may take longer than a call. The trainer
asks again until it is done. Each call may come twice: it leaves what one call leaves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.staging import area, cancels, job_files, locks, owned
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.sample import Sample, Sampler, place_sample
from recpoint.catalog.staging.slot import Placed, Slot, digest_segments, place_behind
from recpoint.catalog.store.contract import now_ms
from recpoint.embeddings.cache.slots import RecordLayout
from recpoint.embeddings.parity.stripes import Stripes
from recpoint.embeddings.server.placement import Placement
from recpoint.errors import FormatError, HomeError, StagingError
from recpoint.format.dtypes import Dtype, array_bytes, item_bytes, torch_dtype
from recpoint.format.job import Job, Segment, StagedTable
from recpoint.format.manifest import TableSpec
from recpoint.format.naming import parse_job_stem
from recpoint.format.records import pack_record

__all__ = ["NamedRows", "PartStager"]

#: Parts of which calls may still come: of the checkpoint that is staged, and those before it.
_MOST_PARTS: Final = 8
#: Attempts of which a trainer has said that nobody wants them, so that the others learn it.
_MOST_DROPPED: Final = 64


class NamedRows(NamedTuple):
    """Rows of one table that a trainer will name.

    Attributes:
        table: index of the table in the job.
        frozen: number of the reader of frozen rows from which they are taken.
        rows: how many there are.
        placement: where the rows of the table are.
    """

    table: int
    frozen: int
    rows: int
    placement: Placement | Stripes


class PartStager:
    """Stages the parts of one embedding server.

    Args:
        name: what errors call the server.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # guards `_parts` and what each part's trainers have said
        self._parts: dict[str, _Part] = {}  # by attempt, the newest last
        self._dropped: deque[str] = deque(maxlen=_MOST_DROPPED)  # attempts that nobody wants
        self._slots: dict[Path, Slot] = {}
        self._held: dict[StagedRun, int] = {}  # lock of this server's part there
        self._leaving: list[_Part] = []  # dropped, and rows may still be written to their slots
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recpoint-stage")

    def open(
        self, job: Job, *, root: Path, most: int, trainer: int, rows: Sequence[NamedRows]
    ) -> tuple[bool, int]:
        """Take note of what a trainer will name.

        Args:
            job: the job to stage, without rows; `job.rank` is the number of this server's part.
            root: the staging area.
            most: how many jobs of this server may be staged at the same time.
            trainer: number of the trainer, 0 … `job.ranks` - 1.
            rows: what it will name.

        Returns:
            Whether rows can be put, and how many trainers have not been here yet.

        Raises:
            HomeError: the part cannot be staged.
        """
        with self._lock:
            self._refuse_dropped(job.attempt)
            part = self._parts.get(job.attempt)
            if part is None:
                while len(self._parts) > max(_MOST_PARTS, most):
                    self._leave(next(iter(self._parts)))
                part = self._parts[job.attempt] = _Part(job, root)
            part.named.setdefault(trainer, (job.tables, rows))
            if len(part.named) == job.ranks and part.opened is None:
                part.opened = self._thread.submit(self._lay_out, part, most)
            awaited = job.ranks - len(part.named)
        return self._is_done(part.opened), awaited

    def record_bytes(self, frozen: int) -> int:
        """Return the bytes of a record of the rows that a reader has; raise as `put`."""
        return self._rows_of(frozen)[1].record_bytes

    def put(self, frozen: int, first: int, slots: Tensor, records: Tensor, there: Tensor) -> None:
        """Stage rows.

        Args:
            frozen: number of the reader from which they were taken.
            first: how many rows its trainer has named before these.
            slots: int64 [n], ascending.
            records: uint8 [n, bytes].
            there: bool [n]: the server has the row. Others must follow by `put_new`.

        Raises:
            HomeError: no part is open for these rows.
        """
        part, rows = self._rows_of(frozen)
        target = slice(rows.first + first, rows.first + first + len(slots))
        if target.stop > rows.first + rows.count:
            raise ValueError(f"rows {first} to {first + len(slots)}, expected {rows.count}")
        with self._writing(part):
            rows.ids[target] = rows.placement.ids(rows.server, slots)
            rows.named = max(rows.named, first + len(slots))
            places = torch.arange(target.start, target.stop, dtype=torch.int64, device="cpu")
            rows.write(places[there], records[there])

    def put_new(self, frozen: int, slots: Tensor, records: Tensor) -> None:
        """Stage rows that the server does not have; see `put`, which was called for them before."""
        part, rows = self._rows_of(frozen)
        ids = rows.placement.ids(rows.server, slots)
        own_ids = rows.ids[rows.first : rows.first + rows.named]
        places = torch.searchsorted(own_ids, ids).clamp_(max=max(0, rows.named - 1))
        if not rows.named or not torch.equal(own_ids[places], ids):
            raise ValueError("records of rows that were not named")
        with self._writing(part):
            rows.write(places + rows.first, records)

    def seal(self, attempt: str, trainer: int) -> tuple[bool, int]:
        """Take note that a trainer has put all its rows.

        Returns:
            Whether the job is staged, and how many trainers have not put all theirs.

        Raises:
            HomeError: the part cannot be staged.
        """
        with self._lock:
            self._refuse_dropped(attempt)
            part = self._part(attempt)
            part.complete.add(trainer)
            if len(part.complete) == part.job.ranks and part.sealed is None:
                part.sealed = self._thread.submit(self._seal, part)
            awaited = part.job.ranks - len(part.complete)
        return self._is_done(part.sealed), awaited

    def rejected(self, attempt: str) -> str | None:
        """Return why the agent has rejected the part; None: it has not, or nothing is known."""
        with self._lock:
            part = self._parts.get(attempt)
        if part is None:
            return None
        part.note_answer()
        return part.rejected

    def drop(self, attempt: str, job: Job | None = None, root: Path | None = None) -> None:
        """Have the agent drop the part, or give it up if it is not staged.

        Args:
            attempt: name of the checkpoint's attempt.
            job: describes the part, which a server of before may have staged here; None: none has.
            root: the staging area of that part.

        Raises:
            HomeError: the mark cannot be written.
        """
        with self._lock:
            self._dropped.append(attempt)
            part = self._leave(attempt)
        if part is None and job is not None and root is not None:
            part = _Part(job, root)
        if part is None:
            return
        try:
            if job_files.read_job(part.job_path).attempt == attempt:
                cancels.write_mark(part.staged_run, part.job.ref, part.job.rank)
        except FileNotFoundError:
            return  # it was not staged, or the agent has answered
        except (OSError, StagingError, FormatError) as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Give up what is not staged. Staged jobs stay for the agent. No call may be running.

        The thread does it, once it sees that nobody wants what it is staging.
        """
        with self._lock:
            for attempt in list(self._parts):
                self._leave(attempt)
        self._thread.submit(self._give_up)
        self._thread.shutdown(wait=False)

    def _leave(self, attempt: str) -> _Part | None:
        """Forget a part, which nobody wants unless it is staged; the lock is held."""
        part = self._parts.pop(attempt, None)
        if part is not None and not part.is_staged:
            part.is_dropped = True
            self._leaving.append(part)
        return part

    @contextmanager
    def _writing(self, part: _Part) -> Iterator[None]:
        """Keep the part's slot from being used again meanwhile."""
        with self._lock:
            part.writes += 1
        try:
            yield
        finally:
            with self._lock:
                part.writes -= 1

    def _refuse_dropped(self, attempt: str) -> None:
        if attempt in self._dropped:
            raise self._refused("a part that a trainer has dropped", "one that all trainers want")

    def _part(self, attempt: str) -> _Part:
        part = self._parts.get(attempt)
        if part is None:
            raise self._refused(f"no part of attempt {attempt:.40}", "a part that was opened")
        return part

    def _rows_of(self, frozen: int) -> tuple[_Part, _StagedRows]:
        with self._lock:
            for part in reversed(self._parts.values()):
                if frozen in part.rows:
                    return part, part.rows[frozen]
        raise self._refused("rows of no part", "rows of a part that was opened")

    def _is_done(self, work: Future[None] | None) -> bool:
        if work is None or not work.done():
            return False
        try:
            work.result()
        except (OSError, MemoryError, RuntimeError, StagingError, FormatError, ValueError) as error:
            raise self._failed(error) from error
        return True

    def _refused(self, found: str, expected: str) -> HomeError:
        return HomeError(
            f"{self._name}: staged rows",
            found=found,
            expected=expected,
            next_step="nothing: the next checkpoint also holds these rows",
        )

    def _failed(self, error: Exception) -> HomeError:
        """Return an error that names this server, whose host the trainer's log does not show."""
        if isinstance(error, (StagingError, FormatError)):
            return HomeError(
                f"{self._name}: {error.subject}",
                found=error.found,
                expected=error.expected,
                next_step=error.next_step,
            )
        return self._refused(str(error), "a part that can be staged")

    # By the thread.

    def _give_up(self) -> None:
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        for lock in self._held.values():
            locks.release(lock)
        self._held.clear()

    def _lay_out(self, part: _Part, most: int) -> None:
        if part.is_dropped:
            return
        slot = self._free_slot(part, most)
        tables = [
            next(
                (named_table for named_table in of_trainers if named_table.scattered),
                of_trainers[0],
            )
            for of_trainers in zip(
                *(named_tables for named_tables, _ in part.named.values()), strict=True
            )
        ]
        counts: dict[int, int] = {}
        for _, (_, named) in sorted(part.named.items()):
            for rows in named:
                counts[rows.table] = counts.get(rows.table, 0) + rows.rows
        end = 0
        for index, count in sorted(counts.items()):
            if not count:
                continue
            for name, dtype, shape in _arrays(index, tables[index].spec, count):
                part.placed.append(place_behind(name, dtype, shape, end))
                end = part.placed[-1].end
        part.tables = [
            StagedTable(**dict(table) | {"row_count": counts.get(index, 0)})
            for index, table in enumerate(tables)
        ]
        specs = [table.spec for table in tables]
        part.sample, sample_bytes = _sample(part.job.attempt, specs, counts)
        slot.reserve(end + sample_bytes)
        part.slot, part.end = slot, end
        views = {spot.name: spot.view(slot.data) for spot in part.placed}
        rows_before = dict.fromkeys(counts, 0)
        rows_by_frozen: dict[int, _StagedRows] = {}
        for _, (_, named) in sorted(part.named.items()):
            for rows in named:
                if rows.rows:
                    spec = specs[rows.table]
                    rows_by_frozen[rows.frozen] = _StagedRows(
                        rows, part.server, rows_before[rows.table], views, _layout(spec), spec
                    )
                rows_before[rows.table] += rows.rows
        with self._lock:
            part.rows = rows_by_frozen

    def _free_slot(self, part: _Part, most: int) -> Slot:
        """Return a slot that no job uses, after making sure that this server alone writes here."""
        staged_run, number = part.staged_run, part.job.rank
        staged_run.make_directories()
        self._take_lock(part)
        busy = self._busy_slots(part, most)
        index = 0
        while area.slot_name(number, index) in busy:
            index += 1
        path = staged_run.slot_path(number, index)
        if path not in self._slots:
            self._slots[path] = Slot(path)
        return self._slots[path]

    def _take_lock(self, part: _Part) -> None:
        """Make sure that no other process stages this server's rows here."""
        staged_run = part.staged_run
        lock_path = staged_run.trainer_lock_path(part.job.rank)
        lock_held = self._held.get(staged_run)
        if lock_held is None or locks.is_lost(lock_held, lock_path):
            self._held[staged_run] = locks.acquire(
                lock_path,
                expected="no other process that stages this server's rows",
                next_step="stop that process, or train under another run URL",
                root=part.root,
                words=area.SERVER_WORDS,
            )
            if lock_held is not None:
                locks.release(lock_held)

    def _busy_slots(self, part: _Part, most: int) -> set[str]:
        """Return the names of the slots that jobs name, or that rows are written to.

        Raises:
            StagingError: as many jobs are staged as may be.
        """
        busy = set()
        for path in part.staged_run.staged_jobs():
            name = parse_job_stem(path.stem)
            if name is not None and name[2] == part.job.rank:
                try:
                    busy.add(job_files.read_job(path).slot)
                except FileNotFoundError:
                    continue  # answered meanwhile
        if len(busy) >= most:
            raise StagingError(
                str(part.staged_run.jobs_directory),
                found=f"{len(busy)} staged checkpoints of this server",
                expected=f"fewer than {most}, as Staging.jobs allows",
                next_step="see that an agent runs on this host: recpoint agent",
            )
        with self._lock:
            self._leaving = [part for part in self._leaving if part.writes]
            staging = [
                part.slot for part in (*self._parts.values(), *self._leaving) if part.is_staging
            ]
        return busy | {slot.path.name for slot in staging if slot is not None}

    def _seal(self, part: _Part) -> None:
        if part.is_dropped:
            return
        assert part.slot is not None and part.sample is not None  # it was laid out
        missing = sum(int((~rows.filled).sum()) for rows in part.rows.values())
        if missing:
            raise ValueError(f"{missing} rows without a record, found at the end")
        data = part.slot.data
        sampled, slot_bytes = place_sample(part.sample, part.tables, part.placed, data, part.end)
        segments: list[Segment] = []
        for placed in (*part.placed, *sampled):
            if part.is_dropped:
                return
            segments += digest_segments(part.slot, (placed,))
        part.slot.sync()
        job = Job(
            **dict(part.job)
            | {
                "tables": tuple(part.tables),
                "slot": part.slot.path.name,
                "slot_bytes": slot_bytes,
                "segments": tuple(segments),
                "staged_ms": now_ms(),
                "full_bytes": sum(_full_bytes(table) for table in part.tables),
            }
        )
        self._forget_answers(part)
        with self._lock:
            if part.is_dropped:
                return
            owned.write_atomically(part.root, part.job_path, pack_record(job))
            part.is_staged = True

    def _forget_answers(self, part: _Part) -> None:
        """Remove the agent's answers to earlier jobs, and marks that wanted these dropped."""
        with self._lock:
            earlier = [
                earlier_part for earlier_part in self._parts.values() if earlier_part is not part
            ]
        for earlier_part in earlier:
            earlier_part.note_answer()  # a trainer may still ask
        for directory in (
            part.staged_run.outcomes_directory,
            part.staged_run.cancels_directory,
        ):
            for name in owned.names(part.root, directory):
                stem = parse_job_stem(name.removesuffix(".json"))
                is_own = stem is not None and stem[2] == part.job.rank
                if is_own and not (part.staged_run.jobs_directory / name).exists():
                    owned.remove(part.root, directory / name)


class _Part:
    """What one checkpoint has on this server.

    Attributes:
        job: the job without rows, as a trainer gave it.
        named: trainer -> the job's tables as it knows them, and the rows that it will name.
        complete: trainers that have put all their rows.
        rows: number of a reader of frozen rows -> where its rows go; empty until it is laid out.
        slot, placed, end, tables, sample: as laid out.
        opened, sealed: the thread's work; None: it has not begun.
        is_staged: the job file is written.
        is_dropped: nobody wants it any more.
        writes: how many calls are writing to its slot.
        rejected: why the agent has rejected it; None: it has not, as far as known.
    """

    def __init__(self, job: Job, root: Path) -> None:
        self.job = job
        self.root = root
        self.staged_run = StagedRun.of(root, job.run_url)
        self.named: dict[int, tuple[tuple[StagedTable, ...], Sequence[NamedRows]]] = {}
        self.complete: set[int] = set()
        self.rows: dict[int, _StagedRows] = {}
        self.slot: Slot | None = None
        self.placed: list[Placed] = []
        self.end = 0
        self.tables: list[StagedTable] = []
        self.sample: Sample | None = None
        self.opened: Future[None] | None = None
        self.sealed: Future[None] | None = None
        self.is_staged = self.is_dropped = False
        self.writes = 0
        self.rejected: str | None = None

    @property
    def server(self) -> int:
        """Number of this server."""
        return self.job.rank - self.job.ranks

    @property
    def is_staging(self) -> bool:
        """Whether the slot is in use, and no job says so."""
        is_wanted = not self.is_dropped or self.writes > 0
        return self.slot is not None and not self.is_staged and is_wanted

    def note_answer(self) -> None:
        """Learn whether the agent has rejected the part."""
        try:
            outcome = job_files.read_outcome(self.outcome_path)
        except (OSError, FormatError, StagingError):
            return  # there is none yet, or it is of no use
        if outcome.result == "rejected" and outcome.attempt == self.job.attempt:
            self.rejected = outcome.error or "rejected"

    @property
    def job_path(self) -> Path:
        """The job file."""
        ref = self.job.ref
        return self.staged_run.job_path(ref.generation, ref.step, self.job.rank)

    @property
    def outcome_path(self) -> Path:
        """The agent's answer."""
        ref = self.job.ref
        return self.staged_run.outcome_path(ref.generation, ref.step, self.job.rank)


class _StagedRows:
    """Where the rows go that one trainer names of one table.

    Attributes:
        placement: where the rows of the table are.
        server: number of this server.
        first: the first of them in the arrays, and `count`: how many they are.
        ids: the slot's array of row ids, int64 [n].
        filled: bool [count]: the row's record is there.
        named: how many of them were named, from the first on.
        record_bytes: bytes of a record.
    """

    def __init__(
        self,
        named: NamedRows,
        server: int,
        first: int,
        views: Mapping[str, Tensor],
        layout: RecordLayout,
        spec: TableSpec,
    ) -> None:
        self.placement, self.count = named.placement, named.rows
        self.server = server
        self.first = first
        self.named = 0
        self.filled = torch.zeros(named.rows, dtype=torch.bool, device="cpu")
        names = [name for name, _, _ in _arrays(named.table, spec, named.rows)]
        self.ids, *self._arrays = [views[name] for name in names]
        self._layout = layout
        self.record_bytes = layout.size_bytes

    def write(self, places: Tensor, records: Tensor) -> None:
        """Write records, uint8 [n, bytes], to places of the arrays, int64 [n]."""
        if records.shape[1] != self._layout.size_bytes:
            raise ValueError(
                f"records of {records.shape[1]} bytes, expected {self._layout.size_bytes}"
            )
        for field, array in zip(self._layout.fields, self._arrays, strict=True):
            array[places] = self._layout.array(records, field)
        self.filled[places - self.first] = True


def _arrays(index: int, spec: TableSpec, rows: int) -> list[tuple[str, Dtype, tuple[int, ...]]]:
    """Return name, dtype and shape of a table's segments: ids, values, row states."""
    arrays: list[tuple[str, Dtype, tuple[int, ...]]] = [
        (f"t{index}.ids", "I64", (rows,)),
        (f"t{index}.values", spec.dtype, (rows, spec.dim)),
    ]
    for number, state in enumerate(spec.row_states):
        arrays.append((f"t{index}.state.{number}", state.dtype, (rows, *state.shape)))
    return arrays


def _layout(spec: TableSpec) -> RecordLayout:
    states = {state.name: (torch_dtype(state.dtype), state.shape) for state in spec.row_states}
    return RecordLayout.of({"": (torch_dtype(spec.dtype), (spec.dim,)), **states})


def _sample(
    attempt: str, specs: Sequence[TableSpec], counts: Mapping[int, int]
) -> tuple[Sample, int]:
    """Return a sample of staged rows only, and the most bytes that it takes.

    Trainers sample the whole tables.
    """
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    row_ranges = [range(counts.get(index, 0)) for index in range(len(specs))]
    size_bytes = Sampler().size_bytes(specs, row_ranges)
    sample = Sample(
        seed=int(attempt, 16),
        specs=tuple(specs),
        first_rows=(0,) * len(specs),
        ids=(none,) * len(specs),
        size_bytes=size_bytes,
    )
    for spec in specs:
        shapes = [
            (spec.dtype, (spec.dim,)),
            *((row_state.dtype, row_state.shape) for row_state in spec.row_states),
        ]
        sample.arrays.append(
            tuple(
                torch.empty((0, *shape), dtype=torch_dtype(dtype), device="cpu")
                for dtype, shape in shapes
            )
        )
    return sample, size_bytes


def _full_bytes(table: StagedTable) -> int:
    row_bytes = table.spec.dim * item_bytes(table.spec.dtype)
    row_bytes += sum(array_bytes(state.dtype, state.shape) for state in table.spec.row_states)
    return table.shard_rows * row_bytes
