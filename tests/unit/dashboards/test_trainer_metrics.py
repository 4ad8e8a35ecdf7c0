"""Metrics of a trainer: what a scrape says is what the Checkpointer knows, and costs it nothing."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import urllib.error
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import prometheus_client
import pytest
import torch

import recpoint
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.counting import CAUSES, SECONDS, Histogram, cause_of, cause_of_name
from recpoint.dashboards import terminal
from recpoint.dashboards.metrics.table import AGENT_METRICS, METRICS, TRAINER_METRICS
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.processes import servers
from recpoint.errors import RecpointError, SettingsError, StaleWriter, StoreFull, StoreUnavailable
from recpoint.installation import install_command
from tests.cached_training import Batches, cached_model, lookahead
from tests.cached_training import train as train_cached
from tests.keyed_training import KeyedTraining, keyed_checkpointer
from tests.scraping import scrape, value
from tests.torch_interpreter import run_program
from tests.training_builder import Place, checkpointer, simple_training, train, until

SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"), tmp_path / "staging")


def exposed(metrics: object) -> set[str]:
    return {
        metric.name + suffix
        for metric in METRICS
        if metric in metrics  # type: ignore[operator]
        for suffix in SUFFIXES[metric.kind]
    }


def test_a_scrape_says_what_the_checkpointer_knows(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=2)
    with recpoint.export_metrics(ckpt, port=0) as export, ckpt:
        assert export.url is not None and export.url.startswith("http://127.0.0.1:")
        before = scrape(export.url)
        assert value(before, "recpoint_trainer_running", run=place.run) == 0
        assert value(before, "recpoint_trainer_lag_seconds") is None
        ckpt.restore()
        train(training, ckpt, 5)  # cut at 2, skipped at 4: nobody has stored the first
        alone = scrape(export.url)
        assert value(alone, "recpoint_trainer_running", run=place.run) == 1
        assert value(alone, "recpoint_trainer_agent_running") == 0
        assert value(alone, "recpoint_trainer_lag_batches") == 5
        assert value(alone, "recpoint_trainer_pending_checkpoints") == 1
        assert value(alone, "recpoint_trainer_checkpoints_total", result="skipped") == 1
        assert value(alone, "recpoint_trainer_last_commit_timestamp_seconds") is None
        with place.agent():
            assert value(scrape(export.url), "recpoint_trainer_agent_running") == 1
            until(lambda: ckpt.stats.committed == 1)
            train(training, ckpt, 1)
            until(lambda: ckpt.stats.committed == 2)
            found = scrape(export.url)
            stats = ckpt.stats
            assert value(found, "recpoint_trainer_lag_batches") == stats.lag_batches == 0
            assert value(found, "recpoint_trainer_batches_total") == 6
            assert value(found, "recpoint_trainer_checkpoints_total", result="committed") == 2
            assert value(found, "recpoint_trainer_stall_seconds_count") == 2
            stalled = value(found, "recpoint_trainer_stall_seconds_sum")
            assert stalled == pytest.approx(sum(stats.stalls_ms) / 1000)
            assert value(found, "recpoint_trainer_stall_seconds_bucket", le="+Inf") == 2
            listed = (Path(place.run) / "chunks").rglob("*.safetensors")
            stored = sum(
                value(found, "recpoint_trainer_stored_bytes_total", kind=kind) or 0
                for kind in ("full", "increment")
            )
            assert stored == sum(path.stat().st_size for path in listed)
            free = value(found, "recpoint_trainer_staging_free_bytes") or 0
            bound = value(found, "recpoint_trainer_staging_bound_bytes")
            assert bound == ckpt.memory_bound_bytes < free
            missing = exposed(TRAINER_METRICS) - {name for name, _ in found}
            # No table is in a cache, and none is keyed.
            of_caches = ("_cache_", "_lost_", "_server_", "_key")
            missing -= {name for name in missing if any(one in name for one in of_caches)}
            assert not missing
            assert {name for name, _ in found if "recpoint" in name} <= exposed(TRAINER_METRICS)
            ckpt.close()
        after = scrape(export.url)
        assert value(after, "recpoint_trainer_running", run=place.run) == 0
        assert value(after, "recpoint_trainer_lag_seconds") is None
        url = export.url
    with pytest.raises(urllib.error.URLError):
        scrape(url)


def _has_committed(ckpt: recpoint.Checkpointer, count: int) -> bool:
    return ckpt.stats.committed == count


class CachedTraining:
    """A training of cached tables, with a checkpoint every 5 batches."""

    def __init__(self, place: Place, home: Home | None = None) -> None:
        self._model, self.cache = cached_model({"users": 30, "items": 40}, home)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self._reader = lookahead(Batches(), self._model, 10)
        self.checkpointer = recpoint.Checkpointer(
            self._model,
            self._optimizer,
            run=place.run,
            reader=self._reader,
            interval_batches=5,
            staging=recpoint.Staging(directory=place.staging),
            options=recpoint.Options(handle_sigterm=False, announce=False),
        )

    def train(self, batches: int) -> None:
        train_cached(
            self._model,
            self._optimizer,
            self._reader,
            batches=batches,
            after=lambda _: self.checkpointer.step(),
        )


def test_what_a_cache_does_is_counted(place: Place) -> None:
    trained = CachedTraining(place)
    ckpt, cache = trained.checkpointer, trained.cache
    with recpoint.export_metrics(ckpt, port=0) as export, ckpt, place.agent():
        ckpt.restore()
        trained.train(20)
        assert export.url is not None
        # The cache goes on fetching ahead, so its counts grow between two looks at them.
        before = cache.stats
        found = scrape(export.url)
        after = ckpt.stats.cache
        assert after is not None
        prefix = "recpoint_trainer_cache"
        assert value(found, f"{prefix}_lookups_total", result="hit") == after.hits > 0
        assert value(found, f"{prefix}_lookups_total", result="miss") == after.misses == 0
        for count in ("fetched_rows", "fetched_bytes", "written_rows", "written_bytes"):
            way, of = count.split("_")
            shown = value(found, f"{prefix}_{of}_total", way=way)
            assert shown is not None and 0 < shown
            assert getattr(before, count) <= shown <= getattr(after, count)
        waited = value(found, f"{prefix}_wait_seconds_total")
        assert waited == pytest.approx(after.wait_seconds)
        assert value(found, f"{prefix}_window_batches") == after.window > 0
    run = Run.open(open_store(place.run))
    newest = run.manifest(*run.live_line()[0])
    assert newest.cache is not None and newest.cache.hits > 0
    assert "cache: 100.00% of" in terminal.stall_text(newest)


def test_keys_are_counted_while_training_goes_on(place: Place) -> None:
    training = KeyedTraining(9, admit=recpoint.Seen(times=2))
    ckpt = keyed_checkpointer(training, place)
    with recpoint.export_metrics(ckpt, port=0) as export, ckpt:
        assert export.url is not None
        assert ckpt.stats.keyed == {"users": (0, 0, 0, 0)}
        ckpt.restore()
        for _ in range(12):
            training.batch()
            ckpt.step()
        counts = training.model.users.counts
        assert ckpt.stats.keyed == {"users": counts} and min(counts) > 0
        exposed_metrics = scrape(export.url)
        labels = {"run": place.run, "table": "users"}
        assert value(exposed_metrics, "recpoint_trainer_keyed_rows", **labels) == counts.rows_used
        for result in ("inserted", "evicted", "refused"):
            keys = value(exposed_metrics, "recpoint_trainer_keys", **labels, result=result)
            assert keys == getattr(counts, result)


def test_metrics_say_which_server_is_rebuilt_and_when_it_is_whole_again(place: Place) -> None:
    with servers(3, parity=Parity(data=2)) as home:
        assert isinstance(home, ServedHome)
        trained = CachedTraining(place, home)
        ckpt = trained.checkpointer
        prefix = "recpoint_trainer_server"
        with recpoint.export_metrics(ckpt, port=0) as export, ckpt, place.agent():
            assert export.url is not None
            ckpt.restore()
            trained.train(20)
            found = scrape(export.url)
            for server in "123":
                rows = value(found, f"{prefix}_rows", server=server)
                assert rows == value(found, f"{prefix}_known_rows", server=server)
                assert rows is not None and rows > 0
            assert value(found, f"{prefix}_whole_timestamp_seconds") is None
            pid = home.greetings[1].pid
            lost = time.time()
            os.kill(pid, signal.SIGKILL)
            trained.train(10)
            url = export.url
            name = f"{prefix}_whole_timestamp_seconds"
            until(lambda: value(scrape(url), name, server="2"))
            found = scrape(url)
            whole = value(found, name, server="2")
            assert whole is not None and lost - 1 < whole < time.time() + 1
            assert value(found, f"{prefix}_known_rows", server="2") == value(
                found, f"{prefix}_rows", server="2"
            )


def test_rows_copied_before_and_in_the_stall_are_counted(place: Place) -> None:
    training = simple_training()
    reader = recpoint.Lookahead(
        training.reader, ids=lambda batch: {"users": batch[0], "items": batch[1]}
    )
    ckpt = checkpointer(replace(training, reader=reader), place, interval_batches=4)  # type: ignore[arg-type]
    with recpoint.export_metrics(ckpt, port=0) as export, ckpt, place.agent():
        ckpt.restore()
        training.reader = iter(reader)  # type: ignore[assignment]
        assert export.url is not None
        sums = dict.fromkeys(("rows_before", "bytes_before", "rows_in_stall", "bytes_in_stall"), 0)
        for committed in (1, 2, 3):
            train(training, ckpt, 4)
            for name in sums:
                sums[name] += getattr(ckpt.stats.copied, name)
            until(partial(_has_committed, ckpt, committed))
        found = scrape(export.url)
        for name, expected in sums.items():
            what, when = name.split("_", 1)
            assert value(found, f"recpoint_trainer_copied_{what}_total", when=when) == expected
        assert sums["rows_before"] > 0 and sums["rows_in_stall"] > 0


def test_restores_and_failures_are_counted_by_cause(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = simple_training()
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 2)
    again = simple_training()
    with recpoint.export_metrics(ckpt := checkpointer(again, place), port=0) as export:
        ckpt.restore()
        assert export.url is not None
        assert value(scrape(export.url), "recpoint_trainer_restores_total") == 1
        assert value(scrape(export.url), "recpoint_trainer_batches_total") == 0
        (place.run_directory / "slots" / "r00000-0.bin").unlink()
        monkeypatch.setattr("os.posix_fallocate", _no_space)
        again.model.users.weight.data.add_(1)
        ckpt.mark_all("users")
        train(again, ckpt, 2)
        found = scrape(export.url)
        failed = {
            cause: value(found, "recpoint_trainer_failures_total", cause=cause) for cause in CAUSES
        }
        assert failed.pop("staging_full") == ckpt.stats.failed >= 1
        assert set(failed.values()) == {0}
        ckpt.close(final=False)


def _no_space(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_scraping_touches_no_generator_and_adds_nothing_to_step(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place)
    ckpt.restore()
    with recpoint.export_metrics(ckpt, port=0) as export:
        assert export.url is not None
        state = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]
        for _ in range(20):
            scrape(export.url)
        now = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]
        assert state == now
        assert "step" not in vars(ckpt), "step() must not be replaced"
    ckpt.close(final=False)


def test_a_registry_of_the_users_own(place: Place) -> None:
    ckpt = checkpointer(simple_training(), place)
    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    export = recpoint.export_metrics(ckpt, registry=registry)
    assert export.url is None
    text = prometheus_client.generate_latest(registry).decode()
    assert "recpoint_trainer_running" in text and "process_" not in text
    with pytest.raises(SettingsError, match="one Checkpointer for each registry"):
        recpoint.export_metrics(ckpt, registry=registry)
    export.close()
    export.close()
    assert b"recpoint" not in prometheus_client.generate_latest(registry)


def test_wrong_uses_are_refused_by_name(place: Place) -> None:
    ckpt = checkpointer(simple_training(), place)
    registry = prometheus_client.CollectorRegistry()
    with pytest.raises(SettingsError, match="neither port nor registry"):
        recpoint.export_metrics(ckpt)
    with pytest.raises(SettingsError, match="both port and registry"):
        recpoint.export_metrics(ckpt, port=0, registry=registry)
    with pytest.raises(SettingsError, match="int"):
        recpoint.export_metrics(ckpt, registry=1)  # type: ignore[arg-type]
    with recpoint.export_metrics(ckpt, port=0) as export:
        assert export.url is not None
        port = int(export.url.split(":")[2].split("/")[0])
        with pytest.raises(SettingsError, match=f"metrics at 127.0.0.1:{port}"):
            recpoint.export_metrics(ckpt, port=port)


def test_a_forked_worker_does_not_keep_the_port(place: Place) -> None:
    ckpt = checkpointer(simple_training(), place)
    export = recpoint.export_metrics(ckpt, port=0)
    assert export.url is not None
    port = int(export.url.split(":")[2].split("/")[0])
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()

    def worker() -> None:
        ready.set()
        done.wait(240)

    child = context.Process(target=worker)
    child.start()
    try:
        assert ready.wait(240)
        export.close()
        with recpoint.export_metrics(ckpt, port=port) as taken:
            assert taken.url == export.url
    finally:
        done.set()
        child.join(60)
    assert child.exitcode == 0


def test_recpoint_does_without_prometheus_and_says_what_is_missing(tmp_path: Path) -> None:
    program = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "prometheus_client":
            raise ModuleNotFoundError(name)
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "prometheus_client" else found(name, *a)
sys.meta_path.insert(0, Missing())
import torch, recpoint
model = torch.nn.Embedding(3, 2)
ckpt = recpoint.Checkpointer(model, torch.optim.SGD(model.parameters(), lr=1.0),
                             run={str(tmp_path / "run")!r}, staging={str(tmp_path / "s")!r},
                             interval_batches=1)
try:
    recpoint.export_metrics(ckpt, port=0)
except recpoint.errors.SettingsError as error:
    print(error)
assert "prefect" not in sys.modules
"""
    done = run_program(program)
    assert done.returncode == 0, done.stderr
    assert "no prometheus_client installed" in done.stdout
    assert install_command("metrics") in done.stdout


