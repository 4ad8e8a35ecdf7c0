"""Measures what measuring the price of a bit takes from training, with `bits=Loss(increase=1e-4)`.

A DLRM trains purchases in turns of 25 batches. Every other turn measures. All times are those of
the process's own work, because other processes share the machine. No checkpoint falls due.

`measuring_share` is the time inside `Checkpointer.measure`, over that of the other work of the same
batches. `with_vs_without` is the time of the turns that measure over that of the others: it has
what measuring leaves behind, such as cold caches, and the noise of both. Both are of 1,000 batches.

First the model must have the weights of the same training without measuring: it changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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

#: Half of 0.5 %: the clock of `Loss.share` also runs in the turns that do not measure.
_SHARE = 0.0025
_DIM = 16
_INTERVAL_BATCHES = 1_000
_TURN_BATCHES = 25
_INTERVALS = 3


class _Seconds(NamedTuple):
    """Processor time of the batches of an interval.

    Attributes:
        measuring: inside `Checkpointer.measure`.
        others: all else, of the turns that measure.
        without: of the turns that do not.
    """

    measuring: float
    others: float
    without: float


def run(*, smoke: bool) -> Report:
    """Train three intervals of 1,000 batches with measuring, and as many between without.

    A batch has 1,024 samples, and rows have 16 values.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    task = retail(dim=_DIM, batches=8, tests=2, rows=1 << 10) if smoke else retail(dim=_DIM)
    interval, turn = (8, 4) if smoke else (_INTERVAL_BATCHES, _TURN_BATCHES)
    report = Report(name="measuring", columns=("interval", "batches measured", "share", "ratio"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with scratch() as memory:
            learned, plain = _copy(task), _copy(task)
            setting = Loss(increase=1e-4, of=_loss_of, share=_SHARE)
            batches = itertools.cycle(task.batches(0))
            with staged_run(
                *learned, url=str(memory / "run"), staging=memory / "staging", bits=setting
            ) as tracked:
                checkpointer = tracked.checkpointer
                _train(learned, checkpointer, batches, turn, turn)
                for number, batch in enumerate(itertools.islice(task.batches(0), 2 * turn)):
                    torch.manual_seed(number)
                    train_batch(*plain, batch)
                _require_same(learned, plain)
                intervals = []
                for number in range(_INTERVALS):
                    measured_before = _measured(checkpointer)
                    seconds = _train(learned, checkpointer, batches, interval, turn)
                    intervals.append(seconds)
                    report.rows.append(
                        (
                            number + 1,
                            _measured(checkpointer) - measured_before,
                            seconds.measuring / seconds.others,
                            (seconds.measuring + seconds.others) / seconds.without,
                        )
                    )
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
    learned: Learned, checkpointer: Checkpointer, batches: Iterator[Any], count: int, turn: int
) -> _Seconds:
    """Train so many batches in turns that measure, and as many in turns between that do not."""
    measuring_seconds = measured_seconds = plain_seconds = 0.0
    for _ in range(count // turn):
        of_turns = list(itertools.islice(batches, 2 * turn))
        began = process_time()
        for number, batch in enumerate(of_turns[:turn]):
            torch.manual_seed(number)  # draws what is dropped out
            asked = process_time()
            checkpointer.measure(batch)
            measuring_seconds += process_time() - asked
            train_batch(*learned, batch)
            checkpointer.step()
        ended = process_time()
        for number, batch in enumerate(of_turns[turn:], turn):
            torch.manual_seed(number)
            train_batch(*learned, batch)
            checkpointer.step()
        measured_seconds += ended - began
        plain_seconds += process_time() - ended
    return _Seconds(measuring_seconds, measured_seconds - measuring_seconds, plain_seconds)


def _measured(checkpointer: Checkpointer) -> int:
    """Return the number of batches measured so far."""
    figures = checkpointer.stats.loss
    assert figures is not None  # bits=Loss
    return figures.batches


def _require_same(measured: Learned, plain: Learned) -> None:
    """Raise RuntimeError unless both models have equal parameters."""
    expected = plain.model.state_dict()
    for name, values in measured.model.state_dict().items():
        if not torch.equal(values, expected[name]):
            raise RuntimeError(f"{name}: a model that measures has other values than one without")
