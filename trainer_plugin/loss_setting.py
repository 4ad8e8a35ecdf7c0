"""Defines the setting by which a loss decides how many bits rows get, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from recpoint.trainer_plugin.setting_checks import checked_number, keep, refused_setting

__all__ = ["Loss", "LossFigures"]

_MOST_INCREASE = 0.1
_MOST_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Stores rows in as few bits as keep the loss of a restored model within a bound.

        def loss_of_batch(model, batch):
            return torch.nn.functional.binary_cross_entropy_with_logits(model(batch.x), batch.y)

        Checkpointer(..., bits=recpoint.Loss(increase=1e-4, of=loss_of_batch))

    Each row gets the width, 2 to 8 bits or its own bytes, that is worth its bits: the squared
    gradients in its optimizer's state, or the count of its lookups, say how much an error matters,
    and one price of a bit holds for all tables. The price is measured: before some batches are
    trained, their loss is computed three times, with the rows that they look up as they are, and
    with the errors of rounding added and taken off. A price is used once the measured batches have
    shown, at 95 % confidence however often one looks, that it costs no more than `increase`. Until
    then all rows get 8 bits; if even 8 bits cost more, rows are stored exactly.

    Rows of increments are stored as residuals to the full of their chain, and second moments in 8
    bits, unless `Precision(residual=False)` or `Precision(state=...)` says otherwise. The measured
    errors are those of a full; an increment costs no more at the same price. What second moments
    in fewer bits change is not measured, because no forward pass looks at them.

    A measurement changes nothing: neither rows, buffers, gradients and modes of modules, nor the
    global random generators. Forward hooks of the model are called in it, and what they and `of`
    change elsewhere stays changed. An error of `of` ends training at the first batch; a later one
    is logged, and rows get 8 bits from then on.

    It works in loops over `Checkpointer.batches`, also with Accelerate, and with
    `Checkpointer.pipelined`. A loop that calls `step` calls `Checkpointer.measure` before it trains
    a batch. Under `LightningCallback`, `of` gets the LightningModule, without Lightning's
    precision. Tables and layers must be on the CPU, and be looked up by `nn.Embedding` and
    `nn.EmbeddingBag`, or their functions, without `max_norm`, or be tables of TorchRec, sharded or
    not. They may be in a cache of one process. Tables that `of` has not looked up in a measured
    batch get 8 bits. On several ranks, each
    must hold the same tables, as `DistributedDataParallel` trains them, or TorchRec has sharded
    them; `of` is then called with the module inside the wrapper. All ranks measure the same
    batches, each its own samples, and agree on prices when they agree on a checkpoint. Lookups in
    sharded tables exchange rows in each forward pass. So their first batch is not measured, all
    ranks must train equally many batches and call `Checkpointer.measure` for the same ones, and an
    error of `of` always ends training.

    Adagrad, row-wise Adagrad, Adam, AdamW and SparseAdam keep squared gradients. For all other
    optimizers, lookups are counted, in one byte a row. There is no common price of both in one
    model: the tables of one kind must be named in `Precision.tables` ("lossless" or 8).

    Attributes:
        increase: the most by which rounding may raise the loss, as a share of the loss: 1e-4 is
            0.01 %.
        of: `of(model, batch)` returns the loss of a batch, a tensor of one value above zero. It is
            called under `torch.no_grad()` with the model as it is. It must neither train it nor
            switch gradients on.
        share: the most of the time of training that measurements take, above 0 and at most 0.5. The
            first batch is always measured; the next ones follow when its time is made up for.

    Raises:
        SettingsError: a value is not allowed; the message names the field.
    """

    increase: float
    of: Callable[[nn.Module, Any], Tensor]
    share: float = 0.005

    def __post_init__(self) -> None:
        if not callable(self.of):
            raise refused_setting("Loss.of", self.of, "a function of a model and a batch")
        keep(
            self,
            increase=checked_number(
                "Loss.increase", self.increase, highest=_MOST_INCREASE, zero=False
            ),
            share=checked_number("Loss.share", self.share, highest=_MOST_SHARE, zero=False),
        )


@dataclass(frozen=True, kw_only=True)
class LossFigures:
    """Says what rounding costs in loss, as far as batches have shown it; costs are shares of it.

    Attributes:
        increase: the bound, `Loss.increase`.
        price: what one bit may cost, in the unit of the importance of rows; None: all rows get 8
            bits.
        is_lossless: rows are stored exactly, because 8 bits cost too much.
        shown: bounds of the cost as they were shown for what is in use; None: nothing was shown.
        trial_price: the price that is measured now; None: 8 bits for all rows.
        trial_even: bounds of the cost of the trial whatever the signs of the errors are.
        trial_odd: bounds of what the signs of the errors add to it.
        trial_batches: batches measured in the trial.
        predicted: cost of the trial by importances and errors alone, as many times as the newest
            cost that could be told from nothing was its prediction; None: none could.
        widths: bits -> share of the rows that the trial gives so many in a full; 0 bits: rows kept
            exactly. Residuals of an increment get fewer.
        batches: batches measured in all, also before restarts.
        measured_share: share of the time of this process's training that measurements took.
        error: why nothing is measured any more; None: all is well.
    """

    increase: float
    price: float | None
    is_lossless: bool
    shown: tuple[float, float] | None
    trial_price: float | None
    trial_even: tuple[float, float]
    trial_odd: tuple[float, float]
    trial_batches: int
    predicted: float | None
    widths: Mapping[int, float]
    batches: int
    measured_share: float
    error: str | None
