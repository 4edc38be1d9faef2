"""The page of measured performance, made of stored reports: `python -m edgekit.measure.performance docs`.

`docs/data/*.json` are reports, as `edgekit bench -o`, `eval -o` and `sweep` write them or with tables of one's own (its
field `tables`); each becomes a section, in the order of their file names. Other data there belongs to other pages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from edgekit.files import write_file
from edgekit.measure.report.markdown import markdown
from edgekit.measure.results import MAX_REPORT_BYTES, read_report
from edgekit.reading import read_json

_HEAD = """\
# Performance

Every table here is made from a stored report in [data/](data/) by `python -m edgekit.measure.performance docs`; a test
compares this page with that data. [measure.md](measure.md) says how the numbers come about and what makes a trial
count.
"""


def performance_page(docs: Path) -> str:
    """The whole page."""
    return "\n".join(_parts(docs))


def _parts(docs: Path) -> Iterator[str]:
    yield _HEAD
    found = stored_reports(docs / "data")
    for path in found:
        yield markdown(read_report(path), level=2)
        yield f"Data: [{path.name}](data/{path.name})\n"
    if not found:
        yield "No run is stored yet.\n"


def stored_reports(folder: Path) -> list[Path]:
    """The reports among the data; what other pages are made of stands there too."""
    return [path for path in sorted(folder.glob("*.json")) if read_json(path, MAX_REPORT_BYTES).get("kind") == "report"]


if __name__ == "__main__":
    write_file(Path(sys.argv[1]) / "performance.md", performance_page(Path(sys.argv[1])).encode())
