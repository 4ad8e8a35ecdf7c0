"""Resolves a chain: the manifests that a restore of one checkpoint reads, checked to join up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import ChainError, FormatError, MissingLink, ObjectNotFound, RecpointError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName

__all__ = [
    "Chain",
    "DAMAGE",
    "ManifestsAhead",
    "PassedOver",
    "blamed",
    "check_link",
    "check_with_own",
    "has_chunk_of",
    "read_with_chain",
    "resolve_chain",
]


# Reading the manifests of a chain several at a time, before each names the next one.


#: A chain of so few manifests is read as fast without.
_WORTH_IT = 4


class ManifestsAhead:
    """Reads manifests for a walk from a checkpoint to its full, which follows the line mostly.

    The first manifest of a chain says how long it is and where it starts. What the walk will ask
    for next is guessed from that and read ahead; what it does not ask for is dropped, and what was
    not guessed is read when it is asked for. A guess thus costs time at most.

    Args:
        run: whose manifests they are.
        line: checkpoints, newest first, among which parents are guessed; may be empty.
        there: consolidated manifests of each checkpoint, those that read least first.
        avoid: keys that will not be asked for.
    """

    def __init__(
        self,
        run: Run,
        line: Sequence[ManifestName],
        there: Mapping[ManifestName, Sequence[Representation]],
        avoid: Collection[str] = (),
    ) -> None:
        self._run = run
        self._line = line
        self._there = there
        self._avoid = avoid
        self._left: set[Representation] | None = None
        self._coming: Iterator[tuple[Representation, Future[Manifest]]] = iter(())
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.close()

    def read(self, representation: Representation) -> Manifest:
        """One manifest; errors as of `Run.read_manifest`, when it is asked for and not before."""
        if self._left and representation in self._left:
            for guess, coming in self._coming:
                self._left.remove(guess)
                if guess == representation:
                    return coming.result()
        found = self._run.read_manifest(representation)
        if self._left is None and self._line and found.chain_length >= _WORTH_IT:
            guesses = list(self._guesses(found))
            self._left = set(guesses)
            reads = self._closing.enter_context(ReadScheduler.of_records())
            self._coming = reads.in_order(guesses, self._run.read_manifest)
        return found

    def _guesses(self, found: Manifest) -> Iterator[Representation]:
        """The walk after `found`, if each checkpoint was taken after the one before it."""
        if found.parent is None or found.base is None:
            return
        newest, left = found.parent.step, found.chain_length - 1
        for name in self._line:
            if name.step > newest:
                continue
            if left == 0 or name.step < found.base.step:
                return
            left -= 1
            choices = [*self._there.get(name, ()), Representation(name)]
            choice = next((one for one in choices if one.key not in self._avoid), None)
            if choice is None:
                return
            yield choice
            if choice.form == "full":
                return
            if choice.after is not None:
                newest = choice.after


# Which manifests must be read to restore a checkpoint, and whether they join up (format §4,
# invariant 4).
#
# A checkpoint may have several representations: its own manifest, and consolidated ones with a
# shorter chain. Walks take the one that reads least, and the next one where that is damaged.


_NEXT_STEP = "restore another checkpoint: recpoint list URL"

#: What a damaged chain is told by: another chain of the same checkpoint may be good.
DAMAGE = (FormatError, ChainError, ObjectNotFound)

_Result = TypeVar("_Result")
_There = Mapping[ManifestName, Sequence[Representation]]


class PassedOver(NamedTuple):
    """A representation that a shorter chain would have used, and what is wrong with it."""

    key: str
    error: str

    @classmethod
    def of(cls, key: str, error: RecpointError) -> PassedOver:
        """The representation `key`, for this error."""
        return cls(key, f"{type(error).__name__}: {error}")


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A full and the increments after it, in the order in which they are applied.

    Attributes:
        manifests: each one representation of its checkpoint.
        passed_over: damaged ones that this chain does without.
    """

    manifests: tuple[Manifest, ...]
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def full(self) -> Manifest:
        """The full that the chain starts from."""
        return self.manifests[0]

    @property
    def newest(self) -> Manifest:
        """The checkpoint the chain restores."""
        return self.manifests[-1]


