"""Measure artifacts: speed, memory, energy and quality, with reports.

Other apps may use these names; each is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.common.lazy import lazy

if TYPE_CHECKING:
    from edgekit.apps.bench.artifact_subjects import bytes_per_token, predicted_s, subject_of_artifact
    from edgekit.apps.bench.commands.reports import ReportFiles
    from edgekit.apps.bench.machine import CONTENDED_SHARE, THROTTLED
    from edgekit.apps.bench.measurement import CaseResult, Measurement, Metric, Predicted, SubjectInfo, TrialStatus
    from edgekit.apps.bench.prompts import encoder_of, tokens_of
    from edgekit.apps.bench.report.compare import Difference, compare_runs
    from edgekit.apps.bench.report.markdown import markdown
    from edgekit.apps.bench.report.page import page
    from edgekit.apps.bench.report.results import Figures, Report, read_report
    from edgekit.apps.bench.sharing import share
    from edgekit.apps.bench.statistics import summaries, values_of
    from edgekit.apps.bench.subject import context_error
    from edgekit.apps.bench.trials import ATTEMPTS, COOL_DOWN_S, LOADS
    from edgekit.apps.bench.workload import Case, Workload, read_workload

__all__ = [
    "ATTEMPTS",
    "CONTENDED_SHARE",
    "COOL_DOWN_S",
    "LOADS",
    "THROTTLED",
    "Case",
    "CaseResult",
    "Difference",
    "Figures",
    "Measurement",
    "Metric",
    "Predicted",
    "Report",
    "ReportFiles",
    "SubjectInfo",
    "TrialStatus",
    "Workload",
    "bytes_per_token",
    "compare_runs",
    "context_error",
    "encoder_of",
    "markdown",
    "page",
    "predicted_s",
    "read_report",
    "read_workload",
    "share",
    "subject_of_artifact",
    "summaries",
    "tokens_of",
    "values_of",
]
_MODULES = {
    ".artifact_subjects": ["bytes_per_token", "predicted_s", "subject_of_artifact"],
    ".commands.reports": ["ReportFiles"],
    ".machine": ["CONTENDED_SHARE", "THROTTLED"],
    ".measurement": [
        "CaseResult",
        "Measurement",
        "Metric",
        "Predicted",
        "SubjectInfo",
        "TrialStatus",
    ],
    ".prompts": ["encoder_of", "tokens_of"],
    ".report.compare": ["Difference", "compare_runs"],
    ".report.markdown": ["markdown"],
    ".report.page": ["page"],
    ".report.results": ["Figures", "Report", "read_report"],
    ".sharing": ["share"],
    ".statistics": ["summaries", "values_of"],
    ".subject": ["context_error"],
    ".trials": ["ATTEMPTS", "COOL_DOWN_S", "LOADS"],
    ".workload": ["Case", "Workload", "read_workload"],
}

__getattr__ = lazy(__name__, _MODULES)
