"""Commits checkpoints of a keyed table, and remembers the row that each key had at each."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE, used_rows
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.format.keyed_use import KeyedUse
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from tests.catalog_builder import Table, build, publish

__all__ = ["KEYS", "KeyedTrainer"]

_DIM = 3
#: Each key that a trainer may have, and some that it never has.
KEYS = torch.cat([torch.arange(-10, 10), torch.tensor([-(2**63), 2**63 - 1])])


class KeyedTrainer:
    """Gives slots to random keys and takes them away, and commits the changes.

    Args:
        run: in which generation 1 has begun.
        slots: rows of the table, row 0 included.
        bits: of stored values; None: they are stored as they are.

    Attributes:
        step: of the newest checkpoint.
        newest: its manifest.
        inserted, refused: keys that have got a slot, and that have got none.
        rows_at: checkpoint -> key -> its row, as a restore gives it.
    """

    def __init__(self, run: Run, *, slots: int = 12, bits: int | None = None) -> None:
        self.run = run
        self._random = torch.Generator().manual_seed(9)
        self._bits = bits
        self._table = self._empty(slots)
        self._generation = 1
        self.step = 0
        self.newest: Manifest | None = None
        self._line: list[tuple[Manifest, Table]] = []
        self._since_full: set[int] = set()
        self.inserted = self.refused = 0
        self.rows_at: dict[ManifestName, dict[int, Tensor]] = {}

    def _empty(self, slots: int) -> Table:
        return Table(
            "users",
            torch.zeros(slots, _DIM),
            bits=self._bits,
            states=(torch.zeros(slots, dtype=torch.int64), torch.full((slots,), -1)),
            state_names=(KEY, LAST_USE),
        )

    @property
    def rows(self) -> dict[int, Tensor]:
        """Key -> its row at the newest checkpoint."""
        assert self.newest is not None
        return self.rows_at[ManifestName(self.newest.step, self.newest.generation)]

    def commit(self, kind: str = "increment") -> None:
        """Change half of the slots: some get other keys, some lose theirs, some are trained.

        Args:
            kind: "increment"; "cumulative": an increment on the full; or "full".
        """
        self.step += 1
        slots = self._change()
        self._since_full.update(slots.tolist())
        parent, dirty = None, None
        if self._line and kind != "full":
            parent, dirty = self._line[-1][0], slots
            if kind == "cumulative":
                parent, dirty = self._line[0][0], torch.tensor(sorted(self._since_full))
        checkpoint = build(
            self.run,
            [self._table],
            step=self.step,
            generation=self._generation,
            parent=parent,
            dirty=None if dirty is None else [dirty],
            keyed=[self._use()],
            state={"model": {"tensors": {"step": torch.tensor([self.step])}, "extra": {}}},
        )
        self.newest = publish(self.run, checkpoint)
        if parent is None:
            self._line, self._since_full = [], set()
        self._line.append((self.newest, self._table.clone()))
        self._note_rows(self.newest)

    def _use(self) -> KeyedUse:
        used = len(used_rows(self._table.states[1]))
        lost = self.inserted - used
        return KeyedUse(
            table=0, used=used, inserted=self.inserted, evicted=lost, refused=self.refused
        )

    def _change(self) -> Tensor:
        keys, last_use = self._table.states
        slots = torch.randperm(self._table.rows - 1, generator=self._random)
        slots = slots[: self._table.rows // 2].sort()[0] + 1
        last_use[slots], keys[slots], self._table.values[slots] = -1, 0, 0.0
        used_keys = set(keys[last_use >= 0].tolist())
        for slot in slots.tolist():
            key = int(KEYS[torch.randint(len(KEYS), (1,), generator=self._random)])
            if key in used_keys or key % 4 == 3:
                self.refused += 1
                continue  # the slot stays free
            self.inserted += 1
            used_keys.add(key)
            keys[slot], last_use[slot] = key, self.step
            self._table.values[slot] = torch.randn(_DIM, generator=self._random)
        return slots

    def _note_rows(self, manifest: Manifest) -> None:
        target = MemoryTarget()
        restore(self.run, target, Selection(step=manifest.step, generation=manifest.generation))
        table = target.tables["users"]
        keys, last_use = table.row_states
        assert keys is not None and last_use is not None
        self.rows_at[ManifestName(manifest.step, manifest.generation)] = {
            int(keys[slot]): table.values[slot].clone() for slot in used_rows(last_use).tolist()
        }

    def grow(self, slots: int) -> None:
        """Give the table more slots, and commit a full."""
        larger, table = self._empty(self._table.rows + slots), self._table
        larger.values[: table.rows] = table.values
        for state, entries in zip(larger.states, table.states, strict=True):
            state[: table.rows] = entries
        self._table = larger
        self.commit("full")

    def go_back(self) -> None:
        """Start a trainer from an older checkpoint of the chain."""
        if len(self._line) < 2:
            return
        self._line = self._line[: len(self._line) // 2]
        self.newest, table = self._line[-1]
        self._table = table.clone()
        self._generation = self.run.claim(self.newest.ref).generation
        self.step = self.newest.step
        # Which rows differ from the full is known no more: all may.
        self._since_full = set(range(table.rows))
