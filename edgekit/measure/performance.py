"""The page of measured performance, made of stored reports: `python -m edgekit.measure.performance docs`.

`docs/data/*.json` are reports, as `edgekit bench -o`, `eval -o` and `sweep` write them or with tables of one's own (its
field `tables`); each becomes a section, in the order of their file names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from edgekit.files import write_file
from edgekit.measure.report.markdown import markdown
from edgekit.measure.results import read_report

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
    found = sorted((docs / "data").glob("*.json"))
    for path in found:
        yield markdown(read_report(path), level=2)
        yield f"Data: [{path.name}](data/{path.name})\n"
    if not found:
        yield "No run is stored yet.\n"


if __name__ == "__main__":
    write_file(Path(sys.argv[1]) / "performance.md", performance_page(Path(sys.argv[1])).encode())
