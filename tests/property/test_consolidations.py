"""Random chains, consolidated at random, go on giving back the bits they were taken with."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recpoint.catalog.check.check import check
from recpoint.catalog.consolidate import moves
from recpoint.catalog.restore import rows
from recpoint.catalog.restore.restore import MemoryTarget
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.run import Run
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY
from recpoint.kernels.bit_packing import BITS
from tests.catalog_builder import Table, new_run, tables
from tests.consolidation import chain_of, merge, require_same, restored, trained
from tests.example_counts import examples

WIDTHS: list[int | None] = [None, *BITS]

trainings = st.tuples(
    st.just("train"), st.sampled_from(WIDTHS), st.sampled_from([0.05, 0.3, 0.9]), st.integers(0, 99)
)
merges = st.tuples(st.just("merge"), st.integers(0, 99), st.none() | st.integers(2, 6), st.just(0))
others = st.tuples(
    st.sampled_from(["let go", "sweep"]), st.integers(0, 99), st.just(None), st.just(0)
)


class History:
    """A run, and what each of its checkpoints gave back when it was taken."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.tables: list[Table] = tables(rows=50, dim=5)
        self.made: list[Manifest] = []
        self.truth: dict[int, MemoryTarget] = {}
        self.train(None, 0.3, 0)

    def train(self, bits: int | None, share: float, seed: int) -> None:
        step = len(self.made) + 1
        self.made += trained(
            self.run,
            self.tables,
            [step],
            parent=self.made[-1] if self.made else None,
            share=share,
            seed=seed,
            bits=[bits],
        )
        target, _ = restored(self.run, self.made[-1])
        # The second table is stored as it is: what comes back is what the trainer has.
        assert torch.equal(target.tables["users"].values, self.tables[1].values)
        self.truth[step] = target

    def alive(self) -> list[Manifest]:
        steps = {name.step for name in self.run.manifest_names()}
        return [manifest for manifest in self.made if manifest.step in steps]

    def merge(self, which: int, links: int | None) -> None:
        manifest = self.alive()[which % len(self.alive())]
        before = chain_of(self.run, manifest)
        done = merge(self.run, manifest, links)
        k = len(before) if links is None else min(links, len(before))
        after = chain_of(self.run, manifest)
        assert done.outcome == ("created" if len(before) > 1 else "not_needed")
        assert len(after) == len(before) - k + 1 and after[-1].links == manifest.links

    def let_go(self, which: int) -> None:
        """Of one checkpoint keep what a reader prefers, and of none before it more than that."""
        alive = self.alive()
        kept = alive[which % len(alive) :]
        needed = {
            (link.step, link.stands_for is None) for m in kept for link in chain_of(self.run, m)
        }
        for manifest in reversed(alive):
            if (manifest.step, True) not in needed:
                self.run.store.delete(MANIFEST_KEY.of(manifest.step, 1))

    def require(self) -> None:
        for manifest in self.alive():
            target, report = restored(self.run, manifest)
            require_same(self.truth[manifest.step], target)
            assert report.passed_over == ()


@pytest.mark.parametrize("small", [False, True], ids=["usual", "small chunks and sections"])
@given(
    operations=st.lists(st.one_of(trainings, merges, others), min_size=3, max_size=14),
)
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_checkpoint_gives_back_what_was_taken(
    small: bool, operations: list[tuple[str, int | None, float | int | None, int]]
) -> None:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="recpoint-merges-", dir=memory))
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(moves, "CHUNK_BYTES", 300)
            patch.setattr(moves, "BUFFERED_BYTES", 12 * mmap.PAGESIZE)
            patch.setattr(rows, "SECTION_ROWS", 16)
        try:
            run = new_run(directory)
            run.claim(None)
            history = History(run)
            for what, first, second, seed in operations:
                if what == "train":
                    history.train(first, float(second or 0), seed)
                elif what == "merge":
                    history.merge(first or 0, None if second is None else int(second))
                elif what == "let go":
                    history.let_go(first or 0)
                else:
                    execute(run, plan_sweep(run, grace_seconds=0))
                history.require()
            report = check(run, level="full", threads=2)
            assert report.ok and all(
                health.restorable for health in report.checkpoints if health.live
            )
        finally:
            shutil.rmtree(directory)
