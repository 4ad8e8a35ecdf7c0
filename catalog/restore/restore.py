"""Restores the newest checkpoint whose chain is good, into memory or into any target.

Restores the newest checkpoint whose chain is good (format §6.3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from recpoint.catalog.restore.chain import ChainReading
from recpoint.catalog.restore.chunks import ChunkSource, StoreChunks
from recpoint.catalog.restore.dense import dense_shards, join_shards
from recpoint.catalog.restore.keyed_rows import KEYED_STATES
from recpoint.catalog.restore.order import NEWEST, RestoreOrder, Selection, Skipped, candidates
from recpoint.catalog.restore.placement import PartsTarget, TablePart, map_parts
from recpoint.catalog.restore.rows import LogicalTable, logical_tables
from recpoint.catalog.restore.target import RestoreTarget, RowSink, TableTarget
from recpoint.catalog.run.chain import Chain, PassedOver, read_with_chain
from recpoint.catalog.run.going import Going
from recpoint.catalog.run.leases import reading
from recpoint.catalog.run.line_to_go_on import manifests_gone, superseded_alone, superseded_text
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


class MemoryTarget:
    """Restores into fresh CPU tensors, without a model.

    Args:
        tables: names of the wanted tables; None: all.
        row_states: whether the row states of these tables are wanted. Those that say which key
            has a row always are.

    Attributes:
        manifest: manifest of the checkpoint that was restored; None before.
        tables: the restored tables by name, with row states in the order of `specs`; None for each
            state that is not wanted.
        specs: specs of these tables, by name.
        state: the state tree of each rank.
    """

    def __init__(self, tables: Iterable[str] | None = None, *, row_states: bool = True) -> None:
        self._wanted_tables = None if tables is None else frozenset(tables)
        self._row_states = row_states
        self.manifest: Manifest | None = None
        self.tables: dict[str, TableTarget] = {}
        self.specs: dict[str, LogicalTable] = {}
        self.state: dict[int, object] = {}

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | RowSink | None]:
        """Make empty tensors for the tables, and return where their rows go."""
        tables = logical_tables(manifest.tables)
        for name in sorted((self._wanted_tables or frozenset()) - tables.keys()):
            raise IncompatibleModel(
                f"table {name!r}",
                found=f"no such table in {manifest.ref}",
                expected=f"one of {', '.join(map(repr, sorted(tables)))[:500]}",
                next_step="name a table of the checkpoint",
            )
        self.specs = {
            name: table
            for name, table in tables.items()
            if self._wanted_tables is None or name in self._wanted_tables
        }
        self.tables = {
            name: _empty(table, row_states=self._row_states) for name, table in self.specs.items()
        }
        return map_parts(manifest, [self._part(name) for name in self.specs])

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Keep the manifest and the state of all ranks."""
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
            if row_states or state.name in KEYED_STATES
            else None
            for state in table.row_states
        ),
    )


#: Name of a module's extra state in torch's `state_dict`.
_EXTRA_STATE_KEY: Final = "_extra_state"


def model_tensors(target: MemoryTarget) -> dict[str, torch.Tensor]:
    """Return all tensors of the model by parameter name, as in `Module.state_dict`."""
    tensors = dense_tensors(target.state)
    for name, table in target.tables.items():
        tensors[weight_name(name)] = table.values
    return tensors


def weight_name(table: str) -> str:
    """Return a table's full parameter name; it is `weight` if the model itself is the table."""
    return table if table == "weight" else f"{table}.weight"


def dense_tensors(state: Mapping[int, object]) -> dict[str, torch.Tensor]:
    """Return the whole parameters and buffers by name, except tables, from the ranks' state trees.

    Tensors of which the ranks hold pieces are joined in fresh memory. If ranks have different
    values (buffers), the lowest rank's are returned, as for a rank that the checkpoint lacks.

    Raises:
        MalformedObject: the pieces of a tensor do not make it up.
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
    """Return what modules gave with `get_extra_state`, by module name, from the lowest rank."""
    states: dict[str, object] = {}
    for rank in sorted(state, reverse=True):
        extra = _at(_at(state[rank], "model"), "extra")
        if isinstance(extra, Mapping):
            states.update((str(name), value) for name, value in extra.items())
    return states


def state_dict(state: Mapping[int, object], tables: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what `Module.state_dict` of the trained model returns, from the arguments.

    A tied parameter appears under each of its names. Buffers that are not persistent are left out.

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
    """Return the other names of tied parameters, each with the name that is stored."""
    names = _of_model(state, "tied")
    if not isinstance(names, Mapping):
        return {}
    return {str(name): str(first) for name, first in names.items()}


def transient_buffers(state: Mapping[int, object]) -> frozenset[str]:
    """Return the names of the stored buffers that `Module.state_dict` leaves out."""
    names = _of_model(state, "transient")
    return frozenset(map(str, names)) if isinstance(names, list | tuple) else frozenset()


def _of_model(state: Mapping[int, object], key: str) -> object:
    """Return the entry `key` of the model in the lowest rank's tree."""
    return _at(_at(state[min(state)], "model"), key) if state else None


