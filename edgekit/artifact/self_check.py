"""The check of an artifact's files before they are sealed: weights read back, then logits on real text.

Reading every matrix back finds weights in the wrong place. Comparing next-token distributions with the reference
decoder, which rounds what the engine rounds, finds a wrong rope, norm, mask or cache; the loss by rounding is a figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, NamedTuple

from edgekit.artifact.checked_reference import Again, check_varied, reference_logits
from edgekit.artifact.read_back import StoredWeights, failed, read_back
from edgekit.common.cores import usable_cores
from edgekit.common.progress import Progress
from edgekit.contracts.engine import Engine
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.contracts.target import Target
from edgekit.errors import TargetMissing, Unsupported

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

CHECKED_TOKENS = 96
_ENDS_WITHIN_S = 20.0  # of the reference that is not needed any more: some layers
TOKENS_A_CALL = 32  # small enough for several calls, so that the cache is checked too
MAX_FLOAT_ERROR = 0.02  # of float weights, as a share of the largest logit
# The largest mean KL divergence, in nats, of quantised weights from the reference on the same integers. Above it, the
# reference is run again with activations in int8, and the artifact's KL may be MAX_KL_OF_ROUNDING times that run's KL.
# That KL differs by a factor of 50 between models, and a rope of the wrong base costs each of them several times more.
MAX_KL = 0.005
MAX_KL_OF_ROUNDING = 2.0
# Smallest cosine between an encoder's hidden states and the reference's on the same weights.
LEAST_FLOAT_COSINE, LEAST_COSINE = 0.9999, 0.98
# A narrower KV cache that costs less than this, in mean KL from the widest one, hides no fault. Above it, the reference
# rounds keys and values as the engine does, and the KL from it may be this, 1.5 times the cost of that rounding and
# twice the KL of the widest cache. Sound engines stay below a third of that, up to key biases of 10,000.
MAX_CACHE_ERROR = 0.05
CACHE_COST_SHARE = 1.5
# The loss of a vendor's own format that cannot be read back, as a multiple of what the plan predicts for it.
MAX_PREDICTED_LOSS = 10.0
_NOT_COMPARED = "ran, results not compared: the reference needs torch (pip install 'edgekit[quantize]')"
_MOST_KL = 99.0  # stated for a cache whose keys overflow

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


class CheckResult(NamedTuple):
    """The result of a self-check: one line for people, and the mean KL that each narrower cache costs, by bits."""

    summary: str
    kv_costs: dict[int, float] = {}  # noqa: RUF012


def self_check(target: Target, plan: Plan, weights: NeutralWeights, files: Path, progress: Progress) -> CheckResult:
    """Check freshly written `files`.

    Raises `TargetFailed` if they are wrong, and `InvalidInput` if the model itself predicts nothing.
    """
    progress(0, 3, "self-check: reading the weights back")
    plan = plan.model_copy(update={"threads": min(plan.threads, usable_cores().number)})  # not its device's
    missing = target.missing()
    if missing:
        return CheckResult(f"packed-only: {read_back(target, plan, weights, files)}; not run: {missing}")
    if plan.model.encoder:
        stored = read_back(target, plan, weights, files)
        progress(1, 3, "self-check: running the artifact")
        return CheckResult(f"{_check_states(target, plan, weights, files)}; {stored}")
    tokens = checked_tokens(plan, weights.folder)
    with _concurrent_reference(weights, plan, tokens) as reference:
        stored = read_back(target, plan, weights, files)
        progress(1, 3, "self-check: running the artifact")
        try:
            ran = _run(target, plan, files, tokens)
        except (TargetMissing, Unsupported) as refused:
            return CheckResult(f"packed-only: {stored}; not run: {refused}")
        progress(2, 3, "self-check: comparing with the reference")
        expected = reference.result()
    if expected is None:
        return CheckResult(f"{_NOT_COMPARED}; {stored}{ran.costs_text}", ran.kv_costs)
    check_varied(plan, expected)
    again = Again(target, plan, weights, weights, tokens)
    loss = ""
    if plan.recipe.is_native():
        loss = f"{compare(ran.logits, expected)}, against the float model; "
        if stored.is_read:
            again = again._replace(source=StoredWeights(target, plan, weights, files))
            expected = again.logits()
    agreement, bound = _judge(ran, expected, again)
    _check_caches(ran, agreement, expected, again)
    progress(3, 3, "self-check")
    found = f"{loss}{agreement}, as expected for {plan.recipe.name} ({bound}); {stored}{ran.costs_text}"
    return CheckResult(found, ran.kv_costs)


@contextmanager
def _concurrent_reference(
    weights: NeutralWeights, plan: Plan, tokens: Sequence[int]
) -> Iterator[Future[NDArray[np.float32] | None]]:
    """Compute the reference while the files are read and run; it ends early if these fail or are interrupted."""
    left, found = Event(), Future["NDArray[np.float32] | None"]()

    def end_early(name: str, inputs: torch.Tensor) -> None:
        if left.is_set():
            raise CancelledError

    def compute() -> None:
        try:
            found.set_result(reference_logits(weights, plan, tokens, end_early))
        except BaseException as error:
            found.set_exception(error)

    # A daemon: interrupted while it imports, this thread keeps the lock of imports, for which the other waits for ever.
    Thread(target=compute, daemon=True).start()
    try:
        yield found
    finally:
        left.set()
        wait([found], _ENDS_WITHIN_S)


class Ran(NamedTuple):
    """An engine's logits: with its widest cache, and with each narrower one that changes them."""

    widest: int
    logits: NDArray[np.float32]
    narrow: dict[int, NDArray[np.float32]]
    kv_costs: dict[int, float]

    @property
    def costs_text(self) -> str:
        costs = dict(self.kv_costs)
        own = costs.pop(self.widest, None)
        itself = "" if own is None else f"; a cache of {self.widest} bits costs KL {own:.4f}"
        each = ", ".join(f"{bits} bits KL {cost:.4f}" for bits, cost in costs.items())
        return f"{itself}; caches, against {self.widest} bits: {each}" if each else itself


