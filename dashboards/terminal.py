"""Prints for a terminal: checkpoints, lag, retention and staged jobs as tables, sizes and times.

Text from a store is untrusted data. It is shown as plain text, never as markup. Characters that
would move the cursor, change colours or reorder the line are shown as escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from recpoint.catalog.overview.keys_of_tables import keys_of_tables
from recpoint.catalog.overview.width_mix import width_mix
from recpoint.catalog.retention.discard_staged import StagedLoss
from recpoint.catalog.retention.plan import PrunePlan
from recpoint.catalog.retention.staged import Fate, StagedWork
from recpoint.catalog.run.pins import pinned_text
from recpoint.catalog.run.validations import Verdict
from recpoint.catalog.staging.free import FreeSlot
from recpoint.catalog.store.run_url import naming_run
from recpoint.errors import RecpointError
from recpoint.format.history import ChosenPrecision, History
from recpoint.format.manifest import Manifest, Quantizer, TableSpec
from recpoint.format.naming import CONSOLIDATED_KEY, ManifestName, ValidationResult
from recpoint.format.validation import ValidationFinding
from recpoint.units import bytes_text, cache_text, copied_text, time_text, widths_text

if TYPE_CHECKING:
    from recpoint.catalog.check.check import CheckReport, Severity
    from recpoint.catalog.retention.sweep import SweepPlan

__all__ = [
    "FittedColumn",
    "FittedTable",
    "Listed",
    "chain_table",
    "check_views",
    "checkpoints_table",
    "chunks_table",
    "decision_text",
    "discard_table",
    "error_text",
    "fields_table",
    "history_text",
    "keyed_fields",
    "plain_table",
    "quantizer_text",
    "result_text",
    "retention_table",
    "shown",
    "slots_views",
    "stall_text",
    "staged_views",
    "sweep_table",
    "tables_table",
    "validation_table",
    "verdict_text",
]


_SEVERITY_STYLES: dict[Severity, str] = {"error": "red", "warning": "yellow", "info": "dim"}

#: A table of findings shows at most so many lines.
_MOST_FINDINGS = 40


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One line of a listing: a checkpoint, and its manifest or the error that reading it gave.

    Attributes:
        name: step and generation.
        live: whether it is on the live line; None: damage keeps that unknown.
        manifest: or why it cannot be read.
        to_read: manifests that a restore reads, which a merge lowers; None: as many as the chain
            in its own manifest.
        merged: one word for each consolidation of this checkpoint.
        pins: the names of its pins.
        expires: whether retention has marked it for deletion.
        verdict: of its validations; None: never validated.
    """

    name: ManifestName
    live: bool | None
    manifest: Manifest | RecpointError
    to_read: int | None = None
    merged: Sequence[str] = ()
    pins: Sequence[str] = ()
    expires: bool = False
    verdict: Verdict | None = None


def shown(value: object, *, limit: int = 300, style: str = "") -> Text:
    """Return `value` as text that a terminal shows literally, cut at `limit` characters."""
    text = str(value)
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return Text("".join(_literal(character) for character in text), style=style)


def _literal(character: str) -> str:
    # Not printable: control characters, line separators, direction overrides, lone surrogates.
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class FittedColumn(NamedTuple):
    """A column of a `FittedTable`.

    Attributes:
        heading: text above the column.
        right: whether its cells are aligned right.
        drop: if the terminal is too narrow, the column with the highest number is left out first;
            0: never.
        own_line: if the column is left out, its cells are printed on a line above their row.
    """

    heading: str
    right: bool = False
    drop: int = 0
    own_line: bool = False


