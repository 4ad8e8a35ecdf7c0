"""Exchanges what ranks agree on around a cut; checks that state stored once is equal on all."""

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
from recpoint.trainer_plugin.policy import Link, Tip
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.ranks.sharding import HeldPiece, balance, stored_elsewhere
from recpoint.trainer_plugin.schedule.schedule import Schedule

__all__ = [
    "AgreedSchedule",
    "CutAgreement",
    "LOST_AT_ONCE",
    "Lost",
    "NOTHING",
    "Replicas",
    "Sketch",
    "after_cut",
    "agree_on_cut",
    "agree_on_lost",
    "agree_on_settings",
    "are_alike",
    "incomplete",
    "incomplete_parts",
]


# What ranks have alike, and is stored once for that: whether they do have it alike.
#
# Dense parameters that are no pieces, tables that every rank holds whole, and pieces that ranks of
# several meshes have. That all of them have the same ones is found when training starts (and so is
# who stores which pieces, `sharding`), that the values are the same at each cut, by sums over a
# sample: comparing every byte would be a stall. What ranks need not have alike (buffers, extra
# states, hyperparameters, schedulers) each of them stores.


_log = logging.getLogger("recpoint")

#: So many values of each tensor are summed, evenly drawn.
_SAMPLE: Final = 1024

#: Replicas that get the same updates differ by how processors round, which is far less than this;
#: tensors of other random values by about one over the root of the sample's size.
_DRIFT: Final = 1e-4

_NEXT: Final = (
    "train what all ranks have with DDP, or in pieces with fully_shard or TorchRec; what each rank "
    "has of its own goes into extras, or into a run of its own"
)


_OTHER_PIECES: Final = "other values in pieces of one place, on ranks of several meshes"


class Sketch(NamedTuple):
    """Of one tensor or several.

    Attributes:
        total: of each tensor the weighted sum of its sample over that of its absolute values, and
            the logarithm of their mean, added.
        balance: the same of pieces, each counted as `sharding.balance` says.
    """

    total: float
    balance: float = 0.0

    def is_like(self, other: Sketch) -> bool:
        """Whether both may be of the same values."""
        return abs(self.total - other.total) <= _DRIFT

    @property
    def integers(self) -> tuple[int, int]:
        """Its bits, as `Ranks.exchange` takes them."""
        total, balance = struct.unpack("<qq", struct.pack("<dd", *self))
        return int(total), int(balance)

    @classmethod
    def of_integers(cls, total: int, balance: int) -> Sketch:
        """See `integers`."""
        return cls(*struct.unpack("<dd", struct.pack("<qq", total, balance)))


def are_alike(sketches: Sequence[Sketch]) -> bool:
    """Whether those of all ranks may be of the same values, wherever they have the same tensors."""
    return all(one.is_like(sketches[0]) for one in sketches) and _is_zero(
        one.balance for one in sketches
    )


def _is_zero(balances: Iterable[float]) -> bool:
    return abs(sum(balances)) <= _DRIFT


#: Of no tensor.
NOTHING: Final = Sketch(0.0)


