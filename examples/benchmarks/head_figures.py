"""Acceptance by place of a sealed head and of other drafters, and whether texts equal plain decoding's, as JSON.

    python -m examples.benchmarks.head_figures ARTIFACT --draft DRAFT_ARTIFACT [--prompts 30] [--window 64]

ARTIFACT is exported with `--drafter`, with `--exit`, or with neither. Every drafter drafts in every step, in exact
mode. Export the draft model with `--sequences 3`, or it drafts for one of three requests at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgekit.artifact.artifact import Artifact, open_artifact
from edgekit.artifact.sealed_head import open_head
from edgekit.contracts.drafter import Drafter
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.methods.drafters.early_exit import EarlyExit
from edgekit.methods.drafters.head import uncalibrated
from edgekit.runtime.generation.chat_template import read_template
from edgekit.runtime.generation.tokenizer import read_codec, read_eos
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.speculation.costs import Costs
from edgekit.runtime.speculation.drafters import DrafterFactory, DraftRequest
from edgekit.runtime.speculation.ngram import Ngrams
from edgekit.runtime.speculation.open import open_draft

ROOT = Path(__file__).parents[2]
TOKENS, PLACES = 24, 4
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer"},
        "is_open": {"type": "boolean"},
    },
    "required": ["name", "size", "is_open"],
}
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "temperature 0.7": {"temperature": 0.7, "seed": 1}}


class Counting:
    """A method that drafts in every step, and the number of right tokens by place."""

    tokens, controller = PLACES, None

    def __init__(self, method: Any) -> None:
        self.method, self.right, self.tried = method, [0] * PLACES, [0] * PLACES

    def start(self, request: DraftRequest) -> Drafter:
        return CountingDrafter(self, self.method.start(request))

    def close(self) -> None:
        self.method.close()


class CountingDrafter:
    """Counts a place where all places before it were right, as the controller does."""

    def __init__(self, counting: Counting, proposer: Any) -> None:
        self._counting, self._proposer = counting, proposer
        self._proposal: Sequence[int] = ()

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        self._proposal = self._proposer.propose(history, limit)
        return self._proposal

    def observe(self, accepted: Sequence[int]) -> None:
        for place, (guess, token) in enumerate(zip(self._proposal, accepted, strict=False)):
            self._counting.tried[place] += 1
            self._counting.right[place] += guess == token
            if guess != token:
                break
        self._proposal = ()
        self._proposer.observe(accepted)

    def close(self) -> None:
        self._proposer.close()


def prompts(count: int, artifact: Artifact) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Prompts and options by kind: code that the demo never saw, prose, chat and JSON."""
    held_out = (ROOT / "edgekit/_demo/held_out.jsonl").read_text().splitlines()
    code = [str(json.loads(line)["text"]) for line in held_out]
    pages = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    prose = [line for page in pages for line in page.splitlines() if len(line) > 100 and line[0].isalpha()]
    names = [line.split("(")[0][4:] for text in code for line in text.splitlines() if line.startswith("def ")]
    asked = [f"What does the function {name} do?" for name in dict.fromkeys(names)]
    template = read_template(artifact.folder)
    chats = [template.render([{"role": "user", "content": each}]) for each in asked[:count]]
    template.close()
    codes = [code[i % len(code)] for i in range(count)]
    return {
        "code": [(text[i * 131 % max(1, len(text) - 300) :][:300], {}) for i, text in enumerate(codes)],
        "prose": [(prose[i * 7 % len(prose)][:90], {}) for i in range(count)],
        "chat": [(chats[i % len(chats)], {}) for i in range(count)],
        "JSON": [(f"# {asked[i % len(asked)]}\ndata = ", {"schema": SCHEMA}) for i in range(count)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--window", type=int)
    given = parser.parse_args()
    artifact = open_artifact(given.artifact)
    plan = artifact.plan.model_copy(update={"sequences": 3})
    engine = artifact.working_target().open(plan, artifact.folder, exact=True)
    policy, kv_config = KVEvictionPolicy.of(given.window), plan.storage
    if given.window:
        kv_config = kv_config.model_copy(update={"capacity_tokens": given.window})
    asked, costs = prompts(given.prompts, artifact), Costs({1: 1.0})

    def answers(drafting: DrafterFactory | None, kind: str, sampling: str) -> list[tuple[int, ...]]:
        """Answers to all prompts of a kind, three at a time."""
        options = {"max_tokens": TOKENS, "drafting": drafting is not None, **SAMPLINGS[sampling]}
        runtime = Runtime(
            engine, read_codec(artifact.folder), kv_config=kv_config, policy=policy, sequences=3,
            chunk_tokens=plan.chunk_tokens, eos=read_eos(artifact.folder, plan.model.eos_ids), drafting=drafting,
        )  # fmt: skip
        streams = [runtime.submit(prompt, **options, **beside) for prompt, beside in asked[kind]]
        return [stream.answer().tokens for stream in streams]  # the runtime stays open: it would close the engine

    methods: dict[str, Any] = {"ngram": Ngrams(tokens=PLACES)}
    if plan.drafter is not None:
        methods["head"] = uncalibrated(open_head(plan, artifact.folder), kv_config.capacity_tokens, PLACES)
    if plan.exits:
        methods["early exit"] = EarlyExit(engine, plan.exits[0], 1.0)
    if given.draft:
        methods["draft model"] = open_draft(given.draft, artifact, engine, costs, policy=policy, kv_config=kv_config)
    found: dict[str, Any] = {}
    plain = {kind: {sampling: answers(None, kind, sampling) for sampling in SAMPLINGS} for kind in asked}
    for name, method in methods.items():
        for kind in asked:
            for sampling in SAMPLINGS:
                counting = Counting(method)
                drafted = answers(counting, kind, sampling)
                same = sum(one == other for one, other in zip(drafted, plain[kind][sampling], strict=True))
                rates = [r / t if t else 0.0 for r, t in zip(counting.right, counting.tried, strict=True)]
                kept = [1.0]
                for rate in rates:
                    kept.append(kept[-1] * rate)
                found[f"{name}, {kind}, {sampling}"] = {
                    "equal": same, "of": len(drafted), "by_place": [round(rate, 3) for rate in rates],
                    "tried": counting.tried, "tokens_a_step": round(sum(kept), 3),
                }  # fmt: skip
                print(f"{name}, {kind}, {sampling}: {json.dumps(found[f'{name}, {kind}, {sampling}'])}", flush=True)
    equal, total = (sum(one[key] for one in found.values()) for key in ("equal", "of"))
    print(json.dumps({"equal": equal, "of": total}))


if __name__ == "__main__":
    main()
