"""Draws docs/window.svg, the tokens that a window with sinks keeps, and docs/ladder.svg, the bytes that a rung saves.

Both come from the code that runs: the policy's own evictions, and the admission of the bundled model.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgekit.common.units import show_bytes
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.plan import Plan
from edgekit.errors import DoesNotFit
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target
from edgekit.runtime.memory.admission import MemoryLimit, RunConfig, admit, estimate_of

DOCS = Path(__file__).parents[2] / "docs"
POLICY = KVEvictionPolicy(window=16, sinks=2, block=4)
CELL, LEFT, TOP = 16, 70, 50
KEPT, SINK, GONE = "#4a90c9", "#d98a2b", "#f1f1ef"
CLASSES = (
    ("runtime", "runtime_bytes", "#8a8f98"),
    ("activations", "activation_bytes", "#b5d3ec"),
    ("cache", "kv_bytes", "#4a90c9"),
    ("prefixes", "prefix_bytes", "#d98a2b"),
)


def kept_after(fed: int, policy: KVEvictionPolicy) -> list[int]:
    """Return the tokens that are cached after `fed` tokens."""
    held: list[int] = []
    for token in range(fed):
        eviction = policy.eviction(len(held))
        if eviction is not None:
            del held[eviction.start : eviction.stop]
        held.append(token)
    return held


def window_picture() -> str:
    steps, last = range(10, 41, 2), 40
    high = TOP + len(steps) * CELL + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + last * CELL + 30} {high}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="15">A window of {POLICY.window} with {POLICY.sinks} sinks, which drops '
        f"{POLICY.block} tokens at a time</text>",
        f'<text x="{LEFT}" y="40">tokens of the text, from the first on</text>',
    ]
    for row, fed in enumerate(steps):
        held, y = set(kept_after(fed, POLICY)), TOP + row * CELL
        parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{fed} fed</text>')
        for token in range(fed):
            shade = GONE if token not in held else SINK if token < POLICY.sinks else KEPT
            parts.append(
                f'<rect x="{LEFT + token * CELL}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{shade}"/>'
            )
    y = high - 22
    for place, (name, shade) in enumerate((("sinks, never dropped", SINK), ("kept", KEPT), ("dropped", GONE))):
        x = LEFT + place * 170
        parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{shade}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def rungs() -> list[tuple[str, dict[str, int]]]:
    """Each rung that the bundled model goes down to as less is allowed, with its bytes by class."""
    plan = _plan()
    price = partial(estimate_of, plan, memory=load_target(plan.target).memory)
    state = price(_opening(plan)).kv_bytes
    wanted = _opening(plan).model_copy(update={"prefix_bytes": state})
    asked = price(wanted)
    found = [("as asked", asked.model_dump())]
    for short in (state // 2, state, state + state // 2, state + state * 3 // 4, state + state * 15 // 16):
        allowed = MemoryLimit(asked.private_bytes - short, "a picture")
        try:
            got = admit(price, wanted, allowed, kv_bits=(32,), can_evict=True)
        except DoesNotFit:
            break
        found.append((got.ladder[-1].change, got.estimate.model_dump()))
    return found


def _plan() -> Plan:
    wish = PlanRequest(context=2048, sequences=4, target="onnx")
    return make_plans("demo", ["raspberry-pi-5-8gb"], wish)[0]


def _opening(plan: Plan) -> RunConfig:
    return RunConfig(kv_config=plan.storage, policy=plan.cache, sequences=plan.sequences)


def ladder_picture() -> str:
    steps = rungs()
    most = sum(steps[0][1][field] for _, field, _ in CLASSES)
    wide, left = 420, 190
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + wide + 110} {TOP + len(steps) * 30 + 40}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<text x="12" y="24" font-size="15">Private memory of the bundled model, as less is allowed</text>',
    ]
    for row, (change, sizes) in enumerate(steps):
        x, y = float(left), TOP + row * 30
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{change}</text>')
        for _, field, shade in CLASSES:
            size = sizes[field] / most * wide
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{size:.1f}" height="22" fill="{shade}"/>')
            x += size
        total = sum(sizes[field] for _, field, _ in CLASSES)
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{show_bytes(total)}</text>')
    y = TOP + len(steps) * 30 + 8
    for place, (name, _, shade) in enumerate(CLASSES):
        x = left + place * 105
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{shade}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    (DOCS / "window.svg").write_text(window_picture())
    (DOCS / "ladder.svg").write_text(ladder_picture())


if __name__ == "__main__":
    main()