class FittedTable:
    """A table that leaves out columns if the terminal is too narrow, and never wraps a cell.

    Args:
        title: above the table; "": none.
        columns: one for each cell of a row.
        rows: the cells of each row, and a note, which may be empty. Notes form a last column if
            all of them fit there, else each note is printed below its row.
        below: lines under the table.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[FittedColumn],
        rows: Sequence[tuple[Sequence[Text], Text]],
        *,
        below: Sequence[Text] = (),
    ) -> None:
        self._title = title
        self._columns = columns
        self._rows = rows
        self._below = below

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [
            max([cell_len(column.heading), *(cells[number].cell_len for cells, _ in self._rows)])
            for number, column in enumerate(self._columns)
        ]
        shown_columns = list(range(len(widths)))

        def room() -> int:
            return options.max_width - sum(widths[column] + 2 for column in shown_columns) + 2

        while room() < 0 and any(self._columns[column].drop for column in shown_columns):
            shown_columns.remove(max(shown_columns, key=lambda number: self._columns[number].drop))
        longest = max((note.cell_len for _, note in self._rows), default=0)
        beside = room() >= longest + 2
        if self._title:
            yield shown(self._title, limit=2000, style="italic")
        headings = [Text(column.heading, style="bold") for column in self._columns]
        head = Text("notes", style="bold") if beside and longest else Text()
        above = [
            number
            for number, column in enumerate(self._columns)
            if column.own_line and number not in shown_columns
        ]
        for cells, note in ((headings, head), *self._rows):
            if cells is not headings:
                yield from (cells[column] for column in above)
            texts = [
                self._padded(cells[column], widths[column], column) for column in shown_columns
            ]
            line = Text("  ").join([*texts, note] if beside else texts)
            line.rstrip()
            line.no_wrap = True
            yield line
            if note and not beside:
                yield Padding(note, (0, 0, 0, 6), expand=False)
        yield from self._below

    def _padded(self, cell: Text, width: int, column: int) -> Text:
        blank = Text(" " * (width - cell.cell_len))
        return blank + cell if self._columns[column].right else cell + blank


_CHECKPOINT_COLUMNS = (
    FittedColumn("step", right=True),
    FittedColumn("gen", right=True, drop=1),
    FittedColumn("kind"),
    FittedColumn("chain", right=True, drop=3),
    FittedColumn("rows", right=True, drop=4),
    FittedColumn("stored", right=True),
    FittedColumn("of full", right=True, drop=2),
    FittedColumn("stall", right=True),
    FittedColumn("lag", right=True),
    FittedColumn("committed (UTC)"),
)


def checkpoints_table(entries: Iterable[Listed], *, title: str) -> FittedTable:
    """Return a table with one line for each checkpoint, in the order given."""
    rows: list[tuple[Sequence[Text], Text]] = []
    below: list[Text] = []
    policies: dict[str, None] = {}  # in order, each once
    for entry in entries:
        name = [Text(str(number)) for number in entry.name]
        if isinstance(entry.manifest, RecpointError):
            blank = [Text()] * (len(_CHECKPOINT_COLUMNS) - 3)
            rows.append(([*name, Text("damaged", style="red"), *blank], Text()))
            problem = f"{entry.name}: {type(entry.manifest).__name__}: {entry.manifest}"
            below.append(shown(problem, limit=2000, style="red"))
        else:
            figures = [Text(figure) for figure in _figures(entry.manifest, entry.to_read)]
            rows.append(([*name, *figures], _notes(entry)))
            policies[entry.manifest.policy] = None
    if policies:
        below.append(shown(f"policy: {', '.join(policies)}"))
    return FittedTable(title, _CHECKPOINT_COLUMNS, rows, below=below)


def _notes(entry: Listed) -> Text:
    notes = ["superseded"] if entry.live is False else []
    notes += [f"merged: {', '.join(entry.merged)}"] if entry.merged else []
    notes += ["expires"] if entry.expires else []
    notes += [pinned_text(entry.pins)] if entry.pins else []
    texts = [shown(", ".join(notes), style="dim")] if notes else []
    texts += [] if entry.verdict is None else [verdict_text(entry.verdict)]
    return Text(" ").join(texts)


def verdict_text(verdict: Verdict | None) -> Text:
    """Return the verdict of a checkpoint's validations in words."""
    if verdict is None:
        return Text("not validated", style="dim")
    if verdict.result == "passed":
        return Text(f"validated ({verdict.level})", style="green")
    return Text(f"validation {verdict}", style="red")


