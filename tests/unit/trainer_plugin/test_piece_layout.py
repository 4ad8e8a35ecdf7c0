"""Pieces of dense tensors that lie on several meshes: one of them stores each."""

from __future__ import annotations

import re

import pytest

from recpoint.trainer_plugin.ranks.sharding import HeldPiece, _fault, balance

TALL, WIDE = ((5, 3), "torch.float32"), ((3, 5), "torch.float32")


def piece(mesh: int, at: int | None, rows: int = 0, form: object = TALL) -> HeldPiece:
    """Rows of the tensor; `at` None: another rank of the mesh stores them."""
    assert isinstance(form, tuple)
    box = None if at is None else ((at, 0), (rows, 3))
    return HeldPiece(form=form, mesh=mesh, box=box)


@pytest.mark.parametrize(
    "by_rank",
    [
        [piece(0, 0, 3), piece(0, 3, 2)],
        [piece(0, 0, 3), piece(1, 0, 3), piece(0, 3, 2), piece(1, 3, 2)],
        [piece(0, 0, 5), piece(1, 0, 5), piece(0, 5, 0), piece(1, 5, 0)],
        [piece(0, 0, 3), piece(0, 3, 2), piece(0, None), piece(0, None)],
        # A replica that is cut in another way.
        [piece(0, 0, 5), piece(1, 0, 3), piece(1, 3, 2)],
    ],
    ids=["one mesh", "two meshes", "nothing on some", "a mesh that replicates", "cut otherwise"],
)
def test_the_first_mesh_makes_the_tensor_up(by_rank: list[HeldPiece | None]) -> None:
    assert _fault(by_rank) is None


@pytest.mark.parametrize(
    ("by_rank", "counts"),
    [
        ([piece(0, 0, 3), piece(0, 3, 2)], [None, None]),
        ([piece(0, 0, 3), piece(1, 0, 3), piece(0, 3, 2), piece(1, 3, 2)], [-1, 1, -1, 1]),
        ([piece(0, 0, 5), piece(1, 0, 5), piece(2, 0, 5)], [-2, 1, 1]),
        ([piece(0, 0, 5), piece(0, None), piece(2, 0, 5), piece(2, None)], [-1, None, 1, None]),
        # Of a replica that is cut in another way nothing is compared.
        ([piece(0, 0, 5), piece(1, 0, 3), piece(1, 3, 2)], [None, None, None]),
    ],
    ids=["one mesh", "two meshes", "three meshes", "meshes that replicate", "cut otherwise"],
)
def test_equal_pieces_add_to_nothing(by_rank: list[HeldPiece], counts: list[int | None]) -> None:
    held = [{"weight": one} for one in by_rank]
    assert [balance(held, rank).get("weight") for rank in range(len(held))] == counts


@pytest.mark.parametrize(
    ("by_rank", "found"),
    [
        ([piece(0, 0, 3), piece(0, 4, 1)], "12 elements of 15"),
        ([piece(0, 0, 3), piece(0, 2, 3)], r"pieces at \[0, 0\] and \[2, 0\] that overlap"),
        ([piece(0, 0, 5), piece(0, 0, 5)], "overlap"),
        ([piece(0, 0, 3), piece(1, 3, 2)], "9 elements of 15"),
        ([piece(0, 0, 5), None, None], r"on ranks \[0\]; no piece on ranks \[1, 2\]"),
        ([piece(0, 0, 5), piece(1, 0, 5, WIDE)], r"\(5, 3\).* on ranks \[0\]; .*\(3, 5\)"),
    ],
    ids=["gap", "overlap", "twice", "two halves of no mesh", "not everywhere", "forms"],
)
def test_what_does_not_is_refused(by_rank: list[HeldPiece | None], found: str) -> None:
    assert re.search(found, _fault(by_rank) or "")
