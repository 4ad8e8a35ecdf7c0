"""Warns of a GradScaler that steps a given optimizer and is in no checkpoint.

Such a scaler begins anew after a restart, with its first scale. A scaler leaves nothing on the
optimizer that it steps. It calls the optimizer's step, so it is a caller of that step's hooks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.state.not_given import within

__all__ = ["warn_of_scaler"]

_log = logging.getLogger("recpoint")

#: A scaler calls the step through a few functions: its own, torch's hooks, a wrapper's.
_MOST_CALLERS = 40


def warn_of_scaler(optimizer: Optimizer, number: int, extras: Collection[object]) -> bool:
    """Warn if an unknown GradScaler makes the step whose hook calls this.

    Args:
        optimizer: the optimizer that steps.
        number: its number among the given optimizers.
        extras: the given extras; they may be or hold scalers.

    Returns:
        Whether it warned.
    """
    try:
        scaler = _calling_scaler()
        if scaler is None or any(extra is scaler for extra in within(extras)):
            return False
    except Exception as error:
        if came_from_handler(error):
            raise
        return False  # reading an attribute of a user's object may raise any error
    _log.warning(
        "optimizers[%d], a %s, is stepped by a %s that is not in its checkpoints, so after a "
        "restart the scaler would begin anew, with its first scale. Next: in a new run, pass "
        'Checkpointer(extras={"scaler": scaler})',
        number,
        type(optimizer).__name__,
        type(scaler).__name__,
    )
    return True


def _calling_scaler() -> GradScaler | None:
    """Return the enabled scaler among the callers of this function."""
    frame = sys._getframe()
    for _ in range(_MOST_CALLERS):
        caller = frame.f_back
        if caller is None:
            return None
        frame = caller
        scaler = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(scaler, GradScaler) and scaler.is_enabled():
            return scaler
    return None
