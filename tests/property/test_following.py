"""Whatever happens to a run, a follower serves a checkpoint of it bit for bit, or what it had."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recpoint import Follower
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.errors import RecpointError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from tests.catalog_builder import Table, build, new_run, publish, tables
from tests.consolidation import merge
from tests.example_counts import examples
from tests.fault.retention_lives import retain_once

OPERATIONS = st.lists(
    st.sampled_from(
        ["increment"] * 4
        + ["cumulative"] * 2
        + ["full", "merge", "merge two", "retain", "go back", "pin", "unpin"]
        + ["poll"] * 6
    ),
    min_size=4,
    max_size=22,
)


class World:
    """A trainer, and what each of its checkpoints holds."""

    def __init__(self, run: Run, bits: int | None, edges: list[int]) -> None:
        self.run = run
        first, *others = tables(rows=30, bits=bits)
        self.tables = [*first.cut(edges), *others]
        self.generation = 1
        self.step = 0
        self.line: list[tuple[Manifest, list[Table]]] = []  # since the newest full
        self.since_full: list[set[int]] = [set() for _ in self.tables]
        self.at: dict[ManifestName, list[Tensor]] = {}
        self.random = torch.Generator().manual_seed(0)

    def commit(self, kind: str) -> None:
        self.step += 1
        changed = []
        for table, rows in zip(self.tables, self.since_full, strict=True):
            ids = (torch.rand(table.rows, generator=self.random) < 0.25).nonzero().flatten()
            table.train(ids, self.random)
            rows.update(ids.tolist())
            changed.append(ids)
        parent: Manifest | None = None
        dirty: list[Tensor] | None = None
        if self.line and kind == "increment":
            parent, dirty = self.line[-1][0], changed
        elif self.line and kind == "cumulative":
            parent = self.line[0][0]
            dirty = [torch.tensor(sorted(r), dtype=torch.int64) for r in self.since_full]
        made = publish(
            self.run,
            build(
                self.run,
                self.tables,
                step=self.step,
                generation=self.generation,
                parent=parent,
                dirty=dirty,
                state={"model": {"tensors": {"step": torch.tensor([self.step])}, "extra": {}}},
            ),
        )
        if parent is None:
            self.line = []
            self.since_full = [set() for _ in self.tables]
        self.line.append((made, [table.clone() for table in self.tables]))

    def go_back(self) -> None:
        """A trainer that starts from an older checkpoint of the chain."""
        if len(self.line) < 2:
            return
        shorter = self.line[: len(self.line) // 2]
        manifest, at = shorter[-1]
        if ManifestName(manifest.step, manifest.generation) not in self.run.manifest_names():
            return  # retention has let it go
        self.line = shorter
        self.tables = [table.clone() for table in at]
        self.generation = self.run.claim(manifest.ref).generation
        self.step = manifest.step
        # Which rows differ from the full is known no more: all may.
        self.since_full = [set(range(table.rows)) for table in self.tables]


def require(follower: Follower, world: World) -> None:
    """What is served is what a restore of the same checkpoint gives."""
    if follower.version is None:
        return
    with follower.reading() as version:
        assert int(version.dense["step"]) == version.step
        for name, table in version.tables.items():
            found = version.lookup(name, torch.arange(table.rows))
            key = ManifestName(version.checkpoint.step, version.checkpoint.generation)
            expected = world.at[key][["items", "users"].index(name)]
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), key


def restored(world: World) -> None:
    """Note what each new checkpoint restores to, before anything is deleted."""
    manifest = world.line[-1][0]
    target = MemoryTarget()
    restore(world.run, target, Selection(step=manifest.step, generation=manifest.generation))
    name = ManifestName(manifest.step, manifest.generation)
    world.at[name] = [target.tables[table].values for table in ("items", "users")]


@settings(max_examples=examples(12), deadline=None)
@given(
    operations=OPERATIONS,
    bits=st.sampled_from([None, 4]),
    edges=st.sampled_from([[], [], [1], [1, 2]]),
    quantized=st.booleans(),
    pinned=st.integers(1, 6),
)
def test_serves_what_a_restore_gives(
    operations: list[str], bits: int | None, edges: list[int], quantized: bool, pinned: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="recpoint-follow-") as folder:
        run = new_run(Path(folder) / "run")
        run.claim(None)
        world = World(run, bits, edges)
        follower = Follower(run.url, quantized=quantized)
        for operation in [*operations, "unpin", "increment", "poll"]:
            if operation in ("increment", "cumulative", "full"):
                world.commit(operation)
                restored(world)
            elif operation == "go back":
                world.go_back()
            elif operation == "retain":
                if world.line:
                    retain_once(run, last=2)
            elif operation == "pin":
                follower.pin(pinned)
            elif operation == "unpin":
                follower.unpin()
            elif operation == "poll":
                try:
                    follower.poll()
                except RecpointError:
                    assert follower.status.pinned is not None, "only a pin may lead nowhere"
                require(follower, world)
            elif world.line and world.line[-1][0].parent is not None:
                try:
                    merge(run, world.line[-1][0], 2 if operation == "merge two" else None)
                except RecpointError:
                    pass  # too short a chain, or its links are gone
        require(follower, world)
        assert follower.version == world.step
