"""Bitmaps against Python sets, over random sequences of operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from recpoint.kernels import dirty_bitmap
from tests.example_counts import examples


class TwoBitmaps(RuleBasedStateMachine):
    """This interval's bitmap and the next one's."""

    @initialize(rows=st.sampled_from([0, 1, 31, 32, 33, 100, 1000]))
    def start(self, rows: int) -> None:
        self.rows = rows
        self.bitmaps = [dirty_bitmap.new(rows), dirty_bitmap.new(rows)]
        self.models: list[set[int]] = [set(), set()]

    @rule(which=st.integers(0, 1), data=st.data(), narrow=st.booleans())
    def mark(self, which: int, data: st.DataObject, narrow: bool) -> None:
        limit = self.rows - 1
        ids = data.draw(st.lists(st.integers(0, limit), max_size=20)) if self.rows else []
        dtype = torch.int32 if narrow else torch.int64
        dirty_bitmap.mark(self.bitmaps[which], torch.tensor(ids, dtype=dtype), rows=self.rows)
        self.models[which] |= set(ids)

    @rule(which=st.integers(0, 1), wrong=st.sampled_from([-1, 0, 1, 31, 2**31, 2**62]))
    def mark_outside(self, which: int, wrong: int) -> None:
        row = wrong if wrong < 0 else self.rows + wrong
        ids = torch.tensor([0, row] if self.rows else [row])
        with pytest.raises(IndexError, match=f"ids: {row},"):
            dirty_bitmap.mark(self.bitmaps[which], ids, rows=self.rows)

    @rule(which=st.integers(0, 1))
    def merge(self, which: int) -> None:
        dirty_bitmap.merge(self.bitmaps[which], self.bitmaps[1 - which])
        self.models[which] |= self.models[1 - which]

    @rule(which=st.integers(0, 1))
    def clear(self, which: int) -> None:
        dirty_bitmap.clear(self.bitmaps[which])
        self.models[which] = set()

    @invariant()
    def equal_their_models(self) -> None:
        for bitmap, model in zip(self.bitmaps, self.models, strict=True):
            assert dirty_bitmap.count(bitmap) == len(model)
            assert dirty_bitmap.collect(bitmap, rows=self.rows).tolist() == sorted(model)


TestTwoBitmaps = TwoBitmaps.TestCase
TestTwoBitmaps.settings = settings(max_examples=examples(40), stateful_step_count=20, deadline=None)
