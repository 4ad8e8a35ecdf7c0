from __future__ import annotations

import pytest
import torch

from recpoint.kernels.row_set import reference, triton
from recpoint.kernels.row_set.coding import compress

pytestmark = pytest.mark.gpu

SETS = {
    "one": [5],
    "range": list(range(9, 2000)),
    "sparse": [3 * i * i + 1 for i in range(1500)],
    "far": [0, 7, 2**32 + 7, 2**33 + 8],
    "farther": [1, 2**32 + 2, 2**47],
    "none": [],
}


@pytest.mark.parametrize("name", SETS)
def test_both_directions_equal_the_reference(device: torch.device, name: str) -> None:
    ids = torch.tensor(SETS[name], dtype=torch.int64)
    coded = triton.encode(ids.to(device))
    assert coded == reference.encode(ids)
    coding, first, payload = coded
    count = ids.numel()
    decoded = triton.decode(coding, first, payload, count=count, rows=2**48, device=device)
    assert torch.equal(decoded.cpu(), ids)


@pytest.mark.parametrize("ids", [[1, 1], [2, 1], [-1, 5], [5, -(2**63)], [-3]])
def test_what_is_not_an_ascending_set_is_refused(device: torch.device, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        triton.encode(torch.tensor(ids, device=device))


@pytest.mark.parametrize(
    "steps", [[2**64 - 1, 1], [2**63, 0], [2**62, 2**62, 2**62, 2**62], [99, 0]]
)
def test_differences_that_leave_the_table_are_refused(
    device: torch.device, steps: list[int]
) -> None:
    words = [step.to_bytes(8, "little") for step in steps]
    payload = compress(b"".join(bytes(word[plane] for word in words) for plane in range(8)))
    with pytest.raises(ValueError, match="not below"):
        triton.decode("delta64", None, payload, count=len(steps), rows=100, device=device)