def result_text(result: ValidationResult) -> Text:
    """Return the result of a validation in words."""
    texts: dict[ValidationResult, tuple[str, str]] = {
        "passed": ("passed", "bold green"),
        "failed": ("failed: rows are damaged or wrong", "bold red"),
        "stateless": ("failed: the state of this checkpoint alone is damaged", "bold red"),
    }
    text, style = texts[result]
    return Text(text, style=style)


def validation_table(
    findings: Sequence[ValidationFinding], notes: Sequence[ValidationFinding]
) -> Table:
    """Return a table with one line for each finding, the errors before the notes."""
    table = plain_table("Findings")
    for heading in ("kind", "object", "row", "what", "found", "expected", "within"):
        table.add_column(heading, overflow="fold")
    marked = [("error", "red", finding) for finding in findings]
    marked += [("note", "dim", finding) for finding in notes]
    for word, style, finding in marked[:_MOST_FINDINGS]:
        row = "" if finding.row is None else f"{finding.row:,}"
        texts = (finding.what, finding.found, finding.expected, finding.bound)
        table.add_row(
            Text(word, style=style), shown(finding.subject), row, *(shown(text) for text in texts)
        )
    if len(marked) > _MOST_FINDINGS:
        table.caption = Text(f"and {len(marked) - _MOST_FINDINGS} more: --json has them all")
        table.caption_justify = "left"
    return table


def stall_text(manifest: Manifest) -> str:
    """Return how long training waited, and the rows and bytes copied before that and in it."""
    text, copied = f"{manifest.stall_us / 1000:.1f} ms", manifest.copied_ahead
    if manifest.cache is not None:
        text += f"; {cache_text(manifest.cache)}"
    if copied is None:
        return text
    share = copied_text(copied.rows_before, copied.rows_in_stall)
    bytes_before, bytes_in_stall = (
        bytes_text(copied.bytes_before),
        bytes_text(copied.bytes_in_stall),
    )
    return f"{text}; {share} ({bytes_before}, and {bytes_in_stall} in it)"


def _figures(manifest: Manifest, to_read: int | None) -> Sequence[str]:
    return (
        manifest.kind,
        str(manifest.chain_length if to_read is None else to_read),
        f"{manifest.dirty_rows:,}",
        bytes_text(manifest.stored_bytes),
        f"{manifest.stored_bytes / manifest.full_bytes:.1%}" if manifest.full_bytes else "",
        f"{manifest.stall_us / 1000:.1f} ms",
        f"{(manifest.committed_ms - manifest.snapshot_ms) / 1000:.1f} s",
        time_text(manifest.committed_ms),
    )


def tables_table(manifest: Manifest) -> Table:
    """Return one line for each embedding table: shape, row states, and what is stored of it."""
    table = plain_table("Tables")
    table.add_column("table")
    pieces = any(spec.columns is not None for spec in manifest.tables)
    for heading in ("rows", "columns", "dim") if pieces else ("rows", "dim"):
        table.add_column(heading, justify="right")
    table.add_column("dtype")
    table.add_column("row states")
    for heading in ("rows stored", "chunks", "stored"):
        table.add_column(heading, justify="right")
    table.add_column("precision")
    quantizers: dict[int, set[str]] = {}
    for quantizer in manifest.quantizers:
        quantizers.setdefault(quantizer.table, set()).add(quantizer_text(quantizer))
    if quantizers:
        table.add_column("quantizer")
    for index, spec in enumerate(manifest.tables):
        chunks = [chunk for chunk in manifest.chunks if chunk.table == index]
        precisions = sorted({precision_text(chunk.scheme, chunk.bits) for chunk in chunks})
        widths = width_mix(chunks, manifest.tables)
        if widths is not None and not widths.is_one_width:
            precisions = [f"{widths.mean_bits:.2f} bit on average"]
        states = (f"{state.name} {state.dtype}{list(state.shape)}" for state in spec.row_states)
        table.add_row(
            shown(spec.name),
            f"{spec.rows:,}",
            *([_columns_text(spec)] if pieces else []),
            str(spec.dim),
            spec.dtype,
            shown(", ".join(states)),
            f"{sum(chunk.row_count or 0 for chunk in chunks):,}",
            str(len(chunks)),
            bytes_text(sum(chunk.bytes for chunk in chunks)),
            ", ".join(precisions),
            *([shown("; ".join(sorted(quantizers.get(index, ()))))] if quantizers else []),
        )
    return table


