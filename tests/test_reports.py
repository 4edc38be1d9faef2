"""Reports: the same numbers on a terminal, in Markdown and on one page that asks nobody for anything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import measured
import pytest
from browser import Browser, browser, chromium

from edgekit.measure.divergence import Divergence
from edgekit.measure.evaluation import Check, Evaluation, TaskScore
from edgekit.measure.report.markdown import escaped, markdown
from edgekit.measure.report.tables import formats_table, notes_of, speed_table, tables
from edgekit.measure.results import Figures, Point, Report, pareto, read_report, to_json

EVIL = '<img src="http://attacker.example/x" onerror=alert(1)>|`*_[x](http://attacker.example)'


def evaluation(recipe: str = "s4-g64") -> Evaluation:
    divergence = Divergence(
        tokens=4096, scored=4088, kl_mean=0.012, kl_error=0.0005, kl_median=0.008, kl_p999=0.26, kl_max=0.5,
        same_top=0.926, same_top_error=0.004, perplexity=15.8, reference_perplexity=15.6, log_ratio=0.011,
        log_ratio_error=0.004, probability_rms=0.03, first_kl_mean=0.001,
    )  # fmt: skip
    return Evaluation(
        artifact_sha256="a" * 64, weights_sha256="b" * 64, model="demo", target="onnx", backend="cpu", recipe=recipe,
        reference="demo, float", text="a text", text_sha256="c" * 64, window_tokens=512, divergence=divergence,
        checks=(Check(what="bos", same=False, detail=EVIL),),
        tasks=(TaskScore(kind="exact", asked=4, right=3, error=0.2, failures=(EVIL,)),),
        file_bytes=4 << 20, bits_per_weight=5.0,
    )  # fmt: skip


def report() -> Report:
    """A bit of everything, words of an attacker among them."""
    runs = (
        measured.measurement([100, 104, 108]),
        measured.measurement([90, 91, 92], name="llama.cpp", invalid=[40.0], predicted=None),
        measured.measurement([], name=EVIL, invalid=[10.0, 12.0], status="contended", why=EVIL),
    )
    points = pareto(
        [
            Point(
                name="s4-g64", decode_tokens_per_s=104, kl=0.012, same_top=0.926, memory_bytes=100 << 20, file_bytes=4
            ),
            Point(name="s8", decode_tokens_per_s=80, kl=0.001, same_top=0.98, memory_bytes=120 << 20, file_bytes=6),
            Point(name="s4-g128", decode_tokens_per_s=90, kl=0.02, same_top=0.9, memory_bytes=110 << 20, file_bytes=4),
        ]
    )
    figures = Figures(title="Other figures", head=("a", "b"), rows=(("1", EVIL),), source="a script")
    return Report(
        title=f"A report {EVIL}", measurements=runs, evaluations=(evaluation(),), points=points, tables=(figures,),
        notes=(EVIL,),
    )  # fmt: skip


def test_tables_say_what_was_disturbed_and_never_average_it_in() -> None:
    found = speed_table(report().measurements, "quick")
    own, peer, disturbed = found.rows
    assert own[3] == "104 ± 3.8%"
    assert own[-1] == "3"
    assert peer[-1] == "3 (1 contended)"
    assert disturbed[3] == "disturbed (≥ 12)"
    assert own[4] == "900"
    assert formats_table(report().measurements).rows[0][3].startswith("4-bit symmetric, groups of 64")
    assert any("contended" in note for note in notes_of(report()))


def test_markdown_lets_no_word_of_a_measurement_through_as_markup() -> None:
    text = markdown(report())
    for line in text.splitlines():
        if "attacker" in line:
            assert not re.search(r"(?<!\\)[<`]|(?<!\\)\]\(", line), line
    heads = [line for line in text.splitlines() if line.startswith("| arm |")]
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


def test_a_recipe_is_dominated_only_by_one_that_is_no_worse_in_anything() -> None:
    assert [point.dominated_by for point in report().points] == [None, None, "s4-g64"]
    unknown = Point(name="x", decode_tokens_per_s=None, kl=9.0, same_top=0.1, memory_bytes=1 << 40, file_bytes=1)
    assert pareto([report().points[0], unknown])[1].dominated_by is None
    equal = report().points[0]
    assert [point.dominated_by for point in pareto([equal, equal])] == [None, None]


def test_a_page_holds_every_number_and_no_foreign_markup() -> None:
    pytest.importorskip("matplotlib")
    from edgekit.measure.report.page import page

    text = page(report())
    assert "<script" not in text
    assert "<img" not in text
    assert "default-src 'none'" in text
    for table in tables(report()):
        assert table.title in text
    assert text.count("<svg") == 4
    assert page(report()) == text, "the same report gives the same page"
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "two charts share an id"


def test_charts_are_pictures_too() -> None:
    pytest.importorskip("matplotlib")
    from edgekit.measure.report.charts import charts, pareto_chart

    assert [chart.title for chart in charts(report())] == [
        "Decode, tokens per second: quick", "Prefill, tokens per second: quick",
        "Peak memory, MiB: predicted and measured", "Quality, speed and memory",
    ]  # fmt: skip
    assert pareto_chart(report().points).png.startswith(b"\x89PNG")
    assert charts(Report(title="nothing")) == []


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="no chromium here; apt-get install chromium")
def test_a_browser_shows_the_page_asks_for_nothing_and_does_not_complain(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from edgekit.measure.report.page import page

    place = tmp_path / "report.html"
    place.write_text(page(report()))
    with browser() as tab:
        colours = {(width, dark): _checked(tab, place, width, dark) for width in (1200, 380) for dark in (False, True)}
    assert colours[1200, False] != colours[1200, True], "light and dark look the same"
    assert colours[380, False] == colours[1200, False]


def _checked(tab: Browser, place: Path, width: int, dark: bool) -> str:
    """Everything that must hold on a screen; the colour of its paper."""
    tab.look(width=width, dark=dark)
    tab.open(place)
    assert tab.requested() == [place.resolve().as_uri()]
    assert tab.complaints() == []
    sizes = tab.value(
        "[...document.querySelectorAll('svg')].map(e => { const b = e.getBoundingClientRect();"
        " return [b.width, b.height, e.querySelectorAll('path').length, getComputedStyle(e).display]; })"
    )
    assert len(sizes) == 4
    for chart_width, height, shapes, display in sizes:
        assert 200 < chart_width <= width
        assert height > 80
        assert shapes > 5
        assert display != "none"
    assert tab.value("document.documentElement.scrollWidth") <= width, "the page is wider than the screen"
    words = tab.value("[...document.querySelectorAll('svg text')].map(e => e.textContent).join(' ')")
    assert "$" not in words, "a chart shows markup instead of a number"
    inks = tab.value("getComputedStyle(document.querySelector('svg text')).fill")
    paper = tab.value("getComputedStyle(document.body).backgroundColor")
    assert inks != paper
    assert tab.value("document.querySelectorAll('img, script, iframe').length") == 0
    return str(paper)
