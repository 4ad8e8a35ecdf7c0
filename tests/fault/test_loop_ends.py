"""A loop over `batches` ends where it was told to, however often its process is killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.combinations import combinations
from tests.fault.loop_lives import BATCHES_AN_EPOCH, ReaderKind, loop_life
from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS

EPOCHS = 3
END = EPOCHS * BATCHES_AN_EPOCH

#: A kind of reader, the batches between two checkpoints, and what bounds the training.
LOOPS: list[tuple[ReaderKind, int, str]] = [
    ("resumable", 2, "epochs"),
    ("resumable", BATCHES_AN_EPOCH, "epochs"),
    ("resumable", BATCHES_AN_EPOCH, "total"),
    ("sampler", BATCHES_AN_EPOCH, "epochs"),
    ("stateful", 2, "total"),
    ("stateful", BATCHES_AN_EPOCH, "epochs"),
    ("stateful sampler", 2, "epochs"),
    ("own", BATCHES_AN_EPOCH, "epochs"),
]
#: How far the reader is ahead in each life; None: not at all.
WINDOWS = [(200, 3, 1, 200), None]


def live(place: Path, *, kind: ReaderKind, **arguments: Any) -> list[list[Any]]:
    """One life; what it told, and at the end of a whole one the weights."""
    told = place / "told"
    told.unlink(missing_ok=True)
    process = ForkedProcess(
        target=loop_life,
        kwargs={"place": str(place), "told": str(told), "kind": kind, **arguments},
        daemon=True,
    )
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == (0 if arguments.get("kill_in") is None else -signal.SIGKILL)
    return [json.loads(line) for line in told.read_text().splitlines()]


# Of torchdata itself, which tells torch that it is there.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("loop", "windows"), combinations(LOOPS, WINDOWS))
def test_a_training_that_is_killed_in_each_epoch_trains_what_is_left(
    loop: tuple[ReaderKind, int, str], windows: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """Also with a reader that is ahead of training, another number of batches in each life."""
    kind, interval, bound = loop
    window, *other_windows = windows or [None] * 4
    one: dict[str, Any] = {"kind": kind, "interval_batches": interval, "window": window}
    one[bound] = {"epochs": EPOCHS, "total": END}[bound]
    (tmp_path / "whole").mkdir()
    *whole, weights = live(tmp_path / "whole", **one)
    assert [number for number, _, _ in whole] == list(range(1, END + 1))
    assert [epoch for _, epoch, _ in whole] == [n // BATCHES_AN_EPOCH for n in range(END)]
    for epoch in range(EPOCHS):
        of_it = whole[epoch * BATCHES_AN_EPOCH : (epoch + 1) * BATCHES_AN_EPOCH]
        assert sorted(sum((goods for _, _, goods in of_it), [])) == list(range(20))

    (tmp_path / "parts").mkdir()
    restored = 0
    for kill_in, window in zip((4, 8, 13), other_windows, strict=True):  # one in each epoch
        found = live(tmp_path / "parts", **{**one, "kill_in": kill_in, "window": window})
        assert found == whole[restored:kill_in]
        restored = (kill_in - 1) // interval * interval
    *rest, ended = live(tmp_path / "parts", **one)
    assert rest == whole[restored:] and ended == weights
    # Whoever starts it a third time has trained once.
    for _ in range(2):
        assert live(tmp_path / "parts", **one) == [weights]
