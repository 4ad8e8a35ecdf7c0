"""Restores the newest checkpoint whose chain is good, into memory or into any target."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from recpoint.catalog.restore.chain import ChainReading
from recpoint.catalog.restore.chunks import ChunkSource, StoreChunks
from recpoint.catalog.restore.dense import dense_shards, join_shards
from recpoint.catalog.restore.order import NEWEST, RestoreOrder, Selection, Skipped, candidates
from recpoint.catalog.restore.placement import PartsTarget, TablePart, map_parts
from recpoint.catalog.restore.rows import LogicalTable, logical_tables
from recpoint.catalog.restore.target import RestoreTarget, RowSink, TableTarget
from recpoint.catalog.run.chain import Chain, PassedOver, read_with_chain
from recpoint.catalog.run.deletions import Going
from recpoint.catalog.run.leases import reading
from recpoint.catalog.run.repair import manifests_gone, superseded_alone, superseded_text
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Doubts, Verdict, verdict_of
from recpoint.catalog.store.run_url import naming_errors, naming_run
from recpoint.catalog.store.store import open_store
from recpoint.errors import (
    ChainError,
    FormatError,
    IncompatibleModel,
    NothingToRestore,
    ObjectNotFound,
    RecpointError,
    RetentionRefused,
    SettingsError,
    UnsupportedVersion,
)
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.format.records import CheckpointRef

__all__ = [
    "MemoryTarget",
    "RestoreReport",
    "TableTarget",
    "dense_tensors",
    "extra_states",
    "model_tensors",
    "restore",
    "restore_parts",
    "state_dict",
    "tied_names",
    "transient_buffers",
    "weight_name",
]


# A checkpoint in the memory of one process: whole tables, however many ranks wrote them.


class MemoryTarget:
    """Restores into fresh CPU tensors, without a model.

    Args:
        tables: names of the tables wanted; None: all.
        row_states: whether the row states of these tables are wanted.

    Attributes:
        manifest: the checkpoint that was restored.
        tables: whole ones by name, with their row states in the order of `specs`; None for each
            state that is not wanted.
        specs: of these tables.
        state: the state tree of each rank.
    """

    def __init__(self, tables: Iterable[str] | None = None, *, row_states: bool = True) -> None:
        self._wanted = None if tables is None else frozenset(tables)
        self._row_states = row_states
        self.manifest: Manifest | None = None
        self.tables: dict[str, TableTarget] = {}
        self.specs: dict[str, LogicalTable] = {}
        self.state: dict[int, object] = {}

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | RowSink | None]:
        """See `RestoreTarget.begin`."""
        known = logical_tables(manifest.tables)
        for name in sorted((self._wanted or frozenset()) - known.keys()):
            raise IncompatibleModel(
                f"table {name!r}",
                found=f"no such table in {manifest.ref}",
                expected=f"one of {', '.join(sorted(known))[:500]}",
                next_step="name a table of the checkpoint",
            )
        self.specs = {
            name: table
            for name, table in known.items()
            if self._wanted is None or name in self._wanted
        }
        self.tables = {
            name: _empty(table, row_states=self._row_states) for name, table in self.specs.items()
        }
        return map_parts(manifest, [self._part(name) for name in self.specs])

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `RestoreTarget.finish`."""
        self.manifest, self.state = manifest, state

    def _part(self, name: str) -> TablePart:
        table, states = self.tables[name], self.specs[name].row_states
        return TablePart(
            table=name,
            values=table.values,
            row_states={
                state.name: tensor
                for state, tensor in zip(states, table.row_states, strict=True)
                if tensor is not None
            },
        )


def _empty(table: LogicalTable, *, row_states: bool) -> TableTarget:
    return TableTarget(
        values=torch.empty(table.rows, table.dim, dtype=torch_dtype(table.dtype), device="cpu"),
        row_states=tuple(
            torch.empty(table.rows, *state.shape, dtype=torch_dtype(state.dtype), device="cpu")
            if row_states
            else None
            for state in table.row_states
        ),
    )


# A restored checkpoint as the state of a model, without the code that built it.

#: What torch calls a module's extra state in a `state_dict`.
_EXTRA_STATE_KEY: Final = "_extra_state"


def model_tensors(target: MemoryTarget) -> dict[str, torch.Tensor]:
    """Tables and the rest of the model by parameter name, as in `Module.state_dict`."""
    tensors = dense_tensors(target.state)
    for name, table in target.tables.items():
        tensors[weight_name(name)] = table.values
    return tensors


def weight_name(table: str) -> str:
    """The parameter's full name of a table; of a model that is one itself, both are `weight`."""
    return table if table == "weight" else f"{table}.weight"