def _run(target: Target, plan: Plan, files: Path, tokens: Sequence[int]) -> Ran:
    """Run the text with each width of the cache, in an engine of its own: some hold weights once for each width."""
    engine = target.open(plan, files)
    widest, *narrower = engine.capabilities.kv_bits
    ran = Ran(widest, _engine_logits(engine, plan, tokens, widest), {}, {})
    for bits in narrower:
        logits = _engine_logits(target.open(plan, files), plan, tokens, bits)
        cost = compare(logits[_cached(tokens)], ran.logits[_cached(tokens)]).kl
        ran.kv_costs[bits] = cost if cost < _MOST_KL else _MOST_KL
        if not cost <= MAX_CACHE_ERROR:
            ran.narrow[bits] = logits
    return ran


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
    with np.errstate(invalid="ignore", over="ignore"):  # logits that overflow give NaN, which meets no bound
        for ours, theirs in zip(logits, expected, strict=True):
            p, q = log_softmax(theirs), log_softmax(ours)
            divergences.append(kl_divergence(p, q))
            same += int(p.argmax() == q.argmax())
        error = float(abs(logits - expected).max() / max(abs(expected).max(), 1e-9))
    return Agreement(len(logits), float(np.mean(divergences)), same / len(logits), error)


def _judge(ran: Ran, expected: NDArray[np.float32], again: Again) -> tuple[Agreement, str]:
    """Return the distance and the bound that it meets. Raises `TargetFailed` if it meets none; NaN meets none."""
    is_exact = again.plan.recipe.is_exact()

    def passes(agreement: Agreement) -> str:
        if is_exact:
            return f"logits within {MAX_FLOAT_ERROR:.0%}" if agreement.error <= MAX_FLOAT_ERROR else ""
        return f"KL at most {MAX_KL}" if agreement.kl <= MAX_KL else ""

    agreement = compare(ran.logits, expected)
    if met := passes(agreement):
        return agreement, met
    rounded = expected
    if ran.widest < 32 and again.rounds_kv:
        rounded = again.logits(kv_bits=ran.widest)
        agreement = compare(ran.logits, rounded)
        ran.kv_costs[ran.widest] = compare(rounded, expected).kl
        if met := passes(agreement):
            return agreement, met
    if is_exact:
        raise failed(
            again.target,
            f"the self-check failed: logits differ from the reference by {agreement.error:.1%} of the largest"
            f" (at most {MAX_FLOAT_ERROR:.0%} for float weights)",
        )
    alike = again.logits(kv_bits=ran.widest, int8_inputs=True)
    allowed = max(MAX_KL, MAX_KL_OF_ROUNDING * compare(alike, rounded).kl)
    if again.plan.recipe.is_native() and again.source is again.weights:
        # The files could not be read, so their rounding is unknown.
        allowed += MAX_PREDICTED_LOSS * (again.plan.quality.kl or 0.1)
    # Processors without products of integers do not round inputs, so either may be the nearer one.
    if not min(agreement.kl, compare(ran.logits, alike).kl) <= allowed:
        raise failed(
            again.target, f"the self-check failed: {agreement}, against the reference (KL at most {allowed:.3f})"
        )
    return agreement, f"KL at most {allowed:.3f}"


