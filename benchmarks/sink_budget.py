"""Measures what a budget of published bytes costs: the log loss of later requests.

A DLRM is trained on the bundled purchases, in the order of time. Every twenty batches there is a
checkpoint: a full, then increments. Sinks get each checkpoint under budgets that are shares of the
bytes that a sink without a budget gets of it. Requests are the samples of the next twenty batches,
which are trained afterwards. Their rows and dense layers are read from the sink.

`gap_share`: how much higher the log loss is than that of the sink without a budget, over the same
for a sink that stays at the full; the mean of all checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.learning import Task, retail, train_batch
from recpoint.serving.sinks.backlog import without_backlog
from recpoint.serving.sinks.contract import Sink
from recpoint.serving.sinks.most_changed import ID_BYTES
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.publisher import Budget, SinkPublisher
from recpoint.serving.sinks.reader import SinkReader
from recpoint.serving.sinks.records import CommittedVersion
from recpoint.serving.sinks.verification import verify
from tests.catalog_builder import Table, build, new_run, publish

__all__ = ["SHARES", "BudgetPoint", "budget_curve"]

#: A budget is one over each of these of an increment's bytes.
SHARES: Final = (4, 13, 52)
_CHUNK_ROWS: Final = 16_384


class BudgetPoint(NamedTuple):
    """What one budget came to.

    Attributes:
        label: the budget.
        loss: mean log loss of requests.
        gap_share: of the gap between a sink that stays and one that gets everything.
        bytes_share: bytes of rows, ids and records of deferred rows, over those of a sink that gets
            everything.
        rows_deferred: at the last checkpoint.
    """

    label: str
    loss: float
    gap_share: float
    bytes_share: float
    rows_deferred: int


class _Training:
    """Trains the model and commits what changed."""

    def __init__(self, folder: Path, task: Task, seed: int) -> None:
        self.run = new_run(folder / "run")
        self.run.claim(None)
        torch.manual_seed(seed)
        self.model: Any = task.build()
        self.weights: dict[str, Tensor] = {
            name: table.weight for name, table in self.model.tables.items()
        }
        dense = [p for name, p in self.model.named_parameters() if not name.startswith("tables.")]
        self._of_tables = torch.optim.Adagrad(self.weights.values(), lr=0.1)
        self._optimizers = [self._of_tables, torch.optim.Adagrad(dense, lr=0.02)]
        self._step = 0
        self._parent: Any = None

    def train(self, batches: Sequence[Any]) -> list[Tensor]:
        """Train on batches; return the rows of each table that were looked up, ascending."""
        for batch in batches:
            train_batch(self.model, self._optimizers, batch)
        return looked_up(batches)

    def commit(self, rows: Sequence[Tensor] | None) -> None:
        """Commit an increment with some rows of each table, or a full."""
        self._step += 1
        tables = [
            Table(
                name,
                weight.detach(),
                states=(self._of_tables.state[weight]["sum"].detach(),),
                state_names=("sum",),
            )
            for name, weight in self.weights.items()
        ]
        checkpoint = build(
            self.run,
            tables,
            step=self._step,
            generation=1,
            parent=None if rows is None else self._parent,
            dirty=rows,
            state={"model": {"tensors": self.dense(), "extra": {}}},
            rows_per_chunk=_CHUNK_ROWS,
        )
        self._parent = publish(self.run, checkpoint)

    def dense(self) -> dict[str, Tensor]:
        """Return the parameters and buffers except the tables, copied."""
        return {
            name: tensor.detach().clone()
            for name, tensor in self.model.state_dict().items()
            if not name.startswith("tables.")
        }


def looked_up(batches: Sequence[Any]) -> list[Tensor]:
    """Return the rows of each table that batches look up, ascending."""
    ids = torch.cat([batch.sparse for batch in batches])
    return [column.unique() for column in ids.unbind(dim=1)]


class _Served:
    """One sink under a budget, and what was published into it."""

    def __init__(self, label: str, share: int | None, url: str, run_url: str) -> None:
        self.label, self._share, self._run_url = label, share, run_url
        self.sink: Sink = open_sink(url)
        self._reader = SinkReader(url)
        self.losses: list[float] = []
        self.published_bytes = 0
        self.rows_deferred = 0

    def publish(self, whole_bytes: int) -> int:
        """Bring the newest checkpoint; return the bytes of its rows, ids and records.

        Args:
            whole_bytes: that a sink without a budget has got of it.
        """
        budget = None if self._share is None else Budget(max(1, whole_bytes // self._share))
        committed = SinkPublisher(self._run_url, self.sink, budget=budget).poll()
        assert committed is not None
        size_bytes = _row_bytes(committed)
        if committed.parent is None:
            return size_bytes
        with self.sink.reading() as reading:
            tensors = reading.dense()
        layers = without_backlog(tensors)
        size_bytes += sum(t.nbytes for name, t in tensors.items() if name not in layers)
        self.published_bytes += size_bytes
        self.rows_deferred = 0 if committed.deferred is None else committed.deferred.rows
        return size_bytes

    def load(self, model: Any, rows: Mapping[str, Tensor]) -> None:
        """Read rows and the dense layers of the sink into a model."""
        with self._reader.reading() as version, torch.no_grad():
            model.load_state_dict(version.dense(), strict=False)
            for name, ids in rows.items():
                model.tables[name].weight[ids] = version.lookup(name, ids)


def _row_bytes(committed: CommittedVersion) -> int:
    return sum(
        change.rows_put * (table.row_bytes + ID_BYTES)
        for change, table in zip(committed.changes, committed.version.tables, strict=True)
    )


def _loss(model: Any, batches: Sequence[Any]) -> float:
    """Return the mean log loss of samples, without dropout."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(batch.dense, batch.sparse) for batch in batches])
    model.train(was_training)
    labels = torch.cat([batch.label for batch in batches])
    return float(F.binary_cross_entropy_with_logits(logits, labels))


