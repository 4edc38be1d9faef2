"""A report as one self-contained HTML page, without scripts and external files.

Text from measurements is escaped, and the page's Content-Security-Policy forbids every request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from edgekit.apps.bench.report.cells import Table
from edgekit.apps.bench.report.charts import Chart, charts
from edgekit.apps.bench.report.headline import Figure, headline
from edgekit.apps.bench.report.results import Report
from edgekit.apps.bench.report.tables import notes_of, tables

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1917; --quiet: #57534e; --grid: #d6d3d1; --page: #ffffff; --box: #f5f5f4;
  --good: #15803d; --fair: #a16207; --poor: #b91c1c;
  --series-1: #2563eb; --series-2: #d97706; --series-3: #059669; --series-4: #be185d; --series-5: #7c3aed;
  --series-6: #78716c; }
@media (prefers-color-scheme: dark) { :root { --ink: #f5f5f4; --quiet: #a8a29e; --grid: #44403c; --page: #171412;
  --box: #231f1d; --good: #4ade80; --fair: #facc15; --poor: #f87171; --series-1: #7aa2ff; --series-2: #f5a64a;
  --series-3: #4fd1a5; --series-4: #f472b6; --series-5: #b794f6; --series-6: #8a817c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 50rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--page); }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; } h1, p, li, figcaption { overflow-wrap: anywhere; }
.lead { font-size: 1.15rem; margin: .75rem 0; } .quiet { color: var(--quiet); font-size: .85rem; margin: .25rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.figures div { background: var(--box); border-radius: .5rem; padding: .75rem 1rem; }
.figures dt { color: var(--quiet); font-size: .85rem; } .figures dd { margin: 0; }
.value { font-size: 1.6rem; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.good::before, .fair::before, .poor::before { content: "\\25CF"; margin-right: .35rem; }
.good::before { color: var(--good); } .fair::before { color: var(--fair); } .poor::before { color: var(--poor); }
figure { margin: 1rem 0; background: var(--box); border-radius: .5rem; padding: .75rem; }
figcaption { font-weight: 600; margin-bottom: .25rem; }
svg { display: block; width: 100%; height: auto; } svg text { font-family: system-ui, sans-serif !important; }
details { border-top: 1px solid var(--grid); } summary { cursor: pointer; font-weight: 600; padding: .6rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--grid); }
thead th { color: var(--quiet); font-weight: 500; }
td, tbody th { overflow-wrap: anywhere; min-width: 5.5rem; max-width: 22rem; }
"""


def page(report: Report, data: str | None = None) -> str:
    """Return the whole page.

    Args:
        data: the path of the report's JSON, relative to the page; None if there is none.
    """
    return "\n".join(_parts(report, charts(report), data))


def _parts(report: Report, pictures: list[Chart], data: str | None) -> Iterator[str]:
    head = headline(report)
    title = escape(report.title or head.context)
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>{_STYLE}</style>\n</head>'
    yield f"<body>\n<h1>{title}</h1>"
    if head.context and head.context != report.title:
        yield f'<p class="quiet">{escape(head.context)}</p>'
    if head.sentence:
        yield f'<p class="lead">{_inline(head.sentence)}</p>'
    if head.figures:
        yield '<dl class="figures">'
        yield from map(_figure, head.figures)
        yield "</dl>"
    for chart in pictures[:1]:
        yield _picture(chart)
    notes = notes_of(report)
    if notes:
        # Open if something went wrong: then they matter more than the figures.
        is_wrong = any(one.status in ("failed", "refused") for one in report.measurements)
        yield f"<details{' open' if is_wrong else ''}>\n<summary>Notes ({len(notes)})</summary>\n<ul>"
        yield from (f"<li>{_inline(note)}</li>" for note in notes)
        yield "</ul>\n</details>"
    if pictures[1:]:
        yield "<details>\n<summary>More charts</summary>"
        yield from map(_picture, pictures[1:])
        yield "</details>"
    for table in tables(report):
        yield from _table(table)
    made = "Made by edgekit."
    if data is not None:
        made += f' Every number is in <a href="{escape(data, quote=True)}">{escape(data)}</a>.'
    yield f'<p class="quiet">{made}</p>'
    yield "</body>\n</html>\n"


def _figure(figure: Figure) -> str:
    verdict = f' class="{figure.verdict}"' if figure.verdict else ""
    return (
        f'<div><dt>{escape(figure.label)}</dt><dd class="value">{escape(figure.value)}</dd>'
        f'<dd class="quiet"><span{verdict}>{escape(figure.detail)}</span></dd></div>'
    )


def _picture(chart: Chart) -> str:
    return f"<figure>\n<figcaption>{escape(chart.title)}</figcaption>\n{chart.svg}\n</figure>"


def _table(table: Table) -> Iterator[str]:
    yield f"<details>\n<summary>{escape(table.title)}</summary>"
    yield '<div class="scroll" tabindex="0"><table>\n<thead><tr>'
    yield from (f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    yield "</tr></thead>\n<tbody>"
    for row in table.rows:
        cells = "".join(f"<td>{_inline(cell)}</td>" for cell in row[1:])
        yield f'<tr><th scope="row">{_inline(row[0])}</th>{cells}</tr>'
    yield "</tbody>\n</table></div>"
    if table.note:
        yield f'<p class="quiet">{_inline(table.note)}</p>'
    yield "</details>"


def _inline(text: str) -> str:
    """Escape `text`, and format text between backticks as code."""
    return re.sub(r"`([^`]{1,200})`", r"<code>\1</code>", escape(text))
