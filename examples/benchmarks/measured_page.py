"""Writes the tables and pictures of docs/measured.md, the tables of three more pages, and what plans expect of recipes.

    python -m examples.benchmarks.measured_page

They come from the files of `results/`: `engine_turns_*.json` and `peers.json` (engine_turns.py), `memory.json`
(memory_contract.py), `quality.json` (quantisation_figures.py), `real_models.jsonl` (real_models.py) and
`speculation.json` (speculation_figures.py).
`edgekit/planner/quality_rows.json` has a row for each that was measured in the last two, with its worst text. Rows that
were rounded to the nearest are of an older date; their integers are still the same, bit for bit (`weights`), and so is
what an engine makes of them. Older rows of the default were replaced when gptq began to give other integers.

A table stands between `<!-- NAME -->` and `<!-- end -->`. Sizes are bytes of files; a MB is a million bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from edgekit.contracts.recipe import NATIVE_RECIPES

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs/measured.md",
    ROOT / "docs/quantisation.md",
    ROOT / "docs/speculation.md",
)
SIZES = {"SmolLM2-135M": "0.1 B", "0.5 B parameters": "0.5 B", "1.2 B parameters": "1.2 B"}
PROCESSORS = {"operators": "Intel, AMX, edgekit's operators", "intel": "Intel, AMX", "amd": "AMD, AVX-512"}
EDGEKIT, SPINNING, LLAMA_CPP, GENAI = "edgekit", "edgekit, `EDGEKIT_SPIN=on`", "llama.cpp", "onnxruntime-genai"
IK, OPENVINO, OLDER = "ik_llama.cpp", "OpenVINO GenAI", "older AMD ¹"
ENGINES = (EDGEKIT, LLAMA_CPP, IK, OPENVINO, GENAI)
# The names of each engine's settings in engine_turns.
SUBJECTS = {
    EDGEKIT: ("onnx brief",),
    LLAMA_CPP: ("llamacpp brief",),
    IK: ("ik_llama.cpp", "ik_llama.cpp, flash attention"),
    OPENVINO: ("OpenVINO GenAI",),
}
DEPTH, TOGETHER = "512", "8 at once"
METRICS = {"decode": "decode_tokens_per_s", "eight at once": TOGETHER, "prefill": "prefill_tokens_per_s"}
KINDS = ("code", "prose", "chat")
MODELS = {
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M"),
    "gemma3": ("gemma-3-270m-Q4_K_M", "Gemma 3 270M"),
    "demo": ("demo", "demo, 11 M"),
}
SPECS = {"smollm2": ("llama", 134_515_008), "gemma3": ("gemma3_text", 268_098_176), "demo": ("llama", 11_015_040)}
QUALITY_ROWS = ROOT / "edgekit/planner/quality_rows.json"
SAMPLINGS = ("greedy", "temperature 0.7")
DRAFTERS = {
    "auto": "`auto`",
    "ngram": "prompt lookup",
    "draft model": "draft model",
    "draft model, always 1": "draft model, always one token",
    "draft model, always 3": "draft model, always three",
    "early exit": "early exit, of a model not trained for it",
}
SHOWN = ("Q5_K_M", "Q4_K_M", "IQ4_K", "IQ4_XS")  # formats of other engines that the table has; the others are stored
FEWER_BITS = "5.32"  # the weights have as many bytes then as in IQ4_XS
RECIPES = ("default", "balanced, calibrated", "s8", "balanced", "s4-g32", "s4-g64", "s4-g128")

Row = dict[str, Any]


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def real_models() -> dict[tuple[str, str, str], Row]:
    """Rows of real models by model, target and recipe, with `, calibrated` where that was asked for."""
    calibrated = {"normal": ", calibrated"}
    return {
        (row["model"], row["target"], row["recipe"] + calibrated.get(row["effort"], "")): row for row in stored_rows()
    }


def stored_rows() -> list[Row]:
    return [json.loads(line) for line in (RESULTS / "real_models.jsonl").read_text().splitlines()]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 2e7 else f"{size / 1e6:.1f} MB"


def rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 50 else f"{tokens_per_s:.1f}"


# Speed


class Speeds(NamedTuple):
    """Tokens a second of one model on one processor, as medians: rows of each engine in one or several settings."""

    processor: str
    size: str
    rows: dict[str, list[dict[str, Row]]]

    def best(self, engine: str, metric: str) -> float | None:
        """Return an engine's speed in its best setting; None where it was not measured."""
        depth = TOGETHER if metric == TOGETHER else DEPTH
        metric = "decode_tokens_per_s" if metric == TOGETHER else metric
        return max((float(row[depth][metric]) for row in self.rows.get(engine, ()) if depth in row), default=None)

    def cells(self, metric: str, unit: str = "") -> list[str]:
        """Return the speeds of edgekit and of the others."""
        found = [self.best(engine, metric) for engine in ENGINES]
        return ["" if each is None else f"{rate(each)}{unit}" for each in found]


