"""Defines the commands that only look (list, show, check, lag, info), and their JSON forms.

The JSON forms of what commands print. Times are milliseconds, sizes bytes, as in the format.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from recpoint.catalog.overview.alarms import alarms
from recpoint.catalog.overview.overview import RunOverview, StagedRisk
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.restore.order import Selection, candidates
from recpoint.catalog.retention.marks import marked
from recpoint.catalog.run.chain import Chain, resolve_chain
from recpoint.catalog.run.line_to_go_on import manifests_gone, superseded_text
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.pins import pinned
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Verdict, records_of, verdict, verdicts
from recpoint.catalog.staging import area
from recpoint.catalog.staging.free import left_behind
from recpoint.catalog.store.run_url import naming_run, parse_run_url
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.catalog.store.store import open_store
from recpoint.cli.reporting import (
    JsonOption,
    Result,
    command,
    exit_code,
    output_console,
    showing_bytes,
    showing_steps,
)
from recpoint.dashboards import terminal
from recpoint.dashboards.catalog_watch import current_watch
from recpoint.dashboards.lag import RunLag, lag_views
from recpoint.dashboards.loss_texts import loss_text
from recpoint.dashboards.terminal import Listed
from recpoint.errors import ChainError, FormatError, ObjectNotFound, RecpointError
from recpoint.format.manifest import Manifest, MeasuredLoss, StateBits
from recpoint.format.naming import MAX_GENERATION, MAX_STEP, ManifestName
from recpoint.format.version import FORMAT_VERSION
from recpoint.units import bytes_text, time_text

if TYPE_CHECKING:
    from recpoint.catalog.check.check import Level
    from recpoint.kernels.implementation import Implementation

__all__ = [
    "GenerationOption",
    "UrlArgument",
    "check_run",
    "find_checkpoint",
    "info",
    "lag",
    "list_checkpoints",
    "open_run",
    "show",
]


def checkpoint(manifest: Manifest) -> dict[str, Any]:
    """Return the JSON form of one checkpoint in a listing."""
    copied = manifest.copied_ahead
    return {
        "step": manifest.step,
        "generation": manifest.generation,
        "attempt": manifest.attempt,
        "kind": manifest.kind,
        "chain_length": manifest.chain_length,
        "policy": manifest.policy,
        "consolidated": manifest.stands_for is not None,
        "dirty_rows": manifest.dirty_rows,
        "stored_bytes": manifest.stored_bytes,
        "full_bytes": manifest.full_bytes,
        "stall_ms": manifest.stall_us / 1000,
        "copied_ahead": None if copied is None else copied.model_dump(),
        "loss": None if manifest.loss is None else _numbers(manifest.loss),
        "keyed": {
            manifest.tables[use.table].name: use.model_dump(exclude={"table"})
            for use in manifest.keyed or ()
        },
        "lag_ms": manifest.committed_ms - manifest.snapshot_ms,
        "committed_ms": manifest.committed_ms,
    }


def _numbers(loss: MeasuredLoss) -> dict[str, float | int | None]:
    """Return the figures of a measured loss as numbers; records have them as text."""
    return {
        name: float.fromhex(value) if isinstance(value, str) else value
        for name, value in loss.model_dump().items()
    }


def listed(entry: Listed) -> dict[str, Any]:
    """Return the JSON form of one line of a listing; its manifest may be unreadable."""
    if isinstance(entry.manifest, RecpointError):
        problem = {"error": type(entry.manifest).__name__, "message": str(entry.manifest)}
        return {**_name(entry.name), **_standing(entry), **problem}
    return {**checkpoint(entry.manifest), "manifests_to_read": entry.to_read, **_standing(entry)}


def validation(verdict: Verdict | None) -> dict[str, Any] | None:
    """Return the JSON form of a checkpoint's verdict; None if it was never validated."""
    return None if verdict is None else verdict._asdict()


def details(manifest: Manifest, chain: list[Manifest] | None) -> dict[str, Any]:
    """Return the JSON form of one checkpoint in detail; `chain` is None if it does not join up."""
    return {
        **checkpoint(manifest),
        "run": manifest.run,
        "ranks": manifest.ranks,
        "servers": manifest.servers,
        "snapshot_ms": manifest.snapshot_ms,
        "staged_ms": manifest.staged_ms,
        "writer": manifest.writer,
        "tables": [table.model_dump(mode="json") for table in manifest.tables],
        "chunks": [chunk.model_dump(mode="json") for chunk in manifest.chunks],
        "quantizers": [quantizer.model_dump(mode="json") for quantizer in manifest.quantizers],
        "quantized_by": manifest.quantized_by,
        "state_bits": manifest.state_bits,
        "history": manifest.history.model_dump(mode="json"),
        "chain": None if chain is None else [checkpoint(member) for member in chain],
    }


