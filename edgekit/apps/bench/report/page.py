"""A report as one self-contained HTML page: its Markdown as HTML, without scripts and external files.

Text from measurements is escaped in the Markdown, and the page's Content-Security-Policy forbids every request.
"""

from __future__ import annotations

from html import escape

from markdown_it import MarkdownIt

from edgekit.apps.bench.report.headline import headline
from edgekit.apps.bench.report.markdown import markdown
from edgekit.apps.bench.report.results import Report

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1917; --quiet: #57534e; --grid: #d6d3d1; --page: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #f5f5f4; --quiet: #a8a29e; --grid: #44403c; --page: #171412; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.1rem; border-top: 1px solid var(--grid); }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: .85rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--grid);
  min-width: 6rem; max-width: 22rem; }
th { color: var(--quiet); font-weight: 500; }
"""


def page(report: Report) -> str:
    """Return the whole page."""
    title = escape(report.title or headline(report).context)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown(report))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}</body>
</html>
"""
