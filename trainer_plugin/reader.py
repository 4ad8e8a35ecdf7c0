"""What recpoint asks of a reader of training batches, and of other things with a state.

A torchdata `StatefulDataLoader` fits as it is, with and without worker processes; what a dataset
draws at random inside a worker is not part of its state, so seed such draws by the sample's index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from recpoint.errors import SettingsError
from recpoint.interrupts import let_into

__all__ = ["BatchBudget", "Divisible", "Stateful", "announce", "refuse_prepared"]


@runtime_checkable
class Stateful(Protocol):
    """A thing whose state is saved and restored: a reader, a metric, a gradient scaler.

    The state must consist of what format §3.4 can store: None, bool, int, float, str, bytes,
    tensors, numpy arrays, and lists, tuples and dicts of those.
    """

    def state_dict(self) -> Any:
        """The state right now: for a reader, after the batches that training has consumed.

        Rows of tables MUST stay as they are: other threads may be copying them already.
        """

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go on from a state that `state_dict` returned, in this or another process."""


@runtime_checkable
class BatchBudget(Protocol):
    """A reader that is told how far it may read ahead."""

    def batches_until_checkpoint(self, n: int, /) -> None:
        """No more than `n` further batches will be consumed before the reader is asked again.

        Called when training starts, after each checkpoint, and when more batches are granted
        before the next one: about eight times in an interval in seconds, which is granted in parts.
        A reader with workers stops after `n` batches, so that none is in flight when its state is
        taken.
        """


@runtime_checkable
class Divisible(Protocol):
    """A reader of one rank that can go on where readers of another number of ranks have stopped."""

    def load_state_dicts(self, states: Sequence[Any], rank: int, ranks: int, /) -> None:
        """Go on from what the readers of all ranks of a checkpoint returned, now as one of several.

        What the `ranks` readers then read, together, MUST be what the earlier ones had left: no
        sample lost, none twice.

        Args:
            states: of each rank of the checkpoint, in their order.
            rank: of this process.
            ranks: how many there are now; another number than of states.
        """


def announce(reader: object, n: int) -> bool:
    """Tell a reader that wants to know how many batches are left; whether it does."""
    if not isinstance(reader, BatchBudget):
        return False
    budget = reader  # narrowed
    let_into(lambda: budget.batches_until_checkpoint(n))
    return True


def refuse_prepared(subject: str, loader: object) -> None:
    """Refuse a loader whose `state_dict` is Accelerate's: that is no position.

    Over torch's DataLoader there is none to ask. Over a `StatefulDataLoader` neither the order of a
    shuffled epoch nor which epoch it is are in it: after a restore other samples come, unnoticed.

    Raises:
        SettingsError: it is one.
    """
    asked = getattr(type(loader), "state_dict", None)
    where = getattr(asked, "__module__", None) or ""  # what is compiled may have none
    if where.partition(".")[0] == "accelerate":
        raise SettingsError(
            subject,
            found=f"a {type(loader).__name__} of Accelerate's prepare(), whose state_dict() does "
            "not say which samples come next",
            expected="the loader that prepare() was given",
            next_step="give ResumableLoader(loader) as reader and leave prepare() out for it: move "
            "batches to accelerator.device, and of several processes give each a "
            "DistributedSampler, as examples/accelerate_loop.py says",
        )
