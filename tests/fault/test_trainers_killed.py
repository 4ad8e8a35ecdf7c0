"""SIGKILL of one of two trainers at boundaries of what it does: the tables end as without it.

`make test` kills at a fixed sample of boundaries; `make nightly` at all of them (`RUNS.md`).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.tcp import TcpServer
from tests.cached_training import as_bits
from tests.fault.kill_points import FAULTS_EVERY, kind_of
from tests.fault.trainer_lives import TOKEN, Dying, live
from tests.several_trainers import Case, Found, alone
from tests.training_builder import Place

RANKS = 2
SERVERS = 2
_AT_ONCE = 2


def case_in(directory: Path) -> tuple[Place, Case]:
    place = Place(str(directory / "run"), directory / "staging")
    case = Case(
        run=place.run,
        staging=str(place.staging),
        batches=7,
        interval=2,
        servers=SERVERS,
        window=3,
        at_servers=True,
        wait_seconds=8.0,  # a rank that ends waits for parts of one that is dead
    )
    return place, case


def servers_in(opened: ExitStack) -> list[tuple[str, int]]:
    """Return addresses of servers; they outlive the trainers, as those on other machines do."""
    made = [TcpServer(EmbeddingServer(), TOKEN) for _ in range(SERVERS)]
    return [opened.enter_context(one).address for one in made]


def is_as_without(found: Found | None, case: Case) -> bool:
    expected = alone(case, RANKS)
    return (
        found is not None
        and found.rows.differences(expected.rows) == []
        and torch.equal(as_bits(found.dense), as_bits(expected.dense))
    )


#: The oracle's exchange, gradients, a write-back of a cut, a server's part, a rank's own part.
KINDS = {
    0: ("before ids of coming batches: swap", "after server: write_back"),
    1: ("before rows: swap", "before server: seal_part"),
}


def chosen(names: Sequence[str], rank: int) -> list[int]:
    """Return numbers of boundaries: one of some kinds, early enough to go on after it; or all."""
    if FAULTS_EVERY:
        return list(range(1, len(names) + 1, FAULTS_EVERY))
    found = []
    for kind in KINDS[rank]:
        its = [number for number, name in enumerate(names, 1) if name == kind]
        found.append(its[len(its) // 3])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly("kills"))])
def test_a_training_whose_rank_is_killed_ends_as_one_whose_are_not(
    rank: int, tmp_path: Path
) -> None:
    counted = tmp_path / "names"
    place, case = case_in(tmp_path / "whole")
    with place.agent(), ExitStack() as opened:
        dying = Dying(rank=rank, count_into=str(counted))
        directory = tmp_path / "whole" / "ranks"
        codes, logs, found = live(case, RANKS, directory, servers_in(opened), dying)
    assert codes == [0] * RANKS, "\n".join(logs)
    assert is_as_without(found, case)
    names = [line.split("\t")[2] for line in counted.read_text().splitlines()]
    assert {kind.split(": ")[0] for kind in map(kind_of, names) if ": " in kind} >= {
        f"{when} {what}"
        for when in ("before", "after")
        for what in (
            "rows",
            "gradients for later steps",
            "sign of a home thread",
            "ids of coming batches",
            "server",
        )
    }

    def attempt(at: int) -> bool:
        place, case = case_in(tmp_path / f"killed-{at}")
        with place.agent(), ExitStack() as opened:
            dying = Dying(rank=rank, at=at)
            directory, servers = tmp_path / f"killed-{at}", servers_in(opened)
            codes, logs, _ = live(case, RANKS, directory / "first", servers, dying)
            if codes[rank] == 0:
                return False  # threads came to fewer boundaries this time
            said = (at, names[at - 1] if at <= len(names) else "", codes, "\n".join(logs))
            assert codes[rank] == -signal.SIGKILL, said
            # The script itself exchanges dense gradients, too.
            assert codes[1 - rank] == 0 or any(
                one in logs[1 - rank] for one in ("RankLost: ", "in _reduced")
            ), said
            codes, logs, found = live(case, RANKS, directory / "second", servers)
            assert codes == [0] * RANKS, (said, "\n".join(logs))
            assert is_as_without(found, case), said
            return True

    wanted = chosen(names, rank)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        killed = list(pool.map(attempt, wanted))
    assert sum(killed) >= 0.9 * len(wanted)
