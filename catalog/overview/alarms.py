"""Says what is wrong with a run now, or may be, from its overview."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from recpoint.catalog.overview.overview import RunOverview
from recpoint.units import duration_text, time_text

__all__ = [
    "Alarm",
    "INTERVALS_OF_SILENCE",
    "alarms",
    "clock_note",
]


#: A run is lagging when this many of its intervals have passed without a commit.
INTERVALS_OF_SILENCE = 3.0

#: A difference of clocks above this is reported.
_CLOCK_SECONDS = 60.0

#: Kinds of alarms.
Trouble = Literal[
    "no_commit",
    "failed",
    "superseded",
    "validation_failed",
    "chain_broken",
    "manifest_damaged",
]


class Alarm(NamedTuple):
    """Something that needs attention now, in one sentence, and what to do."""

    trouble: Trouble
    text: str
    next_step: str


def alarms(
    overview: RunOverview,
    *,
    intervals: float = INTERVALS_OF_SILENCE,
    unknown_interval_seconds: float = 1800.0,
) -> tuple[Alarm, ...]:
    """Return what is wrong now, worst first; empty if nothing is.

    Args:
        overview: the run.
        intervals: number of the run's intervals without a commit that is too long.
        unknown_interval_seconds: time without a commit that is too long if the run's interval is
            not known.
    """
    alarms_found: list[Alarm] = []
    silence = (
        _failed(overview)
        or _uncounted(overview)
        or _gone(overview)
        or _silence(overview, intervals, unknown_interval_seconds)
    )
    if silence is not None:
        alarms_found.append(silence)
    troubles: dict[str, Trouble] = {
        "superseded": "superseded",
        "chain": "chain_broken",
        "manifest": "manifest_damaged",
        "validation": "validation_failed",
    }
    for failure in overview.failures:
        trouble = troubles.get(failure.kind)
        if trouble is not None:
            alarms_found.append(
                Alarm(trouble, f"{failure.subject}: {failure.cause}", failure.next_step)
            )
    return tuple(alarms_found)


def _failed(overview: RunOverview) -> Alarm | None:
    generation, ended, restore = overview.generation, overview.ended, overview.restore
    if generation is None or ended is None or not ended.error:
        return None
    stored = "no checkpoint is stored" if restore is None else f"step {restore.step} is stored"
    return Alarm(
        "failed",
        f"the trainer (process {generation.pid} of {generation.host}) ended after step "
        f"{ended.step} with an exception, {ended.error} ({time_text(ended.ended_ms)} UTC); "
        f"{stored}",
        f"on {generation.host}: read the trainer's log, and start the training again",
    )


def _uncounted(overview: RunOverview) -> Alarm | None:
    if overview.ended is None or not overview.counted_nothing:
        return None
    ended = _ENDED[overview.ended.reason]
    return Alarm(
        "no_commit",
        f"training has {ended}, and its Checkpointer counted no batch: nothing is stored",
        "in the training script: call step() after each batch, or loop over batches(), which "
        "calls it; then train again",
    )


def _gone(overview: RunOverview) -> Alarm | None:
    generation, restore = overview.generation, overview.restore
    if generation is None or overview.gone_ms is None:
        return None
    stored = "no checkpoint is stored" if restore is None else f"step {restore.step} is stored"
    next_step = "start the training again"
    if overview.staged is not None:
        stored += f", and step {overview.staged.step} is staged"
        next_step = f"run recpoint agent, which stores what is staged, then {next_step}"
    return Alarm(
        "no_commit",
        f"the trainer (process {generation.pid} of {generation.host}) is gone and did not say that "
        f"it ended (last sign of life {time_text(overview.gone_ms)} UTC); {stored}",
        f"on {generation.host}: {next_step}",
    )


def _silence(
    overview: RunOverview, intervals: float, unknown_interval_seconds: float
) -> Alarm | None:
    lag, generation, ended = overview.lag, overview.generation, overview.ended
    if generation is None or (ended is not None and lag.at_risk_batches == 0):
        return None
    interval_seconds = lag.interval_seconds
    silence = lag.silent_seconds
    if silence <= (
        unknown_interval_seconds if interval_seconds is None else intervals * interval_seconds
    ):
        return None
    host = generation.host
    if ended is not None:
        return Alarm(
            "no_commit",
            f"training has {_ENDED[ended.reason]} after step {ended.step}, and its last "
            f"{lag.at_risk_batches} batches are not stored",
            f"on {host}: if a checkpoint is staged there, run recpoint agent, which stores it; a "
            "new start trains the other batches again",
        )
    state = f"no new checkpoint at all for {duration_text(silence)}"
    if overview.checkpoints:
        state = f"no new checkpoint that restores for {duration_text(silence)}"
    if lag.seconds is not None and lag.seconds > silence:
        # A trainer that has just started is silent for less time than the checkpoint is old.
        state += (
            f", since the newest trainer started; the newest is {duration_text(lag.seconds)} old"
        )
    if interval_seconds is not None:
        state += f"; one is expected every {duration_text(interval_seconds)}"
    next_step = "is the trainer alive, and recpoint agent running?"
    staged = overview.staged
    if staged is not None and staged.trouble is not None:
        error, next_step, tries = staged.trouble
        counted_tries = f"{tries} {'try' if tries == 1 else 'tries'}"
        state += f"; recpoint agent cannot store step {staged.step} ({counted_tries}): {error}"
        next_step = next_step or "read the log of recpoint agent"
    return Alarm("no_commit", state, f"on {host}: {next_step}")


#: Completes "training has …" by the reason of its end.
_ENDED: Final[dict[str, str]] = {
    "finished": "finished",
    "terminated": "been terminated",
    "failed": "failed",
}


def clock_note(*, store_less_trainer_seconds: float, ahead_seconds: float) -> str:
    """Return a note about clocks that differ by more than a minute; empty if they do not.

    Args:
        store_less_trainer_seconds: the store's time of the newest manifest less the commit time in
            the manifest.
        ahead_seconds: by how much the store's time of that object is after this host's time.
    """
    if ahead_seconds > _CLOCK_SECONDS:
        return f"the store's clock is {ahead_seconds:.0f} s ahead of this host's"
    apart = store_less_trainer_seconds
    if abs(apart) <= _CLOCK_SECONDS:
        return ""
    order = "after" if apart > 0 else "before"
    return (
        f"the store dates the newest manifest {abs(apart):.0f} s {order} its trainer did: their "
        "clocks differ, or the run was copied; ages are by the store's clock"
    )
