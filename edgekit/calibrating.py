"""Reads the calibration text that the options of an export or a quantisation select, and says how long it takes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from edgekit.contracts.neutral import is_neutral
from edgekit.contracts.recipe import Recipe
from edgekit.errors import InvalidInput
from edgekit.model.source import ModelSource
from edgekit.quant.calibration import Calibration, plain_chat, read_calibration
from edgekit.quant.compute import device_for
from edgekit.quant.effort import DEFAULT_TEXT, calibration_text, estimated_seconds, in_words, why_rounded
from edgekit.quant.options import QuantOptions
from edgekit.quant.pipeline import are_kept, need_torch

_LESS = "gptq on calibration text loses 0.25 to 0.7 of that where it was measured"


def calibration_for(
    source: ModelSource, recipes: Iterable[Recipe], options: QuantOptions | None = None
) -> Calibration | None:
    """Read the calibration text that the options select; None if the integers are rounded to nearest.

    Chats are rendered by the model's own template. The reporter gets warnings about an unsuitable text, and the
    expected duration unless the weights are in the store already.
    """
    options = options or QuantOptions()
    calibrate, method, effort, compute = options.calibrate, options.method, options.effort, options.compute
    if compute is not None:
        need_torch()
        device_for(compute)  # refuses it before any work
    if isinstance(calibrate, Calibration):
        return calibrate
    recipes = list(recipes)
    if is_neutral(source.folder) or all(each.keeps or each.is_exact() or each.is_native() for each in recipes):
        given = {"--calibrate": calibrate, "--effort": None if effort == "quick" else effort, "--compute": compute}
        if named := [option for option, value in given.items() if value is not None]:
            raise InvalidInput(
                f"{source.given} as {recipes[0].name}: no integers are left to choose; drop {' and '.join(named)}"
            )
        return None
    text = calibration_text(calibrate, method, effort, source, recipes)
    if text is None:
        if method is None and effort is None and not source.spec.encoder:
            options.report.note(f"weights are rounded to the nearest (rtn); {_what_calibration_takes(source, recipes)}")
        return None
    calibration = read_text(
        source, None if str(text) == DEFAULT_TEXT else Path(text), options.samples, options.sample_length
    )
    for warning in calibration.warnings:
        options.report.warn(warning)
    store = options.weights
    kept = (are_kept(source, recipe, method=method, calibration=calibration, store=store) for recipe in recipes)
    if not all(kept):
        need_torch()
        device = device_for(compute)
        seconds = in_words(estimated_seconds(source.spec, calibration.fact.tokens))
        took = f"about {seconds} (effort quick takes seconds)"
        if device.type != "cpu":
            took = f"computed on {device.type}, where edgekit was never timed"
        options.report.note(f"choosing integers on {calibration.fact.description}: {took}")
    return calibration


def _what_calibration_takes(source: ModelSource, recipes: Iterable[Recipe]) -> str:
    """Say what the calibration that does not take place by default would take, or why there is none."""
    if why := why_rounded(source, None):
        return f"calibrating 4 bits {why}"
    if not any(recipe.has_few_bits for recipe in recipes):
        return "gptq on calibration text is closer: effort normal"
    return f"{_LESS}, and takes about {in_words(estimated_seconds(source.spec))} here: effort normal"


def read_text(
    source: ModelSource, text: Path | None, samples: int, sample_length: int, *, or_plain: bool = False
) -> Calibration:
    """Tokenise the file `text`, or the bundled text; chats are rendered by the model's own template.

    If the model has no template, chats are refused, or written as plain text with `or_plain`.
    """
    from edgekit.runtime.generation.chat_template import read_template

    template = read_template(source.folder)
    plain = plain_chat if or_plain else None
    try:
        return read_calibration(
            text,
            source.folder,
            vocabulary=source.spec.vocab_size,
            sequences=samples,
            length=sample_length,
            render=partial(template.render, add_generation_prompt=False) if template.exists else plain,
        )
    finally:
        template.close()
