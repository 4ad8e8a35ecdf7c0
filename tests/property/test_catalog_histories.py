"""Random histories of trainers on one run against a small model of what counts."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recpoint.catalog.check.check import check
from recpoint.catalog.restore.restore import MemoryTarget, RestoreReport, restore
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.commit import commit
from recpoint.catalog.run.line_to_go_on import line_to_go_on
from recpoint.catalog.run.relink import relink
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.local import LocalStore
from recpoint.errors import GenerationRecordLost, NothingToRestore, StaleWriter
from recpoint.format.manifest import Manifest
from recpoint.format.naming import GENERATION_KEY, ManifestName, generation_in_key
from tests.catalog_builder import Checkpoint, Table, build, new_run, tables, upload
from tests.example_counts import examples

ROWS = 8
seeds = st.integers(0, 2**16)


@dataclass(eq=False)
class Trainer:
    """One life of a trainer: what it has in memory."""

    generation: int
    step: int
    tables: list[Table]
    chain: list[Manifest] = field(default_factory=list)  # of its last checkpoint
    restored: ManifestName | None = None  # that it went on from


@dataclass(eq=False)
class Committed:
    """What a checkpoint must give back."""

    tables: list[Table]
    manifest: Manifest
    chain: list[Manifest]

    @property
    def name(self) -> ManifestName:
        return ManifestName(self.manifest.step, self.manifest.generation)


class Histories(RuleBasedStateMachine):
    """The model keeps the line: a claim cuts it, a commit of the newest trainer adds to it."""

    def __init__(self) -> None:
        super().__init__()
        # In memory where that is possible: these tests are about order, not about disks.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.directory = Path(tempfile.mkdtemp(prefix="recpoint-histories-", dir=memory))
        self.run = new_run(self.directory)
        self.trainers: list[Trainer] = []
        self.line: list[Committed] = []  # oldest first
        self.superseded: set[ManifestName] = set()
        self.damaged: dict[ManifestName, tuple[str, int]] = {}  # how, and of which table
        self.stored: dict[ManifestName, list[set[int]]] = {}  # rows of each table

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    # --- the model -------------------------------------------------------------------------------

    def expected(self) -> list[Committed]:
        """What can be restored, newest first."""
        return [
            committed
            for committed in reversed(self.line)
            if all(self.left_out(link, committed) for link in self.damaged_links(committed))
        ]

    def damaged_links(self, committed: Committed) -> set[ManifestName]:
        chain = {ManifestName(link.step, link.generation) for link in committed.chain}
        return chain & self.damaged.keys()

    def left_out(self, link: ManifestName, committed: Committed) -> bool:
        """Whether what is wrong there is not read, since newer links bring every row of the table.

        That all objects of a chain are there is looked at first, whoever needs them (format §6.3).
        """
        chain = [ManifestName(link.step, link.generation) for link in committed.chain]
        how, table = self.damaged[link]
        newer = [self.stored[name][table] for name in chain[chain.index(link) + 1 :]]
        rows = committed.tables[table].rows
        return how == "flipped" and len(set().union(*newer)) == rows

    def cut(self, restored: Committed | None) -> None:
        keep = self.line.index(restored) + 1 if restored else 0
        self.superseded |= {committed.name for committed in self.line[keep:]}
        del self.line[keep:]

    # --- what trainers do ------------------------------------------------------------------------

    def start(self, restored: Committed | None, *, goes_on: bool) -> None:
        ref = restored.manifest.ref if restored else None
        record = self.run.claim(ref)
        assert record.generation == len(self.trainers) + 1
        self.cut(restored)
        self.trainers.append(
            Trainer(
                generation=record.generation,
                step=restored.manifest.step if restored else 0,
                tables=[table.clone() for table in restored.tables]
                if restored
                else tables(rows=ROWS, seed=record.generation),
                # A trainer may go on with increments, or begin with a full.
                chain=list(restored.chain) if restored and goes_on else [],
                restored=restored.name if restored else None,
            )
        )

    @initialize()
    def first_start(self) -> None:
        self.start(None, goes_on=False)

    @rule(goes_on=st.booleans())
    def start_from_the_newest(self, goes_on: bool) -> None:
        expected = self.expected()
        self.start(expected[0] if expected else None, goes_on=goes_on)

    @precondition(lambda self: self.expected())
    @rule(data=st.data(), goes_on=st.booleans())
    def roll_back(self, data: st.DataObject, goes_on: bool) -> None:
        choice = data.draw(st.integers(0, len(self.expected()) - 1))
        self.start(self.expected()[choice], goes_on=goes_on)

    @rule()
    def start_afresh(self) -> None:
        self.start(None, goes_on=False)

    def train(self, trainer: Trainer, seed: int, full: bool) -> Checkpoint:
        """Some batches, and a checkpoint of them on its way to the store."""
        generator = torch.Generator().manual_seed(seed)
        dirty = []
        for table in trainer.tables:
            # Now and then all of them: then a restore needs nothing that is older.
            share = 1.0 if seed % 7 == 0 else 0.4
            ids = (torch.rand(table.rows, generator=generator) < share).nonzero().flatten()
            table.train(ids, generator)
            dirty.append(ids)
        trainer.step += 1 + seed % 3
        parent = trainer.chain[-1] if trainer.chain and not full else None
        checkpoint = build(
            self.run,
            trainer.tables,
            step=trainer.step,
            generation=trainer.generation,
            parent=parent,
            dirty=dirty if parent else None,
            state={"step": trainer.step, "generation": trainer.generation},
            rows_per_chunk=5,
        )
        upload(self.run.store, checkpoint)
        self.stored[ManifestName(trainer.step, trainer.generation)] = [
            set(ids.tolist()) if parent else set(range(table.rows))
            for table, ids in zip(trainer.tables, dirty, strict=True)
        ]
        trainer.chain = [*(trainer.chain if parent else []), checkpoint.manifest]
        return checkpoint

    @rule(chain=st.lists(st.tuples(seeds, st.booleans()), min_size=1, max_size=3))
    def checkpoints(self, chain: list[tuple[int, bool]]) -> None:
        trainer = self.trainers[-1]
        for seed, full in chain:
            made = self.train(trainer, seed, full)
            assert commit(self.run, made.manifest) == "created"
            if seed % 2:
                assert commit(self.run, made.manifest) == "already"
            self.line.append(
                Committed([table.clone() for table in trainer.tables], made.manifest, trainer.chain)
            )

    @precondition(lambda self: len(self.trainers) > 1)
    @rule(data=st.data(), seed=seeds, full=st.booleans(), in_flight=st.booleans())
    def checkpoint_of_a_replaced_trainer(
        self, data: st.DataObject, seed: int, full: bool, in_flight: bool
    ) -> None:
        """It is stopped at the fence, or had passed it before it was replaced."""
        trainer = self.trainers[data.draw(st.integers(0, len(self.trainers) - 2))]
        before = trainer.chain
        made = self.train(trainer, seed, full)
        if in_flight:
            assert commit(self.run, made.manifest, expect_generation_newest=False) == "created"
            self.superseded.add(ManifestName(made.manifest.step, made.manifest.generation))
            return
        with pytest.raises(StaleWriter):
            commit(self.run, made.manifest)
        trainer.chain = before

    # --- what goes wrong, and what is cleaned up -------------------------------------------------

    @precondition(lambda self: self.expected())
    @rule(data=st.data(), how=st.sampled_from(["missing", "flipped"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        victim = self.expected()[data.draw(st.integers(0, len(self.expected()) - 1))]
        rows = [
            (entry.key, entry.table) for entry in victim.manifest.chunks if entry.table is not None
        ]
        if not rows:
            return
        key, table = rows[data.draw(st.integers(0, len(rows) - 1))]
        if how == "missing":
            self.run.store.delete(key)
        else:
            stored = bytearray(self.run.store.get(key, max_bytes=1 << 20))
            stored[data.draw(st.integers(0, len(stored) - 1))] ^= 16
            self.run.store.put(key, bytes(stored))
        self.damaged[victim.name] = how, table

    @rule(data=st.data(), then=st.sampled_from(["put back", "relink", "start afresh"]))
    def lose_a_generation_record(self, data: st.DataObject, then: str) -> None:
        """What counts is not known, or does not depend on it; and nobody takes it for well."""
        trainer = self.trainers[data.draw(st.integers(0, len(self.trainers) - 1))]
        key = GENERATION_KEY.of(trainer.generation)
        if trainer.generation not in self.run.generation_numbers():
            return  # lost before
        stored = self.run.store.get(key, max_bytes=1 << 20)
        self.run.store.delete(key)
        fresh = Run.open(LocalStore(self.directory))
        live = [committed.name for committed in reversed(self.line)]
        names = fresh.manifest_names()
        traces = {generation_in_key(info.key) for info in fresh.store.list()}
        if trainer.generation < len(self.trainers) and trainer.generation not in self.way():
            assert fresh.live_line() == live
        elif any(name.generation == trainer.generation for name in names) or (
            trainer.generation < len(self.trainers)
        ):
            with pytest.raises(GenerationRecordLost, match=key):
                fresh.live_line()
            with pytest.raises(GenerationRecordLost, match=key):
                restore(fresh, MemoryTarget())
            assert not check(fresh).ok
        if trainer.generation in traces:
            assert key in {found.key for found in check(fresh).findings}
        if then == "start afresh" and trainer.generation in {*traces, *fresh.generation_numbers()}:
            self.run = fresh  # it stays lost; the number is not taken again
            self.start(None, goes_on=False)
        elif then == "relink" and trainer.generation in traces:
            relink(fresh, trainer.generation, trainer.restored)
            self.run = fresh
        else:
            self.run.store.create(key, stored)

    def way(self) -> set[int]:
        """The generations that the live line goes through."""
        found: set[int] = set()
        trainer: Trainer | None = self.trainers[-1]
        while trainer is not None:
            found.add(trainer.generation)
            before = trainer.restored
            trainer = self.trainers[before.generation - 1] if before else None
        return found

    @rule()
    def sweep(self) -> None:
        plan = plan_sweep(self.run, grace_seconds=0)
        execute(self.run, plan)
        left = plan_sweep(self.run, grace_seconds=0)
        assert not left.objects and not left.unfinished and not left.unrecognised

    # --- what has to be so, always ---------------------------------------------------------------

    @invariant()
    def the_line_is_as_expected(self) -> None:
        fresh = Run.open(LocalStore(self.directory))
        assert fresh.live_line() == [committed.name for committed in reversed(self.line)]
        assert set(fresh.superseded()) == self.superseded
        if self.line or not self.superseded:
            assert line_to_go_on(fresh) == fresh.live_line()
        else:  # else all of it would be left behind unasked
            with pytest.raises(NothingToRestore, match=f"{len(self.superseded)} superseded"):
                line_to_go_on(fresh)

    @invariant()
    def the_newest_good_checkpoint_comes_back_bit_for_bit(self) -> None:
        expected = self.expected()
        target = MemoryTarget()
        if not expected:
            with pytest.raises(NothingToRestore):
                restore(self.run, target)
            return
        report: RestoreReport = restore(self.run, target, threads=2)
        newest = expected[0]
        assert report.restored == newest.manifest.ref
        assert report.chain_length == len(newest.chain)
        passed_over = [committed.name for committed in reversed(self.line)]
        assert [skipped.name for skipped in report.skipped] == passed_over[
            : passed_over.index(newest.name)
        ]
        for table in newest.tables:
            found = target.tables[table.name]
            assert torch.equal(found.values, table.values)
            for restored, state in zip(found.row_states, table.states, strict=True):
                assert restored is not None and torch.equal(restored, state)
        step, generation = newest.name
        assert target.state == {0: {"step": step, "generation": generation}}

    @rule()
    def check_agrees(self) -> None:
        report = check(self.run, level="full", threads=2)
        # It looks at all that a checkpoint names, also at what a restore would leave out.
        good = {one.name for one in self.line if not self.damaged_links(one)}
        live = {health.name: health.restorable for health in report.checkpoints if health.live}
        assert live == {committed.name: committed.name in good for committed in self.line}
        nothing_counts = not self.line
        assert report.ok == (len(good) == len(self.line))
        assert report.nothing_counts == nothing_counts


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=examples(20),
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
