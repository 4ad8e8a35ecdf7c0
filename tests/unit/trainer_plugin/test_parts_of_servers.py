"""Embedding servers stage their rows themselves: parts of a checkpoint, each on its own host."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad
from torch.utils.data import DataLoader

from recpoint import Checkpointer, Lookahead, Options, ResumableLoader, Staging
from recpoint.catalog.check.validate import validate
from recpoint.catalog.persist import first_rows
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.embeddings.cache.install import cached, read_rows
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.initial import Uniform, fill
from recpoint.embeddings.home.memory import MemoryHome
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server import served_part
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.processes import servers
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.tcp import TcpServer, TcpTransport
from recpoint.errors import SettingsError
from recpoint.format.job import Allocation
from recpoint.format.manifest import Manifest, MeasuredLoss
from recpoint.trainer_plugin.snapshot import record_bound
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable
from tests.cached_training import Rows, plain_model, rows_of_plain
from tests.combinations import combinations
from tests.mixed_table import a_chunk_for_each_width
from tests.polling import until
from tests.protected_servers import protected
from tests.several_trainers import Case, Part, alone, checkpoints_of, on_ranks, optimizers_of
from tests.training_builder import Place
from tests.unit.trainer_plugin.test_cached_checkpoints import (
    OPTIMIZERS,
    POLICIES,
    SMALL,
    Both,
    checkpointing,
)

_TOKEN = b"of this test"
#: Training is so short that the agent would be busy at the next checkpoint.
_WAITS = {"at_servers": True, "when_busy": "wait"}


@contextmanager
def served(count: int) -> Iterator[ServedHome]:
    with ExitStack() as stack:
        started = [EmbeddingServer(name=f"server {one + 1}") for one in range(count)]
        for server in started:
            stack.callback(server.end)
        listening = [stack.enter_context(TcpServer(one, _TOKEN)) for one in started]
        transports = [TcpTransport(one.address, _TOKEN) for one in listening]
        yield stack.enter_context(ServedHome(transports))


def run_of(place: Place) -> Run:
    return Run.open(open_store(place.run))


def manifests(place: Place) -> list[Manifest]:
    run = run_of(place)
    return [run.manifest(*name) for name in run.live_line()]


def restored(place: Place, name: str, home: Home | None = None) -> Both:
    both = Both(name, None if home is None else SMALL, home)
    with checkpointing(both, place):
        pass
    return both


@pytest.mark.parametrize(("name", "policy"), combinations(list(OPTIMIZERS), list(POLICIES)))
def test_parts_of_servers_restore_into_any_model(place: Place, name: str, policy: str) -> None:
    expected = Both(name, None)
    expected.train(None, 32)
    with served(3) as home:
        first = Both(name, SMALL, home)
        with checkpointing(first, place, policy=POLICIES[policy], **_WAITS) as ckpt:
            first.train(ckpt, 32)
        first.same_as(expected)
    found = manifests(place)
    assert [one.step for one in found] == [32, 30, 25, 20, 15, 10, 5]
    for manifest in found:
        assert (manifest.ranks, manifest.servers) == (1, 3)
        assert {chunk.rank for chunk in manifest.chunks if chunk.content == "rows"} <= {1, 2, 3}
        assert {chunk.rank for chunk in manifest.chunks if chunk.content == "state"} == {0}
        assert manifest.cache is not None and manifest.cache.hits > 0
    run = run_of(place)
    assert all(validate(run, name, level="full").passed for name in run.live_line())
    restored(place, name).same_as(expected)
    restored(place, name, MemoryHome()).same_as(expected)


class FixedPrice:
    """Gives the rows of tables widths by one price of a bit."""

    record = MeasuredLoss(
        increase=(1e-4).hex(), price=None, low=None, high=None, predicted=None, batches=0
    )

    def allocation(self, live: LiveTable) -> Allocation | None:
        return (
            Allocation(price=(2.0**-19).hex(), state=0, scale=(0.5).hex())
            if live.row_states
            else None
        )

    def is_exact(self, live: LiveTable) -> bool:
        return False

    def told(self) -> tuple[int, ...]:
        return ()

    def agree(self, told: Sequence[Sequence[int]]) -> None:
        assert list(told) == [()]


def test_each_row_that_servers_stage_has_its_own_width(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents of servers choose the widths that the trainer's agent chooses."""
    a_chunk_for_each_width(monkeypatch)
    monkeypatch.setattr(first_rows, "_CHUNK_COST_BYTES", 1 << 40)  # all rows are stored
    rows: list[Rows] = []
    widths: list[Counter[int]] = []
    with served(3) as home:
        for name, place_of_rows in (("trainer", None), ("servers", home)):
            own = replace(place, staging=place.staging / name, run=place.run + name)
            both = Both("adagrad", None if place_of_rows is None else SMALL, place_of_rows)
            settings = _WAITS | {"at_servers": place_of_rows is not None}
            precision = {"bits": 8, "quantizer": "asymmetric"}
            with checkpointing(both, own, **settings, **precision) as ckpt:
                ckpt._parts.cutter.parts._prices = FixedPrice()
                both.train(ckpt, 12)
            rows.append(restored(own, "adagrad").rows)
            widths.append(Counter())
            for manifest in manifests(own):
                for chunk in manifest.chunks:
                    if chunk.content == "rows":
                        assert chunk.bits is not None and chunk.row_count is not None
                        widths[-1][chunk.bits] += chunk.row_count
    assert rows[1].differences(rows[0]) == []
    assert widths[1] == widths[0] and len(widths[0]) == 3, widths


