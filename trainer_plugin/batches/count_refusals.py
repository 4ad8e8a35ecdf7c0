"""Builds the errors with which a loop is refused whose trained batches cannot be counted."""

from __future__ import annotations

from recpoint.errors import SettingsError

__all__ = ["late_step", "mid_step", "second_step", "too_many", "unclear"]


def late_step() -> SettingsError:
    """Return the error of a `step` that comes after the next batch was taken."""
    return SettingsError(
        "step()",
        found="a call after the next batch was taken from the reader, whose position is then "
        "after a batch that is not trained",
        expected="a call before the next batch is taken",
        next_step="call checkpoints.step() right after the optimizer step; or pass "
        "Checkpointer(options=Options(in_flight=1))",
    )


def second_step() -> SettingsError:
    """Return the error of a second `step` for one batch of the reader."""
    return SettingsError(
        "step()",
        found="a second call since the last batch was taken from the reader, whose "
        "position is then after batches that are not trained",
        expected="a loop that trains each batch before it takes the next, or that says how "
        "far it reads ahead",
        next_step="pass Checkpointer(options=Options(in_flight=N)), where N is the most "
        "batches that the loop holds beside the one in training",
    )


def mid_step() -> SettingsError:
    """Return the error of a loop that asks for a batch while it trains another one."""
    return SettingsError(
        "batches()",
        found="a training loop that takes the next batch in the middle of a step, after "
        "the forward pass or the backward pass of another batch, so no checkpoint could be "
        "cut where a batch is taken",
        expected="checkpoints between two steps",
        next_step="with a pipeline of TorchRec: pipeline = checkpoints.pipelined(pipeline)"
        "; with any other loop: take batches from iter(reader), and call "
        "checkpoints.step() after each step",
    )


def unclear() -> SettingsError:
    """Return the error of a loop that asks for a second batch before anything was trained."""
    return SettingsError(
        "the training loop",
        found="a second batch that was asked for before anything was trained: no backward pass "
        "and no optimizer step was seen since the first one was taken",
        expected="a loop that trains each batch before it takes the next, or that says how far "
        "it reads ahead, because a checkpoint must hold the position of the last batch trained",
        next_step="if a prefetcher takes batches ahead, pass "
        "Checkpointer(options=Options(in_flight=N)), where N is the most batches that it holds "
        "beside the one in training; with a pipeline of TorchRec, call "
        "checkpoints.pipelined(pipeline); if batches are left out or not trained, pass "
        "Options(in_flight=0)",
    )


def too_many(taken: int, limit: int) -> SettingsError:
    """Return the error of a loop that holds more batches than it may.

    Args:
        taken: batches that were taken and not trained.
        limit: the most beside the one in training.
    """
    return SettingsError(
        "the training loop",
        found=f"{taken} batches that were taken and not trained, when another one was asked for",
        expected=f"at most {limit} beside the one in training",
        next_step="pass Checkpointer(options=Options(in_flight=N)) with a larger N; if the loop "
        "leaves batches out, leave them out in the reader",
    )
