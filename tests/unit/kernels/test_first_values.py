"""First values of rows: native ones are the reference's bits, and those that chunks rely on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recpoint.kernels.first_values import cpu, reference

Kernel = Callable[..., Tensor]
KERNELS = pytest.mark.parametrize("kernel", [cpu.uniform_values, reference.uniform_values])

_ENDS = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])


@KERNELS
def test_values_are_those_of_stored_rules(kernel: Kernel) -> None:
    values = kernel(
        0x1234_0000_0007,
        _ENDS,
        low=-0.25,
        high=0.75,
        row_values=5,
        columns=range(1, 4),
        dtype=torch.float64,
    )
    assert values.tolist() == [
        [0.5822504162788391, 0.1288686990737915, 0.2928675413131714],
        [0.18638145923614502, -0.011079967021942139, 0.5213598608970642],
        [-0.05666518211364746, 0.1334083080291748, 0.010843276977539062],
        [-0.18859970569610596, 0.11158615350723267, 0.5203160047531128],
        [0.23460078239440918, 0.21924042701721191, 0.6203785538673401],
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("columns", [range(16), range(3, 10), range(2, 2), range(1_000)], ids=str)
def test_native_values_are_those_of_the_reference(dtype: torch.dtype, columns: range) -> None:
    random_ids = torch.randint(-(2**63), 2**63 - 1, (70,))
    for ids in (_ENDS[:0], torch.cat([_ENDS, random_ids])):
        for key, low, high in ((0, -0.01, 0.01), (2**64 - 1, -3.3e38, 3.4e38), (7 << 40, 0.1, 0.3)):
            native, expected = (
                kernel(key, ids, low=low, high=high, row_values=2_000, columns=columns, dtype=dtype)
                for kernel in (cpu.uniform_values, reference.uniform_values)
            )
            assert native.dtype == dtype and native.shape == (len(ids), len(columns))
            assert torch.equal(native, expected)


@KERNELS
def test_columns_are_parts_of_whole_rows(kernel: Kernel) -> None:
    def drawn(columns: range) -> Tensor:
        return kernel(
            3, _ENDS, low=-1.0, high=1.0, row_values=9, columns=columns, dtype=torch.float32
        )

    assert torch.equal(torch.cat([drawn(range(4)), drawn(range(4, 9))], 1), drawn(range(9)))


@KERNELS
def test_other_forms_are_refused(kernel: Kernel) -> None:
    for ids, columns, text in (
        (_ENDS.int(), range(2), "ids: dtype torch.int32"),
        (_ENDS[::2], range(2), "ids: not contiguous"),
        (_ENDS[:, None], range(2), "ids: shape"),
        (_ENDS.to("meta"), range(2), "ids: device meta"),
        (_ENDS, range(0, 4, 2), r"columns: range\(0, 4, 2\), expected a range"),
        (_ENDS, range(-1, 4), r"columns: range\(-1, 4\), expected a range"),
    ):
        with pytest.raises(ValueError, match=text):
            kernel(1, ids, low=0.0, high=1.0, row_values=4, columns=columns, dtype=torch.float32)
