"""Lets ranks agree before and after a cut; checks that state stored once is equal on all ranks.

Checks that state which is stored once is equal on all ranks. This state is: dense parameters that
are whole on each rank, tables that every rank holds whole, and pieces that ranks of several meshes
hold. The start of training checks that all ranks have the same tensors, and decides which rank
stores which pieces (`sharding`). Each cut checks that the values are equal, by sums over a sample,
because comparing every byte would take too long. State that may differ between ranks (buffers,
extra states, hyperparameters, schedulers) is stored by each rank.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recpoint.errors import SettingsError, StagingError
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.policy import ChainLink, Tip
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.ranks.sharding import HeldPiece, balance, stored_elsewhere
from recpoint.trainer_plugin.schedule.schedule import Schedule

__all__ = [
    "AgreedSchedule",
    "CutAgreement",
    "LOST_AT_ONCE",
    "Lost",
    "NOTHING",
    "NO_NEEDS",
    "RecordNeeds",
    "Replicas",
    "Sketch",
    "after_cut",
    "agree_on_cut",
    "agree_on_lost",
    "agree_on_settings",
    "are_alike",
    "drift_between",
    "incomplete",
    "incomplete_parts",
]


_log = logging.getLogger("recpoint")

#: Number of values of each tensor that are summed, evenly spaced.
_SAMPLE: Final = 1024

#: Replicas that get the same updates differ only by how processors round, which is far less than
#: this. Tensors of other random values differ by about 1/sqrt(sample size).
_DRIFT: Final = 1e-4

#: Sketches of the same bits differ by less, in whichever order a rank adds them. One last bit of
#: one value makes a larger difference.
_ROUNDING: Final = 1e-11

_NEXT: Final = (
    "train state that all ranks share with DDP, or in pieces with fully_shard or TorchRec; put "
    "state that each rank has for itself into extras, or train it in a separate run. If ranks "
    "share rows of tables, clip gradients with recpoint.embeddings.clip_grad_norm_(): torch's "
    "clips each rank by another factor"
)


_OTHER_PIECES: Final = "other values in pieces of the same place, on ranks of several meshes"


class Sketch(NamedTuple):
    """A short summary of one or several tensors, for comparing their values between ranks.

    Attributes:
        total: sum over all tensors of (weighted sum of the tensor's sample / sum of its absolute
            values) + log(mean of its absolute values).
        balance: the same sum over pieces, each multiplied by its count from `sharding.balance`.
    """

    total: float
    balance: float = 0.0

    def is_like(self, sketch: Sketch) -> bool:
        """Whether both may summarize the same values."""
        return abs(self.total - sketch.total) <= _DRIFT

    def has_bits_of(self, sketch: Sketch) -> bool:
        """Whether both may summarize values of the same bits."""
        return abs(self.total - sketch.total) <= _ROUNDING

    @property
    def integers(self) -> tuple[int, int]:
        """The bits of both numbers as integers, for `Ranks.exchange`."""
        total, balance = struct.unpack("<qq", struct.pack("<dd", *self))
        return int(total), int(balance)

    @classmethod
    def of_integers(cls, total: int, balance: int) -> Sketch:
        """Return the sketch that has these bits; see `integers`."""
        return cls(*struct.unpack("<dd", struct.pack("<qq", total, balance)))


def are_alike(sketches: Sequence[Sketch]) -> bool:
    """Whether the sketches of all ranks may summarize the same values in all shared tensors."""
    return all(sketch.is_like(sketches[0]) for sketch in sketches) and _is_zero(
        sketch.balance for sketch in sketches
    )


def _is_zero(balances: Iterable[float]) -> bool:
    return abs(sum(balances)) <= _DRIFT


#: The sketch of no tensor.
NOTHING: Final = Sketch(0.0)


class Replicas:
    """Checks that tensors which are stored once are equal on all ranks. Collective.

    Args:
        ranks: the ranks of the job.
        tensors: returns the tensors that every rank must hold whole, by name.
        forms: other state that every rank must have in the same form, but not with the same values:
            what it is -> its form.
        pieces: for each tensor that is split over ranks, by name, the piece of this rank.
        local_pieces: returns the present values of these pieces, by name; may return others too.

    Attributes:
        stored_elsewhere: names of split tensors of which other ranks store everything that this
            rank holds.

    Raises:
        SettingsError: another rank has other tensors, or another shape or dtype; or the pieces of a
            tensor do not make up the whole.
        RankLost: a rank did not answer.
    """

    def __init__(
        self,
        ranks: Ranks,
        tensors: Callable[[], Mapping[str, Tensor]],
        forms: Mapping[str, str],
        pieces: Mapping[str, HeldPiece],
        local_pieces: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self._ranks = ranks
        self._tensors = tensors
        self._local_pieces = local_pieces
        whole = {_named(name): f"{list(t.shape)}, {t.dtype}" for name, t in tensors().items()}
        forms = whole | dict(forms)
        gathered = ranks.gather((forms, dict(pieces)))
        forms_of_ranks = [of_rank for of_rank, _ in gathered]
        for name in sorted(set().union(*forms_of_ranks)):
            by_form: dict[str, list[int]] = {}
            for rank, of_rank in enumerate(forms_of_ranks):
                by_form.setdefault(of_rank.get(name, "none"), []).append(rank)
            if len(by_form) > 1:
                forms_text = "; ".join(f"{form} on {_listed(on)}" for form, on in by_form.items())
                raise _unlike(name, forms_text, expected="the same on all ranks")
        pieces_of_ranks = [of_rank for _, of_rank in gathered]
        self.stored_elsewhere = stored_elsewhere(pieces_of_ranks, ranks.rank)
        self._counts = balance(pieces_of_ranks, ranks.rank)

    def sketch(self) -> Sketch:
        """Return the sketch of all tensors as they are now; waits for a GPU if they are on one."""
        return Sketch(_total(self._tensors().values()), sum(self._balances().values()))

    def _balances(self) -> dict[str, float]:
        if not self._counts:
            return {}
        pieces = self._local_pieces()
        return {name: count * _total([pieces[name]]) for name, count in self._counts.items()}

    def differences(self, sketches: Sequence[Sketch]) -> SettingsError:
        """Return an error that names a tensor which differs between ranks. Collective.

        Called after the sketches differed.

        Args:
            sketches: the sketches of all ranks, in rank order.
        """
        answers = self._ranks.gather(self._of_each())
        answered = [of_rank for of_rank in answers if of_rank is not None]
        if len(answered) < len(answers):
            return _unlike_somewhere(sketches)
        sums_of_ranks = [of_rank for of_rank, _ in answered]
        for name in sorted({name for _, balances in answered for name in balances}):
            if not _is_zero(balances.get(name, 0.0) for _, balances in answered):
                return _unlike(_named(name), _OTHER_PIECES)
        for name, first in sums_of_ranks[0].items():
            other_ranks = [
                n
                for n, sums in enumerate(sums_of_ranks)
                if not Sketch(sums.get(name, first)).is_like(Sketch(first))
            ]
            if other_ranks:
                return _unlike(
                    _named(name), f"other values on {_listed(other_ranks)} than on rank 0"
                )
        return _unlike_somewhere(sketches)

    def _of_each(self) -> tuple[dict[str, float], dict[str, float]] | None:
        """Return the sketch of each tensor and the balances of the pieces; None after an error.

        An error is logged and not raised, because the other ranks wait for an answer.
        """
        try:
            own_sums = {name: _total([tensor]) for name, tensor in self._tensors().items()}
            return own_sums, self._balances()
        except Exception as error:
            # An error, for instance of memory or a driver, must not stop training.
            _log.warning("the tensors that differ between ranks cannot be named: %s", error)
            return None


def _total(tensors: Iterable[Tensor]) -> float:
    samples: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.detach()._values()  # values() exists only for coalesced tensors
        if tensor.is_floating_point() and tensor.numel():
            flat = tensor.detach().flatten()
            sample = flat[:: -(-flat.numel() // _SAMPLE)].to(torch.float64)
            samples.setdefault(tensor.device, []).append(sample)
    total = 0.0
    for device, parts in samples.items():
        values = pad_sequence(parts, batch_first=True)
        # The weights make exchanged rows visible. Dividing by the absolute sum makes a tensor of
        # small values count as much as one of large values; the logarithm adds the magnitude.
        weights = torch.linspace(1, 2, values.shape[1], dtype=torch.float64, device=device)
        size = values.abs().sum(dim=1)
        counts = torch.tensor([len(part) for part in parts], dtype=torch.float64, device=device)
        of_each = (values @ weights) / size + (size / counts).log()
        # A tensor of zeros, or with values that are not finite, counts as 0.
        total += float(of_each.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).sum())
    return total


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _named(name: str) -> str:
    return f"the dense parameter or table {name!r}"


def _unlike_somewhere(sketches: Sequence[Sketch]) -> SettingsError:
    other_ranks = [n for n, sketch in enumerate(sketches) if not sketch.is_like(sketches[0])]
    if not other_ranks:
        return _unlike("the model", _OTHER_PIECES)
    return _unlike("the model", f"other values on {_listed(other_ranks)} than on rank 0")


def _unlike(
    subject: str, found: str, expected: str = "the same on all ranks, because one rank stores it"
) -> SettingsError:
    return SettingsError(subject, found=found, expected=expected, next_step=_NEXT)


#: The most lost checkpoints that a rank reports at once; it reports others the next time.
LOST_AT_ONCE: Final = 4


class RecordNeeds(NamedTuple):
    """What one rank would write into records at a cut, in bytes.

    Attributes:
        increment_bytes: entries of its chunks in the manifest, if the checkpoint is an increment.
        full_bytes: the same if it is a full.
        tables_bytes: the tables in the manifest, which are the same on all ranks.
        parts_bytes: the records of its parts of a full; 0 if the checkpoint has no parts.
    """

    increment_bytes: int
    full_bytes: int
    tables_bytes: int
    parts_bytes: int


#: The needs of a rank that cannot cut.
NO_NEEDS: Final = RecordNeeds(0, 0, 0, 0)


class Lost:
    """A set of checkpoints of which some rank has no part, so that they can never be complete."""

    def __init__(self, attempts: Iterable[int]) -> None:
        self._attempts = frozenset(attempts) - {-1}

    def __contains__(self, ref: CheckpointRef) -> bool:
        return _attempt(ref) in self._attempts


@dataclass(frozen=True, kw_only=True)
class CutAgreement:
    """What all ranks have agreed to do.

    Attributes:
        cut: all ranks can cut.
        increment: all want an increment after the same checkpoint; otherwise a full is cut.
        again: a rank already has a checkpoint of this step.
        number: number of the cut, if there is one; a new number each time, also if the same step is
            cut again.
        lost: checkpoints that some rank has lost since the last agreement.
        sketches: for each rank, the sketch of the state that is stored once; empty if some rank
            cannot cut.
        needs: for each rank, what it would write into records; empty if some rank cannot cut.
        measured: for each rank, what it has measured of the loss.
    """

    cut: bool
    increment: bool
    again: bool
    number: int
    lost: Lost
    sketches: tuple[Sketch, ...]
    needs: tuple[RecordNeeds, ...] = ()
    measured: tuple[tuple[int, ...], ...] = ()

    @property
    def unlike(self) -> bool:
        """Whether state that is stored once differs between ranks; if it does, no rank cuts."""
        return not are_alike(self.sketches)


def drift_between(sketches: Sequence[Sketch]) -> str | None:
    """Return a warning that replicas of all ranks are alike and not equal; None: they are equal.

    Args:
        sketches: the sketches of all ranks, in rank order.
    """
    other_ranks = [n for n, sketch in enumerate(sketches) if not sketch.has_bits_of(sketches[0])]
    if not other_ranks:
        return None
    return (
        f"the model: found values on {_listed(other_ranks)} that differ slightly from those on "
        "rank 0; "
        "expected the same bits, unless the ranks have other processors. The checkpoint has the "
        f"values of one rank. Next: {_NEXT}"
    )


def agree_on_cut(
    ranks: Ranks,
    step: int,
    *,
    link: ChainLink | None,
    tip: Tip | None,
    again: bool,
    cuts: int,
    lost: Sequence[CheckpointRef],
    sketch: Sketch,
    needs: RecordNeeds = NO_NEEDS,
    measured: Sequence[int] = (),
) -> CutAgreement:
    """Agree on whether and what all ranks cut. Collective.

    Args:
        ranks: the ranks of the job.
        step: batches done.
        link: link of the checkpoint that this rank would cut; None: it cannot cut.
        tip: the checkpoint after which it would cut.
        again: this rank already has a checkpoint of this step.
        cuts: number of cuts that this rank has begun since the start.
        lost: checkpoints that it has lost and not reported yet, at most `LOST_AT_ONCE`.
        sketch: its sketch of the state that is stored once.
        needs: what it would write into records.
        measured: what it has measured of the loss, equally many integers on all ranks.

    Raises:
        SettingsError: ranks have done different numbers of batches.
        RankLost: a rank did not answer.
    """
    increment = link is not None and link.kind == "increment"
    name = -1 if tip is None else _attempt(tip.ref)
    answers = ranks.exchange(
        "a checkpoint",
        [
            *(link is not None, increment, name, again, cuts),
            *sketch.integers,
            *_padded_attempts(lost),
            *needs,
            *measured,
        ],
        batches_done=step,
    )
    cut = all(answer[0] for answer in answers)
    end_of_lost = 7 + LOST_AT_ONCE
    end_of_needs = end_of_lost + len(needs)
    return CutAgreement(
        cut=cut,
        increment=all(answer[1] for answer in answers)
        and len({answer[2] for answer in answers}) == 1,
        again=any(answer[3] for answer in answers),
        number=1 + max(answer[4] for answer in answers),
        lost=Lost(number for answer in answers for number in answer[7:end_of_lost]),
        sketches=tuple(Sketch.of_integers(answer[5], answer[6]) for answer in answers)
        if cut
        else (),
        needs=tuple(RecordNeeds(*answer[end_of_lost:end_of_needs]) for answer in answers)
        if cut
        else (),
        measured=tuple(tuple(answer[end_of_needs:]) for answer in answers),
    )


def agree_on_lost(ranks: Ranks, lost: Sequence[CheckpointRef], *, step: int) -> Lost:
    """Exchange lost checkpoints before the last cut, as `agree_on_cut` does. Collective."""
    answers = ranks.exchange("lost checkpoints", _padded_attempts(lost), batches_done=step)
    return Lost(number for answer in answers for number in answer)


def _padded_attempts(lost: Sequence[CheckpointRef]) -> list[int]:
    return [*map(_attempt, lost), *(-1,) * LOST_AT_ONCE][:LOST_AT_ONCE]


def _attempt(ref: CheckpointRef) -> int:
    """Return 60 bits of the attempt's name, which identify a checkpoint between ranks."""
    return int(ref.attempt[:15], 16)


