"""Writes the figures of docs/data/speculation.json into docs/evidence/speculation*.md, and draws the picture again.

    python -m examples.benchmarks.speculation_page

On a page each stands between `<!-- NAME -->` and `<!-- end -->`; the words around them are a person's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from examples.benchmarks import speculation_picture

PAGES = [speculation_picture.DOCS / "evidence" / name for name in ("speculation.md", "speculation_pair.md")]


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    names = head.split(" | ")
    lines = [f"| {head} |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def loaded(found: dict[str, Any]) -> str:
    said = f"on {found['cores']} cores at a load of {min(found['load']):.1f} to {max(found['load']):.1f}"
    busy = max(found["load"]) > found["cores"] + 1
    return said + (": others used the machine, so that single figures say nothing" if busy else "")


def equal(found: dict[str, Any]) -> str:
    rows = []
    for engine, by_drafter in found["by_engine"].items():
        for name, greedy in by_drafter.items():
            if ", greedy, " in name:
                sampled = by_drafter[name.replace("greedy", "temperature 0.7")]
                drafter, _, mode = name.split(", ")
                margins = ", ".join(f"{margin:.4f}" for margin in sorted(greedy["margins"])) or "–"
                alike = [f"{each['equal']} of {each['of']}" for each in (greedy, sampled)]
                rows.append((engine, drafter, mode, alike[0], margins, alike[1], f"{greedy['proposed']:,}"))
    noises = ", ".join(f"{by_drafter['noise']:.3g} on {engine}" for engine, by_drafter in found["by_engine"].items())
    largest = max(margins_of(found), default=0.0)
    return "\n".join(
        (
            f"Texts of {found['tokens']} tokens of the demo model (the first one on mlx) that equal plain decoding's:",
            "",
            table(
                "engine | drafter, always on | mode | equal, greedy | margins where they part | equal at "
                "temperature 0.7 | proposed, greedy",
                rows,
            ),
            "",
            "Margins are between the two likeliest tokens, in log-probability. Where rows are computed four at a time "
            f"instead of one by one, a margin moves by at most {noises}; the largest at which a text parted is "
            f"{largest:.4f}.",
        )
    )


def margins_of(found: dict[str, Any]) -> list[float]:
    """Every margin at which a greedy text parted from the plain one."""
    each = [one for by_drafter in found["by_engine"].values() for one in by_drafter.values() if isinstance(one, dict)]
    return [margin for one in each for margin in one["margins"]]


def laws(found: dict[str, Any]) -> str:
    rows = [
        (temperature, *(f"{each[law]:.3f}" for law in ("shared_noise", "rejection", "independent")))
        for temperature, each in found["by_temperature"].items()
    ]
    return table("temperature | shared noise | rejection rule | independent draws", rows)


def lookup(found: dict[str, Any]) -> str:
    rows = [
        (f"{int(length):,}", *(f"{each[name]:.1f} µs" for name in ("lookup_us", "append_us", "corpus_lookup_us")))
        for length, each in found["by_length"].items()
    ]
    return table("tokens | a lookup | appending a token | a lookup in a corpus of that size", rows)


def host(found: dict[str, Any]) -> str:
    rows = [
        (name, f"{each['tokens_per_step']:.2f}", f"{each['step_us']:.0f} µs", f"{each['median_us']:.0f} µs")
        for name, each in found["by_drafter"].items()
    ]
    return table("step | tokens that it gives | least | median of five runs", rows)


def sweep(found: dict[str, Any]) -> str:
    rows = [
        (
            cell["length"],
            cell["rate"],
            f"{cell['tokens_per_step']:.2f}",
            f"{cell['cost']:.2f}",
            f"{cell['measured']:.2f}",
            f"{cell['model']:.2f}",
            f"{cell['share']:.2f}",
        )
        for cell in found["cells"]
    ]
    head = "proposals | set rate | tokens a step | verifying, in plain steps | speed-up | model | measured over model"
    return "\n".join(
        (
            f"Measured over the model: median {found['median_of_model']:.2f}, least {found['least_of_model']:.2f} "
            f"({loaded(found)}).",
            "",
            table(head, rows),
        )
    )


def never(found: dict[str, Any]) -> str:
    rows = [
        (
            name,
            f"{each['over_plain']:.3f}",
            f"{min(each['ratios']):.3f} to {max(each['ratios']):.3f}",
            f"{each['drafted_steps']} of {each['steps']}",
        )
        for name, each in found["by_drafter"].items()
    ]
    return "\n".join(
        (
            f"The least is {found['least']:.3f} of plain decoding's speed ({loaded(found)}).",
            "",
            table("model, drafter | speed over plain | answers, from and to | steps that drafted", rows),
        )
    )


def drafters(found: dict[str, Any]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name, each in found["by_drafter"].items():
        drafter, sampling = name.split("; ")
        accepted = f"{each['accepted']} of {each['proposed']}"
        same = f"{each['equal_texts']} of {found['prompts']}"
        rows.append((drafter, sampling, f"{each['speed_up']:.2f}", f"{each['tokens_per_step']:.2f}", accepted, same))
    return rows


def pair(found: dict[str, Any]) -> str:
    return table("drafter | sampling | speed-up | tokens a step | accepted | equal texts", drafters(found))


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    each.__name__: each for each in (equal, laws, lookup, host, sweep, never, pair)
}
WRITERS["edits"] = pair


def page(text: str, figures: dict[str, Any]) -> str:
    """The page with every part that the figures hold written anew; parts without figures stay as they are."""

    def written(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- {name} -->\n{WRITERS[name](figures[name])}\n<!-- end -->" if name in figures else found[0]

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", written, text, flags=re.DOTALL)


def main() -> None:
    figures = json.loads((speculation_picture.DOCS / "data/speculation.json").read_text())
    for path in PAGES:
        path.write_text(page(path.read_text(), figures))
    speculation_picture.main()


if __name__ == "__main__":
    main()