def keyed_fields(manifest: Manifest) -> list[tuple[str, object]]:
    """Return the fields that say what the keys of keyed tables did; none without such tables."""
    uses = keys_of_tables(manifest, most=len(manifest.tables))
    tables = () if uses is None else uses.tables
    return [("keys", f"{use.table:.200}: {use.text}") for use in tables]


def widths_fields(manifest: Manifest) -> list[tuple[str, object]]:
    """Return a name and a text for each table whose rows have several widths."""
    fields: list[tuple[str, object]] = []
    for index, spec in enumerate(manifest.tables):
        of_table = [chunk for chunk in manifest.chunks if chunk.table == index]
        widths = width_mix(of_table, manifest.tables)
        if widths is not None and not widths.is_one_width:
            text = widths_text(widths.mean_bits, widths.row_shares)
            fields.append(("widths", f"{spec.name:.200}: {text}"))
    return fields


def _columns_text(spec: TableSpec) -> str:
    """Return the columns of the whole table that this piece of it holds."""
    columns = spec.columns
    if columns is None:
        return "all"
    return f"{columns.first} … {columns.first + spec.dim - 1} of {columns.of}"


def precision_text(scheme: str | None, bits: int | None) -> str:
    """Return the precision of a chunk's rows in words."""
    if scheme == "exact":
        return "exact"
    if scheme == "first":
        return "first values"
    return f"{bits} bit residual" if scheme == "residual" else f"{bits} bit"


def quantizer_text(quantizer: Quantizer) -> str:
    """Return how a table's rows were quantized, and on how many sample rows that was chosen."""
    values = {
        "bins": quantizer.bins,
        "ratio": quantizer.ratio_permille / 1000,
        "refits": quantizer.refits,
    }
    named = [f"{name} {value:g}" for name, value in values.items() if value]
    text = ", ".join([quantizer.method, *named])
    return f"{text} (chosen on {quantizer.sample_rows:,} rows)" if quantizer.sample_rows else text


def history_text(history: History) -> str:
    """Return the hours that the state was trained, and its restores from quantized rows."""
    hours = history.trained_ms / 3_600_000
    return f"{hours:.3g} h, {history.lossy_restores} restores from quantized rows"


def decision_text(precision: ChosenPrecision) -> str:
    """Return the bits that `bits="auto"` chose from the expected restores, and the reason."""
    return f'{precision.bits} bits where bits="auto": {precision.reason}'


def chunks_table(manifest: Manifest) -> Table:
    """Return a table with one line for each chunk."""
    table = plain_table("Chunks")
    table.add_column("key", overflow="fold")
    table.add_column("content")
    for heading in ("rows", "bytes", "crc32c"):
        table.add_column(heading, justify="right")
    for chunk in manifest.chunks:
        content = (
            "state"
            if chunk.table is None
            else f"table {chunk.table}, {precision_text(chunk.scheme, chunk.bits)}"
        )
        rows = "" if chunk.row_count is None else f"{chunk.row_count:,}"
        table.add_row(shown(chunk.key), content, rows, f"{chunk.bytes:,}", f"{chunk.crc32c:08x}")
    return table


