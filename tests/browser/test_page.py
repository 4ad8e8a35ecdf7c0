"""What the live page shows is what the catalogs hold, and it shows it while they change."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import pytest
import torch

from recpoint.catalog.check.validate import record, validate
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.retention.plan import plan_prune
from recpoint.catalog.retention.prune import execute
from recpoint.catalog.retention.rules import RetentionPolicy
from recpoint.catalog.run.pins import pin
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.trainer_note import write_trainer_note
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.local import LocalStore
from recpoint.errors import RanksMissing
from recpoint.format.history import History
from recpoint.format.manifest import Manifest, MeasuredLoss
from recpoint.format.naming import GENERATION_KEY, MANIFEST_KEY, PART_KEY, ManifestName
from recpoint.format.records import pack_record
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.publisher import SinkPublisher
from recpoint.units import bytes_text, time_text
from tests import catalog_builder
from tests.agent_process import AgentProcess
from tests.browser.conftest import PATIENCE_SECONDS, dashboard, opened_page
from tests.catalog_builder import build, copy_run, new_run, publish
from tests.job_builder import stage
from tests.keyed_run import KeyedTrainer
from tests.polling import until as poll
from tests.rank_jobs import RankJobs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("nicegui", reason="nicegui is not installed")
STYLE = (Path(__file__).parents[2] / "dashboards" / "page.css").read_text()

T = TypeVar("T")

# One machine runs page, browser, trainer and agent: all tests of this file on one worker.
pytestmark = [pytest.mark.nightly("browser"), pytest.mark.xdist_group("browser")]

TRAINER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch
torch.sparse.check_sparse_tensor_invariants.disable()
from pathlib import Path
from tests.training_builder import Place, checkpointer, simple_training
place = Place(sys.argv[2], Path(sys.argv[3]))
training = simple_training()
with checkpointer(
    training, place, interval_batches=None, interval_seconds=1.0, handle_sigterm=True
) as ckpt:
    ckpt.restore()
    while True:
        training.batch()
        ckpt.step()
        time.sleep(0.02)  # a batch of a model of more than a few rows
"""

#: In the browser: texts whose contrast with their ground is below 4.5 (WCAG 2.2, AA).
LOW_CONTRAST = """() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = e => { for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length && (c.length < 4 || c[3] > 0)) return c; } return [255, 255, 255]; };
  return [...document.querySelectorAll('main *')]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
    .filter(e => e.checkVisibility() && e.localName !== 'style')
    .map(e => { const style = getComputedStyle(e);
      const a = light(parse(e instanceof SVGElement ? style.fill : style.color));
      const b = light(ground(e));
      return [e.textContent.slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; })
    .filter(([, ratio]) => ratio < 4.5);
}"""


#: In the browser: elements that hide a part of their text.
CLIPPED = """() => [...document.querySelectorAll('main *')]
  .filter(e => e.checkVisibility() && e.textContent.trim())
  .filter(e => ['hidden', 'clip'].includes(getComputedStyle(e).overflowX))
  .filter(e => e.scrollWidth > e.clientWidth)
  .map(e => e.textContent.slice(0, 40))"""

#: In the browser: begin and end of the time axis of each chart, and how much each draws.
AXES = """() => [...document.querySelectorAll('.chart')]
  .map(e => getElement(Number(e.id.slice(1))).chart.getOption())
  .map(o => [o.xAxis[0].min, o.xAxis[0].max, o.series[0].data.length])"""

#: In the browser: the headings and cells of the columns of numbers that do not stand at the right.
NOT_RIGHT = """() => [...document.querySelectorAll('main .number')]
  .filter(e => e.checkVisibility() && getComputedStyle(e).textAlign !== 'right')
  .map(e => e.textContent)"""

BROKEN_PIECES = """() => [...document.querySelectorAll('td.long a > span')]
  .filter(e => e.getClientRects().length > 1).map(e => e.textContent)"""

NEWEST = "Newest checkpoint that restores"

