"""Checks the value of one setting: returns it as Python's own, or refuses it by name. Pure.

A setting is named as users write it: `interval_batches`, or `Staging.jobs` for a field of a class.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any, TypeVar

from recpoint.errors import SettingsError

__all__ = [
    "as_float",
    "checked_choice",
    "checked_flag",
    "checked_number",
    "checked_seconds",
    "checked_whole",
    "instance_of",
    "keep",
    "refused_setting",
    "several",
]

_Value = TypeVar("_Value")


def refused_setting(setting: str, found: Any, expected: str) -> SettingsError:
    """The error that names the setting, what was found, and what was expected."""
    owner = setting.partition(".")[0]
    described_at = owner if owner[0].isupper() else "Checkpointer"
    return SettingsError(
        setting,
        found=f"{found!r:.200}",
        expected=expected,
        next_step=f"see the docstring of recpoint.{described_at}",
    )


def keep(settings: object, **checked: Any) -> None:
    """Put checked values in place of those that a frozen dataclass was given."""
    for name, value in checked.items():
        object.__setattr__(settings, name, value)


def as_float(value: object) -> float | None:
    """A real number, numpy's too, as a float; None: it is none, or none that a float can be."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def checked_number(setting: str, value: Any, *, highest: float, zero: bool) -> float:
    """A number up to `highest`; 0 only where `zero`."""
    number = as_float(value)
    # Not a number is in no range.
    if number is None or not 0 <= number <= highest or (number == 0 and not zero):
        lowest = "0" if zero else "more than 0"
        raise refused_setting(setting, value, f"a number, {lowest} to {highest}")
    return number


def checked_whole(setting: str, value: Any, lowest: int, highest: int) -> int:
    """A whole number in a range."""
    if not _is_whole(value) or not lowest <= int(value) <= highest:
        raise refused_setting(setting, value, f"a whole number, {lowest} to {highest}")
    return int(value)


def checked_seconds(setting: str, value: Any, *, zero: bool = True, otherwise: str = "") -> float:
    """A finite number of seconds; 0 only where `zero`.

    Args:
        setting: its name.
        value: what was given.
        zero: whether 0 is one.
        otherwise: what else could have been given, for the message.
    """
    seconds = as_float(value)
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        raise refused_setting(setting, value, f"a finite number of seconds, 0 or more{otherwise}")
    if seconds == 0 and not zero:
        raise refused_setting(setting, value, f"more than 0 seconds{otherwise}")
    return seconds


def checked_choice(
    setting: str, value: Any, choices: Iterable[_Value], *, otherwise: str = ""
) -> _Value:
    """One of the choices.

    Args:
        setting: its name.
        value: what was given.
        choices: what can be given.
        otherwise: what else could have been given, for the message.
    """
    # True == 1 and 2.0 == 2: only whole numbers, numpy's too, are choices that are whole numbers.
    kind = int if _is_whole(value) else type(value)
    choices = tuple(choices)
    for choice in choices:
        if kind is type(choice) and value == choice:
            return choice
    listed = ", ".join(repr(choice) for choice in choices)
    raise refused_setting(setting, value, f"one of {listed}{otherwise}")


def checked_flag(setting: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise refused_setting(setting, value, "True or False")
    return value


def instance_of(setting: str, value: Any, kind: type[_Value]) -> _Value:
    """An object of one of recpoint's own classes."""
    if not isinstance(value, kind):
        raise refused_setting(setting, value, f"a recpoint.{kind.__name__}")
    return value


def several(setting: str, values: Iterable[_Value]) -> list[_Value]:
    """The values of a setting that takes a sequence."""
    if not isinstance(values, Iterable):
        raise refused_setting(setting, values, "a list or tuple")
    return list(values)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
