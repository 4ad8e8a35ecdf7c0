"""Finds the entries of a checkpoint that belong to a model's tensors and to their optimizers.

A script saves `model.state_dict()` alone, or inside a dict under a key of its choice, and a wrapper
may have put its own name before all others. So the *prefix* is searched: the keys that come before
the model's names. The prefix under which most of them lie counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from recpoint.catalog.foreign.contents import ForeignCheckpoint, Scalar

__all__ = [
    "EntryNames",
    "OptimizerEntries",
    "OwnParameter",
    "ParameterStates",
    "is_optimizer_state",
    "renamed",
    "suffixes",
]

_STATE: Final = re.compile(r"(?P<container>(?:.*?\.)??)state\.(?P<path>.+)", re.DOTALL)
_PARAMETER: Final = re.compile(
    r"(?P<container>(?:.*?\.)??)param_groups\.(?P<group>\d+)\.(?P<kind>params|param_names)\."
    r"(?P<place>\d+)",
    re.DOTALL,
)


def suffixes(name: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a dotted name before and after each dot: first ("", name)."""
    yield "", name
    for place, sign in enumerate(name):
        if sign == ".":
            yield name[: place + 1], name[place + 1 :]


class EntryNames:
    """Finds the entries of a checkpoint by the names of a model.

    Args:
        names: names of the checkpoint's entries.
        model_names: names of the model's tensors that are wanted.
        renames: name or pattern in the checkpoint -> name in the model. A pattern has one `*`, and
            so has the name that it becomes. It is matched with whole names, or with what comes
            after the prefix.
        stored_names: names in the checkpoint, without the prefix, that are wanted as they are.

    Attributes:
        prefix: what comes before the model's names.
        tie: a sentence if several prefixes are as good; None: one is the best, or there is none.
        entry_names: name in the model -> name of the entry.
        faults: a sentence for each thing that cannot be decided.
    """

    def __init__(
        self,
        names: Iterable[str],
        model_names: Collection[str],
        renames: Mapping[str, str],
        stored_names: Collection[str] = (),
    ) -> None:
        self.names = frozenset(names)
        self._stored_names = frozenset(stored_names)
        self.entry_names: dict[str, str] = {}
        self.faults: list[str] = []
        self.prefix = ""
        self.tie: str | None = None
        whole = {
            old: new
            for old, new in renames.items()
            if any(fnmatchcase(name, _literal(old)) for name in self.names)
        }
        for name in sorted(self.names):
            new = renamed(name, whole)
            if new is not None:
                self._find(new, name)
        if renames and not whole.keys() >= renames.keys():
            self._search_prefix(
                model_names, {old: new for old, new in renames.items() if old not in whole}
            )
        else:
            self._search_prefix(model_names, {})

    def _find(self, new: str, name: str) -> None:
        earlier = self.entry_names.setdefault(new, name)
        if earlier != name:
            self.faults.append(f"{earlier!r} and {name!r} would both become {new!r}")

    def _search_prefix(self, model_names: Collection[str], renames: Mapping[str, str]) -> None:
        wanted_names = set(model_names) - self.entry_names.keys()
        counts: Counter[str] = Counter()
        matches: dict[str, dict[str, str]] = {}
        matched_patterns: set[str] = set()
        for name in sorted(self.names - set(self.entry_names.values())):
            for prefix, suffix in suffixes(name):
                new = renamed(suffix, renames)
                if new is not None:
                    patterns = [old for old in renames if fnmatchcase(suffix, _literal(old))]
                    matched_patterns |= set(patterns)
                model_name = suffix if new is None else new
                if model_name in wanted_names:
                    counts[prefix] += 1
                    earlier = matches.setdefault(prefix, {}).setdefault(model_name, name)
                    if earlier != name:
                        self.faults.append(
                            f"{earlier!r} and {name!r} would both become {model_name!r}"
                        )
                elif suffix in self._stored_names:
                    counts[prefix] += 1
        self.faults += [
            f"no entry matches {old!r}, which names= renames"
            for old in renames
            if old not in matched_patterns
        ]
        largest_counts = counts.most_common(2)
        if len(largest_counts) == 2 and largest_counts[0][1] == largest_counts[1][1]:
            (first, count), (second, _) = sorted(largest_counts)
            self.tie = (
                f"{count} of the wanted tensors are both under {first!r} and under {second!r}: "
                f"say which with names={{'{first}*': '*'}}"
            )
        elif largest_counts:
            self.prefix = largest_counts[0][0]
            self.entry_names |= {
                new: name
                for new, name in matches.get(self.prefix, {}).items()
                if new not in self.entry_names
            }

    def entry(self, name: str) -> str | None:
        """Return the name of the entry that a user means; None: there is none.

        Args:
            name: name of an entry, with or without the prefix; of a table, also without `.weight`.
        """
        for own_name in (name, f"{name}.weight"):
            for full_name in (own_name, f"{self.prefix}{own_name}"):
                if full_name in self.names:
                    return full_name
        return None