LOSS = MeasuredLoss(
    increase=(1e-4).hex(),
    price=(1e-9).hex(),
    low=(1e-5).hex(),
    high=(8e-5).hex(),
    predicted=(4e-5).hex(),
    batches=312,
)

#: Rows of tables, without the remarks below them.
ROW = "tbody tr:visible:not(:has(td.remark))"


def commit(
    run: Run,
    step: int,
    cut: int,
    *,
    parent: Manifest | None = None,
    stall_us: int = 4_000,
    loss: MeasuredLoss | None = None,
) -> Manifest:
    """A checkpoint cut at a time, in ms, and committed 2 s later; one is expected every 600 s."""
    tables = catalog_builder.tables(rows=400, dim=16)
    dirty = None if parent is None else [torch.arange(30), torch.arange(10)]
    history = History(trained_ms=0, lossy_restores=0, precision=None, due_ms=600_000)
    built = build(
        run,
        tables,
        step=step,
        generation=1,
        parent=parent,
        dirty=dirty,
        rows_per_chunk=400,
        history=history,
    )
    update = {"snapshot_ms": cut, "staged_ms": cut + 100, "committed_ms": cut + 2000}
    made = built.manifest.model_copy(update=update | {"stall_us": stall_us, "loss": loss})
    publish(run, replace(built, manifest=made))
    path = Path(run.url) / MANIFEST_KEY.of(step, 1)
    os.utime(path, ns=(made.committed_ms * 10**6,) * 2)
    return made


def small_run(directory: Path) -> tuple[Run, list[Manifest]]:
    run = new_run(directory)
    run.claim(None)
    now = now_ms()
    full = commit(run, 100, now - 100_000)
    second = commit(run, 200, now - 60_000, parent=full, stall_us=9_000)
    return run, [full, second, commit(run, 300, now - 20_000, parent=second, loss=LOSS)]


def until(look: Callable[[], T | None]) -> T:
    return poll(look, seconds=PATIENCE_SECONDS)


def cells(page: Page, row: int = 0) -> list[str]:
    line = page.locator(ROW).nth(row)
    line.wait_for()  # a page that has just been loaded builds its table a moment later
    return line.locator("th, td").all_inner_texts()


def field(page: Page, name: str) -> str:
    return page.locator(f"dt:text-is('{name}') + dd").inner_text()


def note(page: Page, name: str) -> str:
    """The note below a figure."""
    return page.locator(f"dt:text-is('{name}') ~ dd.note").inner_text()


def status(page: Page) -> str:
    return page.get_by_role("status").inner_text()


def seconds(shown: str) -> float:
    """Of an age like `20.4 s` or `1 min 5 s`."""
    minutes, _, rest = shown.rpartition(" min ")
    assert rest.endswith(" s"), shown
    return 60 * float(minutes or 0) + float(rest[:-2])


def shows(page: Page, words: str) -> None:
    page.get_by_text(words).first.wait_for()


def test_no_such_run(page: Page, tmp_path: Path) -> None:
    with dashboard(tmp_path / "log", str(tmp_path / "run")) as address:
        page.goto(address)
        assert page.get_by_role("heading", level=1).inner_text() == "recpoint: runs"
        page.goto(address + "run/1")
        shows(page, "No such run")


def test_stores_that_serving_reads_are_shown_live(page: Page, tmp_path: Path) -> None:
    run, made = small_run(tmp_path / "run")
    served, empty = f"sqlite:{tmp_path}/served.db", f"sqlite:{tmp_path}/empty.db"

    def sink_cells(row: int) -> list[str]:
        table = page.get_by_role("region", name="What readers see")
        return table.locator("tbody tr:visible").nth(row).locator("th, td").all_inner_texts()

    with open_sink(served) as sink:
        SinkPublisher(run.url, sink).poll()
        with dashboard(tmp_path / "log", run.url, "--sink", served, "--sink", empty) as address:
            page.goto(address)
            until(lambda: sink_cells(0)[0] == "up to date")
            assert sink_cells(0)[1:6] == [served, run.url, "300", "1", "0 s"]
            assert sink_cells(1)[:2] == ["empty", empty]
            commit(run, 400, now_ms(), parent=made[-1])
            until(lambda: sink_cells(0)[0] == "behind")
            assert sink_cells(0)[5].endswith(", 1 checkpoint")
            SinkPublisher(run.url, sink).poll()
            until(lambda: sink_cells(0)[0] == "up to date")
            assert sink_cells(0)[3:5] == ["400", "2"]
            assert page.evaluate(LOW_CONTRAST) == [] and page.evaluate(CLIPPED) == []


