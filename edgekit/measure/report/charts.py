"""Charts as SVG that stands inside a page, and as PNG; matplotlib draws them.

Colours are written as CSS variables, so that one picture serves a light and a dark page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from importlib.util import find_spec
from typing import Any, NamedTuple

from edgekit.errors import TargetMissing
from edgekit.measure.measurement import Measurement, Metric
from edgekit.measure.results import Point, Report
from edgekit.units import MIB

_WIDTH_IN, _BAR_IN, _NAME_LETTERS = 5.0, 0.34, 26


class Palette(NamedTuple):
    """The colours of a picture."""

    ink: str
    grid: str
    series: tuple[str, ...]


_ON_PAPER = Palette("#1c1917", "#d6d3d1", ("#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#78716c"))
# Drawn in these, which then become the page's own variables.
_VARIABLES = Palette("#010203", "#040506", ("#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005", "#0a0006"))
Draw = Callable[[Any, Palette], None]


_BARS: tuple[tuple[Metric, str], ...] = (
    ("decode_tokens_per_s", "Decode, tokens per second"),
    ("prefill_tokens_per_s", "Prefill, tokens per second"),
)


class Chart(NamedTuple):
    """A drawn picture: for a page, and for a file."""

    title: str
    svg: str
    png: bytes


def charts(report: Report) -> list[Chart]:
    """Every picture that the report's numbers allow."""
    found: list[Chart] = []
    workloads = list(dict.fromkeys(one.workload for one in report.measurements))
    for workload in workloads:
        runs = [one for one in report.measurements if one.workload == workload]
        found += [
            _drawn(f"{title}: {workload}", partial(_draw_bars, runs=runs, metric=metric), _rows(runs))
            for metric, title in _BARS
            if _bars(runs, metric)
        ]
    measured = [one for one in report.measurements if one.memory.peak_bytes and one.predicted]
    if measured:
        draw = partial(_draw_memory, runs=measured)
        found.append(_drawn("Peak memory, MiB: predicted and measured", draw, 2 * len(measured)))
    if any(point.kl is not None and point.decode_tokens_per_s is not None for point in report.points):
        found.append(pareto_chart(report.points))
    return found


def pareto_chart(points: Sequence[Point]) -> Chart:
    """Quality against speed; the area of a dot is its memory."""
    return _drawn("Quality, speed and memory", partial(_draw_points, points=points), 11)


def _rows(runs: Sequence[Measurement]) -> int:
    return sum(len(one.cases) for one in runs)


def _bars(runs: Sequence[Measurement], metric: Any) -> list[tuple[str, str, float, float, float]]:
    """Arm, case, median, low and high of everything that has an undisturbed trial."""
    return [
        (one.arm.name, case.case, found.median, found.low, found.high)
        for one in runs
        for case in one.cases
        if (found := case.summary.get(metric)) is not None
    ]


def _draw_bars(axes: Any, palette: Palette, runs: Sequence[Measurement], metric: Metric) -> None:
    found = _bars(runs, metric)
    arms = list(dict.fromkeys(arm for arm, *_ in found))
    cases = list(dict.fromkeys(case for _, case, *_ in found))
    ordered = [each for case in cases for each in found if each[1] == case]
    for place, (arm, _, middle, low, high) in enumerate(ordered):
        colour = palette.series[arms.index(arm) % len(palette.series)]
        axes.barh(place, middle, color=colour, height=0.72, label=_short(arm))
        axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color=palette.ink, capsize=2, linewidth=1)
        _write(axes, f"{middle:.4g}", high, place, palette)
    axes.set_yticks(range(len(ordered)), [_short(case) for _, case, *_ in ordered])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    _legend(axes, palette)


def _draw_memory(axes: Any, palette: Palette, runs: Sequence[Measurement]) -> None:
    for place, one in enumerate(runs):
        assert one.predicted is not None and one.memory.peak_bytes is not None
        pairs = (("predicted", one.predicted.total_bytes, 0), ("measured", one.memory.peak_bytes, 1))
        for name, size, series in pairs:
            at = 2 * place + series
            axes.barh(at, size / MIB, color=palette.series[series], height=0.8, label=name)
            _write(axes, f"{size / MIB:.4g}", size / MIB, at, palette)
    axes.set_yticks(
        [2 * place + 0.5 for place in range(len(runs))], [_short(f"{one.arm.name}, {one.workload}") for one in runs]
    )
    axes.invert_yaxis()
    axes.margins(x=0.12)
    _legend(axes, palette)