def resolve_chain(
    run: Run,
    name: ManifestName,
    *,
    original: bool = False,
    avoid: Collection[str] = (),
    line: Sequence[ManifestName] = (),
    read: Callable[[Representation], Manifest] | None = None,
) -> Chain:
    """The chain of one checkpoint that is cheapest to restore, every check of format §4 made.

    Args:
        run: whose checkpoint it is.
        name: the checkpoint to restore.
        original: only manifests as they were committed, no consolidated ones.
        avoid: keys of manifests to do without.
        line: checkpoints, newest first, among which its parents probably are: their manifests are
            read several at a time. An empty or a wrong one costs time only.
        read: reads a manifest, for those who keep some; `run.read_manifest` when not given.

    Raises:
        ObjectNotFound: there is no such checkpoint.
        MissingLink: a checkpoint it depends on is gone, or is another one of that step.
        ChainError: the links do not join up in another way.
        FormatError: a manifest of the chain is damaged or of another run.
    """
    there: _There = {} if original else run.consolidated()
    try:
        return _walk(run, name, there, avoid, line, read)
    except (ChainError, ObjectNotFound):
        # A manifest that was there may have been let go of since its checkpoint was consolidated.
        again = {} if original else run.consolidated()
        if again == there:
            raise
    return _walk(run, name, again, avoid, line, read)


def _walk(
    run: Run,
    name: ManifestName,
    there: _There,
    avoid: Collection[str],
    line: Sequence[ManifestName],
    read: Callable[[Representation], Manifest] | None,
) -> Chain:
    if read is not None:
        return _Walk(read, avoid).chain(name, there)
    with ManifestsAhead(run, line, there, avoid) as ahead:
        # What is asked for beside the chain says nothing of what comes next in it.
        return _Walk(ahead.read, avoid, run.read_manifest).chain(name, there)


def read_with_chain(
    run: Run,
    name: ManifestName,
    read: Callable[[Chain], _Result],
    *,
    line: Sequence[ManifestName] = (),
) -> tuple[_Result, Chain]:
    """What `read` makes of a checkpoint's chain: the cheapest, or the next when that is damaged.

    Args:
        run: whose checkpoint it is.
        name: the checkpoint.
        read: is called with one chain after another until it ends without an error of damage.
        line: see `resolve_chain`.

    Returns:
        what it returned, and the chain; which says what was passed over.

    Raises:
        ObjectNotFound, ChainError, FormatError: what was wrong with the first chain, when no other
            does without the damaged manifest or chunk.
    """
    avoid: dict[str, PassedOver] = {}
    first: RecpointError | None = None
    while True:
        try:
            chain = resolve_chain(run, name, avoid=avoid, line=line)
        except DAMAGE as error:
            raise first or error from None
        try:
            result = read(chain)
        except DAMAGE as error:
            first = first or error
            key = blamed(chain, error)
            if key is None:
                raise first from None
            avoid[key] = PassedOver.of(key, error)
            continue
        return result, replace(chain, passed_over=(*avoid.values(), *chain.passed_over))


def blamed(chain: Chain, error: RecpointError) -> str | None:
    """Key of the manifest of `chain` that is damaged, or names what is."""
    for manifest in chain.manifests:
        key = Representation.of(manifest).key
        if key in error.subject or has_chunk_of(manifest, error):
            return key
    return None


def has_chunk_of(manifest: Manifest, error: RecpointError) -> bool:
    """Whether it names the chunk that an error is about."""
    # Stores name an object by its URL, parsers by its key.
    return any(error.subject.endswith(chunk.key) for chunk in manifest.chunks)