def chain_table(chain: Sequence[Manifest]) -> Table:
    """Return the manifests that a restore of the last of `chain` reads, in order."""
    table = plain_table("Chain, in the order in which it is read")
    for heading in ("step", "generation"):
        table.add_column(heading, justify="right")
    table.add_column("kind")
    for heading in ("rows", "stored"):
        table.add_column(heading, justify="right")
    for manifest in chain:
        table.add_row(
            str(manifest.step),
            str(manifest.generation),
            manifest.kind if manifest.stands_for is None else f"{manifest.kind}, consolidated",
            f"{manifest.dirty_rows:,}",
            bytes_text(manifest.stored_bytes),
        )
    return table


def check_views(report: CheckReport) -> list[RenderableType]:
    """Return a table of a check's findings, and one line that sums them up."""
    views: list[RenderableType] = []
    if report.findings:
        table = plain_table("Findings")
        table.add_column("severity")
        table.add_column("object", overflow="fold")
        table.add_column("what", overflow="fold")
        for severity, key, text in report.findings:
            style = _SEVERITY_STYLES[severity]
            table.add_row(Text(severity, style=style), shown(key), shown(text, limit=2000))
        views.append(table)
    live = [entry for entry in report.checkpoints if entry.live]
    good = sum(entry.restorable for entry in live)
    looked_at = (
        f"every byte of {report.chunks_read} chunks, {bytes_text(report.bytes_read)}"
        if report.level == "full"
        else "records, chains and sizes"
    )
    if not report.ok:
        verdict = Text("damaged", style="bold red")
    elif report.nothing_counts:
        verdict = Text("nothing to restore", style="bold yellow")
    else:
        verdict = Text("ok", style="bold green")
    summary = f": {good} of {len(live)} live checkpoints restore ({looked_at})"
    views.append(Text.assemble(verdict, summary))
    return views


