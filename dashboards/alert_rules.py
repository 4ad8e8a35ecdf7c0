"""Returns the shipped alert rules, with other values if asked, and the Grafana dashboard."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from recpoint.errors import SettingsError

__all__ = ["alert_rules", "grafana_dashboard", "parameters"]

_HERE: Final = Path(__file__).parent
_PARAMETER: Final = re.compile(r"^#   (\w+) +(\S+)", re.MULTILINE)
#: A number, a Prometheus duration, a URL or a path. No character in it can end its line of YAML.
_VALUE: Final = re.compile(r"[A-Za-z0-9._~:/@%+-]+\Z")
_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?\Z")
#: Each unit at most once, the largest first, as Prometheus requires.
_DURATION: Final = re.compile(
    r"(?=[0-9])(0|([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)\Z"
)
_NEXT_STEP: Final = "run recpoint prometheus rules: its first lines list the parameters"


def parameters() -> dict[str, str]:
    """Return the parameters at the head of the rules file, name -> default value."""
    return dict(_PARAMETER.findall(_rules()))


def alert_rules(values: Mapping[str, str]) -> str:
    """Return the rules, a YAML file for `rule_files:` of Prometheus.

    Args:
        values: parameter -> value that replaces the default.

    Raises:
        SettingsError: there is no such parameter, or Prometheus would not load the value.
    """
    defaults = parameters()
    lines = _rules().splitlines()
    for name, value in values.items():
        if name not in defaults:
            raise SettingsError(
                f"parameter {name!r}",
                found="no such parameter",
                expected=f"one of {', '.join(defaults)}",
                next_step=_NEXT_STEP,
            )
        if not (_VALUE.match(value) and _would_load(name, defaults[name], value)):
            raise SettingsError(
                f"parameter {name}",
                found=repr(value),
                expected=f"a value such as {defaults[name]}, which Prometheus would load",
                next_step=_NEXT_STEP,
            )
        lines = [_with(line, name, defaults[name], value) for line in lines]
    return "\n".join(lines) + "\n"


def grafana_dashboard() -> str:
    """Return the dashboard, a JSON file that Grafana imports."""
    return (_HERE / "grafana" / "recpoint.json").read_text(encoding="utf-8")


def _rules() -> str:
    return (_HERE / "prometheus" / "alerts.yml").read_text(encoding="utf-8")


def _would_load(name: str, default: str, value: str) -> bool:
    """Whether `value` can replace `default`; otherwise Prometheus would refuse the whole file."""
    kind = next((kind for kind in (_NUMBER, _DURATION) if kind.match(default)), _VALUE)
    nothing = name.endswith("_window") and not value.strip("0ywdhms")
    return bool(kind.match(value)) and not nothing


def _with(line: str, name: str, default: str, value: str) -> str:
    """Return the line with the new value if it has this parameter, else the line unchanged."""
    head = f"#   {name} "
    if not line.endswith(f" # {name}") and not line.startswith(head):
        return line
    value_start = line.index(default, len(head) if line.startswith(head) else 0)
    return line[:value_start] + value + line[value_start + len(default) :]
