"""Turns measurements into a file to give away, without prompts, paths, or names of people and machines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from pydantic import ValidationError

from edgekit import Plan
from edgekit.apps.bench.measurement import CaseResult, Measurement
from edgekit.common.files import write_output
from edgekit.common.parsing import sentence_of
from edgekit.contracts.device import THIS, THIS_CPU
from edgekit.contracts.recipe import GGUF_RECIPES, NATIVE_RECIPES, RECIPES
from edgekit.contracts.shared_measurement import SharedCase, SharedFile, SharedMeasurement
from edgekit.errors import InvalidInput

_RUNTIME = "runtime and private weights"  # the name of the class in memory reports


def share(measured: Iterable[tuple[Measurement, Plan, str]], path: Path) -> int:
    """Write the undisturbed measurements, each with its plan and its device, to `path`; return their number."""
    found = []
    for one, plan, device in measured:
        is_plain = one.subject.draft is None and one.subject.sequences == 1
        if one.status == "valid" and is_plain and any(map(_has_figures, one.cases)):
            try:
                found.append(_shared(one, plan, device))
            except ValidationError as error:  # a device may answer anything
                raise InvalidInput(f"{device}: cannot be shared: {sentence_of(error)}; measure again") from error
    if not found:
        raise InvalidInput(f"{path}: no undisturbed measurement of single requests without drafts; measure again")
    write_output(path, (SharedFile(measurements=tuple(found)).model_dump_json(indent=1) + "\n").encode())
    return len(found)


def _shared(one: Measurement, plan: Plan, device: str) -> SharedMeasurement:
    conditions, memory = one.conditions, one.memory
    others = [trial.others_share for case in one.cases for trial in case.trials if trial.others_share is not None]
    taken = next((each.measured_bytes for each in memory.classes if each.name == _RUNTIME), None)
    # The graph and the tokenizer are of the model too.
    model_bytes = plan.estimate.private_weights_bytes + plan.estimate.runtime_bytes - plan.memory.runtime_bytes
    name = plan.recipe.plain_name
    return SharedMeasurement(
        device=None if device in (THIS, THIS_CPU) else device,
        processor=_label(conditions.machine),
        os=_label(" ".join(re.findall(r"^\w+|\d+(?:\.\d+)*", conditions.os)[:2])),  # kernels are named after people
        day=conditions.measured_at[:10],
        engine=f"{plan.target}.{plan.backend}",
        versions={name: _label(version) for name, version in conditions.versions.items()},
        family=plan.model.family,
        parameters=plan.model.parameters,
        layers=len(plan.model.layers),
        hidden_size=plan.model.hidden_size,
        recipe=plan.recipe.name if name in {**RECIPES, **NATIVE_RECIPES, **GGUF_RECIPES} else "own",
        threads=one.subject.threads,
        context=one.subject.context,
        kv_bits=one.subject.kv_bits,
        cases=tuple(map(_case, filter(_has_figures, one.cases))),
        private_bytes=memory.anonymous_bytes,
        peak_bytes=memory.peak_bytes,
        runtime_bytes=taken - model_bytes if taken is not None and taken > model_bytes else None,
        power=_label(conditions.power_source) if conditions.power_source else None,
        temperature_c=conditions.temperature_c,
        others_share=min(1.0, round(fmean(others), 3)) if others else None,
    )


def _has_figures(case: CaseResult) -> bool:
    return "decode_tokens_per_s" in case.summary and bool(case.bytes_per_token)


def _case(case: CaseResult) -> SharedCase:
    decode, prefill = case.summary["decode_tokens_per_s"], case.summary.get("prefill_tokens_per_s")
    return SharedCase(
        prompt_tokens=max(1, sum(case.prompt_tokens)),
        depth_tokens=case.depth_tokens,
        step_bytes=case.bytes_per_token or 0,
        decode_tokens_per_s=(decode.low, decode.median, decode.high),
        prefill_tokens_per_s=(prefill.low, prefill.median, prefill.high) if prefill else None,
    )


def _label(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9 ()@.,+-]+", " ", text).strip(" ().@,+-")[:100] or "not known"