def budget_curve(folder: Path, *, smoke: bool, seed: int = 0) -> list[BudgetPoint]:
    """Return what each budget came to: first none published, last everything.

    Raises:
        AssertionError: a sink is not what it says, or the sink without a budget does not give the
            log loss of the trained model.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()
    task = retail(dim=16, batches=8, tests=2, rows=1 << 10) if smoke else retail(dim=16, tests=2)
    batches = task.batches(seed)
    first, each = (2, 2) if smoke else (150, 20)
    training = _Training(folder, task, seed)
    url = training.run.url
    served = [_Served("everything", None, f"sqlite:{folder}/whole", url)]
    served += [_Served(f"1/{share}", share, f"sqlite:{folder}/{share}", url) for share in SHARES]
    training.train(batches[:first])
    training.commit(None)
    for sink in served:
        sink.publish(0)
    stale = task.build()
    stale.load_state_dict(training.model.state_dict())
    stale_losses: list[float] = []
    models = {sink.label: task.build() for sink in served}
    for start in range(first, len(batches) - 2 * each + 1, each):
        training.commit(training.train(batches[start : start + each]))
        requests = batches[start + each : start + 2 * each]
        rows = dict(zip(training.weights, looked_up(requests), strict=True))
        whole_bytes = served[0].publish(0)
        stale_losses.append(_loss(stale, requests))
        for sink in served:
            if sink is not served[0]:
                sink.publish(whole_bytes)
            sink.load(models[sink.label], rows)
            sink.losses.append(_loss(models[sink.label], requests))
        if served[0].losses[-1] != _loss(training.model, requests):
            raise AssertionError("the sink does not serve the trained model")
    for sink in served:
        comparison = verify(training.run, sink.sink)
        if comparison.differences:
            raise AssertionError(f"{sink.label}: {comparison.differences}")
        sink.sink.close()
    whole, *budgeted = served
    fresh, stays = mean(whole.losses), mean(stale_losses)
    points = [BudgetPoint("nothing", stays, 1.0, 0.0, 0)]
    points += [
        BudgetPoint(
            sink.label,
            mean(sink.losses),
            (mean(sink.losses) - fresh) / (stays - fresh) if stays != fresh else math.nan,
            sink.published_bytes / whole.published_bytes,
            sink.rows_deferred,
        )
        for sink in reversed(budgeted)
    ]
    return [*points, BudgetPoint("everything", fresh, 0.0, 1.0, 0)]
