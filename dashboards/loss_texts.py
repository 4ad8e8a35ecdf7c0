"""Says in words what rounding costs in loss, as a trainer has measured it. Pure."""

from __future__ import annotations

from recpoint.format.manifest import MeasuredLoss
from recpoint.units import counted

__all__ = ["loss_note", "loss_text"]


def loss_text(loss: MeasuredLoss) -> str:
    """Return what a restore costs in loss: measured and predicted, and the price of a bit."""
    return " ".join(
        sentence
        for sentence in (
            f"{_measured_text(loss)}; {_percent(loss.increase)} is allowed.",
            "" if loss.predicted is None else f"Predicted are {_percent(loss.predicted)}.",
            _price_text(loss),
        )
        if sentence
    )


def _measured_text(loss: MeasuredLoss) -> str:
    batches = counted(loss.batches, "measured batch")
    if loss.low is None or loss.high is None:
        return f"What rounding costs in loss is not known after {batches}"
    subject = "Rounding all rows to 8 bits" if loss.price is None else "Rounding"
    return (
        f"{subject} costs {_percent(loss.low)} to {_percent(loss.high)} of the loss (95% "
        f"confidence, {batches})"
    )


def _price_text(loss: MeasuredLoss) -> str:
    if loss.price is not None:
        return f"The price λ of a bit is {float.fromhex(loss.price):.3g}."
    if _is_too_much(loss):
        return "That is too much, so rows are stored exactly."
    return "Until a price of a bit is shown to hold, no row has fewer than 8 bits."


def loss_note(loss: MeasuredLoss) -> str:
    """Return what rounding costs in a few words, for one of many checkpoints."""
    if loss.high is None:
        return "cost of rounding not known yet"
    if _is_too_much(loss):
        return f"8 bits would cost up to {_percent(loss.high)} of the loss"
    return f"rounding costs at most {_percent(loss.high)} of the loss"


def _is_too_much(loss: MeasuredLoss) -> bool:
    return loss.high is not None and float.fromhex(loss.high) > float.fromhex(loss.increase)


def _percent(share: str) -> str:
    """Return a share, `float.hex()` text, in percent."""
    return f"{100 * float.fromhex(share):.2g}%"
