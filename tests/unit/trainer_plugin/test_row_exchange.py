"""Ranks tell the owners of rows which coming batches look them up."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from recpoint.lookahead.owned_rows import OwnedRows, packed_ids
from recpoint.trainer_plugin.ranks.row_exchange import ComingBatches, RowExchange, RowsUnknown
from tests.simulated_ranks import Fault, Network, Servers, Thread

#: Of each rank: "users" by rows, "items" by columns, and "tags" on rank 1.
OWNED = [
    [OwnedRows("users", "users", 0, 40), OwnedRows("items[:, 0:]", "items", 0, 30)],
    [OwnedRows("users", "users", 40, 40), OwnedRows("tags", "tags", 0, 9)],
    [
        OwnedRows("users", "users", 80, 11),
        OwnedRows("items[:, 4:]", "items", 0, 30),
        OwnedRows("items[:, 6:]", "items", 0, 30),
    ],
]
SIZES = {"users": 91, "items": 30, "tags": 9}
Batches = list[dict[str, Tensor]]


def batches_of(rank: int, count: int) -> Batches:
    draw = torch.Generator().manual_seed(rank)
    return [
        {
            name: torch.randint(-3, rows + 3, (20,), generator=draw).to(
                torch.int32 if number % 2 else torch.int64
            )
            for name, rows in SIZES.items()
            if (number + rank) % 3
        }
        for number in range(count)
    ]


def told(network: Network, turns: Sequence[Sequence[ComingBatches]]) -> list[list[Any]]:
    """Return what each rank learned in each of its turns: ids of batches, or why there are none."""

    def tell(rank: int) -> list[Any]:
        exchange = RowExchange(network.channel(rank, "ids"), OWNED)
        answers: list[Any] = []
        for coming in turns[rank]:
            try:
                answers.append(exchange.tell(coming))
            except RowsUnknown as unknown:
                answers.append(str(unknown))
        return answers

    with ThreadPoolExecutor(len(OWNED)) as threads:
        return list(threads.map(tell, range(len(OWNED))))


def network(*faults: Fault) -> Network:
    return Network(len(OWNED), Servers(count=0, seed=0, repeats=0.0), faults=faults)


def last_uses(by_rank: Sequence[Batches], owned: OwnedRows) -> dict[int, int]:
    """Return the last batch that looks up each row, by its position; batches are of one length."""
    return {
        int(row) - owned.first_row: number
        for number, batches in enumerate(zip(*by_rank, strict=True))
        for batch in batches
        for row in batch.get(owned.name, torch.empty(0))
        if 0 <= int(row) - owned.first_row < owned.rows
    }


def test_owners_learn_the_last_uses_of_their_rows() -> None:
    by_rank = [batches_of(rank, 6) for rank in range(3)]
    turns = [[ComingBatches(30, 24, batches)] for batches in by_rank]
    answers = told(network(), turns)
    for rank, owned_rows in enumerate(OWNED):
        (batches,) = answers[rank]
        assert len(batches) == 6
        for owned in owned_rows:
            learned: dict[int, int] = {}
            for number, batch in enumerate(batches):
                ids = batch[owned.key]
                assert ids.dtype == torch.int32
                learned |= dict.fromkeys(ids.tolist(), number)
            assert learned == last_uses(by_rank, owned), owned


def test_what_a_rank_sends_does_not_grow_with_the_ranks() -> None:
    """The same rows on one rank and on ten: each id goes to one owner, once."""
    batches = [{"users": torch.arange(1_000)} for _ in range(2)]
    whole = packed_ids(batches, [OwnedRows("users", "users", 0, 1_000)]).numel()
    parts = [
        packed_ids(batches, [OwnedRows("users", "users", first, 100)]).numel()
        for first in range(0, 1_000, 100)
    ]
    counts = 8 * len(batches)
    assert whole == 4 * 1_000 + counts and sum(parts) == 4 * 1_000 + 10 * counts


def test_ranks_ask_again_until_all_have_read() -> None:
    read = [batches_of(rank, 6) for rank in range(3)]
    turns = [[ComingBatches(30, 24, ids), ComingBatches(30, 27, ids[3:])] for ids in read]
    turns[1][0] = ComingBatches(30, 24, read[1][:5])
    for ranks_turns in turns:
        ranks_turns.append(ComingBatches(30, 29, []))  # exchanges nothing any more
    crossings = network()
    for first, second, third in told(crossings, turns):
        assert first == "rank 1 had read 5 of 6 batches"
        assert len(second) == 3
        assert third == "the ranks had told each other of their batches before"


def test_ranks_that_are_a_batch_apart_count_from_the_checkpoint() -> None:
    ids = [batches_of(rank, 4) for rank in range(3)]
    turns = [[ComingBatches(30, 26, ids[rank])] for rank in range(3)]
    turns[2] = [ComingBatches(30, 27, ids[2][1:])]
    (first,), _, (third,) = told(network(), turns)
    assert len(first) == 4 and len(third) == 3
    # The batch that rank 2 has trained already is not told of.
    assert first[0]["users"].numel() == sum(
        last == 0 for rank in (0, 1) for last in last_uses([ids[rank]], OWNED[0][0]).values()
    )


def test_ranks_with_other_checkpoints_in_mind_go_on() -> None:
    ids = [batches_of(rank, 2) for rank in range(3)]
    turns = [[ComingBatches(30, 28, i), ComingBatches(60, 58, i)] for i in ids]
    turns[0][0] = ComingBatches(31, 29, ids[0])
    for first, second in told(network(), turns):
        assert "expected the checkpoint at batch" in first
        assert len(second) == 2


@pytest.mark.parametrize("number", [1, 5, 9])
def test_a_rank_that_fails_keeps_no_other_waiting(number: int) -> None:
    turns = [[ComingBatches(30, 24, batches_of(rank, 6))] * 2 for rank in range(3)]
    answers = told(network(Fault(Thread(1, "ids"), number, "fail")), turns)
    for answer in answers:
        assert answer[1].startswith(
            ("ranks no longer tell each other", "the ranks had told each other")
        )
    assert answers[1][0].startswith("ranks no longer tell each other")
