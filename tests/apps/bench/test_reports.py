"""Reports: the same numbers on a terminal, in Markdown and on a self-contained page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import measured
import pytest
from browser import Browser, browser, chromium

from edgekit.apps.bench.eval.evaluation import Check, Evaluation, TaskScore
from edgekit.apps.bench.report.headline import headline
from edgekit.apps.bench.report.markdown import escaped, markdown
from edgekit.apps.bench.report.page import page
from edgekit.apps.bench.report.results import Figures, Report, read_report, to_json
from edgekit.apps.bench.report.tables import conditions_table, formats_table, notes_of, number, speed_table, tables
from edgekit.common.divergence import Divergence

EVIL = '<img src="http://attacker.example/x" onerror=alert(1)>|`*_[x](http://attacker.example)'


def evaluation() -> Evaluation:
    divergence = Divergence(
        tokens=4096, scored=4088, kl_mean=0.012, kl_error=0.0005, kl_median=0.008, kl_p999=0.26, kl_max=0.5,
        same_top=0.926, same_top_error=0.004, perplexity=15.8, reference_perplexity=15.6, log_ratio=0.011,
        log_ratio_error=0.004, probability_rms=0.03, first_kl_mean=0.001,
    )  # fmt: skip
    return Evaluation(
        artifact_sha256="a" * 64, weights_sha256="b" * 64, model="demo", target="onnx", backend="cpu", recipe="s4-g64",
        reference="demo, float", text="a text", text_sha256="c" * 64, window_tokens=512, divergence=divergence,
        checks=(Check(what="bos", same=False, detail=EVIL),),
        tasks=(TaskScore(kind="exact", asked=4, right=3, error=0.2, failures=(EVIL,)),),
        file_bytes=4 << 20, bits_per_weight=5.0,
    )  # fmt: skip


def report() -> Report:
    """Make a report with all kinds of content, including hostile text."""
    runs = (
        measured.measurement([100, 104, 108]),
        measured.measurement([90, 91, 92], name="llama.cpp", invalid=[40.0], predicted=None),
        measured.measurement([], name=EVIL, invalid=[10.0, 12.0], status="contended", why=EVIL),
    )
    figures = Figures(title="Other figures", head=("a", "b"), rows=(("1", EVIL),), source="a script")
    return Report(
        title=f"A report {EVIL}", measurements=runs, evaluations=(evaluation(),), tables=(figures,),
        notes=(EVIL,),
    )  # fmt: skip


def test_tables_mark_disturbed_figures() -> None:
    found = speed_table(report().measurements, "quick")
    own, peer, disturbed = found.rows
    assert own[3] == "104 ± 3.8%"
    assert own[-1] == "3"
    assert peer[-1] == "3 (1 contended)"
    assert disturbed[3] == "~11 (disturbed)" and disturbed[5].startswith("~")
    assert own[4] == "900"
    assert formats_table(report().measurements).rows[0][3].startswith("4-bit symmetric, groups of 64")


def test_the_share_of_matrix_speed_is_shown_where_it_was_measured() -> None:
    plain = measured.measurement([100.0])
    (case,) = plain.cases
    known = plain.model_copy(update={"cases": (case.model_copy(update={"matrix_share": 0.62}),)})
    assert "of matrix speed" not in speed_table([plain], "quick").head
    found = speed_table([plain, known], "quick")
    place = found.head.index("of matrix speed")
    assert [row[place] for row in found.rows] == ["", "62%"] and all(len(row) == len(found.head) for row in found.rows)


def test_only_the_integers_of_the_first_artifact_are_the_same() -> None:
    first, other = measured.measurement([100.0]), measured.measurement([90.0], name="other")
    other = other.model_copy(update={"subject": other.subject.model_copy(update={"weights_sha256": "d" * 64})})
    assert [row[-1] for row in formats_table([first, other]).rows] == ["yes", "no"]
    assert any("contended" in note for note in notes_of(report()))


def test_markdown_escapes_text_of_measurements() -> None:
    text = markdown(report())
    for line in text.splitlines():
        if "attacker" in line:
            assert not re.search(r"(?<!\\)[<`]|(?<!\\)\]\(", line), line
    heads = [line for line in text.splitlines() if line.startswith("| subject |")]
    for head in heads:
        rows = text[text.index(head) :].split("\n\n")[0].splitlines()
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {len(re.findall(r"\|", head))}
    assert escaped("a\nb|c") == "a b\\|c"


def test_a_report_is_read_back_and_so_are_measurements_one_a_line(tmp_path: Path) -> None:
    whole = report()
    (tmp_path / "r.json").write_text(to_json(whole))
    assert read_report(tmp_path / "r.json") == whole
    lines = "\n".join(one.model_dump_json() for one in whole.measurements)
    (tmp_path / "lines.json").write_text(lines)
    assert read_report(tmp_path / "lines.json").measurements == whole.measurements
    (tmp_path / "one.json").write_text(whole.measurements[0].model_dump_json(indent=1))
    assert read_report(tmp_path / "one.json").measurements == whole.measurements[:1]
    (tmp_path / "other.json").write_text(json.dumps({"kind": "other"}))
    assert "kind 'other'" in measured.refused(lambda: read_report(tmp_path / "other.json"))
    (tmp_path / "bad.json").write_text(to_json(whole).replace('"status": "valid"', '"status": "splendid"'))
    assert "status" in measured.refused(lambda: read_report(tmp_path / "bad.json"))


def test_a_page_holds_every_number_and_no_foreign_markup() -> None:
    text = page(report())
    assert "<script" not in text
    assert "<img" not in text
    assert "default-src 'none'" in text
    for table in tables(report()):
        assert table.title in text
    assert text.count("<table>") == sum(1 for _ in tables(report()))
    assert page(report()) == text, "the same report gives the same page"


def _runs(*speeds: list[float], **known: Any) -> Report:
    runs = [measured.measurement(each, name=name, **known) for name, each in zip("ABC", speeds, strict=False)]
    return Report(title="", measurements=tuple(runs))


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (_runs([100, 104, 108]), "A decodes 104 tokens per second."),
        (
            _runs([100, 101, 102, 103, 104], [50, 50, 51, 52, 52]),
            "A decodes 102 tokens per second, 2 times as fast as B.",
        ),
        (
            _runs([50, 50, 51, 52, 52], [1500, 1510, 1520, 1530, 1540]),
            "B decodes 1,520 tokens per second, 30 times as fast as A.",
        ),
        (_runs([100, 104], [99, 101]), "A decodes 102 tokens per second; these trials cannot rank it against B."),
        (
            Report(title="", measurements=(measured.measurement([], name="A", invalid=[40, 44], status="contended"),)),
            "A decodes ~42 tokens per second. Figures marked ~ were disturbed by other programs or heat; run again on "
            "an idle machine.",
        ),
        (
            Report(
                title="",
                measurements=(
                    measured.measurement([100, 104, 108]),
                    measured.measurement([], name="B", status="failed", why="gone", cases=()),
                ),
            ),
            "onnx cpu s4-g64 decodes 104 tokens per second. No figures of B: see the notes.",
        ),
        (
            Report(title="", evaluations=(evaluation(),)),
            "s4-g64 predicts the same next token as demo, float in 92.6% of cases.",
        ),
        (Report(title=""), ""),
    ],
    ids=["one", "two", "order", "too close", "disturbed", "failed", "evaluation", "empty"],
)
def test_the_headline_is_a_sentence(report: Report, sentence: str) -> None:
    assert headline(report).sentence == sentence


def test_the_headline_has_three_figures_that_compare_like_with_like() -> None:
    first, speed, memory = headline(_runs([100, 104, 108])).figures
    assert first == ("First token", "100 ms", "after 100 tokens")
    assert speed == ("Tokens per second", "104", "predicted 900 (-88%)")
    assert memory == ("Private memory", "40 MiB", "within 100 MiB"), "private against private"
    disturbed = headline(_runs([], cases=measured.measurement([], invalid=[40, 44]).cases)).figures
    assert disturbed[1] == ("Tokens per second", "~42", "predicted 900 (-95%)")


def test_a_page_names_model_machine_and_date() -> None:
    alone, titled = page(_runs([100.0])), page(_runs([100.0]).model_copy(update={"title": "Mine"}))
    assert "<title>demo on a processor, 2026-01-01</title>" in alone and "<a " not in alone
    assert "<h1>Mine</h1>" in titled and "demo on a processor, 2026-01-01" in titled


def test_code_in_notes_is_shown_as_code() -> None:
    noted = Report(title="x", notes=("export with `--context 4128`; `<b>`",))
    assert "export with <code>--context 4128</code>; `&lt;b&gt;`" in page(noted)
    assert "- export with `--context 4128`; \\`\\<b\\>\\`" in markdown(noted)


def test_figures_have_no_exponents() -> None:
    assert [number(value) for value in (5184.2, 51842.0, 104.25, 0.05)] == ["5,184", "51,842", "104.2", "0.05"]
    (row,) = speed_table([measured.measurement([5184.2])], "quick").rows
    assert row[3] == "5,184 ± 0.0%"


def test_conditions_are_one_row_a_run_and_name_what_is_missing() -> None:
    runs = [measured.measurement([100.0]), measured.measurement([90.0], name="B")]
    table = conditions_table(runs)
    assert len(table.rows) == 1 and table.rows[0][:2] == ("quick", "2026-01-01 00:00:00")
    assert table.note == "Not reported by this machine: temperature, core frequency, after."


def test_a_note_of_every_subject_is_shown_once() -> None:
    runs = [measured.measurement([100.0], name=name, notes=("slept",)) for name in "AB"]
    assert notes_of(Report(title="", measurements=tuple(runs))) == ("slept",)
    assert notes_of(Report(title="", measurements=tuple(runs[:1]))) == ("A: slept",)


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="no chromium here; apt-get install chromium")
def test_a_browser_shows_the_page_without_requests_or_errors(tmp_path: Path) -> None:
    place = tmp_path / "report.html"
    place.write_text(page(report()))
    with browser() as tab:
        colours = {(width, dark): _checked(tab, place, width, dark) for width in (1200, 380) for dark in (False, True)}
    assert colours[1200, False] != colours[1200, True], "light and dark look the same"
    assert colours[380, False] == colours[1200, False]


def _checked(tab: Browser, place: Path, width: int, dark: bool) -> str:
    """Check the page on a screen; return its background colour."""
    tab.look(width=width, dark=dark)
    tab.open(place)
    assert tab.requested() == [place.resolve().as_uri()]
    assert tab.complaints() == []
    assert tab.value("document.documentElement.scrollWidth") <= width, "the page is wider than the screen"
    ink = tab.value("getComputedStyle(document.body).color")
    paper = tab.value("getComputedStyle(document.body).backgroundColor")
    assert ink != paper
    assert tab.value("document.querySelectorAll('img, script, iframe').length") == 0
    return str(paper)