def test_trainings_go_on_from_each_others_checkpoints(place: Place) -> None:
    expected = Both("adagrad", None)
    losses = expected.train(None, 37)
    with served(3) as home:
        first = Both("adagrad", SMALL, home)
        with checkpointing(first, place, **_WAITS) as ckpt:
            found = first.train(ckpt, 12)
    second = Both("adagrad", None)
    with checkpointing(second, place, when_busy="wait") as ckpt:
        assert ckpt.batches_done == 12
        found += second.train(ckpt, 11)
    with served(2) as home:
        third = Both("adagrad", SMALL, home)
        with checkpointing(third, place, **_WAITS) as ckpt:
            assert ckpt.batches_done == 23
            found += third.train(ckpt, 14)
        third.same_as(expected)
    assert found == losses
    assert [one.servers for one in manifests(place)] == [2, 2, 2, None, None, None, 3, 3, 3]


def test_rows_on_servers_with_parity(place: Place) -> None:
    with protected(5, Parity(data=4)) as (_, home):
        both = Both("adagrad", SMALL, home)
        with checkpointing(both, place, **_WAITS) as ckpt:
            both.train(ckpt, 23)
        for manifest in manifests(place):
            assert manifest.servers == 5
            assert manifest.stripes is not None and manifest.stripes.fits
        restored(place, "adagrad").same_as(both)


@pytest.mark.nightly("loops")
def test_several_trainers_name_their_rows_to_all_servers(place: Place, tmp_path: Path) -> None:
    case = Case(run=place.run, staging=str(place.staging), batches=23, servers=3, at_servers=True)
    with place.agent():
        (found,) = on_ranks([case], 2, tmp_path / "first")
        expected = alone(case, 2)
        assert found.rows.differences(expected.rows) == []
        longer = replace(case, batches=31, servers=2, slots={"users": 60, "items": 90})
        (found,) = on_ranks([longer], 2, tmp_path / "second")
        expected = alone(longer, 2)
        assert found.rows.differences(expected.rows) == []
    assert {(one.ranks, one.servers) for one in manifests(place)} == {(2, 3), (2, 2)}
    for manifest in manifests(place):
        rows = {chunk.rank for chunk in manifest.chunks if chunk.content == "rows"}
        assert rows and min(rows) >= 2
    run = run_of(place)
    assert all(validate(run, name, level="full").passed for name in run.live_line())
    plain = plain_model(sparse=True)
    optimizers = optimizers_of(case, plain)
    with checkpoints_of(
        replace(longer, at_servers=False), plain, optimizers, Part(case.epoch)
    ) as checkpoints:
        assert checkpoints is not None and checkpoints.batches_done == 31
        assert rows_of_plain(plain, optimizers[0]).differences(expected.rows) == []


