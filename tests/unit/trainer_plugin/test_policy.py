"""Which checkpoint comes next in a chain."""

from __future__ import annotations

import pytest

from recpoint.errors import (
    CommitConflict,
    DigestMismatch,
    MissingLink,
    StagingError,
    StaleWriter,
    StoreAccessDenied,
)
from recpoint.format.manifest import TableSpec
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.policy import FULL, breaks_chain, next_link, superseded


def ref(step: int) -> CheckpointRef:
    return CheckpointRef(step=step, generation=1, attempt=f"{step:032x}")


def specs(rows: int) -> tuple[TableSpec, ...]:
    return (TableSpec(name="t", rows=rows, dim=4, dtype="F32", row_states=()),)


def test_full_then_consecutive_increments_then_full() -> None:
    tip, kinds, parents = None, [], []
    for step in range(1, 9):
        link = next_link(tip, step=step, tables=specs(5), full_every=3)
        kinds.append(link.kind)
        parents.append(None if link.parent is None else link.parent.step)
        assert link.base is None or link.base.step in (1, 4, 7)
        tip = link.tip(ref(step), specs(5))
    assert kinds == ["full", "increment", "increment"] * 2 + ["full", "increment"]
    assert parents == [None, 1, 2, None, 4, 5, None, 7]


def test_other_tables_need_a_full() -> None:
    tip = FULL.tip(ref(1), specs(5))
    assert next_link(tip, step=2, tables=specs(5), full_every=9).kind == "increment"
    assert next_link(tip, step=2, tables=specs(6), full_every=9) == FULL
    assert next_link(tip, step=1, tables=specs(5), full_every=9) == FULL
    assert next_link(tip, step=2, tables=specs(5), full_every=1) == FULL


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
