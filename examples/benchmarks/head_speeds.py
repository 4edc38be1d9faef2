"""Tokens a second with drafters that the controller turns on and off, against plain decoding, as JSON.

    python -m examples.benchmarks.head_speeds ARTIFACT [ARTIFACT ...] [--prompts 4] [--tokens 96] [--turns 3]

Each ARTIFACT has a sealed head. Both answers are of one engine and take turns step by step, so what else the machine
does meets both. A ratio is one answer's; the median of ratios, the least one and that of all time together are given.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import edgekit
from edgekit.artifact.artifact import open_artifact
from examples.benchmarks.head_figures import prompts
from examples.benchmarks.speculation_figures import SAMPLINGS, Turn, beside, by_steps

DRAFTS = ("head", "ngram", "auto")


def speeds(folder: Path, draft: str, count: int, tokens: int, rounds: int) -> dict[str, Any]:
    """The ratios of one drafter by kind of text, and what its controller says in the end."""
    found: dict[str, Any] = {}
    asked = prompts(count, open_artifact(folder))
    for how, options in SAMPLINGS.items():
        for kind, given in asked.items():
            # A schema would end an answer early, so JSON is continued freely here.
            with edgekit.open(folder, draft=draft, sequences=2, prefixes=0) as drafted:
                plain, turns = beside(drafted), list[Turn]()
                for number in range(rounds * count):
                    prompt = plain.encode(given[number % count][0])
                    turns.append(by_steps(plain, drafted, prompt, tokens, number % 2, options))
                report = drafted.speculation()
                assert report is not None
            ratios = [turn.plain_s / turn.drafted_s for turn in turns]
            plain_s, drafted_s = sum(turn.plain_s for turn in turns), sum(turn.drafted_s for turn in turns)
            found[f"{kind}, {how}"] = {
                "speed_up": round(plain_s / drafted_s, 3), "median": round(median(ratios), 3),
                "least": round(min(ratios), 3), "answers": len(turns),
                "plain_tokens_a_s": round(len(turns) * tokens / plain_s, 1),
                "tokens_a_s": round(len(turns) * tokens / drafted_s, 1),
                "tokens_a_step": round(median(turn.tokens_per_step for turn in turns), 3),
                "equal_texts": sum(turn.same_text for turn in turns), "load": round(os.getloadavg()[0], 1),
                "by_drafter": {each.name: [each.accepted, each.proposed] for each in report.proposals},
                "draft_cost": {each.name: round(each.draft_cost, 3) for each in report.proposals},
                "verify_cost": {rows: round(cost, 3) for rows, cost in report.verify_cost.items()},
            }  # fmt: skip
            print(f"{folder.name}, {draft}, {kind}, {how}: {json.dumps(found[f'{kind}, {how}'])}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=DRAFTS)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3, help="rounds over all prompts (3)")
    given = parser.parse_args()
    found = {
        folder.name: {draft: speeds(folder, draft, given.prompts, given.tokens, given.turns) for draft in given.drafts}
        for folder in given.artifacts
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
