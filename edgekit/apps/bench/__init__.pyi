# The public names of this package, each imported on first use.
from edgekit.apps.bench.artifact_subjects import (
    bytes_per_token as bytes_per_token,
    predicted_s as predicted_s,
    subject_of_artifact as subject_of_artifact,
)
from edgekit.apps.bench.commands.reports import ReportFiles as ReportFiles
from edgekit.apps.bench.machine import CONTENDED_SHARE as CONTENDED_SHARE, THROTTLED as THROTTLED
from edgekit.apps.bench.measurement import (
    CaseResult as CaseResult,
    Measurement as Measurement,
    Metric as Metric,
    Predicted as Predicted,
    SubjectInfo as SubjectInfo,
    TrialStatus as TrialStatus,
)
from edgekit.apps.bench.prompts import prompts_of as prompts_of
from edgekit.apps.bench.report.compare import Difference as Difference, compare_runs as compare_runs
from edgekit.apps.bench.report.markdown import markdown as markdown
from edgekit.apps.bench.report.page import page as page
from edgekit.apps.bench.report.results import Figures as Figures, Report as Report, read_report as read_report
from edgekit.apps.bench.sharing import share as share
from edgekit.apps.bench.statistics import summaries as summaries
from edgekit.apps.bench.subject import context_error as context_error
from edgekit.apps.bench.trials import ATTEMPTS as ATTEMPTS, COOL_DOWN_S as COOL_DOWN_S, LOADS as LOADS
from edgekit.apps.bench.workload import Case as Case, Workload as Workload, read_workload as read_workload
