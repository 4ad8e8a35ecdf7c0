"""Dense tensors in pieces of ranks: whole again in whatever way they were cut, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint.catalog.restore.dense import DenseShard, fill_part, has_part, join_shards, parse_shard
from recpoint.catalog.restore.restore import MemoryTarget, dense_tensors, model_tensors, restore
from recpoint.errors import MalformedObject
from tests.catalog_builder import build, new_run, publish, tables


def piece(whole: torch.Tensor, box: list[range]) -> dict[str, Any]:
    part = whole[tuple(slice(r.start, r.stop) for r in box)].clone()
    return {"shard_of": list(whole.shape), "at": [r.start for r in box], "tensor": part}


@st.composite
def cut_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[range]]:
    """A grid of boxes that make up the shape; some may be empty."""
    boxes: list[list[range]] = [[]]
    for size in shape:
        marks = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
        edges = [0, *marks, size]
        parts = [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]
        boxes = [[*box, part] for box in boxes for part in parts]
    return draw(st.permutations(boxes))


SHAPES = st.sampled_from([(), (7,), (6, 5), (3, 4, 2), (0, 3)])


@settings(deadline=None)
@given(st.data(), SHAPES, st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_any_cut_into_any_other(data: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = torch.randint(0, 100, shape).to(dtype)
    stored = [piece(whole, box) for box in data.draw(cut_boxes(shape))]
    shards = [parse_shard(one, name="w") for one in stored]
    assert torch.equal(join_shards(shards, name="w"), whole)
    for box in data.draw(cut_boxes(shape)):
        expected = whole[tuple(slice(r.start, r.stop) for r in box)]
        into = torch.full(expected.shape, -1, dtype=dtype)
        fill_part(shards, [r.start for r in box], into, name="w")
        assert torch.equal(into, expected)


def test_the_model_of_all_ranks() -> None:
    whole, bias = torch.randn(4, 3), torch.randn(3)
    trees: dict[int, object] = {
        0: {"model": {"tensors": {"w": piece(whole, [range(2), range(3)]), "b": bias}}},
        1: {"model": {"tensors": {"w": piece(whole, [range(2, 4), range(3)])}}},
        2: {"rng": 1},
    }
    found = dense_tensors(trees)
    assert found.keys() == {"w", "b"}
    assert torch.equal(found["w"], whole) and found["b"] is bias


WHOLE = torch.arange(12.0).reshape(4, 3)
TOP, BOTTOM = piece(WHOLE, [range(2), range(3)]), piece(WHOLE, [range(2, 4), range(3)])


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        ([TOP], "6 elements in all pieces"),
        ([TOP, {**TOP, "tensor": -TOP["tensor"]}, BOTTOM], r"two pieces of \[2, 3\] at \[0, 0\]"),
        ([TOP, {**BOTTOM, "at": [1, 0]}], "overlap"),
        ([TOP, {**BOTTOM, "tensor": BOTTOM["tensor"].double()}], "torch.float64"),
        ([TOP, {**BOTTOM, "shard_of": [5, 3]}], "pieces of"),
    ],
    ids=["gap", "copies that differ", "overlap", "dtype", "shape"],
)
def test_pieces_that_do_not_make_it_up_are_refused(pieces: list[object], found: str) -> None:
    shards = [parse_shard(one, name="w") for one in pieces]
    with pytest.raises(MalformedObject, match=found) as error:
        join_shards(shards, name="w")
    assert "dense tensor 'w'" in str(error.value)
    with pytest.raises(MalformedObject, match=found.removesuffix(" in all pieces")):
        fill_part(shards, [0, 0], torch.empty(4, 3), name="w")


def test_copies_of_a_piece_count_once() -> None:
    whole = WHOLE.clone()
    whole[0, 0], whole[0, 1] = float("nan"), -0.0
    top, bottom = piece(whole, [range(2), range(3)]), piece(whole, [range(2, 4), range(3)])
    apart = {**top, "tensor": top["tensor"].t().contiguous().t()}  # of other strides
    shards = [parse_shard(one, name="w") for one in (bottom, top, apart, bottom)]
    joined = join_shards(shards, name="w")
    assert joined.view(torch.int32).equal(whole.view(torch.int32))
    assert has_part(shards, [range(1, 3), range(3)], name="w")
    into = torch.zeros(2, 3)
    fill_part(shards, [1, 0], into, name="w")
    assert torch.equal(into, WHOLE[1:3])
    scalars = [parse_shard(piece(torch.tensor(2.0), []), name="w") for _ in range(2)]
    assert join_shards(scalars, name="w") == 2.0
    # As numbers these would be alike.
    other = {**top, "tensor": top["tensor"].abs()}
    with pytest.raises(MalformedObject, match="that differ"):
        join_shards([*shards, parse_shard(other, name="w")], name="w")


def test_a_part_needs_the_pieces_that_have_some_of_it() -> None:
    shards = [parse_shard(TOP, name="w")]
    assert has_part(shards, [range(1, 2), range(3)], name="w")
    assert not has_part(shards, [range(1, 3), range(3)], name="w")
    into = torch.zeros(1, 2)
    fill_part(shards, [1, 1], into, name="w")
    assert torch.equal(into, WHOLE[1:2, 1:3])
    with pytest.raises(MalformedObject, match=r"1 elements of \[2, 1\] at \[1, 1\]"):
        fill_part(shards, [1, 1], torch.zeros(2, 1), name="w")


@pytest.mark.parametrize(
    "node",
    [
        {**TOP, "at": [3, 0]},
        {**TOP, "at": [0]},
        {**TOP, "at": [-1, 0]},
        {**TOP, "at": [True, 0]},
        {**TOP, "shard_of": [2**80, 3]},
        {**TOP, "shard_of": "43"},
        {**TOP, "tensor": None},
        {**TOP, "more": 1},
        {**TOP, "tensor": WHOLE[:2].to_sparse()},
        7,
    ],
)
def test_what_is_no_piece_is_refused(node: object) -> None:
    with pytest.raises(MalformedObject, match="dense tensor 'w'"):
        parse_shard(node, name="w")


def test_a_huge_shape_allocates_nothing() -> None:
    shard = DenseShard(shape=(2**48, 2**48), at=(0, 0), tensor=torch.zeros(1, 1))
    with pytest.raises(MalformedObject, match="without a gap"):
        join_shards([shard], name="w")


def test_a_tensor_is_stored_whole_or_in_pieces() -> None:
    trees: dict[int, object] = {
        0: {"model": {"tensors": {"w": WHOLE}}},
        1: {"model": {"tensors": {"w": BOTTOM}}},
    }
    with pytest.raises(MalformedObject, match="the whole tensor beside a piece"):
        dense_tensors(trees)


@pytest.mark.parametrize(
    ("at", "into"),
    [
        ([3, 0], torch.empty(2, 3)),
        ([0], torch.empty(2)),
        ([-1, 0], torch.empty(1, 1)),
        ([0, 0], torch.empty(2, 3, dtype=torch.float64)),
    ],
)
def test_a_part_that_is_none_is_refused(at: list[int], into: torch.Tensor) -> None:
    shards = [parse_shard(one, name="w") for one in (TOP, BOTTOM)]
    with pytest.raises(ValueError, match="is no part of"):
        fill_part(shards, at, into, name="w")


def test_a_checkpoint_whose_pieces_do_not_make_it_up_is_passed_over(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.claim(None)
    # As runs have it in which replicas each stored its piece.
    good = [TOP, BOTTOM, TOP, BOTTOM]
    over = {**BOTTOM, "at": [1, 0]}
    for step, parts in ((1, good), (2, [TOP, over]), (3, [TOP, TOP])):
        states = [{"model": {"tensors": {"w": part}}} for part in parts]
        publish(run, build(run, tables(), step=step, generation=1, states=states))
    target = MemoryTarget()
    report = restore(run, target)
    assert report.restored.step == 1
    assert "6 elements in all pieces" in report.skipped[0].error
    assert "overlap" in report.skipped[1].error
    assert torch.equal(model_tensors(target)["w"], WHOLE)