class _Walk:
    """From a checkpoint to a full, turning back where a representation leads nowhere."""

    def __init__(
        self,
        read: Callable[[Representation], Manifest],
        avoid: Collection[str],
        read_own: Callable[[Representation], Manifest] | None = None,
    ) -> None:
        self._read = read
        self._avoid = avoid
        self._read_own = read_own or read

    def chain(self, name: ManifestName, there: _There) -> Chain:
        """The first chain found; see `resolve_chain` for the errors, of which it is the first."""
        newest_first: list[Manifest] = []
        choices: list[Iterator[Representation]] = [iter(_choices(name, there))]
        dead_ends: set[Representation] = set()
        errors: dict[str, RecpointError] = {}
        # Ends: a manifest's parent is of a lower step (checked when it is parsed), steps are >= 0,
        # and a representation from which no full was reached is not gone to again.
        while choices:
            for choice in choices[-1]:
                if choice in dead_ends or choice.key in self._avoid:
                    continue
                try:
                    found = self._link(choice, newest_first[-1] if newest_first else None)
                except DAMAGE as error:
                    # Of several, retention lets go of the longer ones: that is no damage.
                    gone = isinstance(error.__cause__ or error, ObjectNotFound)
                    if not (gone and there.get(choice.name)):
                        errors.setdefault(choice.key, error)
                    continue
                newest_first.append(found)
                if found.parent is None:
                    return Chain(
                        manifests=tuple(reversed(newest_first)),
                        passed_over=tuple(PassedOver.of(*pair) for pair in errors.items()),
                    )
                parent = ManifestName(found.parent.step, found.parent.generation)
                choices.append(iter(_choices(parent, there)))
                break
            else:
                choices.pop()
                if newest_first:
                    dead_ends.add(Representation.of(newest_first.pop()))
        for first in errors.values():
            raise first
        raise ObjectNotFound(
            MANIFEST_KEY.of(*name),
            found="no manifest",
            expected=f"one of {name}",
            next_step=_NEXT_STEP,
        )

    def _link(self, choice: Representation, child: Manifest | None) -> Manifest:
        if child is None:
            found = self._read(choice)
            check_with_own(found, self._read_own)
            return found
        try:
            found = self._read(choice)
        except ObjectNotFound as error:
            raise _missing(child, choice.key, "no manifest") from error
        check_link(child, found)
        return found


def _choices(name: ManifestName, there: _There) -> Sequence[Representation]:
    return (*there.get(name, ()), Representation(name))


def check_with_own(manifest: Manifest, read: Callable[[Representation], Manifest]) -> None:
    """Whether a consolidated manifest says of its checkpoint what the own one does.

    Invariant 6 of format §4 asks for it.
    Of a parent `check_link` shows it, by what its child says.

    Args:
        manifest: any representation; there is nothing to compare where the own one is not good.
        read: reads a manifest.

    Raises:
        ChainError: it does not.
    """
    one = Representation.of(manifest)
    if one.form == "own":
        return
    try:
        own = read(Representation(one.name))
    except (FormatError, ObjectNotFound):
        return
    about = (manifest.ref, manifest.links, manifest.tables, manifest.ranks)
    if about != (own.ref, own.links, own.tables, own.ranks):
        raise ChainError(
            one.key,
            found="another attempt, other links or other tables than the checkpoint's own manifest",
            expected=f"the same as {Representation(one.name).key} says",
            next_step="remove the consolidated manifest; nothing is lost with it",
        )


def check_link(child: Manifest, parent: Manifest) -> None:
    """Whether an increment follows directly after the checkpoint found under its parent's name.

    Args:
        child: any representation of the one.
        parent: any representation of the other: what counts are its links as it was taken.

    Raises:
        MissingLink: that checkpoint is another one than the increment was taken after.
        ChainError: they contradict each other in another way.
    """
    links = parent.links
    if child.parent != parent.ref:
        raise _missing(child, Representation.of(parent).key, f"attempt {parent.attempt}")
    if parent.generation > child.generation:
        raise _broken(child, f"a parent of the later generation {parent.generation}", "an earlier")
    if child.chain_length != links.chain_length + 1:
        raise _broken(
            child,
            f"chain_length {child.chain_length}",
            f"{links.chain_length + 1}, one more than that of its parent, {parent.ref}",
        )
    base = parent.ref if links.kind == "full" else links.base
    if child.base != base:
        raise _broken(child, f"base {child.base}", f"that of its parent, {base}")
    if child.tables != parent.tables:
        raise _broken(child, "other tables than its parent's", "the same in the whole chain")
    if child.ranks != parent.ranks:
        raise _broken(child, f"{child.ranks} ranks", f"as many as its parent has, {parent.ranks}")


def _missing(child: Manifest, parent_key: str, found: str) -> MissingLink:
    return MissingLink(
        parent_key,
        found=found,
        expected=f"{child.parent}, on which {child.ref} depends",
        next_step=_NEXT_STEP,
    )


def _broken(child: Manifest, found: str, expected: str) -> ChainError:
    key = Representation.of(child).key
    return ChainError(key, found=found, expected=expected, next_step=_NEXT_STEP)
