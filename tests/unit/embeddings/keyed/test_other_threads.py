"""Threads that look keys up beside training leave what is trained alone."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from recpoint.embeddings.keyed.embedding import KeyedEmbedding
from recpoint.embeddings.keyed.slot_memory import PlainMemory

_SECONDS = 0.05  # more than a lookup takes


class _Watched(PlainMemory):
    """Has another thread look keys up while rows get other keys."""

    def __init__(self, keyed: KeyedEmbedding) -> None:
        super().__init__(keyed.weight)
        self._keyed = keyed
        self.threads: list[threading.Thread] = []
        self.found_rows: list[Tensor] = []

    def put(self, slots: Tensor, values: Tensor) -> None:
        super().put(slots, values)
        self.threads.append(threading.Thread(target=self._look_up))
        self.threads[-1].start()
        self.threads[-1].join(_SECONDS)

    def _look_up(self) -> None:
        with torch.no_grad():
            self.found_rows.append(self._keyed(torch.tensor([1, 2, 3])))


def _values(table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return ids.to(dtype)[:, None].expand(len(ids), dim).contiguous()


def test_a_lookup_waits_while_rows_get_other_keys() -> None:
    keyed = KeyedEmbedding(1, 3, initial=_values)
    optimizer = torch.optim.SGD(keyed.parameters(), lr=0.1)
    keyed(torch.tensor([1, 2]))
    optimizer.step()
    memory = _Watched(keyed)
    keyed.slots.rows.memory = memory
    assert keyed(torch.tensor([2, 3, 4])).tolist() == [[2], [3], [4]]
    for thread in memory.threads:
        thread.join()
    assert [rows.tolist() for rows in memory.found_rows] == [[[0], [2], [3]]]
    assert keyed.eval()(torch.tensor([2, 3, 4])).tolist() == [[2], [3], [4]]
    assert keyed.counts == (3, 4, 1, 0)