def _literal(pattern: str) -> str:
    """Return a pattern in which only `*` has a meaning."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


def renamed(name: str, renames: Mapping[str, str]) -> str | None:
    """Return what a name becomes; None: no name or pattern of `renames` matches it."""
    for old, new in renames.items():
        head, star, tail = old.partition("*")
        if not star:
            if name == old:
                return new
        elif name.startswith(head) and name.endswith(tail) and len(name) >= len(head) + len(tail):
            return new.replace("*", name[len(head) : len(name) - len(tail)], 1)
    return None


def is_optimizer_state(name: str) -> bool:
    """Whether an entry has the name of an optimizer's state."""
    return _STATE.fullmatch(name) is not None


class ParameterStates(NamedTuple):
    """The optimizer state of one parameter.

    Attributes:
        names: key of the state, such as "sum" -> name of its entry, or of its scalar.
        is_listed: the checkpoint's optimizer lists the parameter, so that it has no state if
            `names` is empty.
    """

    names: Mapping[str, str]
    is_listed: bool


class OwnParameter(NamedTuple):
    """A parameter that an optimizer of the model trains.

    Attributes:
        name: its name in the model.
        shape: its shape, over all ranks; None: it is not known.
        keys: keys of its state; None: its optimizer is not known.
    """

    name: str
    shape: tuple[int, ...] | None
    keys: Collection[str] | None


