"""A report as one HTML page that needs nothing else: no script, no font, no picture from anywhere.

Everything that came from a measurement is escaped, and the page's own policy forbids every request.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from edgekit.measure.report.charts import Chart, charts
from edgekit.measure.report.tables import Table, notes_of, tables
from edgekit.measure.results import Report

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1917; --quiet: #57534e; --grid: #d6d3d1; --page: #ffffff; --box: #f5f5f4;
  --series-1: #2563eb; --series-2: #d97706; --series-3: #059669; --series-4: #be185d; --series-5: #7c3aed;
  --series-6: #78716c; }
@media (prefers-color-scheme: dark) { :root { --ink: #f5f5f4; --quiet: #a8a29e; --grid: #44403c; --page: #171412;
  --box: #231f1d; --series-1: #7aa2ff; --series-2: #f5a64a; --series-3: #4fd1a5; --series-4: #f472b6;
  --series-5: #b794f6; --series-6: #8a817c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--page); }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h1, p, li, figcaption { max-width: 45rem; overflow-wrap: anywhere; } .quiet { color: var(--quiet); font-size: .85rem; }
figure { margin: 1rem 0; background: var(--box); border-radius: .5rem; padding: .75rem; }
figcaption { font-weight: 600; margin-bottom: .25rem; }
svg { display: block; width: 100%; height: auto; max-width: 36rem; }
svg text { font-family: system-ui, sans-serif !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--grid); }
thead th { color: var(--quiet); font-weight: 500; }
td, tbody th { overflow-wrap: anywhere; min-width: 5.5rem; max-width: 22rem; }
"""


def page(report: Report) -> str:
    """The whole page."""
    return "\n".join(_parts(report, charts(report)))


def _parts(report: Report, pictures: list[Chart]) -> Iterator[str]:
    title = escape(report.title)
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>{_STYLE}</style>\n</head>'
    yield f"<body>\n<h1>{title}</h1>"
    for chart in pictures:
        yield f"<figure>\n<figcaption>{escape(chart.title)}</figcaption>\n{chart.svg}\n</figure>"
    for table in tables(report):
        yield from _table(table)
    notes = notes_of(report)
    if notes:
        yield "<h2>Notes</h2>\n<ul>"
        yield from (f"<li>{escape(note)}</li>" for note in notes)
        yield "</ul>"
    yield '<p class="quiet">Made by edgekit. Every number stands in the JSON report beside this page.</p>'
    yield "</body>\n</html>\n"


def _table(table: Table) -> Iterator[str]:
    yield f'<h2>{escape(table.title)}</h2>\n<div class="scroll" tabindex="0"><table>\n<thead><tr>'
    yield from (f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    yield "</tr></thead>\n<tbody>"
    for row in table.rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        yield f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>'
    yield "</tbody>\n</table></div>"
    if table.note:
        yield f'<p class="quiet">{escape(table.note)}</p>'
