"""Seeds and positions are independent, penalties and masks do as they say; bad parameters are refused by name."""

from __future__ import annotations

import math
from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest
from portable_values import exp_inputs, log_inputs
from sampling_laws import LOGITS, assert_follows

from edgekit.errors import InvalidInput
from edgekit.runtime.generation import portable_math
from edgekit.runtime.generation.sampling import Sampler, Sampling, gumbel
from edgekit.runtime.options import GenerationParams

DRAWS = 8_000


def chances_of(logits: np.ndarray) -> np.ndarray:
    chances = np.exp(logits.astype(np.float64))
    return chances / chances.sum()


def test_seeds_are_as_independent_as_positions() -> None:
    tokens = [Sampler(Sampling(temperature=1.0, seed=seed), len(LOGITS)).choose(LOGITS, 7) for seed in range(DRAWS)]
    assert_follows(np.bincount(tokens, minlength=len(LOGITS)), chances_of(LOGITS))


def test_neighbouring_positions_are_independent() -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=2), 4)
    tokens = [sampler.choose(LOGITS[:4], place) for place in range(DRAWS)]
    pairs = np.bincount([4 * first + second for first, second in pairwise(tokens)], minlength=16)
    single = chances_of(LOGITS[:4])
    assert_follows(pairs, np.outer(single, single).ravel())


def test_greedy_takes_the_likeliest_and_reads_no_noise() -> None:
    for seed in range(5):
        assert Sampler(Sampling(seed=seed), len(LOGITS)).choose(LOGITS, seed) == 0


def test_mask_allows_only_its_tokens() -> None:
    allowed = np.zeros(len(LOGITS), bool)
    allowed[[5, 9]] = True
    for temperature in (0.0, 1.0):
        sampler = Sampler(Sampling(temperature=temperature, seed=0, top_p=0.9), len(LOGITS))
        chosen = {sampler.choose(LOGITS, place, allowed) for place in range(200)}
        assert chosen <= {5, 9} and (temperature or chosen == {5})


def test_repetition_weakens_what_was_seen_in_prompt_and_answer() -> None:
    logits = np.array([1.0, 2.0, -1.0, 0.5], np.float32)
    sampler = Sampler(Sampling(repetition_penalty=4.0), 4, prompt=[1, 2])
    assert sampler.choose(logits, 0) == 0  # 2.0 / 4 = 0.5 falls behind 1.0
    sampler.observe(0)
    assert sampler.choose(logits, 1) == 1  # 1.0 / 4 = 0.25 falls behind 0.5; of equals the first
    assert np.array_equal(logits, np.array([1.0, 2.0, -1.0, 0.5], np.float32)), "the engine's row was written to"


def test_presence_counts_once_and_frequency_each_time() -> None:
    logits = np.array([2.0, 0.0], np.float32)
    presence, frequency = (Sampler(Sampling(**{name: 1.5}), 2) for name in ("presence_penalty", "frequency_penalty"))
    for sampler in (presence, frequency):
        for _ in range(3):
            sampler.observe(0)
    assert presence.choose(logits, 0) == 0  # 2.0 - 1.5
    assert frequency.choose(logits, 0) == 1  # 2.0 - 4.5


def test_prompt_tokens_take_no_presence_or_frequency_penalty() -> None:
    sampler = Sampler(Sampling(presence_penalty=2.0, frequency_penalty=2.0), 2, prompt=[0, 0, 0])
    assert sampler.choose(np.array([1.0, 0.0], np.float32), 0) == 0


def test_bias_shifts_a_token() -> None:
    assert Sampler(Sampling(logit_bias={3: 100.0}), 12).choose(LOGITS, 0) == 3
    assert Sampler(Sampling(logit_bias={0: -100.0}), 12).choose(LOGITS, 0) == 1
    with pytest.raises(InvalidInput, match="logit_bias: token 12 is outside"):
        Sampler(Sampling(logit_bias={12: 1.0}), 12)


def test_logprobs_are_the_models_own() -> None:
    sampler = Sampler(Sampling(temperature=0.3, top_k=1, logit_bias={5: 50.0}, logprobs=3), 12)
    found = sampler.logprob(LOGITS, 5)
    exact = np.log(chances_of(LOGITS))
    assert found.token == 5 and math.isclose(found.logprob, exact[5], abs_tol=1e-5)
    assert [token for token, _ in found.top] == [0, 1, 2]
    assert all(math.isclose(value, exact[token], abs_tol=1e-5) for token, value in found.top)
    assert Sampler(Sampling(logprobs=0), 12).logprob(LOGITS, 1).top == ()