def _standing(entry: Listed) -> dict[str, Any]:
    return {
        "live": entry.live,
        "merged": list(entry.merged),
        "pins": list(entry.pins),
        "expires": entry.expires,
        "validation": validation(entry.verdict),
    }


def _name(name: ManifestName) -> dict[str, Any]:
    return {"step": name.step, "generation": name.generation}


_PACKAGES = ("torch", "triton", "numpy", "fsspec", "s3fs", "prefect", "pandas", "pyarrow")


@command
def info(json_output: JsonOption = False) -> Result:
    """Print versions, which kernels run here and why, devices, and the staging area."""
    import torch

    from recpoint.kernels.implementation import implementations
    from recpoint.kernels.native import instruction_set
    from recpoint.trainer_plugin.snapshot import large_pages

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    kernels = implementations()
    leftovers = left_behind(area.default_staging_root())
    versions = {name: _version(name) for name in _PACKAGES}
    document = {
        "recpoint": _version("recpoint"),
        "format": FORMAT_VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "kernels": [kernel._asdict() for kernel in kernels],
        "cuda_devices": devices,
        "cpu_threads": torch.get_num_threads(),
        "instruction_set": instruction_set(),
        "staging": str(area.default_staging_root()),
        "left_behind": [leftover._asdict() for leftover in leftovers],
        "huge_pages": large_pages.policy(),
        "huge_pages_from_bytes": large_pages.SMALLEST_BYTES,
    }
    packages = ", ".join(f"{name} {version or '(none)'}" for name, version in versions.items())
    smallest = bytes_text(large_pages.SMALLEST_BYTES)
    fields = [
        ("recpoint", f"{document['recpoint']}, format {FORMAT_VERSION}"),
        ("python", f"{document['python']} on {document['platform']}"),
        ("packages", packages),
        ("threads", document["cpu_threads"]),
        ("instruction set", document["instruction_set"]),
        ("CUDA devices", ", ".join(devices) or "none"),
        ("staging", document["staging"]),
        *(("left behind", str(leftover)) for leftover in leftovers),
        ("huge pages", f"{document['huge_pages']}; asked for tables of {smallest} and more"),
    ]
    return Result(document, terminal.fields_table(fields), _kernels_table(kernels))


def _kernels_table(kernels: list[Implementation]) -> Table:
    """Return a table with a line for each kernel and device of its tensors."""
    table = terminal.plain_table("Kernels")
    for heading in ("kernel", "tensors on", "runs", "why"):
        table.add_column(heading)
    for kernel in kernels:
        reason = terminal.shown(kernel.why)
        table.add_row(kernel.kernel, kernel.device, kernel.name or "nothing", reason)
    return table


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@command
def lag(
    urls: Annotated[
        list[str], typer.Argument(metavar="URL", help="Runs: local paths, s3://bucket/prefix, …")
    ],
    max_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Exit with 1 if more training than this would be lost now.",
        ),
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Look again this often, until interrupted."),
    ] = None,
    json_output: JsonOption = False,
) -> Result:
    """Print what each run would lose if its trainer's host died now, from its catalog.

    The staging area of this host tells more about a trainer of this host: whether it was killed and
    when, and what it has staged, which is not lost if only the trainer dies.

    Exit codes: 0 all runs could be read, and none is above --max-seconds; 1 a run is above it, or
    does not exist; 2 a URL is wrong; 3 a store cannot be reached; 4 a catalog is damaged. If
    several apply, the highest. A run that ended with everything stored would lose nothing.
    """
    if watch is not None and json_output:
        raise typer.BadParameter("cannot be combined with --json", param_hint="--watch")
    lags = _Lags(urls, max_seconds)
    if watch is not None:
        with Live(console=output_console(), auto_refresh=False) as live:
            while True:
                live.update(Group(*lag_views(lags.refresh())), refresh=True)
                time.sleep(watch)
    run_lags = lags.refresh()
    code = max(
        exit_code(run_lag.found) if isinstance(run_lag.found, RecpointError) else int(run_lag.above)
        for run_lag in run_lags
    )
    return Result(
        {"runs": [_document(run_lag) for run_lag in run_lags]}, *lag_views(run_lags), code=code
    )


