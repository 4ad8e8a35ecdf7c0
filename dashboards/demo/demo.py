"""Runs the demo: real training, Prefect flows, a real SIGKILL, and the proof of the restore.

Two trainers run the same script on the same data. One trains without interruption. The other one
writes checkpoints, is killed, and is started again with another seed. So state that is equal in
both at the end can only come from the restore. Each trainer is one process, or several ranks
under torchrun, of which one is killed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

import recpoint
from recpoint.catalog.check.check import CheckReport, check
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.dashboards import terminal
from recpoint.dashboards.demo.processes import (
    Child,
    ChildFailed,
    DemoProgress,
    PrefectUI,
    RanksTrainer,
    Trainer,
    ended,
    persisted_by_prefect,
    wait_for_prefect,
)
from recpoint.dashboards.demo.settings import DemoSettings
from recpoint.dashboards.terminal import Listed
from recpoint.errors import NothingToRestore, SettingsError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName, parse_job_stem
from recpoint.tasks.job_name import run_tag
from recpoint.units import bytes_text, copied_text, counted

__all__ = ["example_script", "make_fresh", "report_views", "run_demo"]


_SEED = 0
_OTHER_SEED = 20_101_201
#: Rows of the largest tables of keys, in which rows are evicted within a hundred batches.
_KEYED_ROWS = 20_000
_POLL_SECONDS = 0.01
_LOOK_SECONDS = 0.5
_PHASE_SECONDS = 600.0
#: A demo of a few dozen batches would end before a checkpoint is committed. Its trainer is stopped
#: at the batch where it will be killed, until so many checkpoints are committed.
_COMMITS_BEFORE_KILL = 2
#: Room that several staged checkpoints of the demo's model need in memory.
_STAGING_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The result of a demo.

    Attributes:
        document: the figures that are printed as one line of JSON at the end.
        manifests: the checkpoints on the live line, newest first.
        check: the report of a check of every byte of the run.
        run_url: of the run that the demo made.
        ui: where Prefect shows the flows.
        lookahead: as in the settings.
    """

    document: dict[str, Any]
    manifests: list[Manifest]
    check: CheckReport
    run_url: str
    ui: PrefectUI
    lookahead: bool = False

    @property
    def ok(self) -> bool:
        """Whether the restore was proven, the check passed, and Prefect ran flows.

        With `lookahead`, rows must have been copied before a stall, too.
        """
        return bool(self.document["ok"])


