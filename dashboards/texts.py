"""Words what a page says about a run: each figure as one short text with its unit. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from recpoint.catalog.overview.alarms import Alarm
from recpoint.catalog.overview.overview import (
    CheckpointFacts,
    ExpiringManifest,
    Failure,
    RunOverview,
)
from recpoint.catalog.run.pins import pinned_text
from recpoint.catalog.staging.trainer_note import BEAT_SECONDS
from recpoint.dashboards.loss_texts import loss_note, loss_text
from recpoint.dashboards.terminal import shown
from recpoint.dashboards.watched_runs import RunView, WatchedRun
from recpoint.format.retention_records import Plan
from recpoint.units import (
    bytes_text,
    cache_text,
    copied_text,
    counted,
    duration_text,
    time_text,
    widths_text,
)

__all__ = [
    "CHECKPOINT_HEADINGS",
    "EXPIRING_HEADINGS",
    "FAILURE_HEADINGS",
    "FIELDS",
    "FIGURES",
    "NONE",
    "PLAN_HEADINGS",
    "RUN_HEADINGS",
    "Alert",
    "Figure",
    "alerts",
    "checkpoint_row",
    "expectation_text",
    "expiring_row",
    "failure_row",
    "field_texts",
    "figures",
    "path_pieces",
    "plain",
    "plan_rows",
    "plan_text",
    "risk_text",
    "run_row",
    "spans",
    "staged_text",
    "standing_text",
    "summary_text",
    "trouble",
]


#: Where there is nothing to say.
NONE = "–"

RUN_HEADINGS = (
    *("State", "Run", "Lost by a crash now", "Newest step", "Committed (UTC)"),
    *("Stall", "Of full fp32"),
    *("A restore reads", "Last validation", "Seen"),
)
CHECKPOINT_HEADINGS = (
    *("Step", "Kind", "State", "Committed (UTC)", "At risk before it", "Stall", "Cut to commit"),
    *("Stored", "Of full fp32", "Validation", "Notes"),
)
PLAN_HEADINGS = ("Manifest", "Becomes", "Why")
EXPIRING_HEADINGS = ("Manifest", "Goes because", "Marked")
FAILURE_HEADINGS = ("When (UTC)", "What", "Cause", "What to do")
#: The first is the headline.
FIGURES = (
    *("A crash now would cost", "Newest checkpoint that restores", "Stall of a checkpoint"),
    "A restore",
)
FIELDS = (
    *("Written, of full fp32 checkpoints", "Chain", "Last validation", "Checkpoints", "Trainer"),
    *("Clocks", "Retention", "Cost of rounding", "Keys of tables"),
)


class Alert(NamedTuple):
    """What is wrong, as a sentence, and what to do next."""

    cause: str
    next_step: str


class Figure(NamedTuple):
    """A figure with its unit, and a note that belongs to it."""

    value: str
    note: str


_LIMIT = 600
#: Keyed tables whose counts a page shows.
_MOST_KEYED = 10


def plain(value: object) -> str:
    """Data of a store as text without characters that would move or hide other text."""
    return shown(value, limit=_LIMIT).plain


def standing_text(view: RunView) -> str:
    """The state in words."""
    if view.standing == "alarm":
        count = len(view.alarms) + view.damaged
        return "ALARM" if count == 1 else f"ALARM ({count})"
    return "NO ANSWER" if view.standing == "no answer" else view.standing


def summary_text(runs: Sequence[WatchedRun]) -> str:
    """One sentence on all runs."""
    bad = [run for run in runs if run.seen.standing in ("alarm", "no answer")]
    count = f"{len(runs)} run" if len(runs) == 1 else f"{len(runs)} runs"
    if not bad:
        return f"{count}, no alarm."
    names = ", ".join(plain(run.name) for run in bad[:5])
    more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
    needs = "needs" if len(bad) == 1 else "need"
    return f"{len(bad)} of {count} {needs} a look: {names}{more}."


def alerts(view: RunView, now: float) -> list[Alert]:
    """What is wrong and what to do; what keeps the run from being read comes first."""
    alerts = []
    error = view.error
    if error is not None:
        duration = duration_text(now - (view.failing_since or now))
        failure = "The catalog cannot be read" if view.damaged else "No answer"
        cause = f"{error.subject}: found {error.found}; expected {error.expected}"
        alerts.append(Alert(f"{failure} for {duration}: {plain(cause)}.", plain(error.next_step)))
    elif view.overdue:
        age = view.age_seconds()
        silence = "" if age is None else f" for {duration_text(age)}"
        cause = f"No answer{silence}: a look at the store has begun and has not come back."
        alerts.append(Alert(cause, "check that this host still reaches the store"))
    return alerts + [_alert(alarm) for alarm in view.alarms]


def _alert(alarm: Alarm) -> Alert:
    """An alarm; the next step of an error that it quotes is added to its own."""
    words, _, advice = plain(alarm.text).partition(". Next: ")
    subject, _, cause = words.partition(": ")
    if cause.startswith(f"{subject}: "):
        words = cause
    next_step = plain(alarm.next_step)
    if advice:
        next_step = advice if advice.startswith(next_step) else f"{next_step}; {advice}"
    if alarm.trouble != "manifest_damaged":  # which begins with a key
        words = words[:1].upper() + words[1:]
    return Alert(words if words.endswith((".", "…")) else f"{words}.", next_step)


def trouble(view: RunView, now: float) -> Alert | None:
    """The worst alert of a run, and how many more there are; None: nothing is wrong."""
    alarms = alerts(view, now)
    if not alarms:
        return None
    worst = alarms[0]
    more = len(alarms) - 1
    return worst if not more else worst._replace(cause=f"{worst.cause} And {more} more.")


#: A command of recpoint, with the URLs, paths, numbers and options that follow it.
_COMMAND = re.compile(
    r"recpoint [a-z][a-z-]*"
    r"(?: (?:'[^']*'|\d+\b|--[a-z-]+|[^\s,;'-][^\s,;']*[/:][^\s,;']*[^\s,;.']))*"
)


def spans(words: str) -> list[tuple[str, bool]]:
    """`words` in pieces, and whether each piece is a command that can be copied."""
    pieces, end = [], 0
    for match in _COMMAND.finditer(words):
        pieces += [(words[end : match.start()], False), (match[0], True)]
        end = match.end()
    pieces.append((words[end:], False))
    return [(piece, command) for piece, command in pieces if piece]


def path_pieces(words: str) -> list[str]:
    """`words` in pieces, between which a line may end: after the slashes of paths and URLs."""
    return re.split(r"(?<=/)(?=[^/\s])", words)


def risk_text(overview: RunOverview, space: str = " ") -> str:
    """What a crash now would cost, and how well that is known; `space`: between its two parts."""
    value, note = _risk(overview)
    sign = ":" if value == "nothing" else ","
    return f"{value}{sign}{space}{note}" if note else value


def _risk(overview: RunOverview) -> Figure:
    lag = overview.lag
    if overview.ended is not None and lag.at_risk_batches == 0:
        return Figure("nothing", "ended, all is stored")
    if overview.counted_nothing:
        return Figure(f"up to {duration_text(lag.at_risk_seconds)}", "no batch was counted")
    if overview.generation is None:
        return Figure(NONE, "")
    batches = "" if lag.at_risk_batches is None else counted(lag.at_risk_batches, "batch")
    if overview.trainer_gone and overview.ended is None and lag.at_risk_seconds < BEAT_SECONDS:
        # It trained on after its last sign of life, by an unknown part of the time between two.
        return Figure(f"up to {duration_text(BEAT_SECONDS)}", "")
    bound = "" if overview.ended is not None else "about "
    if lag.overdue:
        bound = "up to "
    return Figure(f"{bound}{duration_text(lag.at_risk_seconds)}", batches)


def staged_text(overview: RunOverview) -> str:
    """What is staged and not stored, and what is lost if it is stored; empty: nothing is staged.

    This loss counts from the cut of what is staged. `risk_text` is the loss with the whole host: it
    counts from the cut of what is stored. Both stand here, each with its meaning.
    """
    staged = overview.staged
    if staged is None:
        return ""
    lost = f"about {duration_text(staged.at_risk_seconds)} of training since its cut"
    if staged.at_risk_batches is not None:
        lost += f" ({counted(staged.at_risk_batches, 'batch')})"
    if staged.at_risk_batches == 0 and overview.ended is not None:
        lost = "nothing"
    loss = f"step {staged.step:,} is staged on this host and not stored yet"
    if overview.ended is not None or overview.trainer_gone:
        return f"{loss}; once recpoint agent has stored it, {lost} is lost"
    return (
        f"{loss}; if only the trainer dies, and recpoint agent stores it, {lost} is lost, instead "
        f"of {_risk(overview).value} if this host dies"
    )


def figures(overview: RunOverview) -> dict[str, Figure]:
    """The figures of a run, by `FIGURES`; unknown figures are left out."""
    lag = overview.lag
    figures = {}
    if overview.generation is not None:
        value, note = _risk(overview)
        notes = [note] if note else []
        # Of a loss that is only bounded, the intervals until the last sign of life say too little.
        bounded = value == f"up to {duration_text(BEAT_SECONDS)}" and not note
        notes += [] if lag.intervals is None or bounded else [f"{lag.intervals:.1f} intervals"]
        note = ", ".join(notes)
        if overview.staged is not None:
            note = "; ".join(filter(None, (note, staged_text(overview))))
        figures[FIGURES[0]] = Figure(value, note)
    if overview.checkpoints:
        figures[FIGURES[1]] = _newest_figure(overview)
        figures[FIGURES[2]] = _stall_figure(overview)
        figures[FIGURES[3]] = _restore_figure(overview)
    return figures


def _newest_figure(overview: RunOverview) -> Figure:
    lag, restore = overview.lag, overview.restore
    if lag.interval_seconds is None:
        expected = "when the next is expected is not known yet"
    else:
        expected = f"expected every {duration_text(lag.interval_seconds)}"
    if restore is None:
        return Figure("none", expected)
    age = NONE if lag.seconds is None else f"{duration_text(lag.seconds)} old"
    return Figure(age, f"step {restore.step:,}; {expected}")


def _stall_figure(overview: RunOverview) -> Figure:
    value, _, most = _stall_text(overview.checkpoints).partition(" (")
    notes = [f"median; {most.removesuffix(')')}"] if most else []
    share = overview.totals.stall_share
    notes += [] if share is None else [f"{share:.2%} of training"]
    return Figure(value, "; ".join(notes))


def _restore_figure(overview: RunOverview) -> Figure:
    restore = overview.restore
    if restore is None:
        return Figure("nothing restores", "")
    reads = f"reads {_restore_text(overview)}"
    if restore.seconds is None:
        return Figure(
            bytes_text(restore.bytes_to_read),
            f"{reads}; duration unknown: no validation has measured a speed",
        )
    duration = f"about {duration_text(restore.seconds)}"
    return Figure(duration, f"{reads}, at the last validation's speed")


def expectation_text(overview: RunOverview) -> str:
    """What to expect of a run that has no checkpoint yet; empty: it has some."""
    if overview.checkpoints:
        return ""
    if overview.generation is None:
        return "No trainer has started yet; checkpoints appear here once a trainer commits them."
    if overview.counted_nothing:
        return "No checkpoint: training has ended and counted no batch."
    if overview.trainer_gone:
        return "No checkpoint: the trainer is gone and did not say that it ended."
    return (
        "No checkpoint yet: the first appears here when the trainer's first interval is over and "
        "recpoint agent has stored it."
    )


def _stall_text(checkpoints: Sequence[CheckpointFacts]) -> str:
    stalls = [checkpoint.stall_seconds for checkpoint in checkpoints if checkpoint.error is None]
    if not stalls:
        return NONE
    return f"{duration_text(statistics.median(stalls))} (most {duration_text(max(stalls))})"


def _share_text(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"


def _restore_text(overview: RunOverview) -> str:
    restore = overview.restore
    if restore is None:
        return "nothing restores" if overview.checkpoints else NONE
    manifests = restore.manifests_to_read
    return f"{bytes_text(restore.bytes_to_read)} in {counted(manifests, 'manifest')}"


def _validation_text(overview: RunOverview) -> str:
    last = overview.last_validated
    if last is None:
        return "none"
    return f"{last.verdict.result} ({last.verdict.level}), step {last.step}"


def run_row(run: WatchedRun) -> tuple[str, ...]:
    """The texts of a run's row, as `RUN_HEADINGS`; the second is the link's."""
    view = run.seen
    name = plain(run.name)
    age = view.age_seconds()
    aged = "never" if age is None else f"{duration_text(age) if age >= 1 else '0 s'} ago"
    overview = view.overview
    if overview is None:
        return (standing_text(view), name, *[NONE] * 7, aged)
    newest = overview.newest
    return (
        standing_text(view),
        name,
        risk_text(overview, "\n"),
        NONE if newest is None else f"{newest.step:,}",
        NONE if newest is None or newest.error else time_text(newest.committed_ms),
        _stall_text(overview.checkpoints).partition(" (")[0],
        _share_text(overview.totals.share_of_full),
        _restore_text(overview),
        _validation_text(overview),
        aged,
    )


def field_texts(overview: RunOverview) -> dict[str, str]:
    """The other facts of one run, by `FIELDS`; unknown facts are empty."""
    totals, restore = overview.totals, overview.restore
    written = chain = validated = ""
    if totals.checkpoints:
        written = (
            f"{bytes_text(totals.stored_bytes)} of {bytes_text(totals.full_bytes)} "
            f"({_share_text(totals.share_of_full)}), {counted(totals.checkpoints, 'checkpoint')}"
        )
    if restore is not None:
        chain = f"{restore.chain_length} as taken, {restore.manifests_to_read} to read"
    if overview.checkpoints:
        validated = _validation_text(overview)
    superseded = overview.superseded_checkpoints
    unplanned = "none has run yet, or none that left its plan: nothing goes by itself"
    return {
        FIELDS[0]: written,
        FIELDS[1]: chain,
        FIELDS[2]: validated,
        FIELDS[3]: f"{overview.live_checkpoints:,} live, {superseded:,} superseded",
        FIELDS[4]: _trainer_text(overview),
        FIELDS[5]: plain(overview.lag.clock_note) or "agree",
        FIELDS[6]: unplanned if overview.plan is None else "",
        FIELDS[7]: _rounding_text(overview.newest),
        FIELDS[8]: _keys_text(overview.newest),
    }


def _rounding_text(newest: CheckpointFacts | None) -> str:
    """Return what rounding costs in loss, and the widths that it gives; empty: not measured."""
    if newest is None or newest.loss is None:
        return ""
    text, widths = loss_text(newest.loss), newest.widths
    if widths is not None:
        text += f" Step {newest.step:,} has {widths_text(widths.mean_bits, widths.row_shares)}."
    return text


def _keys_text(newest: CheckpointFacts | None) -> str:
    """Return what the keys of each keyed table did until the newest checkpoint; empty: none is."""
    if newest is None or newest.keyed is None:
        return ""
    uses = newest.keyed
    table_texts = [f"{plain(use.table)}: {use.text}." for use in uses.tables[:_MOST_KEYED]]
    more = len(uses.tables) - len(table_texts) + uses.more
    if more:
        table_texts.append(f"And {more:,} more.")
    return " ".join(table_texts)


def _trainer_text(overview: RunOverview) -> str:
    generation = overview.generation
    if generation is None:
        return "none has started"
    came = "nothing" if generation.restored_step is None else f"step {generation.restored_step:,}"
    text = (
        f"generation {generation.number} on {plain(generation.host)} (process {generation.pid}), "
        f"from {came}, {overview.restarts} restarts"
    )
    if overview.ended is not None:
        text += f"; {overview.ended.reason} after step {overview.ended.step:,}"
        text += f", with {plain(overview.ended.error)}" if overview.ended.error else ""
    elif overview.gone_ms is not None:
        text += f"; gone since {time_text(overview.gone_ms)} UTC without saying that it ended"
    return text


def checkpoint_row(checkpoint: CheckpointFacts) -> tuple[str, ...]:
    """The texts of a checkpoint's row, as `CHECKPOINT_HEADINGS`."""
    notes = ["expires"] if checkpoint.expires else []
    notes += ["merged"] if checkpoint.merged else []
    notes += [pinned_text(map(plain, checkpoint.pins))] if checkpoint.pins else []
    if checkpoint.copied_ahead is not None:
        notes.append(
            copied_text(checkpoint.copied_ahead.rows_before, checkpoint.copied_ahead.rows_in_stall)
        )
    if checkpoint.cache is not None:
        notes.append(cache_text(checkpoint.cache))
    widths = checkpoint.widths
    if widths is not None and not widths.is_one_width:
        notes.append(widths_text(widths.mean_bits, widths.row_shares))
    if checkpoint.keyed is not None:
        keys = sum(use.used for use in checkpoint.keyed.tables)
        rows = sum(use.capacity_rows for use in checkpoint.keyed.tables)
        notes.append(f"{counted(keys, 'key')} in {counted(rows, 'row')}")
    if checkpoint.loss is not None:
        notes.append(loss_note(checkpoint.loss))
    validation = NONE if checkpoint.validation is None else str(checkpoint.validation)
    if checkpoint.error is not None:
        notes.insert(0, plain(checkpoint.error))
        return (
            f"{checkpoint.step:,}",
            NONE,
            checkpoint.state,
            *[NONE] * 6,
            validation,
            "; ".join(notes),
        )
    risk = NONE
    if checkpoint.at_risk_seconds is not None:
        batches = counted(checkpoint.at_risk_batches or 0, "batch")
        risk = f"{duration_text(checkpoint.at_risk_seconds)}, {batches}"
    share = checkpoint.stored_bytes / checkpoint.full_bytes if checkpoint.full_bytes else None
    return (
        f"{checkpoint.step:,}",
        f"{checkpoint.kind}, {checkpoint.chain_length} in chain",
        checkpoint.state,
        time_text(checkpoint.committed_ms),
        risk,
        duration_text(checkpoint.stall_seconds),
        duration_text(checkpoint.lag_seconds),
        bytes_text(checkpoint.stored_bytes),
        _share_text(share),
        validation,
        "; ".join(notes) or NONE,
    )