class _Lags:
    """Looks at runs again and again; a run that cannot be read does not hide the others."""

    def __init__(self, urls: Sequence[str], max_seconds: float | None) -> None:
        self._urls = urls
        self._max_seconds = max_seconds
        self._watches: dict[str, RunWatch] = {}

    def refresh(self) -> list[RunLag]:
        return [self._one(url) for url in self._urls]

    def _one(self, url: str) -> RunLag:
        try:
            # A refused URL may carry a credential: only the error's own form of it is shown.
            named = parse_run_url(url).url
        except RecpointError as error:
            return RunLag("", error)
        try:
            self._watches[url] = current_watch(url, self._watches.get(url))
            view = self._watches[url].refresh()
        except RecpointError as error:
            self._watches.pop(url, None)
            error.next_step = naming_run(error.next_step, named)
            return RunLag(named, error)
        limit = self._max_seconds
        return RunLag(named, view, limit is not None and view.lag.at_risk_seconds > limit)


def _document(run_lag: RunLag) -> dict[str, Any]:
    if isinstance(run_lag.found, RecpointError):
        error = run_lag.found
        return {
            "url": run_lag.url,
            "error": type(error).__name__,
            "subject": error.subject,
            "found": error.found,
            "expected": error.expected,
            "next_step": error.next_step,
        }
    return {"url": run_lag.url, "above": run_lag.above, **_figures(run_lag.found)}


def _staged(staged: StagedRisk) -> dict[str, Any]:
    trouble = staged.trouble
    return {
        "step": staged.step,
        "at_risk_seconds": staged.at_risk_seconds,
        "at_risk_batches": staged.at_risk_batches,
        "agent_error": None if trouble is None else str(trouble),
    }


def _figures(view: RunOverview) -> dict[str, Any]:
    lag, newest, restore, ended = view.lag, view.newest, view.restore, view.ended
    validated = view.last_validated
    verdict = None if validated is None else validated.verdict
    return {
        "run": view.run,
        "lag_seconds": lag.seconds,
        "at_risk_seconds": lag.at_risk_seconds,
        "at_risk_batches": lag.at_risk_batches,
        "overdue": lag.overdue,
        "interval_seconds": lag.interval_seconds,
        "step": None if newest is None else newest.step,
        "stall_seconds": None if newest is None else newest.stall_seconds,
        "checkpoints": view.live_checkpoints,
        "restarts": view.restarts,
        "manifests_to_read": None if restore is None else restore.manifests_to_read,
        "bytes_to_read": None if restore is None else restore.bytes_to_read,
        "ended": None if ended is None else ended.reason,
        "trainer_gone": view.trainer_gone,
        "last_sign_of_life_ms": view.gone_ms,
        "staged": None if view.staged is None else _staged(view.staged),
        "validated": None
        if validated is None or verdict is None
        else {"step": validated.step, "result": verdict.result, "level": verdict.level},
        "alarms": [
            {"trouble": alarm.trouble, "text": alarm.text, "next_step": alarm.next_step}
            for alarm in alarms(view)
        ],
    }


#: What `show` says about row states of F32 with several values a row, by the manifest's bits.
_STATES_TEXT: Final[dict[StateBits, str]] = {
    16: "F32 states of several values a row are rounded to BF16",
    8: "second moments of several values a row have 8-bit codes, other F32 states BF16",
}
_NONE_YET = "no checkpoint yet"

UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="The run: a local path, s3://bucket/prefix, …")
]
GenerationOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_GENERATION, help="With a step: also finds a checkpoint off the live line."
    ),
]


def open_run(url: str) -> Run:
    """Return the run under `url`; raise NothingToRestore if there is none."""
    return Run.open(open_store(url))