@dataclass
class _Demo:
    """A demo in progress."""

    settings: DemoSettings
    script: Path
    run_url: str
    staging: Path
    progress: DemoProgress
    children: list[Child] = field(default_factory=list)
    committed: list[ManifestName] = field(default_factory=list)
    looked: float = 0.0

    def start_agent(self) -> None:
        arguments = ["-m", "recpoint", "agent", f"--staging={self.staging}"]
        log = self.settings.directory / "agent.log"
        self.children.append(Child("agent", arguments, log=log))

    def start_trainer(self, name: str, *, seed: int, checkpoints: bool) -> Trainer:
        arguments = [f"--seed={seed}"]
        if self.settings.keyed:
            arguments += ["--keyed", f"--rows={_KEYED_ROWS}"]
        if checkpoints and self.settings.lookahead:  # the other one proves that it changes nothing
            arguments.append("--lookahead")
        if checkpoints and self.settings.home is not None:
            arguments.append(f"--home={self.settings.home}")
        if checkpoints and self.settings.servers:
            arguments.append(f"--servers={self.settings.servers}")
        if checkpoints and self.settings.parity:
            arguments.append(f"--parity={self.settings.parity}")
        if checkpoints:
            arguments += [
                f"--run={self.run_url}",
                f"--interval={self.settings.interval}",
                f"--bits={self.settings.bits}",
                f"--staging={self.staging}",
                "--max-staged=4",
            ]
        directory, steps = self.settings.directory, self.settings.steps
        ranks = self.settings.ranks
        trainer = (
            Trainer(name, self.script, arguments, directory=directory, steps=steps)
            if ranks == 1
            else RanksTrainer(
                name, self.script, arguments, directory=directory, steps=steps, ranks=ranks
            )
        )
        self.children.append(trainer)
        return trainer

    def read_committed(self) -> None:
        """List the committed checkpoints; not at every poll, because on S3 that is a request."""
        if time.monotonic() - self.looked < _LOOK_SECONDS:
            return
        try:
            self.committed = Run.open(open_store(self.run_url)).live_line()
        except NothingToRestore:
            self.committed = []  # the trainer has not created the run yet
        self.looked = time.monotonic()

    def watch(self, is_done: Callable[[], bool], *trainers: Trainer) -> None:
        """Show progress until `is_done` returns True.

        Raises:
            ChildFailed: a process ended with an error, or it took too long.
        """
        deadline = time.monotonic() + _PHASE_SECONDS
        while not is_done():
            for child in self.children:
                child.check()
            self.read_committed()
            self.progress.show(trainers, self.committed)
            if time.monotonic() > deadline:
                raise ChildFailed(
                    "the demo",
                    found=f"a phase that has not ended after {_PHASE_SECONDS:.0f} s",
                    expected="an end within that time",
                    next_step=f"see the logs in {self.settings.directory}",
                )
            time.sleep(_POLL_SECONDS)
        self.progress.show(trainers, self.committed)

    def kill_a_server(self, victim: Trainer, *other_trainers: Trainer) -> int:
        """Kill a server of a trainer, which goes back to a checkpoint, or on if there is parity.

        Returns the batches that it had trained, once it has gone on.
        """
        interval = self.settings.interval
        target = self.settings.steps // 4 // interval * interval + (interval + 1) // 2
        self.watch(lambda: victim.step >= target, victim, *other_trainers)
        self.stop_until_committed(1, victim, *other_trainers)
        servers_before = victim.servers
        os.kill(servers_before[-1], signal.SIGKILL)
        step = victim.step
        victim.go_on()
        self.watch(lambda: victim.servers not in ([], servers_before), victim, *other_trainers)
        self.progress.server_killed(step, goes_on=bool(self.settings.parity))
        return step

    def kill_in_the_middle(self, victim: Trainer, *other_trainers: Trainer) -> int:
        """Kill a trainer between two checkpoints; return the batches that it had trained."""
        interval = self.settings.interval
        target = self.settings.steps // 2 // interval * interval + (interval + 1) // 2
        self.watch(lambda: victim.step >= target, victim, *other_trainers)
        self.stop_until_committed(_COMMITS_BEFORE_KILL, victim, *other_trainers)
        victim.kill()
        self.children.remove(victim)
        return victim.step

    def stop_until_committed(self, count: int, victim: Trainer, *other_trainers: Trainer) -> None:
        """Stop a trainer until so many checkpoints are committed.

        It goes on while no rank, or not every one, has staged its part of a checkpoint, because the
        rows of a cache are staged while it trains.
        """
        directory = StagedRun.of(self.staging, self.run_url)

        def is_enough() -> bool:
            return len(self.committed) >= count

        def is_staged() -> bool:
            stems = [parse_job_stem(path.stem) for path in directory.staged_jobs()]
            ranks_by_step = Counter(stem[:2] for stem in stems if stem is not None)
            return self.settings.ranks in ranks_by_step.values()

        while not is_enough():
            victim.stop()
            self.watch(lambda: is_enough() or not is_staged(), victim, *other_trainers)
            if not is_enough():
                victim.go_on()
                self.watch(lambda: is_enough() or is_staged(), victim, *other_trainers)


def run_demo(settings: DemoSettings, console: Console) -> DemoResult:
    """Run the demo, which takes about a minute.

    Args:
        settings: of the demo.
        console: where progress is shown.

    Raises:
        SettingsError: the directory holds files that no demo made.
        ChildFailed: a process of the demo ended with an error.
        StoreError: the store cannot be used.
    """
    script = example_script(settings.example)
    make_fresh(settings.directory)
    name = f"demo-{secrets.token_hex(4)}"
    parent = settings.store.rstrip("/") if settings.store else str(settings.directory.resolve())
    run_url = open_store(f"{parent}/{name}").url
    staging = _make_staging(settings.directory)
    try:
        with DemoProgress(
            console, settings.steps, settings.interval, ranks=settings.ranks
        ) as progress:
            demo = _Demo(settings, script, run_url, staging, progress)
            with ended(demo.children):
                return _run(demo)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _run(demo: _Demo) -> DemoResult:
    demo.start_agent()
    ui = wait_for_prefect(demo.children[0], demo.progress)

    alone = demo.start_trainer("uninterrupted", seed=_SEED, checkpoints=False)
    victim = demo.start_trainer("killed", seed=_SEED, checkpoints=True)
    server_killed_at = demo.kill_a_server(victim, alone) if demo.settings.servers else None
    killed_at = demo.kill_in_the_middle(victim, alone)
    committed_by_then = len(demo.committed)
    demo.progress.killed(killed_at, committed_by_then)

    # With another seed, initial weights and random numbers differ unless they are restored.
    resumed = demo.start_trainer("resumed", seed=_OTHER_SEED, checkpoints=True)
    demo.watch(lambda: not (alone.running or resumed.running), resumed, alone)
    expected, resumed_result = alone.result(), resumed.result()

    run = Run.open(open_store(demo.run_url))
    manifests = [run.manifest(*entry) for entry in run.live_line()]
    report = check(run, level="full")
    flows = persisted_by_prefect(ui, demo.run_url)
    document = _document(demo.settings, manifests, expected=expected, resumed=resumed_result) | {
        "server_killed_at_step": server_killed_at,
        "killed_at_step": killed_at,
        "check_ok": report.ok,
        "persisted_by_prefect": flows,
        "persisted_without_prefect": max(0, len(run.manifest_names()) - flows),
        "prefect_ui": ui.url,
        "run": demo.run_url,
    }
    proven = document["resumed_bit_identical"] or demo.settings.bits != "lossless"
    restored = document["restored_step"]
    document["ok"] = bool(
        proven
        and restored is not None
        and 0 < restored <= killed_at
        and report.ok
        and flows > 0
        and (document["checkpoints_copied_ahead"] > 0 or not demo.settings.lookahead)
        and (document["cache"] is not None or not demo.settings.is_cached)
        and (not demo.settings.keyed or document["keys"]["evicted"] > 0)
        and (document["steps"], document["ranks"]) == (demo.settings.steps, demo.settings.ranks)
    )
    return DemoResult(
        document=document,
        manifests=manifests,
        check=report,
        run_url=demo.run_url,
        ui=ui,
        lookahead=demo.settings.lookahead,
    )


