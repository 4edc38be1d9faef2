"""The check of an artifact's files before they are sealed: weights read back, then logits on real text.

Each check finds errors that the other misses. Reading every matrix back, bit for bit, finds weights in the wrong place.
Comparing next-token distributions with the reference decoder finds a wrong rope, norm or mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

from edgekit.common.progress import Progress
from edgekit.contracts.engine import Engine
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.contracts.target import Target
from edgekit.errors import TargetFailed, TargetMissing, Unsupported

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

CHECKED_TOKENS = 96
_TOKENS_A_CALL = 32  # small enough for several calls, so that the cache is checked too
# The largest error of float weights, as a share of the largest logit.
MAX_FLOAT_ERROR = 0.02
# The largest mean KL divergence, in nats, of quantised weights from the reference on the same integers. Above it, the
# reference is run again with activations in int8, and the artifact's KL may be MAX_KL_OF_ROUNDING times that run's KL.
# That KL differs by a factor of 50 between models, and a rope of the wrong base costs each of them several times more.
MAX_KL = 0.005
MAX_KL_OF_ROUNDING = 2.0
# Smallest cosine between an encoder's hidden states and the reference's on the same weights.
LEAST_FLOAT_COSINE, LEAST_COSINE = 0.9999, 0.98
# A vendor's own format is compared with the float model, so the loss of its rounding is part of the distance.
MAX_NATIVE_KL = 1.5
# The largest mean KL of a narrower KV cache from the widest one. Rounding alone stays below it.
MAX_CACHE_KL = 1.0

_TEXT = """\
The lighthouse keeper wrote down the weather every evening: wind from the west, a falling glass, two ships. His \
daughter kept the other book, the one with the questions.

def average(values: list[float]) -> float:
    \"\"\"Return the arithmetic mean.\"\"\"
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

