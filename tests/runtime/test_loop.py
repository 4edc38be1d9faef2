"""The one loop: speculation, batching, windows and chunks never change a text; nothing outlives its request."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from runtimes import codec, make_runtime

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.errors import ContextExceeded, EdgekitError, InvalidInput, RuntimeClosed, TargetFailed, Unsupported
from edgekit.runtime.generation.sampling import Sampler, Sampling
from edgekit.testing import FakeEngine
from edgekit.testing.drafting import Drafting, ReplayDrafter

SIZE = codec().vocabulary


class Scripted:
    """Propose what the test sets, right or wrong, and record the accepted tokens."""

    def __init__(self, proposals: list[list[int]]) -> None:
        self.proposals, self.observed, self.closed, self.limits = list(proposals), list[int](), 0, list[int]()

    def propose(self, history, limit):
        self.limits.append(limit)
        return self.proposals.pop(0)[:limit] if self.proposals else []

    def observe(self, accepted):
        self.observed += accepted

    def close(self):
        self.closed += 1


def plainly(prompt: list[int], count: int, sampling: Sampling, policy: KVEvictionPolicy, capacity: int) -> list[int]:
    """The oracle: one token at a time, on an engine of its own, evicting as the policy says."""
    engine = FakeEngine(vocabulary=SIZE, max_states=8)
    state = engine.start(KVCacheConfig(capacity_tokens=capacity, kv_bits=16))
    sampler, tokens = Sampler(sampling, SIZE, prompt), list(prompt)
    for place in range(len(prompt) + count - 1):
        eviction = policy.eviction(state.length)
        if eviction:
            state.evict(*eviction)
        row = engine.forward([Chunk(state, [tokens[place]], 1)])[0][0]
        if place + 1 == len(tokens):
            tokens.append(sampler.choose(row, len(tokens)))
            sampler.observe(tokens[-1])
    return tokens[len(prompt) :]


SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 4},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 6},
}
KEPT = {"everything": (None, 0), "a window": (24, 0), "a window with sinks": (24, 3), "a tiny window": (4, 1)}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_drafts_chunks_and_batching_do_not_change_a_text(sampling: dict[str, Any], kept, data) -> None:
    window, sinks = kept
    policy = KVEvictionPolicy.of(window, sinks)
    prompts = data.draw(st.lists(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=40), min_size=1, max_size=4))
    truth = [plainly(prompt, 20, Sampling(**sampling), policy, window or 128) for prompt in prompts]
    kind = data.draw(st.sampled_from(["none", "right", "often wrong", "wild"]))
    tokens = data.draw(st.integers(1, 9))

    def drafter(prompt: list[int]) -> Any:
        following = list(prompt) + truth[[tuple(p) for p in prompts].index(tuple(prompt))]
        if kind == "wild":
            return Scripted(data.draw(st.lists(st.lists(st.integers(0, SIZE - 1), max_size=9), max_size=20)))
        return ReplayDrafter(following, wrong_every=3 if kind == "often wrong" else 0)

    drafting = None if kind == "none" else Drafting(drafter, tokens)
    chunk_tokens, sequences = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    with make_runtime(
        context=128, window=window, sinks=sinks, chunk_tokens=chunk_tokens, sequences=sequences, drafting=drafting
    ) as runtime:
        streams = [runtime.submit(prompt, max_tokens=20, **sampling) for prompt in prompts]
        order = data.draw(st.permutations(range(len(prompts))))
        answers = {place: streams[place].answer() for place in order}
        assert [list(answers[place].tokens) for place in range(len(prompts))] == truth
        assert runtime.engine.states == []
        if kind == "right" and window is None and chunk_tokens > 1:
            assert sum(answer.timings.accepted for answer in answers.values()) > 0


def test_accepted_proposals_save_steps() -> None:
    with make_runtime() as runtime:
        plain = runtime.generate("the cat", max_tokens=40)
        assert runtime.metrics().steps == 40
    text = [*codec().encode("the cat", add_special_tokens=True), *plain.tokens]
    with make_runtime(drafting=Drafting(lambda prompt: ReplayDrafter(text), 4)) as runtime:
        drafted = runtime.generate("the cat", max_tokens=40)
        assert runtime.metrics().steps == 1 + 8  # the prompt, then 39 tokens by up to five a step
    assert drafted.tokens == plain.tokens and drafted.text == plain.text
    assert (drafted.timings.accepted, drafted.timings.proposed) == (31, 31)


def test_drafter_observes_accepted_tokens_and_is_closed_once() -> None:
    script = Scripted([[1, 2], [3], []])
    with make_runtime(drafting=Drafting(lambda prompt: script, 3)) as runtime:
        answer = runtime.generate("the cat", max_tokens=12)
    assert script.observed == list(answer.tokens[:-1])  # the last step ends the request, and the drafter with it
    assert script.closed == 1


@pytest.mark.parametrize("proposal", [[SIZE], [-1], [1] * 50], ids=["past the vocabulary", "negative", "too many"])
def test_invalid_proposal_fails_only_its_own_request(proposal: list[int]) -> None:
    class Broken(Scripted):
        def propose(self, history, limit):
            return proposal

    makers = iter([Broken([]), Scripted([])])
    with make_runtime(drafting=Drafting(lambda prompt: next(makers), 3)) as runtime:
        broken, good = runtime.submit("the", max_tokens=8), runtime.submit("cat", max_tokens=8)
        assert len(good.answer().tokens) == 8
        with pytest.raises(InvalidInput, match="drafter"):
            broken.answer()
        assert runtime.engine.states == []


def test_proposals_stop_at_the_window_and_at_the_end() -> None:
    script = Scripted([[1] * 9] * 60)
    with make_runtime(window=24, sinks=2, drafting=Drafting(lambda prompt: script, 9)) as runtime:
        runtime.generate("the cat", max_tokens=50)
    assert max(script.limits) <= 9 and min(script.limits) >= 1  # never asked where nothing may be proposed
    engine = FakeEngine(vocabulary=SIZE, max_rewind=2)
    script = Scripted([[1] * 9] * 60)
    with make_runtime(engine, drafting=Drafting(lambda prompt: script, 9)) as runtime:
        runtime.generate("the cat", max_tokens=10)
    assert max(script.limits) == 2


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    with make_runtime() as runtime:
        texts = [runtime.generate("the cat", max_tokens=30, temperature=1.0, seed=seed).text for seed in (1, 1, 2)]
        unseeded = runtime.generate("the cat", max_tokens=30, temperature=1.0)
        again = runtime.generate("the cat", max_tokens=30, temperature=1.0, seed=unseeded.seed)
    assert texts[0] == texts[1] != texts[2]
    assert again.text == unseeded.text


class Recording(FakeEngine):
    """An engine that records the chunks of each call."""

    def __init__(self, **options) -> None:
        super().__init__(vocabulary=SIZE, **options)
        self.calls: list[list[list[int]]] = []

    def forward(self, chunks):
        self.calls.append([list(chunk.tokens) for chunk in chunks])
        return super().forward(chunks)


def test_requests_are_served_in_the_order_in_which_they_came() -> None:
    engine = Recording()
    with make_runtime(engine, sequences=2, chunk_tokens=8) as runtime:
        streams = [runtime.submit([place + 3] * 20, max_tokens=4) for place in range(8)]
        streams[-1].answer()
        for stream in streams[:-1]:
            stream.answer()
        assert runtime.metrics().finished == {"length": 8}
    prompts = [tokens[0] for call in engine.calls for tokens in call if len(tokens) == 8 and len(set(tokens)) == 1]
    assert list(dict.fromkeys(prompts)) == [place + 3 for place in range(8)]


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with make_runtime(context=32) as runtime:
        with pytest.raises(ContextExceeded, match="has 32 tokens and there is room for 31") as caught:
            runtime.complete([1] * 32, max_tokens=1)
        assert (caught.value.prompt_tokens, caught.value.max_tokens) == (32, 31)
        full = runtime.complete([1] * 31)
        assert len(full.tokens) == 1 and full.finish_reason == "length"
        assert len(runtime.complete([1] * 10, max_tokens=1000).tokens) == 22


def test_an_engine_with_a_last_position_ends_there() -> None:
    engine = FakeEngine(vocabulary=SIZE, max_position=40)
    with make_runtime(engine, window=32) as runtime:
        answer = runtime.complete([1] * 20, max_tokens=100)
        assert (len(answer.tokens), answer.finish_reason) == (20, "length")
        with pytest.raises(ContextExceeded):
            runtime.complete([1] * 40)


@pytest.mark.parametrize("prompt", [[], [SIZE], [-1], b"the", 5, None, [1, "a"], ["a"], [1.0], [True]], ids=repr)
def test_invalid_prompts_are_refused(prompt: object) -> None:
    with make_runtime() as runtime, pytest.raises(InvalidInput):
        runtime.submit(prompt, max_tokens=1)


def test_missing_abilities_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="window"):
        make_runtime(FakeEngine(vocabulary=SIZE, can_evict=False), window=32)


@pytest.mark.parametrize("how", ["close", "break", "with", "forgotten", "cancel"])
def test_leaving_an_answer_early_releases_everything(how: str) -> None:
    script = Scripted([])
    with make_runtime(drafting=Drafting(lambda prompt: script, 3)) as runtime:
        stream = runtime.stream("the cat", max_tokens=100)
        next(stream)
        assert len(runtime.engine.states) == 1
        if how == "close":
            stream.close()
            assert list(stream) == []
        elif how == "break":
            for _ in stream:
                break
            del stream
        elif how == "with":
            with stream:
                next(stream)
        elif how == "cancel":
            stream.cancel()
            rest = list(stream)
            assert rest[-1].finish_reason == "cancelled" and rest[-1].timings.tokens >= 1
        else:
            del stream
        gc.collect()
        assert runtime.engine.states == []
        assert runtime.metrics().finished == {"cancelled": 1}
        assert script.closed == 1
        assert len(runtime.generate("the", max_tokens=3).tokens) == 3


def test_a_waiting_request_can_be_cancelled_before_it_ran() -> None:
    with make_runtime(sequences=1) as runtime:
        first, second = runtime.submit("the", max_tokens=5), runtime.submit("cat", max_tokens=5)
        second.cancel()
        assert [piece.finish_reason for piece in second] == ["cancelled"]
        assert len(first.answer().tokens) == 5


def test_another_thread_can_cancel_an_answer() -> None:
    class Slow(FakeEngine):
        def forward(self, chunks):
            time.sleep(0.002)
            return super().forward(chunks)

    with make_runtime(Slow(vocabulary=SIZE), window=64) as runtime:
        stream = runtime.stream("the cat", max_tokens=1_000_000)
        timer = threading.Timer(0.1, stream.cancel)
        timer.start()
        answer = stream.answer()
        timer.join()
        assert answer.finish_reason == "cancelled" and 0 < len(answer.tokens) < 1000
        assert runtime.engine.states == []


def test_many_threads_share_one_engine_and_get_their_own_texts() -> None:
    prompts = [[place % SIZE, 5, 7] for place in range(12)]
    with make_runtime() as runtime:
        alone = [runtime.complete(prompt, max_tokens=25, temperature=1.0, seed=3).tokens for prompt in prompts]
    found: dict[int, tuple[int, ...]] = {}
    with make_runtime(sequences=3) as runtime:

        def work(place: int) -> None:
            found[place] = runtime.complete(prompts[place], max_tokens=25, temperature=1.0, seed=3).tokens

        threads = [threading.Thread(target=work, args=(place,)) for place in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert [found[place] for place in range(12)] == alone
        assert runtime.engine.states == []


def test_closing_the_runtime_ends_every_answer() -> None:
    runtime = make_runtime(window=64)
    streams = [runtime.submit("the cat", max_tokens=1_000_000) for _ in range(6)]
    next(streams[0])
    ended: list[str | None] = []
    reader = threading.Thread(target=lambda: ended.append(streams[1].answer().finish_reason))
    reader.start()
    runtime.close()
    reader.join(10)
    assert ended == ["cancelled"]
    assert runtime.engine.closed
    runtime.close()
    with pytest.raises(RuntimeClosed, match="closed"):
        runtime.generate("the")


def test_failed_batched_call_is_retried_for_each_request() -> None:
    with make_runtime(FakeEngine(vocabulary=SIZE)) as runtime:
        expected = [runtime.generate(text, max_tokens=10).tokens for text in ("the cat", "sat on", "the mat")]
    engine = FakeEngine(vocabulary=SIZE)
    with make_runtime(engine, sequences=2) as runtime:
        streams = [runtime.submit(text, max_tokens=10) for text in ("the cat", "sat on", "the mat")]
        engine.failures = {4}
        assert [stream.answer().tokens for stream in streams] == expected
        assert runtime.metrics().finished == {"length": 3}
        assert engine.states == []


def test_request_that_breaks_the_engine_fails_alone() -> None:
    class Breaking(FakeEngine):
        def forward(self, chunks):
            if any(9 in chunk.tokens for chunk in chunks):
                self.failures = {self.forwards + 1}
            return super().forward(chunks)

    engine = Breaking(vocabulary=SIZE)
    with make_runtime(engine, sequences=3) as runtime:
        bias = {9: -100.0}
        good = [runtime.submit([5, token], max_tokens=12, logit_bias=bias) for token in (7, 8)]
        bad = runtime.submit([5, 9], max_tokens=12)
        assert [len(stream.answer().tokens) for stream in good] == [12, 12]
        with pytest.raises(TargetFailed, match="told to fail"):
            bad.answer()
        assert runtime.metrics().finished == {"error": 1, "length": 2}
        assert engine.states == []


def test_an_interrupt_in_the_middle_of_a_step_leaves_a_usable_runtime() -> None:
    class Interrupted(FakeEngine):
        def forward(self, chunks):
            if self.forwards == 3:
                self.forwards += 1
                raise KeyboardInterrupt
            return super().forward(chunks)

    engine = Interrupted(vocabulary=SIZE)
    with make_runtime(engine) as runtime:
        stream = runtime.stream("the cat", max_tokens=20)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        with pytest.raises(EdgekitError, match="interrupted"):
            next(stream)
        assert engine.states == []
        assert len(runtime.generate("the cat", max_tokens=5).tokens) == 5


def test_invalid_logits_fail_one_request() -> None:
    class Poisoned(FakeEngine):
        def forward(self, chunks):
            rows = super().forward(chunks)
            for chunk, row in zip(chunks, rows, strict=True):
                if chunk.tokens[-1] == 9:
                    row[:] = float("nan")
            return rows

    with make_runtime(Poisoned(vocabulary=SIZE)) as runtime:
        bad, good = runtime.submit([9], max_tokens=3), runtime.submit([8], max_tokens=1)
        assert len(good.answer().tokens) == 1
        with pytest.raises(TargetFailed, match="logit"):
            bad.answer()
        assert runtime.engine.states == []


def test_timings_are_in_order_and_logprobs_go_with_their_tokens() -> None:
    with make_runtime() as runtime:
        pieces = list(runtime.stream("the cat", max_tokens=12, temperature=1.0, seed=1, logprobs=2))
    timings = pieces[-1].timings
    assert timings is not None and all(piece.timings is None for piece in pieces[:-1])
    assert 0 <= timings.queue_s <= timings.first_token_s <= timings.total_s
    assert timings.tokens == sum(len(piece.tokens) for piece in pieces) == 12
    assert timings.decode_tokens_per_s > 0 and timings.prefill_tokens_per_s > 0
    for piece in pieces:
        assert tuple(one.token for one in piece.logprobs) == piece.tokens
        assert all(len(one.top) == 2 and one.logprob <= 0 for one in piece.logprobs)


@pytest.mark.parametrize("read", [0, 1, None])
def test_the_answer_of_a_stream_is_whole_whatever_was_read_before(read: int | None) -> None:
    with make_runtime() as runtime:
        stream, whole = (runtime.stream("the", max_tokens=5, logprobs=0) for _ in range(2))
        pieces = list(islice(stream, read))
        answer = stream.answer()
        assert answer == replace(whole.answer(), timings=answer.timings, seed=answer.seed) == stream.answer()
        assert answer.text.startswith("".join(piece.text for piece in pieces)) and len(answer.tokens) == 5
        stream = runtime.stream("the", max_tokens=5)
        stream.close()
        with pytest.raises(InvalidInput, match="closed before its end"):
            stream.answer()
