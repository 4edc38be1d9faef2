"""Writes one page of docs/evidence/ per stored report: `python -m edgekit.apps.bench.report.performance docs`.

Reports in `docs/data/*.json` come from `edgekit bench -o`, `eval -o` and `sweep`, or have tables from other scripts
(field `tables`). Other JSON files there belong to other pages.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edgekit.apps.bench.report.markdown import markdown
from edgekit.apps.bench.report.results import MAX_REPORT_BYTES, read_report
from edgekit.common.files import write_file
from edgekit.common.parsing import read_json


def performance_pages(docs: Path) -> dict[Path, str]:
    """Return the text of each page by its path."""
    return {
        docs / "evidence" / f"performance-{path.stem}.md": f"{markdown(read_report(path))}\n"
        f"Data: [{path.name}](../data/{path.name}). [Measuring](../measure.md) says what makes a trial count.\n"
        for path in stored_reports(docs / "data")
    }


def stored_reports(folder: Path) -> list[Path]:
    """Return the reports among the JSON files of a folder."""
    return [path for path in sorted(folder.glob("*.json")) if read_json(path, MAX_REPORT_BYTES).get("kind") == "report"]


def main() -> None:
    """Write every page."""
    for page, text in performance_pages(Path(sys.argv[1])).items():
        write_file(page, text.encode())


if __name__ == "__main__":
    main()
