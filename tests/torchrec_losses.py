"""Defines the plays of TorchRec jobs whose rows have widths by a measured loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from recpoint import Checkpointer, Loss, Options, Precision, ResumableLoader, Staging
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.integrations.train_pipelines import as_written
from recpoint.trainer_plugin.loss.measure import RoundedTable, measure
from recpoint.trainer_plugin.loss.meter import LossMeter
from recpoint.trainer_plugin.loss.rounded_rows import rounded_rows
from tests.mixed_table import FITTED
from tests.torchrec_model import BAGS, ROWS, PooledBatch, PooledRanker, Ranker, batch, sharded
from tests.torchrec_plays import everything, optimizers

__all__ = ["measured", "measured_refused"]

INTERVAL, BATCHES = 4, 16
#: A price at which rows of all widths are worth their bits.
PRICE = 2.0**-14


def loss_of(model: nn.Module, number: int) -> Tensor:
    """Return a loss above zero of a batch of this rank."""
    return functional.softplus(model(*batch(number, dist.get_rank())))


def pooled_loss_of(model: nn.Module, pooled: PooledBatch) -> Tensor:
    """Return the same for a model of pooled tables."""
    return functional.softplus(model(pooled)[0].mean())


def _by_loss(of: Any, tables: Mapping[str, Any]) -> Precision:
    loss = Loss(increase=0.02, of=of, share=0.5)
    return Precision(bits=loss, tables=tables, small_table_values=0)


def measured(
    kinds: Mapping[str, str] | None,
    run: str,
    staging: str,
    *,
    optimizer: str = "RowWiseAdagrad",
    pipeline: str = "",
    tables: Mapping[str, Any] | None = None,
) -> Any:
    """Train without and with measured losses, and compare a measurement with rounded tables.

    Args:
        kinds: how each table is sharded; None: not at all.
        optimizer: what trains the tables.
        pipeline: name of the pipeline's class; "": a loop that calls `step`.
        tables: `Precision.tables`.
    """
    ends, results = [], {}
    for name in ("lossless", "loss"):
        torch.manual_seed(1)
        model = _built(kinds, optimizer, pipeline)
        of_torch = optimizers(model, optimizer)
        of = pooled_loss_of if pipeline else loss_of
        numbers = range(BATCHES)
        batches: Any = numbers
        if pipeline:
            batches = [PooledBatch(number, batch(number, dist.get_rank())[0]) for number in numbers]
        reader = ResumableLoader(batches)
        ckpt = Checkpointer(
            model,
            of_torch,
            reader=reader,
            run=f"{run}-{name}",
            staging=Staging(directory=staging, when_busy="wait"),
            bits=_by_loss(of, tables or {}) if name == "loss" else "lossless",
            interval_batches=INTERVAL,
            options=Options(on_error="raise", handle_sigterm=False, announce=False),
        )
        with ckpt:
            meter = ckpt._parts.loss
            if meter is not None:
                seconds = itertools.count()
                meter._pace.clock = partial(_next_second, seconds)
            ckpt.restore()
            if pipeline:
                _drive(ckpt, model, of_torch, pipeline)
            else:
                _step(ckpt, model, of_torch, reader)
            ends.append(everything(model, *of_torch) | {"generator": torch.get_rng_state()})
            if meter is not None:
                results = _compared(meter, model, of, batches[0])
                results["figures"] = ckpt.stats.loss
                meter._search.price = PRICE
                expected = _rounded(meter)
                batches_done = ckpt.batches_done
            else:
                ckpt.close(final=False)
    again = _built(kinds, optimizer, pipeline)
    with Checkpointer(
        again,
        optimizers(again, optimizer),
        reader=ResumableLoader(batches),
        run=f"{run}-loss",
        staging=Staging(directory=staging),
        bits=_by_loss(of, tables or {}),
        interval_batches=INTERVAL,
        options=Options(on_error="raise", handle_sigterm=False, announce=False),
    ) as restored:
        report = restored.restore()
        assert report is not None and restored._parts.loss is not None
        results["is_last"] = report.restored.step == batches_done
        results["errors"] = _errors(restored._parts.loss, expected)
        restored.close(final=False)
    return results | {"plain": ends[0], "measured": ends[1]}


def _built(kinds: Mapping[str, str] | None, optimizer: str, pipeline: str) -> Any:
    if kinds is None:
        return Ranker(device="cpu")
    return sharded(kinds, optimizer=optimizer, model=PooledRanker() if pipeline else None)


def _next_second(seconds: Iterator[int]) -> float:
    return float(next(seconds))


def _step(ckpt: Checkpointer, model: Any, of_torch: Any, reader: ResumableLoader) -> None:
    for number in reader:
        ckpt.measure(number)
        for optimizer in of_torch:
            optimizer.zero_grad()
        model(*batch(number, dist.get_rank())).backward()
        for optimizer in of_torch:
            optimizer.step()
        ckpt.step()


def _pipeline(kind: str, model: Any, of_torch: Any, **settings: Any) -> Any:
    from torchrec.distributed.train_pipeline import train_pipelines
    from torchrec.streamable import Pipelineable

    Pipelineable.register(PooledBatch)
    (optimizer,) = of_torch
    return getattr(train_pipelines, kind)(model, optimizer, torch.device("cpu"), **settings)


def _drive(ckpt: Checkpointer, model: Any, of_torch: Any, pipeline: str) -> None:
    driven = ckpt.pipelined(_pipeline(pipeline, model, of_torch))
    batches = ckpt.batches(epochs=1)
    while True:
        try:
            driven.progress(batches)
        except StopIteration:
            return


def _compared(meter: LossMeter, model: Any, of: Any, first_batch: Any) -> dict[str, Any]:
    """Measure a batch, and compute its loss again with all rows of all tables rounded."""
    lives = [live for live in meter._live() if live.key in meter._rounded and len(live.held)]
    tables = [
        RoundedTable(
            name=live.spec.name,
            weight=live.weight,
            decoded=partial(meter._decoded, live, meter._moment(live), PRICE),
        )
        for live in lives
    ]
    measured_model = meter._model
    inside = measured_model.module
    assert inside is getattr(model, "module", model)
    pair = measure(measured_model, first_batch, of, tables)
    with torch.no_grad(), as_written(inside):
        plain = float(of(inside, first_batch))
        rows = [live.weight.detach().clone() for live in lives]
        for table in tables:
            table.weight.copy_(table.decoded(torch.arange(len(table.weight))))
        rounded = float(of(inside, first_batch))
        for table, exact in zip(tables, rows, strict=True):
            table.weight.copy_(exact)
    return {
        "loss": (pair.loss, plain),
        "change": (pair.even + pair.odd, rounded - plain),
        "looked_up": sorted(meter._looked_up),
    }


def _rounded(meter: LossMeter) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each table's rows, and as a full has them at the price."""
    rounded = {}
    for live in meter._live():
        if live.key in meter._priced & meter._looked_up and len(live.held):
            ids = torch.arange(len(live.held))
            values = rounded_rows(live, ids, meter._moment(live), PRICE, FITTED).values
            rounded[live.key] = (live.weight.detach().clone(), values)
    return rounded