@command
def list_checkpoints(
    url: UrlArgument,
    everything: Annotated[bool, typer.Option("--all", help="Superseded checkpoints too.")] = False,
    json_output: JsonOption = False,
) -> Result:
    """List the checkpoints of a run, newest first: kind, bytes, stall, lag.

    With --all they are listed even if damage hides which of them count; the exit code is then 4.
    """
    run = open_run(url)
    live: list[ManifestName] = []
    unknown: FormatError | ChainError | None = None
    # Generations first (format §6.3, read order, rule 3). The live line is taken from this same
    # listing: a checkpoint that is committed meanwhile would look superseded.
    numbers, forms = run.generation_numbers(), run.representations()
    try:
        live = run.line_of(numbers, forms)
    except (FormatError, ChainError) as error:
        if not everything:
            raise
        error.next_step = naming_run(error.next_step, url)
        unknown = error
    counts = set(live)
    names = sorted(forms, reverse=True) if everything else live
    with ReadScheduler.of_records() as reads:
        manifests = list(reads.results(names, lambda name: _manifest(run, name)))
    pins, doomed, verdict_of = pinned(run), marked(run), verdicts(run)
    to_read = _manifests_to_read(forms, dict(zip(names, manifests, strict=True)))
    entries = [
        Listed(
            name=name,
            live=None if unknown else name in counts,
            manifest=manifest,
            to_read=to_read.get(name),
            merged=_merged(forms.get(name, ())),
            pins=pins.get(name, ()),
            verdict=verdict_of.get(name),
            expires=name in forms and all(form.key in doomed for form in forms[name]),
        )
        for name, manifest in zip(names, manifests, strict=True)
    ]
    document = {
        "url": run.url,
        "run": run.id,
        "superseded": None if unknown else len(forms.keys() - counts),
        "checkpoints": [listed(entry) for entry in entries],
    }
    if not entries:
        if not forms and (damage := manifests_gone(run)):
            document.update(error=type(damage).__name__, message=str(damage))
            return Result(document, terminal.error_text(damage), code=exit_code(damage))
        text = _NONE_YET
        troubles = alarms(current_watch(url, None).refresh())
        text += "".join(f"; {trouble.text}. Next: {trouble.next_step}" for trouble in troubles)
        if forms:
            others_text = superseded_text(sorted(forms))
            text = f"no checkpoint that counts; {others_text}: --all lists them"
        return Result(document, terminal.shown(f"{run.url}: {text}"))
    table = terminal.checkpoints_table(entries, title=run.url)
    if unknown is None:
        return Result(document, table)
    document.update(error=type(unknown).__name__, message=str(unknown))
    return Result(document, table, terminal.error_text(unknown), code=exit_code(unknown))


def _manifests_to_read(
    forms: Mapping[ManifestName, Sequence[Representation]],
    manifests: Mapping[ManifestName, Manifest | RecpointError],
) -> dict[ManifestName, int]:
    """How many manifests a restore of each checkpoint reads, of the forms that readers prefer.

    Args:
        forms: those of each checkpoint, which include what consolidations have made of it.
        manifests: each checkpoint's own; one that cannot be read is left out.
    """
    lengths: dict[ManifestName, int] = {}
    by_step: dict[int, ManifestName] = {}
    for name in sorted(manifests):
        merged = [form for form in forms.get(name, ()) if form.form != "own"]
        manifest = manifests[name]
        if any(form.form == "full" for form in merged):
            lengths[name] = 1
        elif not isinstance(manifest, RecpointError):
            afters = [form.after for form in merged if form.after is not None]
            parent = manifest.parent
            parent_name = None if parent is None else ManifestName(parent.step, parent.generation)
            if afters:
                parent_name = by_step.get(min(afters))
            lengths[name] = manifest.chain_length
            if parent_name in lengths:
                lengths[name] = lengths[parent_name] + 1
        by_step[name.step] = name
    return lengths


def _merged(forms: Iterable[Representation]) -> tuple[str, ...]:
    """Return the forms that consolidations made of a checkpoint, beside its own manifest."""
    return tuple(
        "full" if form.after is None else f"after {form.after}"
        for form in forms
        if form.form != "own"
    )


def _manifest(run: Run, name: ManifestName) -> Manifest | FormatError | ObjectNotFound:
    # One damaged checkpoint must not keep the others from being listed.
    try:
        return run.manifest(*name)
    except (FormatError, ObjectNotFound) as error:
        error.next_step = naming_run(error.next_step, run.url)
        return error