def _document(
    settings: DemoSettings,
    manifests: list[Manifest],
    *,
    expected: dict[str, Any],
    resumed: dict[str, Any],
) -> dict[str, Any]:
    stalls = [manifest.stall_us / 1000 for manifest in manifests]
    lags = [(manifest.committed_ms - manifest.snapshot_ms) / 1000 for manifest in manifests]
    return {
        "steps": resumed["steps"],
        "server_killed_at_step": None,
        "killed_at_step": None,
        "restored_step": resumed["restored_step"],
        "resumed_bit_identical": resumed["digests"] == expected["digests"],
        "auc": resumed["auc"],
        "auc_uninterrupted": expected["auc"],
        "auc_last_tenth": resumed["auc_last_tenth"],
        "bits": settings.bits,
        "ranks": resumed["ranks"],
        "parity": settings.parity or None,
        "cache": resumed.get("cache"),
        "keys": _keys(manifests) if settings.keyed else None,
        "checkpoints": len(manifests),
        "bytes_written": sum(manifest.stored_bytes for manifest in manifests),
        "bytes_full_fp32": sum(manifest.full_bytes for manifest in manifests),
        "stall_ms_median": round(statistics.median(stalls), 3) if stalls else None,
        **_copied(manifests),
        "lag_s_median": round(statistics.median(lags), 3) if lags else None,
        "digests_equal": {
            state: resumed["digests"].get(state) == digest
            for state, digest in expected["digests"].items()
        },
    }


def _keys(manifests: list[Manifest]) -> dict[str, int]:
    """Return what the keys of all tables did until the newest checkpoint."""
    uses = None if not manifests else manifests[0].keyed
    return {
        name: sum(getattr(use, name) for use in uses or ())
        for name in ("used", "inserted", "evicted", "refused")
    }


def _copied(manifests: list[Manifest]) -> dict[str, int]:
    """Return the rows and bytes of checkpoints that were copied ahead, before stalls and in them.

    A checkpoint that was not copied ahead copied its rows in its stall; it is counted apart.
    """
    ahead = [manifest.copied_ahead for manifest in manifests if manifest.copied_ahead is not None]
    return {
        "checkpoints_copied_ahead": len(ahead),
        "rows_copied_before_stalls": sum(entry.rows_before for entry in ahead),
        "rows_copied_in_stalls": sum(entry.rows_in_stall for entry in ahead),
        "bytes_copied_before_stalls": sum(entry.bytes_before for entry in ahead),
        "bytes_copied_in_stalls": sum(entry.bytes_in_stall for entry in ahead),
    }


def example_script(name: str = "train_dlrm") -> Path:
    """Return the path of a training script, which ships with this package."""
    return Path(recpoint.__file__).resolve().parent / "examples" / f"{name}.py"


_MARK = "recpoint-demo.txt"


def make_fresh(directory: Path) -> None:
    """Make `directory`; empty it if an earlier demo made it, and only then.

    Raises:
        SettingsError: the directory is not empty, and no demo made it.
    """
    if directory.exists() and not (directory / _MARK).is_file():
        if not directory.is_dir() or any(directory.iterdir()):
            raise SettingsError(
                "--dir",
                found=f"{directory}, which exists and was not made by a demo",
                expected="a new or empty directory, or the directory of an earlier demo",
                next_step="choose another directory",
            )
    directory.mkdir(parents=True, exist_ok=True)
    for entry in directory.iterdir():
        if entry.name == _MARK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (directory / _MARK).write_text("Made by `recpoint demo`, and emptied by the next one.\n")