def _at(tree: object, key: str) -> object:
    return tree.get(key) if isinstance(tree, Mapping) else None


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """The checkpoint that was restored, and the cost of the restore.

    Attributes:
        restored: the checkpoint.
        full: the full checkpoint that the chain starts with; `restored` itself if that is a full.
        full_stored_bytes: bytes of the chunks of that full.
        validation: result of the validations of `restored` when the restore began; None if it was
            never validated. Its digests were compared in either case.
        skipped: newer checkpoints that were not restored, and why, newest first.
        passed_over: damaged manifests that a shorter chain would have used.
        chain_length: number of manifests in the chain.
        quantized: whether any rows of the chain were quantized.
        chunks_read, bytes_read, seconds: cost of reading the chain that was restored.
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
    """Restore the newest good checkpoint of the live line, or the named one.

    A checkpoint counts as damaged if its validation, or that of a checkpoint it needs, has failed;
    it is still restored if it is named. A checkpoint that was never validated is preferred to an
    older validated one, unless `selection` says how many batches may be given up: all bytes are
    compared with their digests in any case, and committed training would be lost. The report says
    which kind was restored, and which checkpoints were skipped.

    Each row is decoded once: a row that a newer checkpoint of the chain has brought is skipped in
    the older ones.

    Memory beyond the target's: `threads` + 3 chunks with their row ids, the state of the ranks that
    the target asks for, a few times 8 MiB of rows, and two bits for each wanted row of the table
    that is being read.

    Args:
        run: the run.
        target: where everything goes. After an error its tables may hold anything.
        selection: selects the checkpoint. Its `validated_within` may cost that many batches at each
            start, so it must be less than the batches trained between two failures. Otherwise, if
            nothing newer is validated meanwhile, every start continues from the same checkpoint.
        before: leave out this generation and later ones (`Run.claim_from_newest`).
        damaged: without a step: checkpoints to skip because the caller found them damaged, and
            their errors.
        leased: the caller holds a lease of everything. The restore then waits for a retention that
            is deleting, and passes over or refuses what it deletes, so that nothing that is
            restored is deleted meanwhile. Costs the read of one small record.
        threads: chunks read at once, not counting chunks of up to 2 MiB.
        on_progress: called with bytes read so far and bytes to read, in this thread.
        source: where chunks are read from; None: the run's store. Records always come from the
            run's store.

    Raises:
        SettingsError: `threads` is less than 1.
        NothingToRestore: there is no checkpoint, or no good one; the error says what was wrong with
            each.
        IncompatibleModel: the newest good checkpoint does not fit the target. Older ones are not
            tried.
        UnsupportedVersion: a later release wrote the newest checkpoint. Older ones are not tried.
        FormatError, ChainError, ObjectNotFound: the named checkpoint is damaged.
        RetentionRefused: with `leased`: the named checkpoint is being deleted.
        StoreError: the store cannot be read. Older checkpoints are not tried.
    """
    if threads < 1:
        raise SettingsError(
            "threads", found=str(threads), expected="1 or more", next_step="correct threads"
        )
    with naming_errors(run.url):
        going = Going.read(run, leased=leased)  # MUST come before a manifest is read
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
    """Restore the first good checkpoint; without `doubts` the named one, which must be good."""
    started = time.monotonic()
    damaged_chunks: dict[str, RecpointError] = {}

    def read(chain: Chain) -> ChainReading:
        going.require_staying(chain)
        reading = ChainReading(source, chain, damaged_chunks, on_progress)
        reading.run(target, threads)
        return reading

    for name in order:
        # Before the chain is read, so that a failing listing does not discard a finished restore.
        verdict = verdict_of(run, name) if doubts is None else doubts.known(name)
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
            validation=verdict,
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
    if not superseded and (damage := manifests_gone(run)):
        raise damage
    others_text = f"; {superseded_text(superseded)}" if superseded else ""
    raise NothingToRestore(
        run.url,
        found=f"no checkpoint on the live line{others_text}",
        expected="at least one",
        next_step=f"recpoint list {run.url} --all; a superseded one is restored by step and "
        "generation"
        if superseded
        else f"recpoint lag {run.url} says what the trainer does; the first checkpoint is there "
        "when the first interval is over and recpoint agent, on the trainer's host, has stored it",
    )


def _quantized(chain: Chain) -> bool:
    return any(c.scheme in ("asymmetric", "residual") for m in chain.manifests for c in m.chunks)


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
    """Read parts of tables from a run of any sharding; reads only chunks that may hold them.

        part = TablePart(table="items", values=torch.empty(1_000_000, 64), first_row=5_000_000)
        restore_parts("s3://b/ranker", [part])

    Memory beyond the parts: as `restore` says, for the wanted rows.

    Args:
        url: URL of the run.
        parts: any number of parts, of any tables.
        step: restore this checkpoint instead of the newest good one.
        generation: with `step`: the checkpoint of this generation, even if it is superseded.
        validated_only: restore only a checkpoint that was validated.
        validated_within: a validated checkpoint goes first if it is at most this many batches
            older than the newest.
        on_progress: as for `restore`.

    Raises:
        SettingsError: see `Selection`.
        IncompatibleModel: a part does not lie in a table of the checkpoint; nothing has been
            written.
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
