"""Draws docs/speculation.svg, where speculation pays, from what speculation_figures.py stored in docs/data.

Across: the chance that a drafted token is right. Upwards: what one more verified token costs, in steps. Each cell holds
the best speed-up over draft lengths of 1 to 15, at the draft's measured cost; dots are what was measured.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
WIDTH, HEIGHT, LEFT, TOP = 620, 400, 70, 40
COLUMNS, ROWS = 50, 40
FEWEST = 20  # proposals
DEAREST = 1.0  # a verified token that costs as much as a step
BANDS = (
    (1.0, "#f1f1ef", "slower: stays off"),
    (1.25, "#dbe9f6", "1 to 1.25×"),
    (1.5, "#b5d3ec", "to 1.5×"),
    (2.0, "#83b5de", "to 2×"),
    (3.0, "#4a90c9", "to 3×"),
    (99.0, "#1f5f9e", "above 3×"),
)


def best(rate: float, slope: float, draft: float) -> float:
    """The best speed-up over draft lengths, where k verified tokens cost 1 + slope (k - 1) steps."""
    found = []
    for length in range(1, 16):
        expected = sum(rate**place for place in range(length + 1))
        found.append(expected / (1 + slope * length + draft * length))
    return max(found)


def colour(speed: float) -> str:
    return next(shade for bound, shade, _ in BANDS if speed <= bound)


def picture(figures: dict[str, Any]) -> str:
    draft = figures["pair"]["draft_cost"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEFT + 170} {HEIGHT + TOP + 60}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#222">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="15">Where speculation pays, when drafting costs {draft:.2f} steps</text>',
    ]
    wide, high = WIDTH / COLUMNS, HEIGHT / ROWS
    for row in range(ROWS):
        slope, y = (row + 0.5) / ROWS * DEAREST, TOP + HEIGHT - (row + 1) * high
        shades = [colour(best((column + 0.5) / COLUMNS, slope, draft)) for column in range(COLUMNS)]
        column = 0
        for shade, run in groupby(shades):
            count = len(list(run))
            size = f'width="{count * wide + 0.3:.1f}" height="{high + 0.3:.1f}"'
            parts.append(f'<rect x="{LEFT + column * wide:.1f}" y="{y:.1f}" {size} fill="{shade}"/>')
            column += count
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        x, y = LEFT + share * WIDTH, TOP + HEIGHT - share * HEIGHT
        parts.append(f'<text x="{x}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{share:g}</text>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{share * DEAREST:g}</text>')
    parts.append(
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 44}" text-anchor="middle">acceptance of a token</text>'
    )
    middle = TOP + HEIGHT / 2
    turned = f'text-anchor="middle" transform="rotate(-90 20 {middle})"'
    parts.append(f'<text x="20" y="{middle}" {turned}>cost of one more verified token, in steps</text>')
    for place, (name, rate, slope) in enumerate(figures["pair"]["points"]):
        x, y = LEFT + rate * WIDTH, TOP + HEIGHT - min(1.0, slope / DEAREST) * HEIGHT
        anchor, shift = ("end", -8) if rate > 0.7 else ("start", 8)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#d1495b" stroke="#fff"/>')
        parts.append(
            f'<text x="{x + shift:.1f}" y="{y + (17, -7, 33, -21)[place % 4]:.1f}" text-anchor="{anchor}">{name}</text>'
        )
    for place, (_, shade, words) in enumerate(BANDS):
        y = TOP + 10 + place * 24
        parts.append(f'<rect x="{LEFT + WIDTH + 20}" y="{y}" width="16" height="16" fill="{shade}" stroke="#ccc"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 44}" y="{y + 13}">{words}</text>')
    return "\n".join([*parts, "</svg>", ""])


def with_points(figures: dict[str, Any]) -> dict[str, Any]:
    """Coordinates of the dots: the first place's acceptance, and the slope of the cost of verifying up to eight.

    Only greedy runs in which enough was proposed to say something.
    """
    points = []
    for part, words in (("pair", ""), ("edits", " on edits")):
        slope = (figures[part]["cost"]["8"] - 1) / 7
        for name in ("draft model, always 1", "ngram", "early exit"):
            found = figures[part]["by_drafter"][f"{name}; greedy"]
            if found["proposed"] >= FEWEST:
                report = found["report"]
                rate = report["proposals"][0]["acceptance"][0] if report else found["accepted"] / found["proposed"]
                points.append((name.partition(",")[0] + words, rate, slope))
    model = figures["pair"]["by_drafter"]["draft model; greedy"]["report"]["proposals"][0]
    return {**figures, "pair": {**figures["pair"], "points": points, "draft_cost": model["draft_cost"]}}


def main() -> None:
    figures = json.loads((DOCS / "data/speculation.json").read_text())
    (DOCS / "speculation.svg").write_text(picture(with_points(figures)))


if __name__ == "__main__":
    main()
