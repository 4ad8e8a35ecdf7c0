"""Which checkpoint comes next in a chain."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recpoint import Consecutive, Continuous, Intermittent, OneShot
from recpoint.errors import (
    CommitConflict,
    DigestMismatch,
    MissingLink,
    StagingError,
    StaleWriter,
    StoreAccessDenied,
)
from recpoint.format.manifest import MAX_CHAIN_LENGTH, TableSpec
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.policy import (
    FULL,
    POLICIES,
    BaseHistory,
    Policy,
    PolicyName,
    Sizes,
    Tip,
    breaks_chain,
    full_pays,
    next_link,
    superseded,
)


def ref(step: int) -> CheckpointRef:
    return CheckpointRef(step=step, generation=1, attempt=f"{step:032x}")


def specs(rows: int) -> tuple[TableSpec, ...]:
    return (TableSpec(name="t", rows=rows, dim=4, dtype="F32", row_states=()),)


#: Bytes of a full; the sizes of increments are exact to nine digits in it.
FULL_BYTES = 10**9


def paper_bytes(intervals: int) -> int:
    """Rows changed in so many intervals: the curve of Check-N-Run, .26·i^.289 of the model."""
    changed: float = 0.26 * intervals**0.289
    return round(changed * FULL_BYTES)


class Training:
    """Checkpoints 1, 2, 3, … under one policy, each committed before the next is cut."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tip: Tip | None = None
        self.history: BaseHistory | None = None
        self.sizes: list[int] = []  # of the increments on the newest full
        self.kinds: list[str] = []
        self.parents: list[int] = []
        self.written: list[Fraction] = []
        self.capacity: list[Fraction] = []

    def checkpoint(self, *, links_to_read: int | None = None) -> None:
        step = len(self.kinds) + 1
        link = next_link(self.tip, self.history, step=step, tables=specs(5), policy=self.policy)
        if link.kind == "full":
            size, self.history, self.sizes = FULL_BYTES, BaseHistory(ref(step)), []
        else:
            assert self.history is not None
            size = paper_bytes(len(self.history) if self.policy.cumulative else 1)
            self.history.cut(ref(step))
            self.sizes.append(size)
        read = link.chain_length if links_to_read is None else links_to_read
        self.history.stored(ref(step), size, links_to_read=read)
        self.tip = link.tip(ref(step), specs(5), before=self.tip, policy=self.policy)
        self.kinds.append(link.kind)
        self.parents.append(0 if link.parent is None else link.parent.step)
        self.written.append(Fraction(size, FULL_BYTES))
        assert self.history.known == Sizes.of(self.sizes) and self.history.waiting == 0
        needed = self.sizes[-1:] if self.policy.cumulative else self.sizes
        self.capacity.append(1 + Fraction(sum(needed), FULL_BYTES))


def test_intermittent_reproduces_the_curves_of_the_paper() -> None:
    training = Training(Intermittent())
    for _ in range(17):
        training.checkpoint()
    # The first full is the start; then seven increments, and the eighth interval takes a full.
    assert [step for step, kind in enumerate(training.kinds) if kind == "full"] == [0, 8, 16]
    assert training.parents[1:8] == [1] * 7
    assert float(sum(training.written[1:9]) / 8) == pytest.approx(0.454, abs=0.0005)
    assert float(max(training.capacity)) == pytest.approx(1.46, abs=0.005)


def test_consecutive_reproduces_the_capacity_of_the_paper() -> None:
    training = Training(Consecutive(full_every=100))
    for _ in range(12):
        training.checkpoint()
    assert training.kinds == ["full"] + ["increment"] * 11
    assert training.parents == list(range(12))
    assert float(training.capacity[-1]) == pytest.approx(3.86, abs=0.005)


def test_one_shot_stands_on_its_first_full() -> None:
    training = Training(OneShot())
    for _ in range(30):
        training.checkpoint()
    assert training.kinds == ["full"] + ["increment"] * 29
    assert training.parents == [0] + [1] * 29
    assert training.tip is not None and training.tip.ref == ref(1)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_full_every_n_checkpoints(name: PolicyName, every: int) -> None:
    training = Training(POLICIES[name](full_every=every))
    for _ in range(7):
        training.checkpoint()
    fulls = [step for step, kind in enumerate(training.kinds) if kind == "full"]
    assert fulls == list(range(0, 7, every))


def test_continuous_goes_on_as_long_as_chains_are_consolidated() -> None:
    training = Training(Continuous(full_every=4))
    training.checkpoint()
    for links in (2, 3, 2, 3, 3, 3):  # consolidated in between, but never down to the full
        training.checkpoint(links_to_read=links)
    assert training.kinds == ["full"] + ["increment"] * 6
    training.checkpoint(links_to_read=4)
    training.checkpoint()
    assert training.kinds[-2:] == ["increment", "full"]