@command
def show(
    url: UrlArgument,
    step: Annotated[int, typer.Argument(min=0, max=MAX_STEP, help="Step of the checkpoint.")],
    generation: GenerationOption = None,
    chunks: Annotated[bool, typer.Option("--chunks", help="List its chunks too.")] = False,
    json_output: JsonOption = False,
) -> Result:
    """Show one checkpoint: its tables, its chunks, and the chain that restores it.

    The exit code is 1 if no chain restores it.
    """
    run = open_run(url)
    name = find_checkpoint(run, step, generation)
    manifest = run.manifest(*name)
    validations = records_of(run, name)
    stored_verdict = verdict(validations) if validations else None
    chain: Chain | None = None
    broken: RecpointError | None = None
    try:
        chain = resolve_chain(run, name)
    except (ChainError, FormatError, ObjectNotFound) as error:
        error.next_step = naming_run(error.next_step, url)
        broken = error
    fields: list[tuple[str, object]] = [
        ("run", f"{run.url} ({manifest.run})"),
        ("checkpoint", manifest.ref),
        ("kind", _kind_text(manifest, chain)),
        ("policy", manifest.policy),
        ("stored", f"{bytes_text(manifest.stored_bytes)}, {len(manifest.chunks)} chunks"),
        ("full, exact", bytes_text(manifest.full_bytes)),
        ("rows", f"{manifest.dirty_rows:,}"),
        ("trained", terminal.history_text(manifest.history)),
        ("ranks", manifest.ranks),
        ("stall", terminal.stall_text(manifest)),
        ("snapshot", time_text(manifest.snapshot_ms)),
        ("staged", time_text(manifest.staged_ms)),
        ("committed", time_text(manifest.committed_ms)),
        ("written by", manifest.writer),
        ("validation", terminal.verdict_text(stored_verdict)),
    ]
    if manifest.servers is not None:
        fields.append(("embedding servers", f"{manifest.servers} have stored rows themselves"))
    if manifest.history.precision is not None:
        fields.append(("precision", terminal.decision_text(manifest.history.precision)))
    if manifest.quantized_by:
        fields.append(("quantized by", manifest.quantized_by))
    if manifest.loss is not None:
        fields.append(("cost of rounding", loss_text(manifest.loss)))
    fields += terminal.keyed_fields(manifest)
    fields += terminal.widths_fields(manifest)
    if manifest.state_bits is not None:
        fields.append(("row states", _STATES_TEXT[manifest.state_bits]))
    views: list[RenderableType] = [terminal.fields_table(fields), terminal.tables_table(manifest)]
    if chunks:
        views.append(terminal.chunks_table(manifest))
    if chain is not None:
        for key, reason in chain.passed_over:
            passed = f"passed over {key}: {naming_run(reason, url)}"
            views.append(terminal.shown(passed, limit=2000, style="yellow"))
    views.append(terminal.error_text(broken) if broken else terminal.chain_table(_members(chain)))
    document = details(manifest, None if chain is None else _members(chain))
    document["validation"] = validation(stored_verdict)
    if broken is not None:
        document.update(error=type(broken).__name__, message=str(broken))
    return Result(document, *views, code=0 if broken is None else 1)


def _kind_text(manifest: Manifest, chain: Chain | None) -> str:
    links = manifest.links
    text = f"{links.kind}, {links.chain_length} in its chain"
    return text if chain is None else f"{text}; a restore reads {len(chain.manifests)}"


def _members(chain: Chain | None) -> list[Manifest]:
    return list(chain.manifests) if chain else []


def find_checkpoint(run: Run, step: int, generation: int | None) -> ManifestName:
    """Return the live line's checkpoint at `step`, or the one of `step` and `generation`."""
    return candidates(run, Selection(step=step, generation=generation))[0]


@command
def check_run(
    url: UrlArgument,
    level: Annotated[
        str, typer.Option(help="metadata: records, chains, sizes; full: every byte too.")
    ] = "metadata",
    step: Annotated[int | None, typer.Option(help="Only this step and what it needs.")] = None,
    json_output: JsonOption = False,
) -> Result:
    """Check whether what is stored restores; exit code 1 if not, or if no checkpoint counts."""
    from recpoint.catalog.check.check import check

    chosen, run = _level(level), open_run(url)
    with ExitStack() as bars:
        # One bar at a time: the manifests are read before the first byte of a chunk is.
        on_step = bars.enter_context(showing_steps(quiet=json_output or chosen == "full"))
        on_progress = bars.enter_context(
            showing_bytes("checking", quiet=json_output or chosen != "full")
        )
        report = check(run, level=chosen, step=step, on_step=on_step, on_progress=on_progress)
    findings = tuple(
        finding._replace(text=naming_run(finding.text, url)) for finding in report.findings
    )
    report = replace(report, findings=findings)
    document = {
        "ok": report.ok,
        "nothing_counts": report.nothing_counts,
        "level": report.level,
        "chunks_read": report.chunks_read,
        "bytes_read": report.bytes_read,
        "checkpoints": [
            {"step": name.step, "generation": name.generation, "live": live, "restorable": good}
            for name, live, good in report.checkpoints
        ],
        "findings": [finding._asdict() for finding in report.findings],
    }
    code = 0 if report.ok and not report.nothing_counts else 1
    return Result(document, *terminal.check_views(report), code=code)


def _level(text: str) -> Level:
    levels: tuple[Level, ...] = ("metadata", "full")
    for level in levels:
        if text == level:
            return level
    raise typer.BadParameter(f"{text!r} is neither metadata nor full", param_hint="--level")