class Replicas:
    """The tensors that every rank has whole. Collective.

    Args:
        ranks: of the job.
        tensors: says which there are here, by name.
        forms: what else every rank has to have, though not with the same values: what -> which.
        pieces: what this rank has of tensors that are in pieces, by name.
        local_pieces: says what they are now, by name; others may be among them.

    Attributes:
        stored_elsewhere: the tensors in pieces of which other ranks store all that this one has.

    Raises:
        SettingsError: another rank has others, or of another shape or dtype; or the pieces of a
            tensor do not make it up.
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
        said = ranks.gather((forms, dict(pieces)))
        heard = [of_rank for of_rank, _ in said]
        for name in sorted(set().union(*heard)):
            by_form: dict[str, list[int]] = {}
            for rank, of_rank in enumerate(heard):
                by_form.setdefault(of_rank.get(name, "none"), []).append(rank)
            if len(by_form) > 1:
                found = "; ".join(f"{form} on {_listed(on)}" for form, on in by_form.items())
                raise _unlike(name, found, expected="the same on all ranks")
        held = [of_rank for _, of_rank in said]
        self.stored_elsewhere = stored_elsewhere(held, ranks.rank)
        self._counts = balance(held, ranks.rank)

    def sketch(self) -> Sketch:
        """Of all of them together, as they are now; on a GPU this waits for it."""
        return Sketch(_total(self._tensors().values()), sum(self._balances().values()))

    def _balances(self) -> dict[str, float]:
        if not self._counts:
            return {}
        pieces = self._local_pieces()
        return {name: count * _total([pieces[name]]) for name, count in self._counts.items()}

    def differences(self, sketches: Sequence[Sketch]) -> SettingsError:
        """Which of them are not the same on all ranks, after the sketches were not. Collective.

        Args:
            sketches: of all ranks.
        """
        answers = self._ranks.gather(self._of_each())
        told = [of_rank for of_rank in answers if of_rank is not None]
        if len(told) < len(answers):
            return _unlike_somewhere(sketches)
        heard = [of_rank for of_rank, _ in told]
        for name in sorted({name for _, balances in told for name in balances}):
            if not _is_zero(balances.get(name, 0.0) for _, balances in told):
                return _unlike(_named(name), _OTHER_PIECES)
        for name, first in heard[0].items():
            others = [
                n
                for n, said in enumerate(heard)
                if not Sketch(said.get(name, first)).is_like(Sketch(first))
            ]
            if others:
                return _unlike(_named(name), f"other values on {_listed(others)} than on rank 0")
        return _unlike_somewhere(sketches)

    def _of_each(self) -> tuple[dict[str, float], dict[str, float]] | None:
        """Of each tensor and of the pieces; None: that cannot be told here, and is logged.

        The other ranks wait for an answer, whatever goes wrong here.
        """
        try:
            own = {name: _total([tensor]) for name, tensor in self._tensors().items()}
            return own, self._balances()
        except Exception as error:
            # Memory, a driver: none of it may stop training.
            _log.warning("which tensors are not alike cannot be told: %s", error)
            return None


def _total(tensors: Iterable[Tensor]) -> float:
    samples: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.detach()._values()  # public for coalesced ones only
        if tensor.is_floating_point() and tensor.numel():
            flat = tensor.detach().flatten()
            sample = flat[:: -(-flat.numel() // _SAMPLE)].to(torch.float64)
            samples.setdefault(tensor.device, []).append(sample)
    total = 0.0
    for device, parts in samples.items():
        values = pad_sequence(parts, batch_first=True)
        # Weighed, so that rows which have changed places are not the same; each tensor by its own
        # size, so that a small one counts as much as a large one, and the size's logarithm beside.
        weights = torch.linspace(1, 2, values.shape[1], dtype=torch.float64, device=device)
        size = values.abs().sum(dim=1)
        counts = torch.tensor([len(part) for part in parts], dtype=torch.float64, device=device)
        of_each = (values @ weights) / size + (size / counts).log()
        # 0: all zeros, or not finite any more.
        total += float(of_each.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).sum())
    return total


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _named(name: str) -> str:
    return f"the dense parameter or table {name!r}"


def _unlike_somewhere(sketches: Sequence[Sketch]) -> SettingsError:
    others = [n for n, one in enumerate(sketches) if not one.is_like(sketches[0])]
    if not others:
        return _unlike("the model", _OTHER_PIECES)
    return _unlike("the model", f"other values on {_listed(others)} than on rank 0")


def _unlike(
    subject: str, found: str, expected: str = "the same on all ranks, of which one stores it"
) -> SettingsError:
    return SettingsError(subject, found=found, expected=expected, next_step=_NEXT)


# What ranks say to each other before and after a cut: a few integers of a fixed number each.


#: Most checkpoints that a rank reports as lost at once; others are reported the next time.
LOST_AT_ONCE: Final = 4


class Lost:
    """Checkpoints that some rank has no part of, so that they can never be whole."""

    def __init__(self, heard: Iterable[int]) -> None:
        self._attempts = frozenset(heard) - {-1}

    def __contains__(self, ref: CheckpointRef) -> bool:
        return _attempt(ref) in self._attempts


@dataclass(frozen=True, kw_only=True)
class CutAgreement:
    """What all ranks do.

    Attributes:
        cut: all of them can cut.
        increment: all want an increment, after the same checkpoint; else a full is cut.
        again: one of them has a checkpoint of this step already.
        number: of the cut, if there is one: another each time, also when a step is cut again.
        lost: those that some rank has lost since the last agreement.
        sketches: of what all have alike, of each rank; where all can cut.
    """

    cut: bool
    increment: bool
    again: bool
    number: int
    lost: Lost
    sketches: tuple[Sketch, ...]

    @property
    def unlike(self) -> bool:
        """Whether what is stored once is not the same on all ranks: no rank cuts then."""
        return not are_alike(self.sketches)


def agree_on_cut(
    ranks: Ranks,
    step: int,
    *,
    link: Link | None,
    tip: Tip | None,
    again: bool,
    cuts: int,
    lost: Sequence[CheckpointRef],
    sketch: Sketch,
) -> CutAgreement:
    """Before a cut. Collective.

    Args:
        ranks: of the job.
        step: batches done.
        link: what this rank would cut; None: it cannot.
        tip: that it would cut after.
        again: it has a checkpoint of this step already.
        cuts: that it has begun since the start.
        lost: those that it has lost and not told of yet, at most `LOST_AT_ONCE`.
        sketch: of what it has as all ranks have it.

    Raises:
        SettingsError: ranks have done different numbers of batches.
        RankLost: one did not answer.
    """
    increment = link is not None and link.kind == "increment"
    name = -1 if tip is None else _attempt(tip.ref)
    heard = ranks.exchange(
        "a checkpoint",
        [link is not None, increment, name, again, cuts, *sketch.integers, *_padded_attempts(lost)],
        batches_done=step,
    )
    cut = all(said[0] for said in heard)
    return CutAgreement(
        cut=cut,
        increment=all(said[1] for said in heard) and len({said[2] for said in heard}) == 1,
        again=any(said[3] for said in heard),
        number=1 + max(said[4] for said in heard),
        lost=Lost(one for said in heard for one in said[7:]),
        sketches=tuple(Sketch.of_integers(said[5], said[6]) for said in heard) if cut else (),
    )


def agree_on_lost(ranks: Ranks, lost: Sequence[CheckpointRef], *, step: int) -> Lost:
    """Before the last cut, as `agree_on_cut` does before each. Collective."""
    heard = ranks.exchange("lost checkpoints", _padded_attempts(lost), batches_done=step)
    return Lost(one for said in heard for one in said)


def _padded_attempts(lost: Sequence[CheckpointRef]) -> list[int]:
    return [*map(_attempt, lost), *(-1,) * LOST_AT_ONCE][:LOST_AT_ONCE]


def _attempt(ref: CheckpointRef) -> int:
    """60 bits of the attempt: checkpoints are the same where they are."""
    return int(ref.attempt[:15], 16)


def agree_on_settings(ranks: Ranks, settings: Mapping[str, Any]) -> None:
    """Whether all ranks were given the same. Collective.

    Args:
        ranks: of the job.
        settings: name -> value, plain ones, of those that may not differ.

    Raises:
        SettingsError: they differ; on every rank.
        RankLost: one did not answer.
    """
    if not ranks.several:
        return
    heard: list[dict[str, Any]] = ranks.gather(dict(settings))
    for name, first in heard[0].items():
        for rank, said in enumerate(heard):
            if said[name] != first:
                raise SettingsError(
                    name,
                    found=f"{said[name]!r:.200} on rank {rank}, {first!r:.200} on rank 0",
                    expected="the same on all ranks",
                    next_step=f"give each rank's Checkpointer the same {name}",
                )


class AgreedSchedule:
    """A schedule that measures time, as rank 0 sees it: clocks differ, and batches must not.

    One exchange for each grant: about nine in an interval, see `schedule.SecondsInterval`.

    Args:
        own: of this rank.
        ranks: of the job.
    """

    def __init__(self, own: Schedule, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    @property
    def due_seconds(self) -> float:
        """Never: a rank that decided by its own clock would be alone."""
        return math.inf

    def restart(self, now_seconds: float, *, in_parts: bool = False) -> int:
        """See `schedule.Schedule`. Collective."""
        return self._first(self._own.restart(now_seconds, in_parts=in_parts))

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """See `schedule.Schedule`. Collective."""
        return self._first(self._own.extend(now_seconds, batches=batches))

    def _first(self, batches: int) -> int:
        return self._ranks.exchange("the interval", [batches])[0][0]


def after_cut(
    ranks: Ranks, *, failed: bool, bound_bytes: int, step: int
) -> tuple[list[int], list[int]]:
    """After a cut: the ranks on which it failed, and the `bound_bytes` of each. Collective."""
    said = ranks.exchange("a cut", [failed, bound_bytes], batches_done=step)
    return [rank for rank, (bad, _) in enumerate(said) if bad], [bound for _, bound in said]


def incomplete_parts(
    by_rank: Sequence[Mapping[tuple[int, int], Mapping[int, int]]],
) -> set[tuple[int, int]]:
    """Generation and step of staged checkpoints that lack the part of some rank.

    Args:
        by_rank: what the host of each rank has, see `StagingArea.parts_here`.
    """
    there: dict[tuple[int, int], dict[int, int]] = {}
    for host in by_rank:
        for name, parts in host.items():
            known = there.setdefault(name, {})
            for rank, ranks in parts.items():
                known[rank] = max(ranks, known.get(rank, 0))
    return {name for name, parts in there.items() if len(parts) < max(parts.values())}


def incomplete(step: int, failed: Sequence[int], count: int) -> StagingError:
    """What is wrong with a checkpoint that other ranks could not cut."""
    return StagingError(
        f"checkpoint of step {step}",
        found=f"no part of rank {', '.join(map(str, failed))}",
        expected=f"a part of each of {count} ranks",
        next_step="see the log of that rank; the next checkpoint holds these rows too",
    )
