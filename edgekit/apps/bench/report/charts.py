"""Charts drawn by matplotlib, as SVG for an HTML page and as PNG.

The SVG's colours are CSS variables, so that one picture fits light and dark pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from importlib.util import find_spec
from typing import Any, NamedTuple

from edgekit.apps.bench.measurement import Measurement, Metric
from edgekit.apps.bench.report.cells import number
from edgekit.apps.bench.report.results import Report
from edgekit.apps.bench.statistics import ShownSummary, shown_summary
from edgekit.common.units import MIB
from edgekit.errors import TargetMissing

_WIDTH_IN, _BAR_IN, _NAME_LETTERS = 5.6, 0.32, 26


class Palette(NamedTuple):
    """The colours of a chart."""

    ink: str
    grid: str
    series: tuple[str, ...]


_ON_PAPER = Palette("#1c1917", "#d6d3d1", ("#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#78716c"))
# The SVG is drawn in these colours, which then become CSS variables.
_VARIABLES = Palette("#010203", "#040506", ("#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005", "#0a0006"))
Draw = Callable[[Any, Palette], None]


_BARS: tuple[tuple[Metric, str], ...] = (
    ("decode_tokens_per_s", "Decode, tokens per second"),
    ("prefill_tokens_per_s", "Prefill, tokens per second"),
)


class Chart(NamedTuple):
    """A drawn chart as SVG and PNG."""

    title: str
    svg: str
    png: bytes


class Bar(NamedTuple):
    """One bar of a speed chart."""

    subject: str
    case: str
    shown: ShownSummary


def charts(report: Report) -> list[Chart]:
    """Draw every chart for which the report has figures, the most informative first."""
    drawn: list[Chart] = []
    workloads = list(dict.fromkeys(one.workload for one in report.measurements))
    for metric, title in _BARS:
        for workload in workloads:
            bars = _bars([one for one in report.measurements if one.workload == workload], metric)
            if bars:
                drawn.append(_drawn(f"{title}: {workload}", partial(_draw_bars, bars=bars), len(bars)))
    measured = [one for one in report.measurements if one.memory.anonymous_bytes and one.predicted]
    if measured:
        draw = partial(_draw_memory, runs=measured)
        drawn.append(_drawn("Private memory, MiB: predicted and measured", draw, 2 * len(measured)))
    return drawn


def _bars(runs: Sequence[Measurement], metric: Metric) -> list[Bar]:
    """Return the bars of a metric, grouped by case."""
    bars = [
        Bar(one.subject.name, case.case, shown)
        for one in runs
        for case in one.cases
        if (shown := shown_summary(case, metric)) is not None
    ]
    cases = list(dict.fromkeys(bar.case for bar in bars))
    return sorted(bars, key=lambda bar: cases.index(bar.case))


def _draw_bars(axes: Any, palette: Palette, bars: Sequence[Bar]) -> None:
    subjects = list(dict.fromkeys(bar.subject for bar in bars))
    for index, bar in enumerate(bars):
        colour = palette.series[subjects.index(bar.subject) % len(palette.series)]
        middle, low, high = bar.shown.summary.median, bar.shown.summary.low, bar.shown.summary.high
        # Disturbed figures are pale, because they are not results.
        alpha, mark = (0.35, "~") if bar.shown.is_disturbed else (1.0, "")
        axes.barh(index, middle, color=colour, alpha=alpha, height=0.72, label=_short(bar.subject))
        axes.errorbar(middle, index, xerr=[[middle - low], [high - middle]], color=palette.ink, capsize=2, linewidth=1)
        _write(axes, f"{mark}{number(middle)}", high, index, palette)
    axes.set_yticks(range(len(bars)), [_short(bar.case) for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.margins(x=0.12)
    _legend(axes, palette)


def _draw_memory(axes: Any, palette: Palette, runs: Sequence[Measurement]) -> None:
    for index, one in enumerate(runs):
        assert one.predicted is not None and one.memory.anonymous_bytes is not None
        pairs = (("predicted", one.predicted.private_bytes, 0), ("measured", one.memory.anonymous_bytes, 1))
        for name, count, series in pairs:
            at = 2 * index + series
            axes.barh(at, count / MIB, color=palette.series[series], height=0.8, label=name)
            _write(axes, number(count / MIB), count / MIB, at, palette)
    axes.set_yticks(
        [2 * index + 0.5 for index in range(len(runs))], [_short(f"{one.subject.name}, {one.workload}") for one in runs]
    )
    axes.invert_yaxis()
    axes.margins(x=0.12)
    _legend(axes, palette)


def _write(axes: Any, text: str, x: float, y: float, palette: Palette) -> None:
    """Write a bar's value to its right."""
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
    """Draw a chart twice: with CSS variables for a page, and with fixed colours for a file."""
    vector = _saved(title, draw, rows, _VARIABLES, format="svg", transparent=True, metadata={"Date": None})
    picture = _saved(
        title, draw, rows, _ON_PAPER, format="png", dpi=160, facecolor="white", metadata={"Software": None}
    )
    return Chart(title, _for_a_page(vector.decode(), title), picture)


def check_charts() -> None:
    """Raise `TargetMissing` if matplotlib is not installed."""
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
        figure = Figure(figsize=(_WIDTH_IN, 0.95 + _BAR_IN * rows), layout="constrained")
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        axes.grid(axis="x", color=palette.grid, linewidth=0.6)
        draw(axes, palette)
        data = io.BytesIO()
        figure.savefig(data, **how)
    return data.getvalue()


def _for_a_page(svg: str, title: str) -> str:
    """Adapt an SVG to the page: no XML head, unique ids, CSS variables, flexible width."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    mark = re.sub(r"\W+", "-", title.lower()).strip("-")
    svg = re.sub(r'\bid="', f'id="{mark}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{mark}-", svg)
    names = ("ink", "grid", *(f"series-{number}" for number in range(1, len(_VARIABLES.series) + 1)))
    for variable, name in zip((_VARIABLES.ink, _VARIABLES.grid, *_VARIABLES.series), names, strict=True):
        svg = svg.replace(variable, f"var(--{name})")
    # A size in points would not fit a phone; the view box keeps the shape.
    for side in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {side}="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title, quote=True)}"', 1).strip()