def agree_on_settings(ranks: Ranks, settings: Mapping[str, Any]) -> None:
    """Check that all ranks have the same settings. Collective.

    Args:
        ranks: the ranks of the job.
        settings: name -> plain value, for settings that must not differ.

    Raises:
        SettingsError: a setting differs; raised on every rank.
        RankLost: a rank did not answer.
    """
    if not ranks.several:
        return
    settings_of_ranks: list[dict[str, Any]] = ranks.gather(dict(settings))
    for name, first in settings_of_ranks[0].items():
        for rank, other_settings in enumerate(settings_of_ranks):
            if other_settings[name] != first:
                raise SettingsError(
                    name,
                    found=f"{other_settings[name]!r:.200} on rank {rank}, {first!r:.200} on rank 0",
                    expected="the same on all ranks",
                    next_step=f"give each rank's Checkpointer the same {name}",
                )


class AgreedSchedule:
    """Follows the time-based schedule of rank 0, because clocks differ but batches must not.

    Each grant takes one exchange; there are about nine in an interval, see
    `schedule.SecondsInterval`.

    Args:
        own_schedule: schedule of this rank.
        ranks: the ranks of the job.
    """

    def __init__(self, own_schedule: Schedule, ranks: Ranks) -> None:
        self._own_schedule = own_schedule
        self._ranks = ranks

    @property
    def due_seconds(self) -> float:
        """Infinity: no rank may decide by its own clock, because it would be alone."""
        return math.inf

    def restart(self, now_seconds: float, *, in_parts: bool = False) -> int:
        """Begin an interval; see `schedule.Schedule`. Collective."""
        return self._first(self._own_schedule.restart(now_seconds, in_parts=in_parts))

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """Grant more batches if time is left; see `schedule.Schedule`. Collective."""
        return self._first(self._own_schedule.extend(now_seconds, batches=batches))

    def batches_left(self, now_seconds: float, *, batches: int) -> None:
        """Return None: ranks do not look ahead."""

    def _first(self, batches: int) -> int:
        return self._ranks.exchange("the interval", [batches])[0][0]


