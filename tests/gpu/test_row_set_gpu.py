from __future__ import annotations

import numpy as np
import pytest
import torch

from recpoint.kernels.row_set import reference, triton
from recpoint.kernels.row_set.frame import compress

pytestmark = pytest.mark.gpu

SETS = {
    "one": [5],
    "range": list(range(9, 2000)),
    "bitmap": [3 * i + i % 3 for i in range(1500)],
    "sparse": [3 * i * i + 1 for i in range(1500)],
    "escapes": [250 * i + (i * i) % 200 for i in range(1100)],
    "clusters": [3000 * i + k for i in range(150) for k in range(i % 17 + 1)],
    "long runs": [70_000 * i + k for i in range(3) for k in range(1200)],
    "far": [0, 7, 2**32 + 7, 2**33 + 8],
    "farther": [1, 2**32 + 2, 2**47],
    "far bitmap": [2**40 + i * 2 for i in range(100)],
    "none": [],
}


@pytest.mark.parametrize("name", SETS)
def test_both_directions_equal_the_reference(device: torch.device, name: str) -> None:
    ids = torch.tensor(SETS[name], dtype=torch.int64)
    coded = triton.encode(ids.to(device))
    assert coded == reference.encode(ids)
    count = ids.numel()
    decoded = triton.decode(*coded, count=count, rows=2**48, device=device)
    assert torch.equal(decoded.cpu(), ids)
    if coded.coding != "range":
        with pytest.raises(ValueError, match="not below"):
            triton.decode(*coded, count=count, rows=int(ids[-1]), device=device)


def test_all_codings_are_among_them() -> None:
    found = {reference.encode(torch.tensor(ids, dtype=torch.int64)).coding for ids in SETS.values()}
    assert found == {"range", "bitmap", "runs", "delta"}


@pytest.mark.parametrize("ids", [[1, 1], [2, 1], [-1, 5], [5, -(2**63)], [-3], [0, 5, 5, 9]])
def test_what_is_not_an_ascending_set_is_refused(device: torch.device, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        triton.encode(torch.tensor(ids, device=device))


@pytest.mark.parametrize(
    ("low", "content", "count"),
    [
        (7, [0] * 7 + [64], 2),
        (7, [255] * 7 + [255, 254], 2),
        (7, [0] * 28 + [63] * 4, 5),
        (7, [0] * 21 + [0, 255, 1, 0], 4),
        (0, [255, 0, 40], 3),
        (0, [97, 0], 3),
    ],
)
def test_gaps_that_leave_the_table_are_refused(
    device: torch.device, low: int, content: list[int], count: int
) -> None:
    payload = bytes([low]) + compress([np.array(content, np.uint8)])
    with pytest.raises(ValueError, match="not below"):
        triton.decode("delta", 0, payload, count=count, rows=99, device=device)


def test_runs_of_too_many_ids_are_refused(device: torch.device) -> None:
    payload = (2).to_bytes(8, "little") + bytes(2) + compress([np.array([90, 4], np.uint8)])
    with pytest.raises(ValueError, match="more than 5 ids"):
        triton.decode("runs", 0, payload, count=5, rows=400, device=device)
