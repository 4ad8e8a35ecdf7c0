"""Defines every exception that recpoint raises, in one tree.

A message always answers four questions: which object, what was found there, what was expected,
and what to run or change next. Callers that want to react rather than read use the attributes.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ChainError",
    "CheckpointCancelled",
    "CommitConflict",
    "CommitError",
    "DigestMismatch",
    "EvaluationFailed",
    "ForeignObject",
    "FormatError",
    "GenerationRecordLost",
    "HomeError",
    "IncompatibleModel",
    "MalformedObject",
    "MissingLink",
    "NonFiniteValue",
    "NotServing",
    "NothingToRestore",
    "NothingValidated",
    "ObjectExists",
    "ObjectNotFound",
    "RankLost",
    "RanksDiffer",
    "RanksMissing",
    "RecordTooLarge",
    "RecpointError",
    "RestoreError",
    "RetentionRefused",
    "RunRecordLost",
    "ScriptingRefused",
    "ServerLost",
    "SettingsError",
    "SinkError",
    "StaleWriter",
    "StagingError",
    "StagingFull",
    "StagingRefused",
    "StoreAccessDenied",
    "StoreError",
    "StoreFull",
    "StoreThrottled",
    "StoreUnavailable",
    "StoreUnsupported",
    "UnknownRow",
    "UnknownTable",
    "UnsupportedVersion",
]


class RecpointError(Exception):
    """Base of all recpoint errors.

    Args:
        subject: the object that the error is about: a key, a path, a table, a setting.
        found: what was there.
        expected: what should have been there.
        next_step: the command to run or the change to make.
    """

    #: Whether the same call may succeed when it is made again later, with nothing changed.
    retryable: ClassVar[bool] = False

    def __init__(self, subject: str, *, found: str, expected: str, next_step: str) -> None:
        super().__init__(subject, found, expected, next_step)
        self.subject = subject
        self.found = found
        self.expected = expected
        self.next_step = next_step

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.subject, self.found, self.expected, self.next_step))

    def __str__(self) -> str:
        return (
            f"{self.subject}: found {self.found}; expected {self.expected}. Next: {self.next_step}"
        )


def _rebuild(
    kind: type[RecpointError], subject: str, found: str, expected: str, next_step: str
) -> RecpointError:
    return kind(subject, found=found, expected=expected, next_step=next_step)


class SettingsError(RecpointError, ValueError):
    """A setting that cannot work, refused when it is given; `subject` names the setting."""


class ScriptingRefused(SettingsError, AttributeError):
    """A model whose lookups are being marked was given to torch.jit.script."""


class NonFiniteValue(RecpointError, ValueError):
    """A NaN or an infinity where only finite values can be stored."""


class StoreError(RecpointError):
    """The store did not do what was asked.

    Attributes:
        refused: whether the store answered 403 or 409. A store that just restarted, or that other
            writers keep busy, does so now and then. A pickled copy of the error says False.
    """

    refused = False


class ObjectNotFound(StoreError):
    """No object has this key."""


class ObjectExists(StoreError):
    """A create-only write found another object under its key."""


class StoreAccessDenied(StoreError):
    """The store does not accept the credentials, or not for this request (401, 403)."""


class StoreThrottled(StoreError):
    """The store asks for fewer requests (429, 503)."""

    retryable = True


class StoreUnavailable(StoreError):
    """No usable answer: time-out, reset, refused connection, 5xx, body shorter than announced."""

    retryable = True


class StoreFull(StoreError):
    """No space or quota is left in the store."""


class StoreUnsupported(StoreError):
    """The store lacks something a commit relies on, for instance create-only writes."""


class FormatError(RecpointError):
    """Bytes that are not what docs/format.md describes."""


class MalformedObject(FormatError):
    """A manifest, chunk, generation record or staged job that does not parse, or breaks a bound."""


class RecordTooLarge(MalformedObject):
    """A record that would be larger than readers accept, so it is not written."""


class UnsupportedVersion(FormatError):
    """Written by a version of the format this release does not read."""


class DigestMismatch(FormatError):
    """Bytes whose crc32c or length differs from the recorded one."""


class ForeignObject(FormatError):
    """A well-formed object that belongs to another run, checkpoint or table."""


class ChainError(RecpointError):
    """The links from a full to an increment do not join up."""


class MissingLink(ChainError):
    """A checkpoint that an increment depends on is not there, or is another one of that step."""


class GenerationRecordLost(MissingLink):
    """Checkpoints exist, but the record of what their trainer went on from is lost."""


class CommitError(RecpointError):
    """A checkpoint could not be committed, and never will be in this form."""


class CommitConflict(CommitError):
    """Another writer has committed this step of this generation."""


class StaleWriter(CommitError):
    """A newer trainer has taken over the run; this one may not commit any more."""


class RanksMissing(RecpointError):
    """Other parts of a checkpoint are not stored yet, so that it stays staged.

    Args:
        ranks: numbers of the missing parts, ascending: those of ranks, then those of embedding
            servers, which count on after the ranks; the other arguments as for `RecpointError`.
    """

    retryable = False  # in this process: the agent looks again

    def __init__(
        self,
        subject: str,
        *,
        found: str,
        expected: str,
        next_step: str,
        ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(subject, found=found, expected=expected, next_step=next_step)
        self.ranks = ranks


class RetentionRefused(RecpointError):
    """A deletion or a pin that would contradict what is kept, or what is already being deleted."""


class NothingValidated(RetentionRefused):
    """A retention drops nothing yet: no checkpoint that it would keep has been validated."""


class RankLost(RecpointError):
    """Another process that trains the same model did not answer, or failed where all had to act."""


class RanksDiffer(SettingsError):
    """Ranks that share rows do different things at one time, such as a step on some of them."""


class CheckpointCancelled(RecpointError):
    """The trainer dropped this checkpoint; its rows are in the next one."""


class RestoreError(RecpointError):
    """A restore could not be done."""


class NothingToRestore(RestoreError):
    """The run holds no checkpoint that can be restored."""


class RunRecordLost(NothingToRestore):
    """A run exists, but the record with its id is lost."""


class IncompatibleModel(RestoreError):
    """Model, optimizers or tables differ from the checkpoint's."""


class EvaluationFailed(RestoreError):
    """The user's function raised for a restored model, or returned no metrics."""


class NotServing(RestoreError):
    """A follower has nothing to serve yet."""


class SinkError(RecpointError):
    """A sink, a store that serving reads, cannot be used, or does not hold what was expected."""


class UnknownTable(RecpointError, KeyError):
    """A table that is not served was looked up."""


class UnknownRow(RecpointError, IndexError):
    """A row that its table does not have was looked up."""


class HomeError(RecpointError):
    """A home of embedding rows was used against its contract, or its files cannot be used."""


class ServerLost(HomeError):
    """An embedding server does not answer, or was started again and has no rows any more."""


class ClusterLost(ServerLost):
    """The Ray cluster of the embedding servers has no head any more: no restore brings it back."""


class StagingError(RecpointError):
    """The staging area on this host cannot be used."""


class StagingFull(StagingError):
    """The staging area has no room for this checkpoint."""


class StagingRefused(StagingError):
    """Something in the staging area is another user's, is a link, or is writable by others."""
