"""Builds chains to consolidate, and checks whether two restores gave the same bits."""

from __future__ import annotations

import torch

from recpoint.catalog.check.validate import record, validate
from recpoint.catalog.consolidate.consolidate import Consolidated, consolidate
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, RestoreReport, restore
from recpoint.catalog.run.chain import resolve_chain
from recpoint.catalog.run.run import Run
from recpoint.format.manifest import Manifest
from recpoint.format.naming import CHUNKS_PREFIX, ManifestName, parse_chunk_key
from tests.catalog_builder import Table, build, publish

__all__ = [
    "chain_of",
    "chunks_of",
    "merge",
    "name_of",
    "require_same",
    "restored",
    "spoil",
    "trained",
]


def name_of(manifest: Manifest) -> ManifestName:
    """Return the name of the manifest's checkpoint."""
    return ManifestName(manifest.step, manifest.generation)


def trained(
    run: Run,
    tables: list[Table],
    steps: list[int],
    *,
    parent: Manifest | None = None,
    share: float = 0.3,
    seed: int = 0,
    bits: list[int | None] | None = None,
    ranks: int = 1,
) -> list[Manifest]:
    """Publish a checkpoint at each step, the first a full unless it has a parent.

    Chunks have 16 rows.

    Args:
        run: to which the checkpoints belong; its newest generation is 1.
        tables: trained in place.
        steps: ascending.
        parent: of the first checkpoint.
        share: share of the rows that change between two checkpoints.
        seed: for the choice of the changed rows.
        bits: width of the first table's rows in each checkpoint.
        ranks: number of ranks that write a state.
    """
    generator = torch.Generator().manual_seed(seed)
    manifests = [] if parent is None else [parent]
    for number, step in enumerate(steps):
        dirty = []
        for table in tables:
            ids = (torch.rand(table.rows, generator=generator) < share).nonzero().flatten()
            table.train(ids, generator)
            dirty.append(ids)
        if bits is not None:
            tables[0].bits = bits[number % len(bits)]
        checkpoint = build(
            run,
            tables,
            step=step,
            generation=1,
            parent=manifests[-1] if manifests else None,
            dirty=dirty if manifests else None,
            state={"step": step, "weights": torch.arange(step)},
            ranks=ranks,
        )
        manifests.append(publish(run, checkpoint))
    return manifests if parent is None else manifests[1:]


def spoil(run: Run, manifest: Manifest) -> None:
    """Damage a chunk of rows, and record the full validation that fails because of it."""
    key = next(chunk.key for chunk in manifest.chunks if chunk.content == "rows")
    data = bytearray(run.store.get(key, max_bytes=1 << 26))
    data[len(data) // 2] ^= 1
    run.store.put(key, bytes(data))
    verdict = validate(run, name_of(manifest), level="full")
    assert not verdict.passed
    record(run, verdict)


def merge(run: Run, manifest: Manifest, links: int | None = None) -> Consolidated:
    """Plan and consolidate."""
    return consolidate(run, plan_consolidation(run, name_of(manifest), links=links))


def chain_of(run: Run, manifest: Manifest, *, original: bool = False) -> tuple[Manifest, ...]:
    """Return the manifests that a restore reads."""
    return resolve_chain(run, name_of(manifest), original=original).manifests


def chunks_of(run: Run, attempt: str) -> set[str]:
    """Return the keys of the chunks of an attempt."""
    keys = {info.key for info in run.store.list(CHUNKS_PREFIX)}
    return {
        key
        for key in keys
        if (chunk_name := parse_chunk_key(key)) and chunk_name.attempt == attempt
    }


def restored(run: Run, manifest: Manifest) -> tuple[MemoryTarget, RestoreReport]:
    """Restore a checkpoint; return its contents and the report of the restore."""
    target = MemoryTarget()
    step, generation = name_of(manifest)
    return target, restore(run, target, Selection(step=step, generation=generation), threads=2)


def require_same(restored: MemoryTarget, expected: MemoryTarget) -> None:
    """Require equal bits in every table, in every row state, and in the state."""
    assert restored.tables.keys() == expected.tables.keys()
    for name, table in restored.tables.items():
        tensors, other_table = [table.values, *table.row_states], expected.tables[name]
        for tensor, their in zip(
            tensors, [other_table.values, *other_table.row_states], strict=True
        ):
            assert tensor is not None and their is not None
            assert tensor.dtype == their.dtype
            assert torch.equal(tensor.view(torch.uint8), their.view(torch.uint8))
    assert repr(restored.state) == repr(expected.state)