def after_cut(
    ranks: Ranks, *, failed: bool, bound_bytes: int, step: int
) -> tuple[list[int], list[int]]:
    """Return the ranks on which a cut failed, and each rank's `bound_bytes`. Collective."""
    answers = ranks.exchange("a cut", [failed, bound_bytes], batches_done=step)
    return [rank for rank, (bad, _) in enumerate(answers) if bad], [bound for _, bound in answers]


def incomplete_parts(
    by_rank: Sequence[Mapping[tuple[int, int], Mapping[int, int]]],
) -> set[tuple[int, int]]:
    """Return (generation, step) of staged checkpoints that lack the part of some rank.

    Args:
        by_rank: for each rank, the parts on its host; see `StagingArea.parts_here`.
    """
    parts_by_name: dict[tuple[int, int], dict[int, int]] = {}
    for host in by_rank:
        for name, parts in host.items():
            ranks_by_part = parts_by_name.setdefault(name, {})
            for rank, ranks in parts.items():
                ranks_by_part[rank] = max(ranks, ranks_by_part.get(rank, 0))
    incomplete = set()
    for name, parts in parts_by_name.items():
        ranks = max(parts.values())
        # Parts with higher numbers are of embedding servers, which may be on any hosts.
        if sum(number < ranks for number in parts) < ranks:
            incomplete.add(name)
    return incomplete


def incomplete(step: int, failed: Sequence[int], count: int) -> StagingError:
    """Return the error of a checkpoint that other ranks could not cut."""
    return StagingError(
        f"checkpoint of step {step}",
        found=f"no part of rank {', '.join(map(str, failed))}",
        expected=f"a part of each of {count} ranks",
        next_step="see the log of that rank; the next checkpoint also holds these rows",
    )