def test_the_values_are_the_catalogs(page: Page, tmp_path: Path) -> None:
    run, made = small_run(tmp_path / "run")
    pin(run, run.live_line()[1], label="release")
    plan = plan_prune(
        run, RetentionPolicy(keep_last=1, require_validated=False), grace_seconds=3600
    )
    execute(run, plan)
    job_file = stage(run, tmp_path / "staging", catalog_builder.tables(), step=400, generation=1)
    slot = StagedRun(job_file.parent.parent).slots_directory / job_files.read_job(job_file).slot
    slot.write_bytes(bytes(slot.stat().st_size))
    rejected = persist_job(job_file)
    validated = validate(run, ManifestName(200, 1))
    assert validated.result == "passed"
    record(run, validated)
    with dashboard(tmp_path / "log", run.url) as address:
        page.goto(address)
        shows(page, "fine")

        def risk_is_right() -> bool:
            before = RunWatch(run).refresh().lag
            shown = re.fullmatch(r"about (.*),\n([0-9]+) batches", cells(page)[2])
            after = RunWatch(run).refresh().lag
            assert shown and before.at_risk_batches and after.at_risk_batches
            assert seconds(shown[1]) - 0.5 <= after.at_risk_seconds
            assert int(shown[2]) <= after.at_risk_batches + 1
            close = before.at_risk_batches - 9 <= int(shown[2])  # 400 ms a batch
            return close and before.at_risk_seconds - 3 <= seconds(shown[1])

        until(risk_is_right)
        row = cells(page)
        assert row[8] == "passed (sample), step 200"
        stored = sum(manifest.stored_bytes for manifest in made)
        full = sum(manifest.full_bytes for manifest in made)
        assert row[0] == "fine" and row[1] == run.url and row[3] == "300"
        assert row[4] == time_text(made[-1].committed_ms)
        assert row[5] == "4 ms" and row[6] == f"{stored / full:.1%}"
        page.get_by_role("link", name=run.url).click()
        page.get_by_role("heading", level=1, name=run.url).wait_for()
        assert f"{bytes_text(stored)} of {bytes_text(full)}" in field(
            page, "Written, of full fp32 checkpoints"
        )
        assert field(page, "Chain") == "3 as taken, 3 to read"
        rows = sum(c.bytes for m in made for c in m.chunks if c.content == "rows")
        state = sum(c.bytes for c in made[-1].chunks if c.content == "state")
        assert f"reads {bytes_text(rows + state)} in 3 manifests" in note(page, "A restore")
        assert note(page, NEWEST) == "step 300; expected every 10 min 0 s"
        assert field(page, "Stall of a checkpoint") == "4 ms"
        assert note(page, "Stall of a checkpoint").startswith("median; most 9 ms; ")
        table = page.locator("table:visible").first
        found = [
            line.locator("th, td").all_inner_texts()
            for line in table.locator("tbody tr:visible").all()
        ]
        assert [line[0] for line in found] == ["300", "200", "100"]
        assert [line[7] for line in found] == [bytes_text(m.stored_bytes) for m in made[::-1]]
        assert [line[5] for line in found] == ["4 ms", "9 ms", "4 ms"]
        assert [line[9] for line in found] == ["–", "sample", "–"]
        assert found[1][10] == "pinned (release)" and found[0][4] == "42.0 s, 105 batches"
        assert found[0][10] == "rounding costs at most 0.008% of the loss"
        assert field(page, "Cost of rounding") == (
            "Rounding costs 0.001% to 0.008% of the loss (95% confidence, 312 measured batches); "
            "0.01% is allowed. Predicted are 0.004%. The price λ of a bit is 1e-09. Step 300 has "
            "31.36 bits a value (of the rows, 100.0% exact)."
        )

        def age_is_right() -> bool:
            before = time.time() - made[-1].snapshot_ms / 1000
            shown = seconds(field(page, NEWEST).removesuffix(" old"))
            after = time.time() - made[-1].snapshot_ms / 1000
            assert shown - 0.5 <= after  # from a minute on in whole seconds
            return before - 3 <= shown

        until(age_is_right)  # the store is read, and the page filled, now and then
        until(lambda: page.locator(".chart svg").count() == 3)  # whose scripts are loaded later
        rules = page.get_by_text("Rules: the newest 1; what is pinned. Grace 1 h 0 min.")
        assert "3 stay, 0 to mark, 0 wait, 0 to delete" in rules.inner_text()
        planned = page.locator("table", has_text="The plan of the newest retention")
        assert [
            line.locator("th, td").all_inner_texts()
            for line in planned.locator("tbody tr:visible").all()
        ] == [[row.key, "stays", row.reason] for row in plan.rows()]
        failed = page.locator("table", has_text="As far as the catalog holds them")
        assert "step 400 (generation 1, " in failed.inner_text()
        assert f"{rejected.error_type}: {rejected.error[:1024]}" in failed.inner_text()
        captions = page.locator("figcaption").all_inner_texts()
        assert "at most 42.0 s and 105 batches" in captions[0]
        assert not page.get_by_role("alert").locator("p:visible").count()


