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
    """Draws the plans of one source and width, as shares of a full fp32 checkpoint.

    Returns:
        The path of the picture, docs/images/<name>.png.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for of in counted:
        scale = 100 / of.full_fp32
        intervals = range(len(of.taken))
        left.plot(intervals, [scale * t.written for t in of.taken], lw=1.3, label=of.plan)
        right.plot(intervals, [scale * t.kept for t in of.taken], lw=1.3)
    _axis(left, "written in an interval")
    _axis(right, "kept")
    figure.suptitle(f"{title}: % of a full fp32 checkpoint", fontsize=10)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
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