def speeds() -> list[Speeds]:
    """Default settings of edgekit's onnx target and other engines on the same integers, in turns."""
    found = []
    for name, processor in PROCESSORS.items():
        measured = stored(f"engine_turns_{name}.json")
        for model, size in SIZES.items():
            quiet = measured.get(model, {}).get("quiet")
            if quiet is None:
                continue
            rows = {engine: [quiet[each] for each in names if each in quiet] for engine, names in SUBJECTS.items()}
            found.append(Speeds(processor, size, rows))
    older: dict[str, list[dict[str, Row]]] = {EDGEKIT: [{DEPTH: peers()[EDGEKIT]}], GENAI: [{DEPTH: peers()[GENAI]}]}
    older[LLAMA_CPP] = [{DEPTH: row} for name, row in peers().items() if name.startswith(LLAMA_CPP)]
    return [*found, Speeds(OLDER, "1.2 B", older)]


@cache
def peers() -> dict[str, Row]:
    """The engines that were compared on random weights of 1.2 B parameters, by the names of the page."""
    found = stored("peers.json")["1.2 B parameters"]
    names = (EDGEKIT, SPINNING, f"{LLAMA_CPP}, 8-bit head", f"{LLAMA_CPP}, Q6_K head", GENAI)
    rows = [{**found["quiet"][subject][DEPTH], **told} for subject, told in found["subjects"].items()]
    return dict(zip(names, rows, strict=True))


def speed_table() -> str:
    rows = []
    for words, metric in METRICS.items():
        for each in speeds():
            ours, others = each.best(EDGEKIT, metric), [each.best(engine, metric) for engine in ENGINES[1:]]
            if ours is not None:
                best = max(other for other in others if other is not None)
                rows.append([f"{words}, {each.size}, {each.processor}", *each.cells(metric), f"{ours / best:.2f}"])
    return table(["tokens/s after 512 tokens", *ENGINES, "edgekit over the best"], rows)


# Memory


def memory_table() -> str:
    rows = []
    for name, row in peers().items():
        sizes = [mb(row[each]) for each in ("file_bytes", "private_bytes", "peak_bytes")]
        rows.append([name, *sizes, *(f"{seconds:.1f} s" for seconds in row["load_s"][:2])])
    return table(["1.2 B, 4 bits", "files", "private memory", "peak, resident", "first opening", "second"], rows)


def predicted_table() -> str:
    rows = []
    for (model, target, recipe), row in real_models().items():
        if recipe == "default":
            run = row["run"]
            pair = run["predicted_private_bytes"], run["measured_private_bytes"]
            off = f"{pair[0] / pair[1] - 1:+.1%}"
            rows.append([f"{MODELS[model][1]}, {target}", f"{run['context']:,}", *map(mb, pair), off])
    return table(["default artifact", "context", "predicted", "measured", "off by"], rows)


# Quality