def test_the_slots_of_a_trainer_have_no_rows_of_servers(place: Place) -> None:
    sizes = {}
    for at_servers in (False, True):
        here = replace(
            place, staging=place.staging / str(at_servers), run=place.run + str(at_servers)
        )
        with served(3) as home:
            both = Both("adagrad", SMALL, home)
            with checkpointing(both, here, at_servers=at_servers) as ckpt:
                both.train(ckpt, 12)
                sizes[at_servers] = ckpt.memory_bound_bytes
        slots = StagedRun(here.run_directory).slots_directory
        assert {path.name[:6] for path in slots.iterdir()} == (
            {f"r{number:05d}" for number in range(4)} if at_servers else {"r00000"}
        )
    assert sizes[True] < sizes[False]


def test_the_chunks_of_servers_count_towards_the_manifest_and_tables_towards_a_command(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(3) as home:
        both = Both("adagrad", SMALL, home)
        with checkpointing(both, place, **_WAITS) as ckpt:
            estimated, _ = ckpt._parts.records._joined(record_bound._AS_SET)
            both.train(ckpt, 12)
        stored = manifests(place)[-1]  # the oldest
        assert stored.kind == "full"
        assert {chunk.rank for chunk in stored.chunks} == {0, 1, 2, 3}
        # The estimate leaves out the trainer's sample of the tables that servers stage.
        assert estimated.chunks == len(stored.chunks) - 1, [chunk.key for chunk in stored.chunks]
    monkeypatch.setattr(served_part, "_MOST_TEXT_BYTES", 300)
    with served(3) as home:
        both = Both("adagrad", SMALL, home)
        message = r"Staging\(at_servers=True\): found \d+ bytes that describe its tables"
        with pytest.raises(SettingsError, match=message):
            both.checkpointer(place, at_servers=True)


def test_a_server_that_cannot_stage_costs_a_checkpoint(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with served(3) as home:
        both = Both("adagrad", SMALL, home)
        with checkpointing(both, place, on_error="continue", **_WAITS) as ckpt:
            in_the_way = StagedRun(place.run_directory).slot_path(2, 0)
            in_the_way.mkdir(mode=0o700, parents=True)
            while in_the_way.name not in caplog.text:
                both.train(ckpt, 1)  # a step notes what has failed
            assert "server 2: " in caplog.text
            in_the_way.rmdir()
            both.train(ckpt, 15)
        assert len(manifests(place)) >= 2
        restored(place, "adagrad").same_as(both)


def damage(slot: Path) -> None:
    with slot.open("r+b") as file:
        file.write(bytes(8))  # ids of rows, or part of the state, that are not what was staged


@pytest.mark.parametrize("number", [0, 3])
def test_a_part_that_an_agent_rejects_ends_the_whole_attempt(
    place: Place, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    with served(3) as home:
        both = Both("adagrad", SMALL, home)
        settings = _WAITS | {"on_error": "continue", "busy_wait_seconds": 120.0}
        with both.checkpointer(place, **settings) as ckpt:
            ckpt.restore()
            both.train(ckpt, 5)
            until(lambda: len(StagedRun(place.run_directory).staged_jobs()) == 4)
            damage(StagedRun(place.run_directory).slot_path(number, 0))
            with place.agent():
                both.train(ckpt, 17)
                ckpt.close()
                until(lambda: not StagedRun(place.run_directory).staged_jobs())
        if number:
            assert "part of embedding server 3: " in caplog.text
        assert [one.step for one in manifests(place)] == [22, 20, 15, 10]
        restored(place, "adagrad").same_as(both)


def test_a_part_that_is_lost_with_its_server_ends_the_attempt(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Its host is gone, so no agent will store it. Parity makes up for the server itself."""
    with servers(3, parity=Parity(data=2)) as home:
        assert isinstance(home, ServedHome)
        both = Both("adagrad", SMALL, home)
        settings = _WAITS | {"on_error": "continue", "busy_wait_seconds": 120.0}
        with both.checkpointer(place, ranks_seconds=3.0, **settings) as ckpt:
            ckpt.restore()
            both.train(ckpt, 5)
            until(lambda: len(StagedRun(place.run_directory).staged_jobs()) == 4)
            os.kill(home.greetings[1].pid, signal.SIGKILL)
            (of_it,) = (
                path
                for path in StagedRun(place.run_directory).staged_jobs()
                if path.stem.endswith("r00002")
            )
            of_it.unlink()
            with place.agent():
                both.train(ckpt, 17)
                ckpt.close()
                until(lambda: not StagedRun(place.run_directory).staged_jobs())
        assert "embedding server 2 was lost, and so may be its part" in caplog.text
        assert [one.step for one in manifests(place)] == [22, 20, 15, 10]
        restored(place, "adagrad").same_as(both)


def test_rows_are_read_as_they_are_after_a_cut_that_has_failed(place: Place) -> None:
    expected = Both("adagrad", None)
    expected.train(None, 19)
    with served(3) as home:
        both = Both("adagrad", SMALL, home)
        with checkpointing(both, place, on_error="continue", **_WAITS) as ckpt:
            slot = StagedRun(place.run_directory).slot_path(0, 0)
            slot.unlink()
            slot.mkdir(mode=0o700)
            both.train(ckpt, 19)
            assert ckpt.stats.failed > 0
            both.same_as(expected)
            slot.rmdir()
        restored(place, "adagrad").same_as(expected)


def test_more_rows_than_one_call_names(place: Place) -> None:
    """Most of them were never trained, so that no server has them."""
    rows = 150_000

    def trained(home: Home | None, batches: int) -> tuple[nn.ModuleDict, dict[str, Tensor]]:
        initial = Uniform(seed=3)
        model = nn.ModuleDict({"users": nn.Embedding(rows, 2, sparse=True, device="meta")})
        ids: Any = [{"users": n * 7_919 % rows} for n in range(640)]  # a list serves as a dataset
        reader: Any = ResumableLoader(DataLoader(ids, batch_size=64))
        if home is None:
            fill(model.to_empty(device="cpu"), initial)
        else:
            cached(model, home, capacity_rows=1_000, initial=initial)
            reader = Lookahead(reader, model, window=3)
        optimizer = Adagrad(model.parameters(), lr=0.1)
        with Checkpointer(
            model,
            optimizer,
            reader=reader,
            run=place.run,
            interval_batches=4,
            staging=Staging(directory=place.staging, at_servers=home is not None, when_busy="wait"),
            options=Options(announce=False, handle_sigterm=False),
        ) as ckpt:
            ckpt.restore()
            for batch in ckpt.batches(total=batches):
                optimizer.zero_grad()
                model["users"](batch["users"]).sum().backward()
                optimizer.step()
        return model, read_rows(model, "users", optimizer)

    with place.agent():
        with served(2) as home:
            _, first = trained(home, 10)
        assert manifests(place)[-1].kind == "full"
        _, again = trained(None, 10)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_servers_are_asked_for(place: Place) -> None:
    both = Both("adagrad", SMALL)
    with pytest.raises(
        SettingsError, match=r"Staging\(at_servers=True\): found a home that is no s"
    ):
        both.checkpointer(place, at_servers=True)
    plain = plain_model()
    with pytest.raises(SettingsError, match="found no tables in a cache"):
        Checkpointer(
            plain,
            SGD(plain.parameters(), lr=0.1),
            run=place.run,
            interval_batches=5,
            staging=Staging(directory=place.staging, at_servers=True),
        )
