"""Says what is wrong with the stored state of a keyed table, before anything is restored of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from recpoint.kernels.key_sketch import DEPTH

__all__ = ["LOOKUPS_PER_COLUMN", "state_faults"]

#: Counts of `Seen` are halved after so many lookups. With fewer, keys that come as often as the
#: last rows of a table never reach a count of ten. With more, tail keys that share all counts are
#: admitted.
LOOKUPS_PER_COLUMN: Final = 2

_COUNTS: Final = ("steps", "inserted", "evicted", "refused")
_MOST: Final = 2**63 - 1


def state_faults(state: object) -> Iterator[str]:
    """Yield each fault of what `KeySlots.state_dict` returned when it was stored.

    Args:
        state: the stored state; anything at all.
    """
    if not isinstance(state, Mapping):
        yield f"its state is {state!r:.80}, and no dict"
        return
    for name in _COUNTS:
        count = state.get(name)
        if type(count) is not int or not 0 <= count <= _MOST:
            yield f"{name} is {count!r:.80}, and not 0 to {_MOST}"
    settings, admission = state.get("settings"), state.get("admission")
    if not isinstance(settings, Mapping):
        yield f"settings is {settings!r:.80}, and no dict"
    if not isinstance(admission, Mapping):
        yield f"admission is {admission!r:.80}, and no dict"
    elif admission:
        yield from _sketch_faults(admission)


def _sketch_faults(admission: Mapping[str, object]) -> Iterator[str]:
    counts, added = admission.get("counts"), admission.get("added")
    if (
        not isinstance(counts, Tensor)
        or counts.dtype != torch.uint8
        or counts.dim() != 2
        or counts.shape[0] != DEPTH
        or not counts.shape[1]
    ):
        form = f"{counts.dtype} {tuple(counts.shape)}" if isinstance(counts, Tensor) else counts
        yield f"the counts of admission are {form!s:.80}, and not uint8 [{DEPTH}, columns]"
        return
    most = LOOKUPS_PER_COLUMN * counts.shape[1]
    if type(added) is not int or not 0 <= added < most:
        yield f"{added!r:.80} lookups since counts were halved, and not 0 to {most - 1}"