class Loss(NamedTuple):
    """What a file loses against the float model: KL by kind of text, equal top tokens, and the bytes of the file."""

    what: str
    file_bytes: int
    kl: tuple[float, ...]
    same_top: float
    is_edgekit: bool


def losses(model: str) -> list[Loss]:
    """The default of edgekit on two targets, then the formats of llama.cpp, the largest file first."""
    stored_name, _ = MODELS[model]
    rows = [row for row in stored("quality.json")["rows"] if row["model"] == stored_name]
    balanced = next(row for row in rows if (row["recipe"], row["method"]) == ("balanced", "gptq"))
    default = next((row for row in rows if row["recipe"] == "keep"), balanced)
    ours = [
        loss(f"edgekit, default, {target}", default, real_models()[model, target, "default"]["bytes"])
        for target in ("onnx", "llamacpp")
    ]
    if default is not balanced:
        weights = real_models()[model, "llamacpp", "balanced, calibrated"]
        ours.append(loss("edgekit, balanced, llamacpp", balanced, weights["bytes"]))
    if smaller := real_models().get((model, "llamacpp", f"balanced-to-{FEWER_BITS}")):
        weights = next(row for row in rows if row["recipe"] == "balanced at the bytes of IQ4_XS")
        ours.append(loss(f"edgekit, {FEWER_BITS} bits a weight, llamacpp", weights, smaller["bytes"]))
    peers_ = [
        loss(f"{row['method']} {row['recipe']}", row, row["file_bytes"])
        for row in rows
        if row["recipe"] in SHOWN and row["recipe"] not in stored_name  # the file that all were made from
    ]
    return ours + sorted(peers_, key=lambda each: -each.file_bytes)


def loss(what: str, row: Row, file_bytes: int) -> Loss:
    kl = tuple(fmean(row["text"][kind]["kl"]) for kind in KINDS)
    same_top = fmean(fmean(row["text"][kind]["same_top"]) for kind in KINDS)
    return Loss(what, file_bytes, kl, same_top, what.startswith(EDGEKIT))


def quality_rows() -> list[Row]:
    """What plans expect of recipes: each measured model, target, recipe and method, with its worst text."""
    found: list[Row] = []

    def add(model: str, target: str, recipe: str, method: str, kl: list[float], same_top: list[float]) -> None:
        family, parameters = SPECS[model]
        name = MODELS[model][1].partition(",")[0]
        ends = [float(f"{each:.3g}") for each in (min(kl), max(kl))]
        place = {"model": name, "family": family, "parameters": parameters, "target": target, "recipe": recipe}
        found.append({**place, "method": method, "kl": ends, "same_top": int(min(same_top) * 1e4) / 1e4})

    for row in stored_rows():
        texts = (row.get("quality") or {}).values()
        if texts:
            losses_ = [each["kl_mean"] for each in texts], [each["same_top"] for each in texts]
            add(row["model"], row["target"], row["stored_as"], row["method"], *losses_)
    names = {name: model for model, (name, _) in MODELS.items()}
    for row in stored("quality.json")["rows"]:  # llama.cpp's own files have no recipe
        recipe = "s4-g32" if " at the bytes of " in row["recipe"] else row["recipe"]  # which loses as much, or more
        if row["activations"] == "float" and recipe in (*NATIVE_RECIPES, "balanced", "s4-g32", "small"):
            texts = row["text"].values()
            losses_ = [fmean(each["kl"]) for each in texts], [fmean(each["same_top"]) for each in texts]
            held = "float32" if recipe != "small" else "llamacpp" if row["method"] == "none" else "mlx"
            add(names[row["model"]], held, recipe, row["method"], *losses_)
    return sorted(found, key=lambda row: [str(each) for each in row.values()])


def quality_rows_text() -> str:
    return "[\n " + ",\n ".join(map(json.dumps, quality_rows())) + "\n]\n"