class OptimizerEntries:
    """Finds the optimizer state of parameters.

    torch's optimizers number their parameters. `torch.distributed.checkpoint.state_dict` and
    TorchRec name them.

    Args:
        checkpoint: the checkpoint.
        orders: for each optimizer of the model, its parameters, in its order.

    Attributes:
        faults: a sentence for each thing that cannot be decided.
        names_by_order: container -> the numbers in it, and the parameter here that each was given
            to by order alone.
    """

    def __init__(self, checkpoint: ForeignCheckpoint, orders: list[list[OwnParameter]]) -> None:
        self.faults: list[str] = []
        self.names_by_order: dict[str, dict[str, str]] = {}
        self._entries = checkpoint.entries
        #: Parameter as the checkpoint names it -> container -> key -> name.
        self._by_parameter: dict[str, dict[str, dict[str, str]]] = {}
        #: Container -> names, or numbers, of the parameters that its groups list.
        self._group_members: dict[str, list[Scalar]] = {}
        self._member_names: dict[str, list[Scalar]] = {}
        for name in (*checkpoint.entries, *checkpoint.scalars):
            match = _STATE.fullmatch(name)
            if match:
                self._add(match["container"], match["path"], name)
        for name, value in checkpoint.scalars.items():
            match = _PARAMETER.fullmatch(name)
            if match:
                lists = self._group_members if match["kind"] == "params" else self._member_names
                lists.setdefault(match["container"], []).append(value)
        self._numbers = self._number(orders)

    def _add(self, container: str, path: str, name: str) -> None:
        for parameter, key in suffixes(path):
            if parameter:
                containers = self._by_parameter.setdefault(parameter[:-1], {})
                containers.setdefault(container, {})[key] = name

    def _number(self, orders: list[list[OwnParameter]]) -> dict[str, tuple[str, str]]:
        """Return for parameters here the container and number of the checkpoint."""
        containers = [
            container
            for container, members in self._group_members.items()
            if members and all(isinstance(value, int) for value in members)
        ]
        numbers_by_name: dict[str, tuple[str, str]] = {}
        if not containers:
            return numbers_by_name
        own_orders = [parameters for parameters in orders if parameters]
        if len(containers) != len(own_orders):
            self.faults.append(
                f"{len(containers)} optimizers with numbered parameters in the checkpoint, and "
                f"{len(own_orders)} optimizers here"
            )
            return numbers_by_name
        for container, own_parameters in zip(containers, own_orders, strict=True):
            numbers = self._group_members[container]
            stored_names = self._member_names.get(container, [])
            if len(stored_names) == len(numbers):
                numbers_by_name |= {
                    str(name): (container, str(number))
                    for name, number in zip(stored_names, numbers, strict=True)
                }
            elif len(numbers) != len(own_parameters):
                self.faults.append(
                    f"{len(numbers)} numbered parameters under {container!r} in the checkpoint, "
                    f"and {len(own_parameters)} parameters of the optimizer here"
                )
            else:
                self.names_by_order[container] = {
                    str(number): parameter.name
                    for parameter, number in zip(own_parameters, numbers, strict=True)
                }
        if self.names_by_order:
            self._require_one_order(containers, own_orders)
        for container, names in self.names_by_order.items():
            numbers_by_name |= {name: (container, number) for number, name in names.items()}
        return numbers_by_name

    def _require_one_order(
        self, containers: list[str], own_orders: list[list[OwnParameter]]
    ) -> None:
        """Note a fault if optimizers of the checkpoint could as well be taken in another order.

        An optimizer that fits the place of another is an edge between the two. Another order than
        the one taken exists if, and only if, edges lead from one place to another and back.
        """
        places = range(len(containers))
        reachable = [
            {
                place
                for place in places
                if place != own_place and self._fits(containers[own_place], own_orders[place])
            }
            for own_place in places
        ]
        for middle in places:
            for own_reachable in reachable:
                if middle in own_reachable:
                    own_reachable |= reachable[middle]
        ambiguous_containers = [
            container
            for place, container in enumerate(containers)
            if any(
                neighbour != place
                and place in reachable[neighbour]
                and (self._has_states(container) or self._has_states(containers[neighbour]))
                for neighbour in reachable[place]
            )
        ]
        if ambiguous_containers:
            self.faults.append(
                f"the optimizers under {ambiguous_containers!r:.200} number their parameters, and "
                "their states fit the optimizers here in another order, too, so that the order "
                "proves nothing: "
                "save them with names (SGD(model.named_parameters()), or get_state_dict of "
                "torch.distributed.checkpoint), or begin with optimizer_states='drop'"
            )

    def _has_states(self, container: str) -> bool:
        return any(container in containers for containers in self._by_parameter.values())

    def _fits(self, container: str, own_parameters: list[OwnParameter]) -> bool:
        """Whether the states of a container have keys and shapes for these parameters."""
        numbers = self._group_members[container]
        return len(numbers) == len(own_parameters) and all(
            self._state_fits(self._by_parameter.get(str(number), {}).get(container, {}), parameter)
            for number, parameter in zip(numbers, own_parameters, strict=True)
        )

    def _state_fits(self, states: Mapping[str, str], parameter: OwnParameter) -> bool:
        if not states or parameter.keys is None:
            return True
        if not parameter.keys or not states.keys() >= set(parameter.keys):
            return False
        entries = [self._entries.get(states[key]) for key in parameter.keys if key != "step"]
        return all(
            entry is not None and parameter.shape in (None, entry.shape) for entry in entries
        )

    def of(self, parameter: str, entry: str) -> ParameterStates | None:
        """Return the optimizer state of a parameter; None: nothing says that there is any.

        Args:
            parameter: name of the parameter in the model.
            entry: name of the parameter's entry in the checkpoint.
        """
        if parameter in self._numbers:
            container, number = self._numbers[parameter]
            return ParameterStates(self._by_parameter.get(number, {}).get(container, {}), True)
        for _, name in suffixes(entry):
            if name in self._numbers:
                container, number = self._numbers[name]
                return ParameterStates(self._by_parameter.get(number, {}).get(container, {}), True)
            containers = self._by_parameter.get(name, {})
            if len(containers) > 1:
                self.faults.append(
                    f"the state of {name!r} is under {sorted(containers)!r:.200}: several "
                    "optimizers trained it"
                )
            if containers:
                return ParameterStates(next(iter(containers.values())), True)
            if any(name in members for members in self._group_members.values()):
                return ParameterStates({}, True)
        return None
