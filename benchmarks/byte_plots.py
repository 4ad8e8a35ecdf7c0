"""Draws the bytes that the benchmark `bytes` counted: written in each interval, and kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.workload import ROOT

if TYPE_CHECKING:
    from benchmarks.bytes import Counted

__all__ = ["plot"]

_IMAGES = ROOT / "docs" / "images"


def plot(name: str, title: str, counted: Sequence[Counted]) -> Path:
    """Draw the plans of one source and width, as shares of a full fp32 checkpoint.

    Returns:
        The path of the picture, docs/images/<name>.png.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    from matplotlib import pyplot

    figure, (left_axes, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for form in counted:
        scale = 100 / form.full_fp32
        intervals = range(len(form.taken))
        left_axes.plot(intervals, [scale * t.written for t in form.taken], lw=1.3, label=form.plan)
        right.plot(intervals, [scale * t.kept for t in form.taken], lw=1.3)
    _axis(left_axes, "written in an interval")
    _axis(right, "kept")
    figure.suptitle(f"{title}: % of a full fp32 checkpoint", fontsize=10)
    figure.legend(
        *left_axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
    )
    _IMAGES.mkdir(parents=True, exist_ok=True)
    path = _IMAGES / f"{name}.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def _axis(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("interval", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