def quality_table() -> str:
    rows = [
        [MODELS[model][1], each.what, mb(each.file_bytes), *(f"{kl:.4f}" for kl in each.kl), f"{each.same_top:.1%}"]
        for model in MODELS
        for each in losses(model)
    ]
    return table(["model", "made by", "files", *(f"KL, {kind}" for kind in KINDS), "same top token"], rows)


def recipe_table() -> str:
    rows = []
    for recipe in RECIPES:
        row = real_models()["smollm2", "onnx", recipe]
        kl = [f"{row['quality'][kind]['kl_mean']:.4f}" for kind in ("code", "prose")]
        name, calibrated, _ = recipe.partition(", calibrated")
        how = "calibrated (the default of float weights)" if calibrated else "to the nearest"
        name = "`keep` (the default of this file)" if recipe == "default" else f"`{name}`, {how}"
        private = mb(row["run"]["measured_private_bytes"])
        rows.append([name, mb(row["bytes"]), *kl, f"{row['quality']['code']['same_top']:.1%}", private])
    return table(["recipe", "files", "KL, code", "KL, prose", "same top token, code", "private memory"], rows)


# Speculation


def draft_table() -> str:
    """Speed with drafts over plain decoding, of a trained pair of models."""
    found = stored("speculation.json")
    runs = [(found[part]["by_drafter"], sampling) for part in ("pair", "edits") for sampling in SAMPLINGS]
    rows = [
        [words, *(f"{by[f'{name}; {each}']['speed_up']:.2f}" for by, each in runs)] for name, words in DRAFTERS.items()
    ]
    return table(["drafter", "code, greedy", "code, 0.7", "edits, greedy", "edits, 0.7"], rows)


# README


def readme_table() -> str:
    rows, found = [], peers()
    for each in speeds():
        if each.size != "0.5 B":
            cells = each.cells("decode_tokens_per_s", " tokens/s")
            rows.append([f"decode, {each.size}, {each.processor.removesuffix(' ¹')}", *cells])
    best = found[f"{LLAMA_CPP}, Q6_K head"]
    for words, key in (("private memory, 1.2 B", "private_bytes"), ("files, 1.2 B in 4 bits", "file_bytes")):
        ours, theirs, last = (mb(row[key]) for row in (found[EDGEKIT], best, found[GENAI]))
        rows.append([words, ours, theirs, "", "", last])
    sources = {"demo": "the demo's float weights", "smollm2": "SmolLM2-135M, a Q4_1 file that edgekit keeps"}
    for model, made_from in sources.items():
        found_losses = {each.what: each for each in losses(model)}
        shown = ("edgekit, default, llamacpp", "llama.cpp Q4_K_M", "ik_llama.cpp IQ4_K")
        cells = [f"KL {found_losses[name].kl[0]:.3f} in {mb(found_losses[name].file_bytes)}" for name in shown]
        rows.append([f"loss on code, {made_from}", *cells, "", ""])
    return table(["", *ENGINES], rows)


TABLES: dict[str, Callable[[], str]] = {
    "speed": speed_table,
    "memory": memory_table,
    "predicted": predicted_table,
    "quality": quality_table,
    "recipes": recipe_table,
    "drafts": draft_table,
    "rivals": readme_table,
}


def written(page: str) -> str:
    """The page with its tables made anew."""
    return re.sub(
        r"<!-- (\w+) -->\n.*?<!-- end -->",
        lambda found: f"<!-- {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->",
        page,
        flags=re.DOTALL,
    )


# Pictures

STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.t{font-size:15px}.b{fill:#fff}.o{fill:#4a90c9}.p{fill:#b9bec6}"
    "@media(prefers-color-scheme:dark){text{fill:#e6e6e6}.b{fill:#16181d}.p{fill:#5c6470}}"
)


class Bar(NamedTuple):
    what: str
    value: float
    words: str
    is_edgekit: bool


