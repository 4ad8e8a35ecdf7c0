"""Checks the value of one setting: returns it as a Python value, or refuses it by name.

A setting is named as users write it: `interval_batches`, or `Staging.jobs` for a field of a class.
No function here has side effects, except `keep`.
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
    """Return the error that names the setting, what was found, and what was expected."""
    owner = setting.partition(".")[0]
    described_at = owner if owner[0].isupper() else "Checkpointer"
    return SettingsError(
        setting,
        found=f"{found!r:.200}",
        expected=expected,
        next_step=f"see the docstring of recpoint.{described_at}",
    )


def keep(settings: object, **checked: Any) -> None:
    """Replace fields of a frozen dataclass by checked values."""
    for name, value in checked.items():
        object.__setattr__(settings, name, value)


def as_float(value: object) -> float | None:
    """Return a real number (also numpy's) as a float; None for other values or if too large."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def checked_number(setting: str, value: Any, *, highest: float, zero: bool) -> float:
    """Return a number from 0 to `highest` as a float; 0 is allowed only if `zero`.

    Raises:
        SettingsError: the value is not such a number.
    """
    number = as_float(value)
    # The comparison is written so that NaN fails it.
    if number is None or not 0 <= number <= highest or (number == 0 and not zero):
        lowest = "0" if zero else "more than 0"
        raise refused_setting(setting, value, f"a number, {lowest} to {highest}")
    return number


def checked_whole(setting: str, value: Any, lowest: int, highest: int) -> int:
    """Return a whole number from `lowest` to `highest` as an int.

    Raises:
        SettingsError: the value is not such a number.
    """
    if not _is_whole(value) or not lowest <= int(value) <= highest:
        raise refused_setting(setting, value, f"a whole number, {lowest} to {highest}")
    return int(value)


def checked_seconds(setting: str, value: Any, *, zero: bool = True, otherwise: str = "") -> float:
    """Return a finite number of seconds as a float.

    Args:
        setting: name of the setting.
        value: the value that the user gave.
        zero: whether 0 is allowed.
        otherwise: what else is allowed, for the end of the message.

    Raises:
        SettingsError: the value is not such a number.
    """
    seconds = as_float(value)
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        least = "0 or more" if zero else "more than 0"
        raise refused_setting(setting, value, f"a finite number of seconds, {least}{otherwise}")
    if seconds == 0 and not zero:
        raise refused_setting(setting, value, f"more than 0 seconds{otherwise}")
    return seconds


def checked_choice(
    setting: str, value: Any, choices: Iterable[_Value], *, otherwise: str = ""
) -> _Value:
    """Return the choice that the value equals.

    Args:
        setting: name of the setting.
        value: the value that the user gave.
        choices: the allowed values.
        otherwise: what else is allowed, for the end of the message.

    Raises:
        SettingsError: the value is none of the choices.
    """
    # Python has True == 1 and 2.0 == 2, so types are compared too; numpy's integers count as int.
    kind = int if _is_whole(value) else type(value)
    choices = tuple(choices)
    for choice in choices:
        if kind is type(choice) and value == choice:
            return choice
    listed = ", ".join(repr(choice) for choice in choices)
    raise refused_setting(setting, value, f"one of {listed}{otherwise}")


def checked_flag(setting: str, value: Any) -> bool:
    """Return the value if it is True or False.

    Raises:
        SettingsError: it is neither.
    """
    if not isinstance(value, bool):
        raise refused_setting(setting, value, "True or False")
    return value


def instance_of(setting: str, value: Any, kind: type[_Value]) -> _Value:
    """Return the value if it is an instance of `kind`, a class that recpoint exports.

    Raises:
        SettingsError: it is not.
    """
    if not isinstance(value, kind):
        raise refused_setting(setting, value, f"a recpoint.{kind.__name__}")
    return value


def several(setting: str, values: Iterable[_Value]) -> list[_Value]:
    """Return the values of a setting that takes a sequence, as a list.

    Raises:
        SettingsError: the value is not iterable.
    """
    if not isinstance(values, Iterable):
        raise refused_setting(setting, values, "a list or tuple")
    return list(values)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