def _check_caches(ran: Ran, agreement: Agreement, expected: NDArray[np.float32], again: Again) -> None:
    """Raise `TargetFailed` if a narrower cache is further from the reference with the same rounding than noise."""
    rows = _cached(again.tokens)
    for bits, logits in ran.narrow.items() if again.rounds_kv else ():
        rounded = again.logits(kv_bits=bits)
        found, cost = compare(logits[rows], rounded[rows]).kl, compare(rounded[rows], expected[rows]).kl
        if cost != cost:  # the rounded keys overflow: the cache is useless, as its cost says, but no engine's fault
            continue
        allowed = MAX_CACHE_ERROR + CACHE_COST_SHARE * cost + MAX_KL_OF_ROUNDING * agreement.kl
        if not found <= allowed:
            found = compare(logits[rows], again.logits(kv_bits=bits, int8_inputs=True)[rows]).kl
        if not found <= allowed:
            raise failed(
                again.target,
                f"the self-check failed: with a cache of {bits} bits, KL {found:.3f} against the reference that rounds"
                f" keys and values in the same way (at most {allowed:.3f})",
            )


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
        return _NOT_COMPARED
    from edgekit.quant.reference_encoder import hidden_states

    expected = hidden_states(plan.model, lambda name: torch.from_numpy(weights.tensor(name)), tokens).numpy()
    weights.release()
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosine = float(((found * expected).sum(axis=1) / lengths).min())
    least = LEAST_FLOAT_COSINE if plan.recipe.is_exact() else LEAST_COSINE
    if not cosine >= least:
        raise failed(target, f"the self-check failed: a hidden state has cosine {cosine:.5f} (at least {least})")
    return f"cosine {cosine:.5f} or more of {len(tokens)} hidden states with the reference (at least {least})"


def _cached(tokens: Sequence[int]) -> slice:
    """Return the rows after the first call, which reads no cache."""
    return slice(min(TOKENS_A_CALL, len(tokens) // 2), None)


def _engine_logits(engine: Engine, plan: Plan, tokens: Sequence[int], bits: int) -> NDArray[np.float32]:
    """Return the logits of `tokens` with a KV cache of `bits` bits, which holds no more than them; close the engine."""
    from edgekit.contracts.feeding import feed

    try:
        state = engine.start(plan.storage.model_copy(update={"kv_bits": bits, "capacity_tokens": len(tokens)}))
        try:
            return feed(engine, state, tokens, len(tokens), chunk_tokens=TOKENS_A_CALL)
        finally:
            state.close()
    finally:
        engine.close()