def test_continuous_counts_what_has_no_outcome_yet() -> None:
    policy = Continuous(full_every=4)
    tip = FULL.tip(ref(1), specs(5), before=None, policy=policy)
    history = BaseHistory(ref(1))
    history.stored(ref(1), FULL_BYTES, links_to_read=1)
    for step in (2, 3, 4):
        assert not policy.full_is_due(tip, history)
        history.cut(ref(step))
    assert policy.full_is_due(tip, history)
    history.stored(ref(3), 5, links_to_read=2)  # the answers came late: 4 stands on 3, so 3 in all
    assert history.links_to_read == 3 and not policy.full_is_due(tip, history)
    history.lost(ref(4))
    assert history.links_to_read == 2 and len(history) == 3


@pytest.mark.parametrize(
    ("base", "increments", "due"),
    [
        (None, [5], False),  # the full is on its way
        (100, [], False),
        (100, [99], False),
        (100, [100], True),  # as large as the full
        (100, [60, 79], False),  # 239 <= 237?
        (100, [60, 80], True),  # 240 <= 240
        (100, [10, 10, 10], False),
        (0, [0], True),  # nothing to lose
        (2**62, [2**62 - 1], False),  # exact where floats are not
        (2**62, [2**62], True),
    ],
)
def test_when_a_full_pays(base: int | None, increments: list[int], due: bool) -> None:
    assert full_pays(base, Sizes.of(increments)) is due


@given(
    base=st.integers(0, 1000),
    increments=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    unknown=st.integers(0, 5),
)
def test_the_unknown_ones_may_be_left_out(base: int, increments: list[int], unknown: int) -> None:
    estimated = [*increments, *[increments[-1]] * unknown]
    due = full_pays(base, Sizes.of(increments))
    assert full_pays(base, Sizes.of(estimated)) == due
    mean = Fraction(base + sum(increments), 1 + len(increments))
    assert due == (increments[-1] >= mean)


def test_the_predictor_waits_for_outcomes_and_forgets_what_came_to_nothing() -> None:
    policy = Intermittent()
    tip = FULL.tip(ref(1), specs(5), before=None, policy=policy)
    history = BaseHistory(ref(1))
    for step in (2, 3):
        history.cut(ref(step))
    history.stored(ref(3), 300, links_to_read=2)
    assert not policy.full_is_due(tip, history)  # the full's size is not known
    history.stored(ref(1), 300, links_to_read=1)
    assert policy.full_is_due(tip, history)  # 300 + 300 <= 2 * 300
    history.stored(ref(2), 10, links_to_read=2)
    assert history.known == Sizes.of((10, 300))  # in the order of the cuts
    assert policy.full_is_due(tip, history)
    for step in (4, 5):
        history.cut(ref(step))
    history.stored(ref(5), 200, links_to_read=2)
    assert history.known == Sizes.of((10, 300, 200)) and len(history) == 5
    assert not policy.full_is_due(tip, history)  # 300 + 510 <= 4 * 200?
    history.lost(ref(4))
    assert history.known == Sizes.of((10, 300, 200)) and len(history) == 4
    history.stored(ref(7), 10**6, links_to_read=9)  # of another chain
    assert history.known.number == 3 and history.links_to_read == 2


def test_a_full_without_end_of_increments_takes_no_more_memory() -> None:
    history = BaseHistory(ref(1), stored_bytes=100)
    for step in range(2, 5000):
        history.cut(ref(step))
        if step > 3:  # outcomes come two checkpoints later
            history.stored(ref(step - 2), step, links_to_read=2)
        assert history.waiting <= 3
    assert len(history) == 4999 and history.known.number == 4996
    assert history.links_to_read == 4


@pytest.mark.parametrize("name", POLICIES)
def test_where_no_increment_can_stand(name: PolicyName) -> None:
    policy = POLICIES[name](full_every=MAX_CHAIN_LENGTH)
    tip = FULL.tip(ref(1), specs(5), before=None, policy=policy)
    history = BaseHistory(ref(1), stored_bytes=100)

    def link(after: Tip | None, step: int, rows: int) -> str:
        return next_link(after, history, step=step, tables=specs(rows), policy=policy).kind

    assert link(tip, 2, 5) == "increment"
    assert link(tip, 2, 6) == "full"  # other tables
    assert link(tip, 1, 5) == "full"  # steps ascend
    assert link(None, 2, 5) == "full"
    longest = Tip(ref=ref(5), base=ref(1), chain_length=MAX_CHAIN_LENGTH, tables=specs(5))
    assert link(longest, 9, 5) == "full"


@pytest.mark.parametrize(
    ("kind", "breaks", "ends"),
    [
        (MissingLink, True, False),
        (CommitConflict, True, False),
        (StaleWriter, True, True),
        (DigestMismatch, True, False),
        (StagingError, False, False),
        (StoreAccessDenied, False, False),
    ],
)
def test_what_a_rejection_means(kind: type, breaks: bool, ends: bool) -> None:
    assert breaks_chain(kind.__name__) is breaks
    assert superseded(kind.__name__) is ends


def test_an_unknown_error_class_breaks_nothing() -> None:
    assert not breaks_chain("Annotated") and not breaks_chain("no such class")
