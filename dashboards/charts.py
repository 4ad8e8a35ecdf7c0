"""The charts of one run as options of ECharts, and what they show in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recpoint.catalog.overview.overview import CheckpointFacts
from recpoint.dashboards.run_texts import duration_text
from recpoint.dashboards.terminal import bytes_text

__all__ = ["NEWEST", "bytes_chart", "lag_chart", "stall_chart"]

#: So many of the newest checkpoints are drawn.
NEWEST = 200

# Told apart without colour too: by their form. Contrast with white at least 4.5.
_BLUE, _RED, _GREY = "#1f4e8c", "#a1260d", "#5c5c5c"


def lag_chart(checkpoints: Sequence[CheckpointFacts]) -> tuple[dict[str, Any], str]:
    """What a crash right before each commit would have cost, in seconds and in batches."""
    drawn = [one for one in _drawn(checkpoints) if one.at_risk_seconds is not None]
    seconds = [[one.committed_ms, round(one.at_risk_seconds or 0.0, 3)] for one in drawn]
    batches = [[one.committed_ms, one.at_risk_batches] for one in drawn]
    persist = [[one.committed_ms, round(one.lag_seconds, 3)] for one in drawn]
    options = _time_axes(
        [_axis("seconds"), _axis("batches", right=True)],
        [
            _series("at risk, s", "line", seconds, _RED, symbol="circle"),
            _series("cut to commit, s", "line", persist, _BLUE, dashed=True),
            _series("at risk, batches", "scatter", batches, _GREY, symbol="triangle", axis=1),
        ],
    )
    if not drawn:
        return options, "No history yet: it takes a checkpoint with a known one before it."
    worst = max(drawn, key=lambda one: one.at_risk_seconds or 0.0)
    text = (
        f"Lost by a crash right before each of the newest {len(drawn)} commits: at most "
        f"{duration_text(worst.at_risk_seconds or 0.0)} and {worst.at_risk_batches:,} batches, "
        f"before step {worst.step:,}."
    )
    return options, text


def stall_chart(checkpoints: Sequence[CheckpointFacts]) -> tuple[dict[str, Any], str]:
    """How long training waited for each checkpoint."""
    drawn = _drawn(checkpoints)
    stalls = [[one.committed_ms, round(1000 * one.stall_seconds, 3)] for one in drawn]
    series = [_series("stall, ms", "bar", stalls, _BLUE)]
    options = _time_axes([_axis("milliseconds")], series)
    if not drawn:
        return options, "No checkpoint yet."
    worst = max(drawn, key=lambda one: one.stall_seconds)
    text = (
        f"Stall of each of the newest {len(drawn)} checkpoints: at most "
        f"{duration_text(worst.stall_seconds)}, at step {worst.step:,}."
    )
    return options, text


def bytes_chart(checkpoints: Sequence[CheckpointFacts]) -> tuple[dict[str, Any], str]:
    """Bytes of each checkpoint beside those of a full one in fp32."""
    drawn = _drawn(checkpoints)
    stored = [[one.committed_ms, one.stored_bytes / 1e6] for one in drawn]
    full = [[one.committed_ms, one.full_bytes / 1e6] for one in drawn]
    series = [
        _series("stored, MB", "bar", stored, _BLUE),
        _series("full fp32, MB", "line", full, _RED, dashed=True),
    ]
    options = _time_axes([_axis("MB")], series)
    if not drawn:
        return options, "No checkpoint yet."
    written = sum(one.stored_bytes for one in drawn)
    whole = sum(one.full_bytes for one in drawn)
    share = f" ({written / whole:.1%})" if whole else ""
    text = (
        f"The newest {len(drawn)} checkpoints took {bytes_text(written)}, "
        f"full fp32 ones would have taken {bytes_text(whole)}{share}."
    )
    return options, text


def _drawn(checkpoints: Sequence[CheckpointFacts]) -> list[CheckpointFacts]:
    """Those to draw, oldest first."""
    return [one for one in reversed(checkpoints[:NEWEST]) if one.error is None]


def _axis(name: str, *, right: bool = False) -> dict[str, Any]:
    return {
        "type": "value",
        "name": name,
        "min": 0,
        "position": "right" if right else "left",
        "splitLine": {"show": not right},
    }


def _series(
    name: str,
    kind: str,
    data: list[list[Any]],
    colour: str,
    *,
    dashed: bool = False,
    symbol: str = "none",
    axis: int = 0,
) -> dict[str, Any]:
    return {
        "name": name,
        "type": kind,
        "data": data,
        "symbol": symbol,
        "yAxisIndex": axis,
        "barMaxWidth": 12,
        "itemStyle": {"color": colour},
        "lineStyle": {"color": colour, "type": "dashed" if dashed else "solid"},
    }


def _time_axes(axes: list[dict[str, Any]], series: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "animation": False,
        "useUTC": True,
        "aria": {"enabled": True},
        "grid": {"left": 70, "right": 60, "top": 50, "bottom": 30},
        "legend": {"top": 0},
        "tooltip": {"trigger": "axis"},
        "xAxis": {"type": "time", "axisLabel": {"hideOverlap": True}},
        "yAxis": axes,
        "series": series,
    }