def bars(title: str, shown: Sequence[Bar]) -> str:
    """A chart of horizontal bars; edgekit's are blue."""
    left, wide, high = 310, 330, 22
    most = max(bar.value for bar in shown)
    lines = [f'<text class="t" x="12" y="24">{title}</text>']
    for bar, y in zip(shown, count(42, high), strict=False):
        lines.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{bar.what}</text>')
        width = bar.value / most * wide
        kind = "o" if bar.is_edgekit else "p"
        lines.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{width:.1f}" height="{high - 5}"/>')
        lines.append(f'<text x="{left + width + 6:.1f}" y="{y + 13}">{bar.words}</text>')
    return drawn(lines, left + wide + 190, 42 + len(shown) * high + 10)


def drawn(lines: Sequence[str], width: int, height: int) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join(
        [head, f"<style>{STYLE}</style>", '<rect class="b" width="100%" height="100%"/>', *lines, "</svg>\n"]
    )


def speed_picture() -> str:
    shown = []
    for each in speeds():
        for name in ENGINES:
            value = each.best(name, "decode_tokens_per_s")
            if value is not None and each.processor != OLDER:
                shown.append(Bar(f"{each.size}, {each.processor}: {name}", value, rate(value), name == EDGEKIT))
    for name, row in peers().items():
        value = row["decode_tokens_per_s"]
        what = f"1.2 B, older AMD: {name.replace('`', '')}"
        shown.append(Bar(what, value, rate(value), name.startswith(EDGEKIT)))
    return bars("Decoded tokens a second after 512 tokens, two cores", shown)


def memory_picture() -> str:
    shown = []
    for name, row in peers().items():
        words = f"{mb(row['peak_bytes'])}, {mb(row['private_bytes'])} private"
        shown.append(Bar(name.replace("`", ""), row["peak_bytes"], words, name.startswith(EDGEKIT)))
    return bars("Peak of resident memory, 1.2 B parameters in 4 bits", shown)


def quality_picture() -> str:
    """Loss on code by bytes of files, SmolLM2-135M."""
    found, left, top, wide, high = losses("smollm2"), 60, 50, 560, 240
    low, most = 85e6, 120e6
    worst = max(each.kl[0] for each in found) * 1.1
    title = "SmolLM2-135M: KL on code by size of files (blue: edgekit, grey: others)"
    lines = [f'<text class="t" x="12" y="24">{title}</text>']
    for size in range(85, 121, 5):
        x = left + (size * 1e6 - low) / (most - low) * wide
        lines.append(f'<text x="{x:.0f}" y="{top + high + 28}" text-anchor="middle">{size}</text>')
    for share in (0.0, 0.02, 0.04, 0.06):
        y = top + high - share / worst * high + 4
        lines.append(f'<text x="{left - 8}" y="{y:.0f}" text-anchor="end">{share}</text>')
    lines.append(f'<text x="{left + wide / 2}" y="{top + high + 48}" text-anchor="middle">MB of files</text>')
    for each in found:
        x = left + (each.file_bytes - low) / (most - low) * wide
        y = top + high - each.kl[0] / worst * high
        kind = "o" if each.is_edgekit else "p"
        lines.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
        what = re.sub(r"^(edgekit, (default, )?|(ik_)?llama\.cpp )", "", each.what)
        # To the right of edgekit's points, and below the others', so that neighbours do not cover each other.
        place = f'x="{x + 10:.1f}" y="{y + 5:.1f}"' if each.is_edgekit else f'x="{x - 20:.1f}" y="{y + 20:.1f}"'
        lines.append(f"<text {place}>{what}</text>")
    return drawn(lines, left + wide + 60, top + high + 60)


PICTURES: dict[str, Callable[[], str]] = {
    "measured_speed.svg": speed_picture,
    "measured_memory.svg": memory_picture,
    "measured_quality.svg": quality_picture,
}


def main() -> None:
    for page in PAGES:
        page.write_text(written(page.read_text()))
    QUALITY_ROWS.write_text(quality_rows_text())
    for name, picture in PICTURES.items():
        (ROOT / "docs" / name).write_text(picture())


if __name__ == "__main__":
    main()
