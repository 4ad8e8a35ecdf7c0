"""The commands that only look at a run: list, show, check."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from recpoint.catalog.records.pins import pinned
from recpoint.catalog.records.validations import records_of, verdict, verdicts
from recpoint.catalog.restoring.selection import Selection, candidates
from recpoint.catalog.retention.marks import marked
from recpoint.catalog.runs.chain import Chain, resolve_chain
from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.runs.run import Run
from recpoint.catalog.runs.superseded import manifests_gone, superseded_text
from recpoint.catalog.stores.io_scheduler import ReadScheduler
from recpoint.catalog.stores.run_url import naming_run
from recpoint.catalog.stores.store import open_store
from recpoint.cli import documents
from recpoint.cli.reporting import (
    JsonOption,
    Result,
    command,
    exit_code,
    showing_bytes,
    showing_steps,
)
from recpoint.dashboards import terminal
from recpoint.dashboards.terminal import Listed
from recpoint.errors import (
    ChainError,
    FormatError,
    ObjectNotFound,
    RecpointError,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MAX_GENERATION, MAX_STEP, ManifestName

if TYPE_CHECKING:  # checking imports torch, which takes longer than to print a listing
    from recpoint.catalog.validation.check import Level

__all__ = [
    "GenerationOption",
    "UrlArgument",
    "check_run",
    "find_checkpoint",
    "list_checkpoints",
    "open_run",
    "show",
]

_NONE_YET = "no checkpoint yet"

UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="The run: a local path, s3://bucket/prefix, …")
]
GenerationOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_GENERATION, help="With a step: a checkpoint that is not on the live line."
    ),
]


def open_run(url: str) -> Run:
    """The run under `url`; NothingToRestore if there is none."""
    return Run.open(open_store(url))


@command
def list_checkpoints(
    url: UrlArgument,
    everything: Annotated[bool, typer.Option("--all", help="Superseded checkpoints too.")] = False,
    json_output: JsonOption = False,
) -> Result:
    """The checkpoints of a run, newest first: kind, bytes, stall, lag.

    With --all they are listed too where damage keeps it unknown which of them count; the exit code
    is 4 then.
    """
    run = open_run(url)
    live: list[ManifestName] = []
    unknown: FormatError | ChainError | None = None
    # Generations first (format §6.3 R3); and what counts of these very checkpoints: one that is
    # committed meanwhile would look superseded.
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
    pins, doomed, known = pinned(run), marked(run), verdicts(run)
    entries = [
        Listed(
            name=name,
            live=None if unknown else name in counts,
            manifest=manifest,
            merged=_merged(forms.get(name, ())),
            pins=pins.get(name, ()),
            verdict=known.get(name),
            expires=name in forms and all(form.key in doomed for form in forms[name]),
        )
        for name, manifest in zip(names, manifests, strict=True)
    ]
    document = {
        "url": run.url,
        "run": run.id,
        "superseded": None if unknown else len(forms.keys() - counts),
        "checkpoints": [documents.listed(entry) for entry in entries],
    }
    if not entries:
        if not forms and (gone := manifests_gone(run)):
            document.update(error=type(gone).__name__, message=str(gone))
            return Result(document, terminal.error_text(gone), code=exit_code(gone))
        text = _NONE_YET
        if forms:
            others = superseded_text(sorted(forms))
            text = f"no checkpoint that counts; {others}: --all lists them"
        return Result(document, terminal.shown(f"{run.url}: {text}"))
    table = terminal.checkpoints_table(entries, title=run.url)
    if unknown is None:
        return Result(document, table)
    document.update(error=type(unknown).__name__, message=str(unknown))
    return Result(document, table, terminal.error_text(unknown), code=exit_code(unknown))


def _merged(forms: Iterable[Representation]) -> tuple[str, ...]:
    """What consolidations have made of a checkpoint, beside its own manifest."""
    return tuple(
        "full" if form.after is None else f"after {form.after}"
        for form in forms
        if form.form != "own"
    )


def _manifest(run: Run, name: ManifestName) -> Manifest | FormatError | ObjectNotFound:
    # A listing has to come out whole although a checkpoint in it is damaged.
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
    chunks: Annotated[bool, typer.Option("--chunks", help="Every stored object.")] = False,
    json_output: JsonOption = False,
) -> Result:
    """One checkpoint: its tables, its chunks, and the chain that restores it.

    Exit code 1 where no chain does.
    """
    run = open_run(url)
    name = find_checkpoint(run, step, generation)
    manifest = run.manifest(*name)
    validations = records_of(run, name)
    known = verdict(validations) if validations else None
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
        ("stored", f"{terminal.bytes_text(manifest.stored_bytes)}, {len(manifest.chunks)} chunks"),
        ("full, exact", terminal.bytes_text(manifest.full_bytes)),
        ("rows", f"{manifest.dirty_rows:,}"),
        ("trained", terminal.history_text(manifest.history)),
        ("ranks", manifest.ranks),
        ("stall", f"{manifest.stall_us / 1000:.1f} ms"),
        ("snapshot", terminal.time_text(manifest.snapshot_ms)),
        ("staged", terminal.time_text(manifest.staged_ms)),
        ("committed", terminal.time_text(manifest.committed_ms)),
        ("written by", manifest.writer),
        ("validation", terminal.verdict_text(known)),
    ]
    if manifest.history.precision is not None:
        fields.append(("precision", terminal.decision_text(manifest.history.precision)))
    if manifest.quantized_by:
        fields.append(("quantized by", manifest.quantized_by))
    if manifest.state_bits is not None:
        fields.append(("row states", "those of several F32 values a row rounded to BF16"))
    views: list[RenderableType] = [terminal.fields_table(fields), terminal.tables_table(manifest)]
    if chunks:
        views.append(terminal.chunks_table(manifest))
    if chain is not None:
        for key, why in chain.passed_over:
            passed = f"passed over {key}: {naming_run(why, url)}"
            views.append(terminal.shown(passed, limit=2000, style="yellow"))
    views.append(terminal.error_text(broken) if broken else terminal.chain_table(_members(chain)))
    document = documents.details(manifest, None if chain is None else _members(chain))
    document["validation"] = documents.validation(known)
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
    """The checkpoint of the live line at `step`, or the one that is named in full."""
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
    """Whether what is stored restores; exit code 1 when it does not, or nothing counts yet."""
    from recpoint.catalog.validation.check import check

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