@contextmanager
def trainer(run: str, staging: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    root = str(Path(__file__).parents[2])
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, root, run, str(staging)],
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_it_says_what_the_keys_of_tables_did(page: Page, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    trainer = KeyedTrainer(run)
    trainer.commit("full")
    trainer.commit()
    used = len(trainer.rows)
    with dashboard(tmp_path / "log", run.url) as address:
        page.goto(f"{address}run/0")
        until(lambda: page.locator(ROW).count() == 2)
        assert field(page, "Keys of tables") == (
            f"users: {used} in 11 rows; {trainer.inserted} inserted, "
            f"{trainer.inserted - used} evicted, {trainer.refused} refused."
        )
        assert f"{used} keys in 11 rows" in cells(page)[10]


def test_it_follows_a_trainer_and_alarms_when_the_agent_is_killed(
    page: Page, tmp_path: Path
) -> None:
    run, staging = str(tmp_path / "run"), tmp_path / "staging"

    def newest() -> int:
        shown = cells(page)[3]
        return int(shown.replace(",", "")) if shown[0].isdigit() else 0

    with dashboard(tmp_path / "log", run) as address:
        page.goto(address)
        shows(page, "NO ANSWER")  # the trainer makes the run
        with trainer(run, staging, tmp_path / "trainer.log") as training:
            with AgentProcess(staging, tmp_path / "agent.log") as agent:
                first = until(lambda: newest() or None)
                until(lambda: newest() > first)
                until(lambda: cells(page)[0] == "fine")
                agent.process.kill()
                agent.process.wait()
            until(lambda: cells(page)[0] == "ALARM")
            # A page's title comes by a message of its own, after the cells.
            until(lambda: page.title() == "(1) recpoint")
            until(lambda: f"1 of 1 run needs a look: {run}" in status(page))
            page.goto(address + "run/0")
            alert = page.get_by_role("alert").locator("p:visible")
            alert.first.wait_for()
            assert "No new checkpoint that restores for" in alert.first.inner_text()
            page.goto(address)
            with AgentProcess(staging, tmp_path / "agent.log"):
                until(lambda: cells(page)[0] == "fine")
                training.send_signal(signal.SIGTERM)
                until(lambda: cells(page)[0] == "ended")
                assert cells(page)[2] == "nothing:\nended, all is stored"
                last = Run.open(LocalStore(run)).live_line()[0].step
                until(lambda: newest() == last)


def test_fifty_runs_of_which_some_are_in_trouble(page: Page, tmp_path: Path) -> None:
    run, _ = small_run(tmp_path / "runs" / "00")
    urls = [run.url]
    for number in range(1, 50):
        urls.append(copy_run(run, tmp_path / "runs" / f"{number:02}").url)
    (Path(urls[7]) / MANIFEST_KEY.of(300, 1)).unlink()
    damaged = Path(urls[9]) / MANIFEST_KEY.of(300, 1)
    damaged.write_bytes(damaged.read_bytes()[:-30])
    urls[11] = str(tmp_path / "runs" / "nowhere")
    with dashboard(tmp_path / "log", *urls) as address:
        page.goto(address)
        until(lambda: page.locator(ROW).count() == 50)
        until(lambda: "2 of 50 runs need a look" in status(page))
        until(lambda: page.get_by_text("fine", exact=True).count() == 48)
        fine = [url for url in urls if url not in (urls[9], urls[11])]
        assert [cells(page, at)[1] for at in range(50)] == [urls[9], urls[11], *fine]
        assert cells(page, 9)[3] == "200" and cells(page, 9)[1] == urls[7]
        assert cells(page)[0] == "ALARM (2)" and cells(page, 1)[0] == "NO ANSWER"
        causes = page.locator("td.remark:visible").all_inner_texts()
        assert len(causes) == 2 and "And 1 more.\nNext: recpoint check" in causes[0]
        assert causes[1].startswith("No answer for ")
        page.get_by_role("link", name=urls[9]).click()
        page.get_by_role("alert").locator("p:visible").first.wait_for()
        assert note(page, NEWEST).startswith("step 200;")
        assert (
            page.locator("table:visible")
            .first.locator("tr:visible")
            .nth(1)
            .locator("td")
            .nth(1)
            .inner_text()
            == "damaged"
        )


def test_the_rank_that_a_checkpoint_waits_for_is_named(page: Page, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    jobs = RankJobs(run, [tmp_path / "host-0", tmp_path / "host-1"], catalog_builder.tables())
    first, second = jobs.stage(10)
    with suppress(RanksMissing):
        persist_job(first)
    persist_job(second)
    first, second = jobs.stage(20)
    with pytest.raises(RanksMissing):
        persist_job(first)
    part = Path(run.url) / PART_KEY.of(20, 1, jobs.attempt(20), rank=0)
    os.utime(part, (time.time() - 61, time.time() - 61))
    with dashboard(tmp_path / "log", run.url) as address:
        page.goto(address + "run/0")
        shows(page, "step 20 waits for rank 1 of 2")
        assert note(page, NEWEST).startswith("step 10;")
        persist_job(second)
        until(lambda: note(page, NEWEST).startswith("step 20;"))
        until(lambda: page.get_by_text("waits for rank").locator("visible=true").count() == 0)


def test_a_store_that_goes_away_keeps_what_was_seen(page: Page, tmp_path: Path) -> None:
    run, _ = small_run(tmp_path / "away")
    other = copy_run(run, tmp_path / "there")
    with dashboard(tmp_path / "log", run.url, other.url) as address:
        page.goto(address)
        until(lambda: cells(page)[0] == cells(page, 1)[0] == "fine")
        Path(run.url).rename(tmp_path / "hidden")
        until(lambda: cells(page)[0] == "NO ANSWER")
        assert cells(page)[3] == "300" and cells(page, 1)[0] == "fine"
        page.goto(address + "run/0")
        alert = page.get_by_role("alert").locator("p:visible")
        alert.first.wait_for()
        assert alert.first.inner_text().startswith("No answer for ")
        assert field(page, "Chain") == "3 as taken, 3 to read"
        page.goto(address)
        (tmp_path / "hidden").rename(run.url)
        until(lambda: cells(page)[0] == "fine")


def test_a_store_that_never_answers_holds_up_nobody(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = small_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes calls and says nothing
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with dashboard(tmp_path / "log", "s3://silent/run", run.url) as address:
            page.goto(address)
            until(lambda: cells(page, 1)[0] == "fine")
            assert cells(page)[:2] == ["reading", "s3://silent/run"] and cells(page)[9] == "never"


def test_what_a_store_says_is_text_and_never_markup(page: Page, tmp_path: Path) -> None:
    run, _ = small_run(tmp_path / "run")
    record = run.generation(1).model_copy(
        update={"host": "<img src=x onerror=alert(1)>\u202e{{1}}"}
    )
    (Path(run.url) / GENERATION_KEY.of(1)).write_bytes(pack_record(record))
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    with dashboard(tmp_path / "log", run.url) as address:
        page.goto(address + "run/0")
        shows(page, "<img src=x onerror=alert(1)>\\u202e{{1}}")
        assert page.locator("main img").count() == 0 and not dialogs


def test_texts_can_be_read_and_parts_have_roles(page: Page, tmp_path: Path) -> None:
    run, _ = small_run(tmp_path / "run")
    with dashboard(tmp_path / "log", run.url, str(tmp_path / "nowhere")) as address:
        page.goto(address)
        until(lambda: cells(page)[0] == "NO ANSWER" and cells(page, 1)[0] == "fine")
        assert page.get_by_role("main").count() == page.get_by_role("table").count() == 1
        assert page.get_by_role("columnheader").count() == 10
        assert page.get_by_role("rowheader").count() == 2
        assert page.evaluate(LOW_CONTRAST) == []
        page.goto(address + "run/1")
        page.get_by_role("alert").locator("p:visible").first.wait_for()
        assert page.evaluate(LOW_CONTRAST) == []
        assert page.evaluate("document.documentElement.lang") == "en-US"


@pytest.fixture(scope="module")
def layout(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Page, str]]:
    """One browser page and one dashboard: a run that is fine, one in alarm, two with little."""
    directory = tmp_path_factory.mktemp("layout")
    run = new_run(directory / "fine")
    run.claim(None)
    made = commit(run, 100, now_ms() - 5 * 3_600_000)
    for step in (200, 300, 400):
        made = commit(run, step, now_ms() - (420 - step) * 6_000, parent=made)
    execute(
        run,
        plan_prune(run, RetentionPolicy(keep_last=1, require_validated=False), grace_seconds=3600),
    )
    alarmed = copy_run(run, directory / "a-run-whose-newest-manifest-is-damaged")
    damaged = Path(alarmed.url) / MANIFEST_KEY.of(400, 1)
    damaged.write_bytes(damaged.read_bytes()[:-30])
    empty = new_run(directory / "empty")
    started = new_run(directory / "started")
    started.claim(None)
    urls = (run.url, alarmed.url, empty.url, started.url)
    with dashboard(directory / "log", *urls) as address, opened_page(browser) as page:
        yield page, address


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 800, 1400])
def test_nothing_overflows_and_all_can_be_read(
    layout: tuple[Page, str], width: int, scheme: Literal["light", "dark"]
) -> None:
    page, address = layout
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    for path, words, charts in (
        ("", "And 1 more.", 0),
        ("run/0", "Rules: the newest 1;", 3),
        ("run/1", "Chain of step 400", 3),
        ("run/2", "No trainer has started yet", 0),
    ):
        page.goto(address + path)
        shows(page, words)
        if charts:
            page.locator(".chart svg:visible").nth(charts - 1).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CLIPPED) == page.evaluate(LOW_CONTRAST) == []
        assert page.evaluate(NOT_RIGHT) == []
        assert page.locator("td.number").count() or path == "run/2"
        dark = (
            page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        )
        assert dark == (scheme == "dark")