In 1969 the population of the island was 1,204; by 2001 it had fallen to 377. What happened? Most families moved to \
the mainland, where there was work.
"""


class Agreement(NamedTuple):
    """The distance between an artifact's logits and the reference's."""

    tokens: int
    kl: float  # mean, in nats
    same_top: float  # share of tokens after which both rank the same token first
    error: float  # largest difference, as a share of the largest logit

    def __str__(self) -> str:
        return f"KL {self.kl:.4f}, {self.same_top:.0%} of top tokens equal, on {self.tokens} tokens"


def self_check(target: Target, plan: Plan, weights: NeutralWeights, files: Path, progress: Progress) -> str:
    """Check freshly written `files` and return a one-line summary. Raises `TargetFailed` if they are wrong."""
    progress(0, 3, "self-check: reading the weights back")
    missing = target.missing()
    if missing:
        return f"packed-only: {_read_back(target, plan, weights, files)}; {missing}"
    if plan.model.encoder:
        stored = _read_back(target, plan, weights, files)
        progress(1, 3, "self-check: running the artifact")
        return f"{_check_states(target, plan, weights, files)}; {stored}"
    tokens = checked_tokens(plan, weights.folder)
    with _reference_beside(weights, plan, tokens) as reference:
        stored = _read_back(target, plan, weights, files)
        progress(1, 3, "self-check: running the artifact")
        try:
            engine = target.open(plan, files)
        except (TargetMissing, Unsupported) as refused:
            return f"packed-only: {stored}; {refused}"
        logits, caches = _run(engine, target, plan, tokens)
        progress(2, 3, "self-check: comparing with the reference")
        expected = reference.result()
    if expected is None:
        return f"ran, {stored}; not compared, because the reference needs torch: pip install 'edgekit[quantize]'"
    agreement = compare(logits, expected)
    bound = _judge(agreement, target, plan, lambda: _cost_of_rounding(weights, plan, tokens, expected))
    progress(3, 3, "self-check")
    return f"{agreement}, as expected for {plan.recipe.name} ({bound}); {stored}{caches}"


@contextmanager
def _reference_beside(
    weights: NeutralWeights, plan: Plan, tokens: Sequence[int]
) -> Iterator[Future[NDArray[np.float32] | None]]:
    """Compute the reference while the files are read and run; it ends early if these fail or are interrupted."""
    left = Event()

    def end_early(name: str, inputs: torch.Tensor) -> None:
        if left.is_set():
            raise CancelledError

    with ThreadPoolExecutor(1) as beside:
        try:
            yield beside.submit(reference_logits, weights, plan, tokens, end_early)
        finally:
            left.set()


def _run(engine: Engine, target: Target, plan: Plan, tokens: Sequence[int]) -> tuple[NDArray[np.float32], str]:
    """Return the logits with the widest cache, and what narrower ones lose; close the engine."""
    try:
        widest, *narrower = engine.abilities.kv_bits
        logits = _engine_logits(engine, plan, tokens, widest)
        losses = {bits: _loss(engine, plan, tokens, bits, logits) for bits in narrower}
    finally:
        engine.close()
    if wrong := [bits for bits in losses if not losses[bits] <= MAX_CACHE_KL]:
        reason = f"a cache of {wrong[0]} bits costs a KL of {losses[wrong[0]]:.3f} (at most {MAX_CACHE_KL})"
        raise _failed(target, f"the self-check failed: {reason}")
    each = ", ".join(f"{bits} bits KL {loss:.4f}" for bits, loss in losses.items())
    return logits, f"; caches, against {widest} bits: {each}" if each else ""


def checked_tokens(plan: Plan, folder: Path) -> list[int]:
    """Return the tokens of a fixed text; without a tokenizer, tokens spread over the vocabulary."""
    from edgekit.quant.calibration import Document, encode

    count = min(CHECKED_TOKENS, plan.storage.capacity_tokens)
    if (folder / "tokenizer.json").is_file():
        encoded: list[int] = encode([Document(_TEXT, is_chat=False)], folder)[:count].tolist()
        if encoded and max(encoded) < plan.model.vocab_size:
            return encoded
    from edgekit.contracts.feeding import probe_tokens

    return probe_tokens(count, plan.model.vocab_size)


def compare(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> Agreement:
    """Compare logits [tokens, vocabulary] row by row; a shift that softmax ignores counts only in `error`."""
    import numpy as np

    from edgekit.common.divergence import kl_divergence, log_softmax

    divergences, same = [], 0
    for ours, theirs in zip(logits, expected, strict=True):
        p, q = log_softmax(theirs), log_softmax(ours)
        divergences.append(kl_divergence(p, q))
        same += int(p.argmax() == q.argmax())
    error = float(abs(logits - expected).max() / max(abs(expected).max(), 1e-9))
    return Agreement(len(logits), float(np.mean(divergences)), same / len(logits), error)


def _judge(agreement: Agreement, target: Target, plan: Plan, cost_of_rounding: Callable[[], float]) -> str:
    """Describe the bound that `agreement` meets. Raises `TargetFailed` if it meets none; NaN meets none."""
    if plan.recipe.is_exact():
        if agreement.error <= MAX_FLOAT_ERROR:
            return f"logits within {MAX_FLOAT_ERROR:.0%}"
        reason = (
            f"logits differ from the reference by {agreement.error:.1%} of the largest"
            f" (at most {MAX_FLOAT_ERROR:.0%} for float weights)"
        )
    elif plan.recipe.is_native():
        if agreement.kl <= MAX_NATIVE_KL:
            return f"KL to the float model at most {MAX_NATIVE_KL}"
        reason = f"{agreement}, against the float model (KL at most {MAX_NATIVE_KL})"
    else:
        if agreement.kl <= MAX_KL:
            return f"KL at most {MAX_KL}"
        allowed = max(MAX_KL, MAX_KL_OF_ROUNDING * cost_of_rounding())
        if agreement.kl <= allowed:
            return f"KL at most {allowed:.3f}"
        reason = f"{agreement}, against the reference (KL at most {allowed:.3f})"
    raise _failed(target, f"the self-check failed: {reason}")


def _check_states(target: Target, plan: Plan, weights: NeutralWeights, files: Path) -> str:
    """Compare an encoder's hidden states of the fixed text with the reference on the same integers."""
    import numpy as np

    from edgekit.contracts.engine import Chunk

    tokens = checked_tokens(plan, weights.folder)
    engine = target.open(plan, files)
    try:
        found = engine.forward([Chunk(engine.start(plan.storage), tokens, len(tokens), hidden=True)])[0]
    finally:
        engine.close()
    try:
        import torch
    except ImportError:
        return "ran, not compared, because the reference needs torch: pip install 'edgekit[quantize]'"
    from edgekit.quant.reference_encoder import hidden_states

    expected = hidden_states(plan.model, lambda name: torch.from_numpy(weights.tensor(name)), tokens).numpy()
    weights.release()
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosine = float(((found * expected).sum(axis=1) / lengths).min())
    least = LEAST_FLOAT_COSINE if plan.recipe.is_exact() else LEAST_COSINE
    if not cosine >= least:
        raise _failed(target, f"the self-check failed: a hidden state has cosine {cosine:.5f} (at least {least})")
    return f"cosine {cosine:.5f} or more of {len(tokens)} hidden states with the reference (at least {least})"