def _errors(meter: LossMeter, expected: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
    """Return of each table: the sum of squared errors, and that of a full at the price."""
    errors = {}
    for live in meter._live():
        if live.key in expected and len(live.held):
            exact, rounded = expected[live.key]
            errors[live.key] = (
                float((live.weight.detach() - exact).square().sum()),
                float((rounded - exact).square().sum()),
            )
    return errors


def measured_refused(run: str, staging: str) -> dict[str, str]:
    """Return the errors of what cannot be measured."""
    kinds = dict.fromkeys((*BAGS, *ROWS), "table_wise")
    refused = {}
    for name, own_kinds, optimizer in (
        ("fused SGD", kinds, "SGD"),
        ("SGD of torch", dict.fromkeys(kinds, "dense"), "SGD"),
    ):
        model = sharded(own_kinds, optimizer=optimizer, sequences=name == "fused SGD")
        try:
            Checkpointer(
                model,
                optimizers(model, optimizer),
                run=run,
                staging=Staging(directory=staging),
                interval_batches=INTERVAL,
                bits=_by_loss(loss_of, {}),
            )
            refused[name] = "not refused"
        except SettingsError as error:
            refused[name] = str(error)
    for name, is_driven, settings in (
        ("batches", False, {}),
        ("postproc", True, {"pipeline_postproc": True}),
    ):
        refused[name] = _refused_pipeline(f"{run}-{name}", staging, is_driven, settings)
    return refused


class Doubled(nn.Module):
    """Doubles the features of a batch, as a module that a pipeline may move before the lookup."""

    def forward(self, bags: Any) -> Any:
        return type(bags).concat([bags])


class PreparedRanker(PooledRanker):
    """The pooled ranker, which changes its features first."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared = Doubled()

    def forward(self, pooled: PooledBatch) -> tuple[Tensor, Tensor]:
        """Return the losses of one batch, twice."""
        losses = self.head(self.bags(self.prepared(pooled.bags)))
        return losses, losses.detach()


def _refused_pipeline(run: str, staging: str, is_driven: bool, settings: Any) -> str:
    kinds = dict.fromkeys((*BAGS, *ROWS), "table_wise")
    model = sharded(kinds, model=PreparedRanker())
    of_torch = optimizers(model, "RowWiseAdagrad")
    batches = [PooledBatch(number, batch(number, 0)[0]) for number in range(BATCHES)]
    ckpt = Checkpointer(
        model,
        of_torch,
        reader=ResumableLoader(batches),
        run=run,
        staging=Staging(directory=staging),
        bits=_by_loss(pooled_loss_of, {}),
        interval_batches=BATCHES,
        options=Options(on_error="raise", handle_sigterm=False, announce=False),
    )
    try:
        ckpt.restore()
        pipeline = _pipeline("TrainPipelineSparseDist", model, of_torch, **settings)
        driven = ckpt.pipelined(pipeline) if is_driven else pipeline
        source = ckpt.batches(epochs=1)
        for _ in range(BATCHES // 2):
            driven.progress(source)
    except SettingsError as error:
        return str(error)
    finally:
        ckpt.close(final=False)
    return "not refused"
