"""A sink serves keyed tables by key: keys that move, leave and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE
from recpoint.catalog.run.run import Run
from recpoint.errors import UnknownRow
from recpoint.format.manifest import Manifest
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.publisher import SinkPublisher
from recpoint.serving.sinks.reader import SinkReader
from recpoint.serving.sinks.verification import verify
from tests.catalog_builder import Table, build, new_run, publish

_SLOTS = 12


class _KeyedTrainer:
    """Gives slots to random keys and takes them away, and commits the changes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._random = torch.Generator().manual_seed(9)
        free = torch.full((_SLOTS,), -1)
        self.table = Table(
            "users",
            torch.zeros(_SLOTS, 3),
            states=(torch.zeros(_SLOTS, dtype=torch.int64), free),
            state_names=(KEY, LAST_USE),
        )
        self._made: Manifest | None = None
        self.step = 0

    @property
    def rows(self) -> dict[int, Tensor]:
        """Key -> its row."""
        keys, last_use = self.table.states
        return {
            int(keys[slot]): self.table.values[slot].clone()
            for slot in range(_SLOTS)
            if last_use[slot] >= 0
        }

    def commit(self) -> None:
        """Change half of the slots: some get other keys, some lose theirs, some are trained."""
        self.step += 1
        keys, last_use = self.table.states
        slots = torch.randperm(_SLOTS, generator=self._random)[1 : _SLOTS // 2]
        last_use[slots] = -1
        keys[slots] = 0
        held_keys = set(self.rows)
        for slot in slots.tolist():
            key = int(torch.randint(-8, 8, (1,), generator=self._random))
            if key in held_keys or key % 4 == 0:
                continue  # the slot stays free
            held_keys.add(key)
            keys[slot], last_use[slot] = key, self.step
            self.table.values[slot] = torch.randn(3, generator=self._random)
        checkpoint = build(
            self.run,
            [self.table],
            step=self.step,
            generation=1,
            parent=self._made,
            dirty=None if self._made is None else [slots.sort()[0]],
        )
        self._made = publish(self.run, checkpoint)


def test_keys_come_move_and_go(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    trainer = _KeyedTrainer(run)
    url = f"sqlite:{tmp_path}/served.db"
    publisher = SinkPublisher(run.url, open_sink(url))
    deleted_rows = 0
    for _ in range(25):
        trainer.commit()
        if trainer.step % 5 == 3:
            continue  # two increments come at once
        committed = publisher.poll()
        assert committed is not None
        deleted_rows += committed.changes[0].rows_deleted
        keys = torch.arange(-10, 10)
        with SinkReader(url).reading() as version:
            rows, present = version.lookup_present("users", keys)
            with pytest.raises(UnknownRow):
                version.lookup("users", keys)
        expected = trainer.rows
        assert set(keys[present].tolist()) == set(expected)
        for key, row in zip(keys[present].tolist(), rows[present], strict=True):
            assert torch.equal(row, expected[key])
        with open_sink(url) as sink:
            comparison = verify(run, sink)
        assert comparison.differences == []
    assert deleted_rows > 10