_BECOMES = {
    "keep": "stays",
    "mark": "is marked",
    "wait": "is marked, waits",
    "delete": "is deleted",
}


def plan_text(plan: Plan | None, now_ms: int) -> str:
    """The newest retention's rules, and what they came to; empty: there is no plan."""
    if plan is None:
        return ""
    rules = plan.rules
    rule_texts = [f"the newest {rules.last}"] if rules.last else []
    if rules.within_ms:
        rule_texts.append(
            f"what is at most {duration_text(rules.within_ms / 1000)} older than that"
        )
    periods = {"hour": rules.hourly, "day": rules.daily, "week": rules.weekly}
    periods["month"] = rules.monthly
    rule_texts += [f"one of each of {count} {name}s" for name, count in periods.items() if count]
    rule_texts += [
        f"the {rule.count} best by {rule.direction} {plain(rule.metric)}" for rule in rules.best
    ]
    validated = "; nothing goes unless a validated one stays" if rules.require_validated else ""
    ago = duration_text(max(0, now_ms - plan.planned_ms) / 1000)
    return (
        f"Rules: {', '.join(rule_texts)}; what is pinned{validated}. Grace "
        f"{duration_text(plan.grace_ms / 1000)}. Planned {ago} ago by process {plan.pid} of "
        f"{plain(plan.host)}: {plan.keep} stay, {plan.mark} to mark, {plan.wait} wait, "
        f"{plan.delete} to delete."
    )


def plan_rows(plan: Plan | None, most: int) -> list[tuple[str, ...]]:
    """The texts of a plan's rows, as `PLAN_HEADINGS`; what goes comes first."""
    if plan is None:
        return []
    rows = sorted(plan.manifests, key=lambda entry: entry.action == "keep")[:most]
    return [(plain(entry.manifest), _BECOMES[entry.action], plain(entry.reason)) for entry in rows]


def expiring_row(manifest: ExpiringManifest) -> tuple[str, ...]:
    """The texts of a row of what retention removes, as `EXPIRING_HEADINGS`."""
    reason = plain(manifest.reason) or "its mark has not been read, or cannot be"
    return (plain(manifest.key), reason, f"{duration_text(max(0.0, manifest.age.seconds))} ago")


def failure_row(failure: Failure) -> tuple[str, ...]:
    """The texts of a failure's row, as `FAILURE_HEADINGS`."""
    time = NONE if failure.when_ms is None else time_text(failure.when_ms)
    return (time, plain(failure.subject), plain(failure.cause), plain(failure.next_step))