def test_a_long_note_makes_its_figure_no_wider(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = tmp_path / "staging"
    monkeypatch.setenv("RECPOINT_STAGING", str(staging))
    run, _ = small_run(tmp_path / "a-run-with-long-names-in-its-path" / "run")
    stage(run, staging, catalog_builder.tables(), step=400, generation=1)
    write_trainer_note(StagedRun.of(staging, run.url), run.url, "training")
    with dashboard(tmp_path / "log", run.url) as address:
        for width in (420, 800, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(address + "run/0")
            shows(page, "once recpoint agent has stored it")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(CLIPPED) == []
        page.goto(address)
        pieces = page.locator("td.long a > span")
        pieces.first.wait_for()
        assert page.evaluate(BROKEN_PIECES) == []


def test_alarms_come_first_with_cause_and_command(layout: tuple[Page, str]) -> None:
    page, address = layout
    page.set_viewport_size({"width": 1400, "height": 900})
    page.goto(address)
    shows(page, "And 1 more.")
    assert "damaged" in cells(page)[1] and cells(page, 1)[0] == "fine"
    page.goto(address + "run/1")
    alarm = page.get_by_role("alert").locator("p:visible")
    alarm.first.wait_for()
    command = f"recpoint check {page.get_by_role('heading', level=1).inner_text()}"
    assert alarm.first.locator("code").inner_text() == command
    cause, advice = alarm.first.inner_text().split("\n")
    assert cause.startswith(f"{MANIFEST_KEY.of(400, 1)}: found ") and "Next" not in cause
    assert advice == f"Next: {command}, and restore an older checkpoint"
    top = {name: page.locator(name).first.bounding_box() for name in (".alarm", ".figures")}
    assert top[".alarm"] and top[".figures"] and top[".alarm"]["y"] < top[".figures"]["y"]
    big = page.locator(".headline .value")
    assert (
        big.inner_text().startswith("about ") and page.locator(".figures dt:visible").count() == 4
    )


def test_sections_without_content_are_hidden(layout: tuple[Page, str]) -> None:
    page, address = layout

    def headings(path: str, words: str) -> list[str]:
        page.goto(address + path)
        shows(page, words)
        return page.locator("h2:visible").all_inner_texts()

    all_but_failures = ["Charts", "This run", "Newest checkpoints", "Retention"]
    assert headings("run/0", "Rules: the newest 1;") == all_but_failures
    assert "Failures" in headings("run/1", "Chain of step 400")
    assert headings("run/2", "No trainer has started yet") == ["This run"]
    assert page.locator("table:visible, .figures:visible, figure:visible").count() == 0
    assert headings("run/3", "No checkpoint yet: the first appears here") == ["This run"]
    assert page.locator(".figures dt:visible").all_inner_texts() == ["A crash now would cost"]


def test_the_window_is_that_of_the_time_axes(layout: tuple[Page, str]) -> None:
    page, address = layout

    def axes(query: str) -> list[list[int]]:
        page.goto(f"{address}run/0{query}")
        until(lambda: page.locator(".chart svg").count() == 3)
        found: list[list[int]] = page.evaluate(AXES)
        assert len({(first, last) for first, last, _ in found}) == 1
        assert page.locator("a[aria-current]").count() == 1
        return found

    for query, hours, drawn in (("?window=1h", 1, 3), ("?window=6h", 6, 4), ("?window=24h", 24, 4)):
        found = axes(query)
        assert found[0][1] - found[0][0] == hours * 3_600_000
        assert abs(found[0][1] - now_ms()) < 60_000 and found[1][2] == drawn
    shows(page, "4 checkpoints of the last 24 h")
    everything = axes("")
    assert 5 < (everything[0][1] - everything[0][0]) / 3_600_000 < 5.5
    assert axes("?window=elsewhere") == everything
    page.get_by_role("link", name="last hour").click()
    shows(page, "3 checkpoints of the last hour")
    assert page.url.endswith("?window=1h")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_of_charts_stand_out(scheme: str) -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)", 1)
    found = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", light if scheme == "light" else dark))
    for name, least in {"text": 4.5, "soft": 4.5, "red": 3, "blue": 3, "grey": 3}.items():
        assert contrast(found[name], found["ground"]) >= least, name


def contrast(first: str, second: str) -> float:
    """Of two colours, as WCAG 2.2 defines it."""

    def light(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(first), light(second)))
    return (high + 0.05) / (low + 0.05)


def test_a_page_of_another_name_cannot_read_it(tmp_path: Path) -> None:
    with dashboard(tmp_path / "log", str(tmp_path / "run")) as address:
        asked = urllib.request.Request(address, headers={"Host": "elsewhere.example"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS)
        with refused.value:
            assert refused.value.code == 400
