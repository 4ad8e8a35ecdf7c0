"""Measures what measuring the price of a bit takes from training, with `bits=Loss(increase=1e-4)`.

Two copies of a DLRM train the same purchases in turn, some batches each: one measures, and the
other, with `bits=8`, does not. All times are those of the process's own work, because other
processes share the machine. No checkpoint falls due.

`measuring_share` is the time inside `Checkpointer.measure`, over that of the other work of the same
batches. `with_vs_without` is the time of the copy that measures over that of the other one: it has
what measuring leaves behind, such as cold caches, and the noise of both. Both are of 1,000 batches.

First both copies must have equal weights after some batches: measuring changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from time import process_time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.learning import Learned, Task, retail, train_batch
from benchmarks.report import Report, ratio, spread_of
from benchmarks.workload import scratch, staged_run
from recpoint import Checkpointer, Loss

__all__ = ["KEYS", "run"]

KEYS = ("measuring_share", "with_vs_without")

#: Half of 0.5 %: the clock of `Loss.share` also runs while the other copy trains.
_SHARE = 0.0025
_DIM = 16
_INTERVAL_BATCHES = 1_000
#: Batches that one copy trains before the other one does.
_TURN_BATCHES = 25
_INTERVALS = 3


class _Seconds(NamedTuple):
    """Processor time of the batches of an interval.

    Attributes:
        measuring: inside `Checkpointer.measure`.
        others: all else, of the copy that measures.
        without: of the copy that does not.
    """

    measuring: float
    others: float
    without: float


def run(*, smoke: bool) -> Report:
    """Train both copies for three intervals of 1,000 batches of 1,024 samples, 16 values a row."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    task = retail(dim=_DIM, batches=8, tests=2, rows=1 << 10) if smoke else retail(dim=_DIM)
    interval, turn = (8, 4) if smoke else (_INTERVAL_BATCHES, _TURN_BATCHES)
    report = Report(name="measuring", columns=("interval", "batches measured", "share", "ratio"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with scratch() as memory:
            measuring, without = _copy(task), _copy(task)
            setting = Loss(increase=1e-4, of=_loss_of, share=_SHARE)
            with (
                staged_run(
                    *measuring, url=str(memory / "a"), staging=memory / "b", bits=setting
                ) as priced,
                staged_run(*without, url=str(memory / "c"), staging=memory / "d", bits=8) as plain,
            ):
                batches = itertools.cycle(task.batches(0))
                checkpointers = (priced.checkpointer, plain.checkpointer)
                _train(measuring, without, checkpointers, batches, turn, turn)
                _require_same(measuring, without)
                intervals = []
                for number in range(_INTERVALS):
                    measured_before = _measured(priced.checkpointer)
                    seconds = _train(measuring, without, checkpointers, batches, interval, turn)
                    intervals.append(seconds)
                    report.rows.append(
                        (
                            number + 1,
                            _measured(priced.checkpointer) - measured_before,
                            seconds.measuring / seconds.others,
                            (seconds.measuring + seconds.others) / seconds.without,
                        )
                    )
                _require_same(measuring, without)
    finally:
        torch.set_num_threads(threads)
    with_measuring = [each.measuring + each.others for each in intervals]
    report.timed("with measuring", with_measuring)
    report.timed("without", [each.without for each in intervals])
    report.put("measuring_share", spread_of([each.measuring / each.others for each in intervals]))
    report.put("with_vs_without", ratio(with_measuring, [each.without for each in intervals]))
    return report


def _copy(task: Task) -> Learned:
    torch.manual_seed(0)
    model = task.build()
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    return Learned(
        model,
        [
            torch.optim.Adagrad(model.tables.parameters(), lr=0.1),
            torch.optim.Adagrad(dense, lr=0.02),
        ],
    )


def _loss_of(model: Any, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.label)


def _train(
    measuring: Learned,
    without: Learned,
    checkpointers: tuple[Checkpointer, Checkpointer],
    batches: Iterator[Any],
    count: int,
    turn: int,
) -> _Seconds:
    """Train both copies with so many batches, the same ones, in turns of so many."""
    priced, plain = checkpointers
    measured_seconds = priced_seconds = plain_seconds = 0.0
    for _ in range(count // turn):
        of_turn: Sequence[Any] = list(itertools.islice(batches, turn))
        began = process_time()
        for number, batch in enumerate(of_turn):
            torch.manual_seed(number)  # both copies drop the same values out
            asked = process_time()
            priced.measure(batch)
            measured_seconds += process_time() - asked
            train_batch(*measuring, batch)
            priced.step()
        ended = process_time()
        for number, batch in enumerate(of_turn):
            torch.manual_seed(number)
            train_batch(*without, batch)
            plain.step()
        priced_seconds += ended - began
        plain_seconds += process_time() - ended
    return _Seconds(measured_seconds, priced_seconds - measured_seconds, plain_seconds)


def _measured(checkpointer: Checkpointer) -> int:
    """Return the number of batches measured so far."""
    figures = checkpointer.stats.loss
    assert figures is not None  # bits=Loss
    return figures.batches


def _require_same(measuring: Learned, without: Learned) -> None:
    """Raise RuntimeError unless both copies have equal parameters."""
    expected = without.model.state_dict()
    for name, values in measuring.model.state_dict().items():
        if not torch.equal(values, expected[name]):
            raise RuntimeError(f"{name}: a model that measures has other values than one without")