def sweep_table(plan: SweepPlan) -> Table:
    """Return a table of what a sweep removes and what it keeps, each with the reason."""
    count = len(plan.objects) + len(plan.unfinished)
    table = plain_table(f"to remove: {count} objects, {bytes_text(plan.size_bytes)}")
    table.show_header = bool(count or plan.kept or plan.unrecognised or plan.blocked)
    table.add_column("action")
    table.add_column("object", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("why", overflow="fold")
    for swept in plan.objects + plan.unfinished:
        remove = Text("remove", style="red")
        table.add_row(remove, shown(swept.key), f"{swept.size_bytes:,}", shown(swept.reason))
    for prefix in plan.kept:
        table.add_row("keep", shown(prefix.prefix), "", shown(prefix.reason))
    for key in plan.unrecognised:
        table.add_row("keep", shown(key), "", "not an object of this format")
    for key in plan.blocked:
        table.add_row(Text("blocks", style="yellow"), shown(key), "", "cannot be read")
    return table


def fields_table(fields: Iterable[tuple[str, object]], *, title: str = "") -> Table:
    """Return a table of names and values, one pair on each line."""
    table = Table(title=Text(title) if title else None, show_header=False, box=None)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.title_justify = "left"
    for name, value in fields:
        table.add_row(name, value if isinstance(value, Text) else shown(value, limit=2000))
    return table


def error_text(error: Exception) -> Text:
    """Return an error's message; a RecpointError's has the object, found, expected and next."""
    if not isinstance(error, RecpointError):
        return Text.assemble(("error: ", "bold red"), shown(error, limit=2000))
    return Text.assemble(
        (f"{type(error).__name__}: ", "bold red"),
        shown(error.subject, limit=1000),
        "\n  found     ",
        shown(error.found, limit=2000),
        "\n  expected  ",
        shown(error.expected, limit=1000),
        "\n  next      ",
        shown(error.next_step, limit=1000),
    )


def plain_table(title: str) -> Table:
    """Return an empty table without rules, its headings in bold."""
    line = shown(title, limit=200)
    # It would be broken at the width of the table, which may be narrower than the terminal.
    line.no_wrap, line.overflow = True, "ignore"
    table = Table(title=line, title_justify="left", pad_edge=False)
    table.box = None
    table.header_style = "bold"
    return table


_ACTION_STYLES = {"keep": "", "mark": "yellow", "wait": "yellow", "delete": "red"}


def retention_table(plan: PrunePlan) -> Table:
    """Return a table of a retention plan: each manifest, its action, and the reason."""
    counts = {"keep": 0, "mark": 0, "wait": 0, "delete": 0}
    rows = list(plan.rows())
    for row in rows:
        counts[row.action] += 1
    table = plain_table(", ".join(f"{count} to {action}" for action, count in counts.items()))
    for heading in ("step", "gen"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("merged", no_wrap=True)
    table.add_column("action")
    table.add_column("stored", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in rows:
        table.add_row(
            str(row.step),
            str(row.generation),
            _merged(row.key),
            Text(row.action, style=_ACTION_STYLES[row.action]),
            bytes_text(row.stored_bytes),
            shown(row.reason),
        )
    for key in plan.stray_pins:
        table.add_row("", "", "", "", "", shown(f"{key} pins a checkpoint that is not there"))
    for reader in plan.held:
        table.add_row("", "", "", Text("held", style="yellow"), "", shown(reader))
    return table


def _merged(key: str) -> str:
    """Return the words that distinguish the manifests of one checkpoint."""
    name = CONSOLIDATED_KEY.parse(key)
    if name is None:
        return ""
    return "into a full" if name.after is None else f"after {name.after}"


_FATE_STYLES: dict[Fate, str] = {"rejected": "red", "would be rejected": "red", "stays": "yellow"}


def staged_views(work: StagedWork, run_url: str) -> list[Table]:
    """Return a table of a run's staged jobs and their fates; nothing if no job is staged."""
    if not work.jobs:
        return []
    table = plain_table(f"staged here: {len(work.jobs)} job{'' if len(work.jobs) == 1 else 's'}")
    for name in ("fate", "job", "why"):
        table.add_column(name, overflow="fold")
    for job, fate, reason in work.jobs:
        reason_text = shown(naming_run(reason, run_url), limit=1000)
        table.add_row(Text(fate, style=_FATE_STYLES.get(fate, "")), shown(job), reason_text)
    return [table]


def discard_table(losses: Sequence[StagedLoss], *, dry_run: bool) -> Table:
    """Return a table of the jobs of a run that is gone, and what is lost with each."""
    count = f"{len(losses)} job{'' if len(losses) == 1 else 's'} of a run that is gone"
    table = plain_table(f"to discard: {count}" if dry_run else f"discarded {count}")
    table.show_header = bool(losses)
    for name in ("job", "what is lost with it"):
        table.add_column(name, overflow="fold")
    for loss in losses:
        text = "it cannot be read"
        if loss.kind:
            text = (
                f"{loss.kind} of step {loss.step}: {loss.rows:,} rows, "
                f"{bytes_text(loss.bytes)}, cut {time_text(loss.snapshot_ms)}"
            )
        table.add_row(shown(loss.job), shown(text))
    return table


def slots_views(slots: Sequence[FreeSlot], *, dry_run: bool) -> list[Table]:
    """Return a table of the free slots; nothing if no slot is free."""
    if not slots:
        return []
    size = bytes_text(sum(slot.size_bytes for slot in slots))
    count = f"{len(slots)} slot{'' if len(slots) == 1 else 's'}, {size}"
    table = plain_table(f"to remove: {count}" if dry_run else f"removed {count}")
    for name in ("slot", "bytes", "why"):
        table.add_column(name, overflow="fold")
    for slot in slots:
        table.add_row(shown(slot.slot), f"{slot.size_bytes:,}", shown(slot.reason))
    return [table]