REFUSED = {
    "temperature": [-0.1, math.nan, math.inf, True, "1", 1e9, None],
    "top_k": [0, -1, 1.5, True, "5", 1 << 30],
    "top_p": [0.0, 1.1, -0.5, math.nan, True],
    "min_p": [-0.1, 1.1, math.nan, False],
    "typical_p": [0.0, 2.0, math.nan],
    "repetition_penalty": [0.0, 1e-46, -1.0, math.inf, True],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "logit_bias": [{0: math.nan}, {0: 101.0}, {-1: 0.0}, {"0": 1.0}, {0: True}, [1], dict.fromkeys(range(1025), 0.0)],
    "seed": [-1, 1.5, True, 2**63, "7"],
    "logprobs": [-1, 21, True, 1_000_000],
    "max_tokens": [-1, -5, 1.5, True, 10**12, math.inf],
    "stop": [[""], [1], ["x" * 1025], ["x"] * 17],
    "stop_tokens": [[-1], ["a"], [True], [1.0], list(range(257))],
    "ignore_eos": [1, "yes", None],
    "schema": [5, True, [1]],
    "regex": [5, ["a"]],
    "temprature": [1.0],
    "do_sample": [True],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in REFUSED.items() for value in values],
    ids=lambda one: str(one)[:20],
)
def test_a_value_out_of_bounds_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=name) as caught:
        GenerationParams.parse({name: value})
    assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


def test_misspelt_option_suggests_the_nearest() -> None:
    with pytest.raises(InvalidInput, match=r"prompt_logprobs; it is a method: runtime\.prompt_logprobs"):
        GenerationParams.parse({"prompt_logprobs": 1})
    with pytest.raises(InvalidInput, match="did you mean temperature"):
        GenerationParams.parse({"temprature": 0.5})


def test_response_formats_exclude_each_other() -> None:
    with pytest.raises(InvalidInput, match="schema and regex exclude each other"):
        _ = GenerationParams.parse({"schema": {}, "regex": "a"}).response_format.given


def test_whole_numbers_are_numbers() -> None:
    params = GenerationParams.parse({"temperature": 1, "stop": ["a"], "stop_tokens": [3], "max_tokens": 5})
    assert params.sampling.temperature == 1.0 and params.stopping.stop == ("a",) and params.stopping.max_tokens == 5


SAME_EVERYWHERE = {"log": "65eb5d0f81e4584c", "exp": "d3e67359df7efe2b", "gumbel": "ef9d8f6fa5a765fc"}


def units_in_the_last_place(found: np.ndarray, right: np.ndarray) -> float:
    return float((np.abs(found - right) / np.spacing(np.abs(right))).max())


def test_bits_are_the_same_on_every_machine() -> None:
    """The digests are those of x86-64 and of arm64."""
    bits = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    found = {
        "log": portable_math.log(log_inputs()),
        "exp": portable_math.exp(exp_inputs()),
        "gumbel": gumbel(np.append(bits, np.array([0, 1, 2**32 - 2, 2**32 - 1], np.uint32))),
    }
    assert {name: sha256(values.tobytes()).hexdigest()[:16] for name, values in found.items()} == SAME_EVERYWHERE


def test_logarithms_are_right_to_two_units_in_the_last_place() -> None:
    values = log_inputs()
    found = portable_math.log(values)
    right = np.array([math.log(value) for value in values.tolist()])
    assert (found[values == 1.0] == 0.0).all()
    assert units_in_the_last_place(found[values != 1.0], right[values != 1.0]) <= 3.0  # one of them the C library's


def test_exponentials_are_right_to_one_unit_in_the_last_place() -> None:
    values = exp_inputs()
    found = portable_math.exp(values)
    normal = values >= portable_math.LEAST_EXPONENT
    right = np.array([math.exp(value) for value in values[normal].tolist()])
    assert units_in_the_last_place(found[normal], right) <= 2.0  # one of them the C library's
    assert (found[~normal] == 0.0).all()
    assert portable_math.exp(np.array([0.0, -0.0])).tolist() == [1.0, 1.0]
