"""Writes the published JSON schemas of measurements: `python -m edgekit.apps.bench.report.schemas docs/schemas`.

A schema's `$id` contains its version. New fields have a default; any other change increases the version.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic import BaseModel

from edgekit.apps.bench.eval.evaluation import Evaluation
from edgekit.apps.bench.measurement import Measurement
from edgekit.apps.bench.report.results import Report
from edgekit.apps.bench.tasks.results import TaskReport
from edgekit.apps.bench.workload import Workload
from edgekit.common.files import write_file

PUBLISHED: dict[str, type[BaseModel]] = {
    "workload": Workload,
    "measurement": Measurement,
    "evaluation": Evaluation,
    "report": Report,
    "tasks": TaskReport,
}


def schema_text(name: str) -> str:
    """Return the published text of one schema."""
    model = PUBLISHED[name]
    version = model.model_fields["version"].default
    schema = model.model_json_schema() | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"edgekit:{name}:{version}",
    }
    return json.dumps(schema, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write_schemas(folder: Path) -> None:
    for name in PUBLISHED:
        write_file(folder / f"{name}.schema.json", schema_text(name).encode())


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