def _make_staging(directory: Path) -> Path:
    """Make a staging area for the demo alone, so that no agent of real trainers serves it."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > _STAGING_BYTES:
        return Path(tempfile.mkdtemp(prefix="recpoint-demo-", dir=memory))
    (directory / "staging").mkdir()
    return directory / "staging"


def report_views(result: DemoResult, *, server_stopped: bool) -> list[RenderableType]:
    """Return the report for a terminal: checkpoints, where to look, and the proof in words.

    The line of JSON that follows the report is not included.
    """
    entries = [
        Listed(name=ManifestName(manifest.step, manifest.generation), live=True, manifest=manifest)
        for manifest in reversed(result.manifests)
    ]
    document = result.document
    look = f"{document['prefect_ui']}, flow persist, tag {run_tag(result.run_url)}"
    if server_stopped:
        look += " (the server was stopped: recpoint server start)"
    elif result.ui.own_server:
        look += " (it stays; to stop it: recpoint server stop)"
    fields: list[tuple[str, object]] = [
        ("run", f"{result.run_url} (recpoint list, show, check, restore)"),
        (
            "persisted",
            f"{document['persisted_by_prefect']} as Prefect flows, "
            f"{document['persisted_without_prefect']} without Prefect",
        ),
        ("look at", look),
        *([("copied ahead", _copied_text(document))] if result.lookahead else []),
        *([("cache", _cache_text(document["cache"]))] if document["cache"] else []),
        *([("keys", _keys_text(document["keys"]))] if document["keys"] else []),
        ("AUC", f"{document['auc']:.6f}, uninterrupted {document['auc_uninterrupted']:.6f}"),
    ]
    return [
        Text(),
        terminal.checkpoints_table(entries, title="Checkpoints"),
        Text(),
        terminal.fields_table(fields),
        *terminal.check_views(result.check)[-1:],
        _proof(result),
    ]


def _cache_text(cache: dict[str, Any]) -> str:
    return (
        f"{counted(cache['hits'], 'id')} found in it, {cache['misses']:,} not; "
        f"{counted(cache['fetched_rows'], 'row')} fetched, {cache['written_rows']:,} written back"
    )


def _keys_text(keys: dict[str, int]) -> str:
    return (
        f"{keys['used']:,} have rows; {keys['inserted']:,} got one, and {keys['evicted']:,} lost "
        "theirs to others"
    )


def _copied_text(document: dict[str, Any]) -> str:
    rows_before, rows_in_stall = (
        document["rows_copied_before_stalls"],
        document["rows_copied_in_stalls"],
    )
    all_of_them = counted(document["checkpoints"], "checkpoint")
    return (
        f"{document['checkpoints_copied_ahead']} of {all_of_them}: "
        f"{copied_text(rows_before, rows_in_stall)} "
        f"({bytes_text(document['bytes_copied_before_stalls'])}, and "
        f"{counted(rows_in_stall, 'row')} of "
        f"{bytes_text(document['bytes_copied_in_stalls'])} in it)"
    )


def _proof(result: DemoResult) -> Text:
    document = result.document
    killed, restored = document["killed_at_step"], document["restored_step"]
    ranks = document["ranks"]
    killed_process = f"rank {ranks - 1} of {ranks} " if ranks > 1 else ""
    story = ""
    if document["server_killed_at_step"] is not None:
        lost_step = document["server_killed_at_step"]
        story = f"an embedding server killed with SIGKILL at step {lost_step}, "
        if document["parity"]:
            story += "training went on with rows of the others, "
        killed_process = killed_process or "the trainer "
    story += (
        f"{killed_process}killed with SIGKILL at step {killed}, restored at step {restored}: after "
    )
    keys = "keys, " if document["keys"] else ""
    story += (
        f"{document['steps']} steps weights, {keys}optimizer state, random generators and next "
        "batch "
    )
    if document["resumed_bit_identical"]:
        proof = "are the same, bit for bit, as those of the run that was never interrupted."
        return Text.assemble(("proof: ", "bold green"), story, proof)
    differing = ", ".join(name for name, equal in document["digests_equal"].items() if not equal)
    if document["bits"] != "lossless":
        proof = f"differ ({differing}), as they must at {document['bits']} bits; compare the AUC."
        return Text.assemble(("not bit-identical: ", "yellow"), story, proof)
    return Text.assemble(("NOT PROVEN: ", "bold red"), story, f"differ: {differing}.")