def dense_tensors(state: Mapping[int, object]) -> dict[str, torch.Tensor]:
    """Parameters and buffers but for the tables, by name, whole; of the state tree of each rank.

    What several ranks hold a piece of each comes in fresh memory. Of what each has of its own
    (buffers) that of the lowest rank counts, as for a rank that the checkpoint does not have.

    Raises:
        MalformedObject: the pieces of one do not make it up.
    """
    tensors: dict[str, torch.Tensor] = {}
    pieces = dense_shards(state)
    for rank in sorted(state, reverse=True):
        dense = _at(_at(state[rank], "model"), "tensors")
        if isinstance(dense, Mapping):
            tensors.update((n, t) for n, t in dense.items() if isinstance(t, torch.Tensor))
    for name, shards in pieces.items():
        tensors[name] = join_shards(shards, name=name)
    return tensors


def extra_states(state: Mapping[int, object]) -> dict[str, object]:
    """What modules gave with `get_extra_state`, by the module's name; of the lowest rank."""
    found: dict[str, object] = {}
    for rank in sorted(state, reverse=True):
        extra = _at(_at(state[rank], "model"), "extra")
        if isinstance(extra, Mapping):
            found.update((str(name), value) for name, value in extra.items())
    return found


def state_dict(state: Mapping[int, object], tables: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What `Module.state_dict` of the trained model returns, as far as it is given here.

    A tied parameter has each of its names. Buffers that are not persistent are left out.

    Args:
        state: the state tree of each rank.
        tables: the tables' values by parameter name; names that are tied to other tables are left
            out.
    """
    named: dict[str, Any] = {**dense_tensors(state), **tables}
    for name, first in tied_names(state).items():
        if first in named:
            named[name] = named[first]
    for name in transient_buffers(state):
        named.pop(name, None)
    for module, value in extra_states(state).items():
        named[f"{module}.{_EXTRA_STATE_KEY}" if module else _EXTRA_STATE_KEY] = value
    return named


def tied_names(state: Mapping[int, object]) -> dict[str, str]:
    """Each further name of a tied parameter, and the name that the parameter is stored under."""
    found = _of_model(state, "tied")
    if not isinstance(found, Mapping):
        return {}
    return {str(name): str(first) for name, first in found.items()}


def transient_buffers(state: Mapping[int, object]) -> frozenset[str]:
    """Names of the buffers that are stored, and that `Module.state_dict` leaves out."""
    found = _of_model(state, "transient")
    return frozenset(map(str, found)) if isinstance(found, list | tuple) else frozenset()


def _of_model(state: Mapping[int, object], key: str) -> object:
    """What the lowest rank's tree says of the model."""
    return _at(_at(state[min(state)], "model"), key) if state else None


def _at(tree: object, key: str) -> object:
    return tree.get(key) if isinstance(tree, Mapping) else None


# Restoring a checkpoint: the newest whose chain is good (format §6.3).


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """What was restored, and what that took.

    Attributes:
        restored: the checkpoint.
        full: the checkpoint whose full the chain starts with; `restored` itself, if it is one.
        full_stored_bytes: of that full's chunks.
        validation: what validations of `restored` said when the restore began; None: it was never
            validated. Its digests were compared in either case.
        skipped: newer ones that were not restored, and why, newest first.
        passed_over: damaged manifests that a shorter chain would have used.
        chain_length: how many manifests were read.
        quantized: whether any rows of the chain had been quantized.
        chunks_read, bytes_read, seconds: of the chain that was restored.
    """

    restored: CheckpointRef
    full: CheckpointRef
    full_stored_bytes: int
    validation: Verdict | None
    skipped: tuple[Skipped, ...]
    passed_over: tuple[PassedOver, ...]
    chain_length: int
    quantized: bool
    chunks_read: int
    bytes_read: int
    seconds: float


def restore(
    run: Run,
    target: RestoreTarget,
    selection: Selection = NEWEST,
    *,
    before: int | None = None,
    damaged: Mapping[ManifestName, str] | None = None,
    leased: bool = False,
    threads: int = 4,
    on_progress: Callable[[int, int], None] | None = None,
    source: ChunkSource | None = None,
) -> RestoreReport:
    """Restore the newest good checkpoint of the live line, or the one that is named.

    One whose validation has failed, or that needs one whose validation has, counts as damaged: it
    is restored if it is named. One that was never validated is as good as one that was: all bytes
    that are read are compared with their digests anyway, and training that was committed would be
    lost, unless `selection` says how much of it may be. The report says which of the two was
    restored, and what was left for it.

    Rows are decoded once: a row that a newer checkpoint of the chain has brought is passed over in
    the older ones.

    Memory beyond the target's: `threads` + 3 chunks with their row ids, the state of the ranks that
    the target asks for, 8 MiB of rows a few times over, and two bits a row of the table that is
    being read, or of the rows of it that are wanted.

    Args:
        run: the run.
        target: where everything goes. After an error its tables may hold anything.
        selection: which one. What its `validated_within` costs is up to so many batches of each
            start, so it must be less than a life between two failures brings: where each is
            shorter, and nothing newer is validated meanwhile, all go on from the same checkpoint.
        before: leave out this generation and later ones (`Run.claim_from_newest`).
        damaged: without a step: checkpoints to skip, which the caller has found so, and how.
        leased: the caller holds a lease of everything: what a retention is deleting just as it
            comes is waited for, and passed over or refused, so that what is restored stays. Costs
            the read of one small record.
        threads: chunks read at once, not counting those of up to 2 MiB.
        on_progress: called with bytes read so far and bytes to read, from this thread.
        source: where chunks are read from; None: the run's store, from which records come always.

    Raises:
        SettingsError: `threads` cannot be.
        NothingToRestore: no checkpoint, or none that is good; it says what was wrong with each.
        IncompatibleModel: the newest good one does not fit the target. Older ones are not tried.
        UnsupportedVersion: the newest was written by a later release. Older ones are not tried.
        FormatError, ChainError, ObjectNotFound: the named checkpoint is damaged.
        RetentionRefused: with `leased`: the named checkpoint is being deleted.
        StoreError: the store cannot be read. That is no reason to go back in time either.
    """
    if threads < 1:
        raise SettingsError("threads", found=str(threads), expected="1 or more", next_step="set it")
    with naming_errors(run.url):
        going = Going.read(run, leased=leased)  # before a manifest is read
        names = candidates(run, selection, before=before)
        ask = not selection.named and names
        doubts = Doubts(run, validated_only=selection.validated_only) if ask else None
        order = RestoreOrder(names, doubts, selection, damaged=None if selection.named else damaged)
        source = StoreChunks(run.store) if source is None else source
        return _restore_first(
            run, source, target, order, names, doubts, going, threads, on_progress
        )


def _restore_first(
    run: Run,
    source: ChunkSource,
    target: RestoreTarget,
    order: RestoreOrder,
    names: Sequence[ManifestName],
    doubts: Doubts | None,
    going: Going,
    threads: int,
    on_progress: Callable[[int, int], None] | None,
) -> RestoreReport:
    """The first that is good; without `doubts` it is named, and has to be."""
    started = time.monotonic()
    damaged_chunks: dict[str, RecpointError] = {}

    def read(chain: Chain) -> ChainReading:
        going.require_staying(chain)
        reading = ChainReading(source, chain, damaged_chunks, on_progress)
        reading.run(target, threads)
        return reading

    for name in order:
        # Before anything is read: what was restored is not given up for a listing that fails.
        known = verdict_of(run, name) if doubts is None else doubts.known(name)
        try:
            reading, chain = read_with_chain(run, name, read, line=names)
        except (FormatError, ChainError, ObjectNotFound, RetentionRefused) as error:
            if doubts is None or isinstance(error, UnsupportedVersion):
                raise
            order.damaged(name, naming_run(f"{type(error).__name__}: {error}", run.url))
            continue
        return RestoreReport(
            restored=chain.newest.ref,
            full=chain.full.ref,
            full_stored_bytes=chain.full.stored_bytes,
            validation=known,
            skipped=tuple(order.skipped),
            passed_over=tuple(
                PassedOver(key, naming_run(error, run.url)) for key, error in chain.passed_over
            ),
            chain_length=len(chain.manifests),
            quantized=_quantized(chain),
            chunks_read=reading.chunks_read,
            bytes_read=reading.bytes_read,
            seconds=time.monotonic() - started,
        )
    if order.skipped:
        raise order.nothing_good(run, good="with a chain that is good")
    superseded = superseded_alone(run)
    if not superseded and (gone := manifests_gone(run)):
        raise gone
    others = f"; {superseded_text(superseded)}" if superseded else ""
    raise NothingToRestore(
        run.url,
        found=f"no checkpoint on the live line{others}",
        expected="at least one",
        next_step=f"recpoint list {run.url} --all; a superseded one is restored by step and "
        "generation",
    )


def _quantized(chain: Chain) -> bool:
    return any(c.scheme == "asymmetric" for m in chain.manifests for c in m.chunks)


# Rows and columns of tables out of a stored run, into a process that is not its trainer.


def restore_parts(
    url: str,
    parts: Sequence[TablePart],
    *,
    step: int | None = None,
    generation: int | None = None,
    validated_only: bool = False,
    validated_within: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RestoreReport:
    """Read parts of tables, however the run was sharded; only chunks that may hold them are read.

        part = TablePart(table="items", values=torch.empty(1_000_000, 64), first_row=5_000_000)
        restore_parts("s3://b/ranker", [part])

    Memory beyond the parts: as `restore` says, for the rows that are wanted.

    Args:
        url: of the run.
        parts: any number, of any tables.
        step: restore this checkpoint instead of the newest good one.
        generation: with `step`: the checkpoint of this generation, even if it is superseded.
        validated_only: restore only a checkpoint that was validated.
        validated_within: a validated checkpoint goes first if it is at most this many batches
            older than the newest.
        on_progress: as for `restore`.

    Raises:
        SettingsError: see `Selection`.
        IncompatibleModel: a part is none of the checkpoint; nothing has been written.
        RecpointError: as for `restore`.
    """
    selection = Selection(
        step=step,
        generation=generation,
        validated_only=validated_only,
        validated_within=validated_within,
    )
    run = Run.open(open_store(url))
    with reading(run, purpose="restore") as lease:
        return restore(
            run,
            PartsTarget(parts),
            selection,
            leased=lease is not None,
            on_progress=on_progress,
        )