def _draw_points(axes: Any, palette: Palette, points: Sequence[Point]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    known = [point for point in points if point.kl is not None and point.decode_tokens_per_s is not None]
    largest = max((point.memory_bytes or 0 for point in known), default=0) or 1
    for point in known:
        colour = palette.series[5] if point.dominated_by else palette.series[0]
        size = 40 + 360 * (point.memory_bytes or 0) / largest
        label = "dominated" if point.dominated_by else "worth having"
        axes.scatter(point.decode_tokens_per_s, point.kl, s=size, color=colour, alpha=0.75, label=label)
        axes.annotate(
            _short(point.name), (point.decode_tokens_per_s, point.kl), xytext=(8, 6), textcoords="offset points",
            fontsize=9, color=palette.ink,
        )  # fmt: skip
    axes.set_xlabel("decode, tokens per second (right is better)")
    axes.set_ylabel("KL against the float model, nats (down is better)")
    if known and min(point.kl or 0 for point in known) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(0.18)
    axes.grid(axis="y", color=palette.grid, linewidth=0.6)
    _legend(axes, palette)


def _write(axes: Any, text: str, x: float, y: float, palette: Palette) -> None:
    """A figure to the right of a bar."""
    axes.annotate(
        text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, color=palette.ink
    )  # fmt: skip


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LETTERS else f"{name[: _NAME_LETTERS - 1]}…"


def _legend(axes: Any, palette: Palette) -> None:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if len(unique) > 1:
        axes.figure.legend(
            unique.values(), unique.keys(), loc="outside upper left", ncols=min(3, len(unique)), frameon=False,
            fontsize=9, labelcolor=palette.ink,
        )  # fmt: skip


def _drawn(title: str, draw: Draw, rows: int) -> Chart:
    """The same picture twice: in the variables of a page, and in colours of its own."""
    vector = _saved(title, draw, rows, _VARIABLES, format="svg", transparent=True, metadata={"Date": None})
    picture = _saved(
        title, draw, rows, _ON_PAPER, format="png", dpi=160, facecolor="white", metadata={"Software": None}
    )
    return Chart(title, _for_a_page(vector.decode(), title), picture)


def check_charts() -> None:
    """Refuse charts where what draws them is not installed."""
    if find_spec("matplotlib") is None:
        raise TargetMissing("charts need matplotlib; pip install 'edgekit[report]'")


def _saved(title: str, draw: Draw, rows: int, palette: Palette, **how: Any) -> bytes:
    check_charts()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none", "svg.hashsalt": title, "text.parse_math": False, "font.size": 9,
        "text.color": palette.ink, "axes.edgecolor": palette.grid, "axes.labelcolor": palette.ink,
        "xtick.color": palette.ink, "ytick.color": palette.ink, "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with mpl.rc_context(settings):
        figure = Figure(figsize=(_WIDTH_IN, 1.1 + _BAR_IN * max(2, rows)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        axes.grid(axis="x", color=palette.grid, linewidth=0.6)
        draw(axes, palette)
        data = io.BytesIO()
        figure.savefig(data, **how)
    return data.getvalue()


def _for_a_page(svg: str, title: str) -> str:
    """Without the head of a file; ids of its own; colours of the page; a width that gives way."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    mark = re.sub(r"\W+", "-", title.lower()).strip("-")
    svg = re.sub(r'\bid="', f'id="{mark}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{mark}-", svg)
    names = ("ink", "grid", *(f"series-{number}" for number in range(1, len(_VARIABLES.series) + 1)))
    for variable, name in zip((_VARIABLES.ink, _VARIABLES.grid, *_VARIABLES.series), names, strict=True):
        svg = svg.replace(variable, f"var(--{name})")
    # The size in points would not give way to a phone; the view box keeps the shape.
    for side in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {side}="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title, quote=True)}"', 1).strip()