def _failed(target: Target, reason: str) -> TargetFailed:
    return TargetFailed(f"{target.name}: {reason}; nothing was written. This is a bug: please report the plan")


def _read_back(target: Target, plan: Plan, weights: NeutralWeights, files: Path) -> str:
    """Read every matrix back from the files and compare it with the packed one: integer × scale, bit for bit."""
    if plan.recipe.is_native():
        return "a vendor's own format is not read back"
    quantised = {module for module in weights.modules() if not weights.format_of(module).is_float}
    count = 0
    try:
        for name, values in target.weights(plan, files):
            module = name.removesuffix(".weight")
            if module == name or module not in quantised:
                continue
            count += 1
            if not (values == weights.tensor(name)).all():
                raise _failed(target, f"{name} was packed wrongly")
    except (TargetMissing, Unsupported) as refused:
        return f"not read back: {refused}"
    finally:
        weights.release()
    return f"{count} quantised matrices read back bit for bit"


def _loss(engine: Engine, plan: Plan, tokens: Sequence[int], bits: int, widest: NDArray[np.float32]) -> float:
    """Return the mean KL of a `bits`-wide cache from the widest one, without the first call, which reads no cache."""
    from edgekit.common.divergence import kl_divergence, log_softmax

    rows = slice(min(_TOKENS_A_CALL, len(tokens) // 2), None)
    narrow = _engine_logits(engine, plan, tokens, bits)
    return float(kl_divergence(log_softmax(widest[rows]), log_softmax(narrow[rows])).mean())


def _engine_logits(engine: Engine, plan: Plan, tokens: Sequence[int], bits: int) -> NDArray[np.float32]:
    """Return the logits of `tokens` with a KV cache of `bits` bits."""
    from edgekit.contracts.feeding import feed

    state = engine.start(plan.storage.model_copy(update={"kv_bits": bits}))
    try:
        return feed(engine, state, tokens, len(tokens), chunk_tokens=_TOKENS_A_CALL)
    finally:
        state.close()


def reference_logits(
    weights: NeutralWeights,
    plan: Plan,
    tokens: Sequence[int],
    observe: Callable[[str, torch.Tensor], None] | None = None,
) -> NDArray[np.float32] | None:
    try:
        import torch
    except ImportError:
        return None
    from edgekit.quant.reference_decoder import ignore, logits

    computed = logits(
        plan.model,
        lambda name: torch.from_numpy(weights.tensor(name)),
        list(tokens),
        context_tokens=plan.context,
        get_rows=lambda name, rows: torch.from_numpy(weights.dequantised(name.removesuffix(".weight"), rows)),
        observe=observe or ignore,
    )
    weights.release()
    values: NDArray[np.float32] = computed.numpy()
    return values


def _cost_of_rounding(
    weights: NeutralWeights, plan: Plan, tokens: Sequence[int], expected: NDArray[np.float32]
) -> float:
    """Return the mean KL that rounding the input of every linear to 8 bits, token by token, costs the reference."""

    def to_int8(name: str, inputs: torch.Tensor) -> None:
        low, high = inputs.amin(-1, keepdim=True).clamp(max=0), inputs.amax(-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 255).clamp(min=1e-12)
        inputs.div_(scale).round_().mul_(scale)

    rounded = reference_logits(weights, plan, tokens, to_int8)
    assert rounded is not None
    return compare(rounded, expected).kl