def test_names_are_as_prometheus_wants_them() -> None:
    for metric in METRICS:
        assert metric.name.startswith("recpoint_")
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric
        assert not set(metric.labels) - {
            "run",
            "result",
            "kind",
            "cause",
            "version",
            "when",
            "way",
            "server",
            "table",
            "sink",
        }, metric
        assert not any(unit in metric.name for unit in ("_ms", "_mb", "minutes")), metric
        assert metric.help[0].isupper() or metric.help[0].isdigit() or metric.name in metric.help
        assert metric.help.endswith("."), metric
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    shared = {metric.name for metric in TRAINER_METRICS} & {m.name for m in AGENT_METRICS}
    assert shared == {"recpoint_build_info"}


def test_every_error_has_one_cause_and_the_names_say_the_same() -> None:
    def kinds(base: type[BaseException]) -> list[type[BaseException]]:
        return [base, *(kind for below in base.__subclasses__() for kind in kinds(below))]

    for kind in kinds(RecpointError):
        if kind.__module__ != "recpoint.errors":
            continue
        error = kind("a", found="b", expected="c", next_step="d")  # type: ignore[call-arg]
        assert cause_of(error) in CAUSES
        assert cause_of_name(kind.__name__) == cause_of(error)
    away = StoreUnavailable("", found="", expected="", next_step="")
    assert cause_of(away) == "store_unavailable"
    assert cause_of(StoreFull("", found="", expected="", next_step="")) == "store_full"
    assert cause_of(StaleWriter("", found="", expected="", next_step="")) == "superseded"
    assert cause_of(MemoryError()) == "memory"
    assert cause_of(OSError()) == "host"
    assert cause_of(ZeroDivisionError()) == "other"
    assert cause_of_name("SystemExit") == cause_of_name("annotations") == "other"
    assert len(set(CAUSES)) == len(CAUSES)


def test_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for number in (0.0, 1.0, 1.5, 2.0, 2.1, 9.0):
        histogram.add(number)
    assert histogram.read().counts == (2, 2, 2)
    assert histogram.read().total == pytest.approx(15.6)
    assert list(SECONDS) == sorted(SECONDS) and SECONDS[0] == 0.001 and SECONDS[-1] == 60


def test_rows_that_nothing_had_marked_are_counted(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, verify_unmarked_rows=1000, when_busy="wait")
    with place.agent(), ckpt, recpoint.export_metrics(ckpt, port=0) as export:
        ckpt.restore()
        assert export.url is not None
        assert value(scrape(export.url), "recpoint_trainer_unmarked_rows_total") == 0
        ckpt.checkpoint()
        training.model.users.weight.detach().numpy()[[3, 5]] = 1.0
        train(training, ckpt, 2)
        found = value(scrape(export.url), "recpoint_trainer_unmarked_rows_total")
        assert found == ckpt.stats.unmarked_rows == 2
