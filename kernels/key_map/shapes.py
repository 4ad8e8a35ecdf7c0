"""What the calls of a key map need to be given."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from recpoint.kernels.arguments import require_integers

__all__ = ["MOST_SLOTS", "require_larger", "require_pairs", "require_room", "require_slot_keys"]

#: The largest capacity: an entry of the index has half of its 64 bits for the slot.
MOST_SLOTS: Final = (1 << 31) - 1


def require_pairs(keys: Tensor, slots: Tensor) -> None:
    """Refuse keys and slots that are not two vectors of one length.

    Raises:
        ValueError: names the argument.
    """
    require_integers("keys", keys)
    require_integers("slots", slots)
    # `shape` is read in a tenth of the time of `len`.
    if keys.shape != slots.shape:
        raise ValueError(f"slots: {slots.shape[0]}, expected {keys.shape[0]}, one for each key")


def require_room(count: int, free: int) -> None:
    """Refuse to choose more free slots than there are, or fewer slots than leave.

    Raises:
        ValueError: says how many there are.
    """
    if not 0 <= count <= free:
        raise ValueError(f"count: {count} free slots beside those that leave, expected 0 to {free}")


def require_slot_keys(slot_keys: Tensor) -> None:
    """Refuse a tensor that cannot hold the keys of 1 to MOST_SLOTS slots.

    Raises:
        ValueError: says which capacity it would make.
    """
    require_integers("slot_keys", slot_keys)
    capacity = len(slot_keys) - 1
    if not 1 <= capacity <= MOST_SLOTS:
        raise ValueError(
            f"slot_keys: room for slot 0 and {capacity:,} others, expected 1 to {MOST_SLOTS:,}"
        )


def require_larger(slot_keys: Tensor, before: Tensor) -> None:
    """Refuse a tensor that has no room for what `before` has.

    Raises:
        ValueError: says which capacity it would make.
    """
    require_slot_keys(slot_keys)
    if len(slot_keys) < len(before):
        raise ValueError(
            f"slot_keys: capacity {len(slot_keys) - 1:,}, expected the current one,"
            f" {len(before) - 1:,}, or more"
        )
