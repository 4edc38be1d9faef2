"""Stop strings end an answer, never show, and hold back no more than they must."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from runtimes import codec, make_runtime

from edgekit.runtime.generation.stopping import StopStrings

TEXTS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def cut(text: str, stops: list[str]) -> str:
    """`text` before the stop string that is complete first; of those, the one that began first."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(deadline=None, max_examples=300)
@given(text=TEXTS, stops=STOPS, sizes=st.lists(st.integers(1, 5), min_size=1))
def test_stop_string_never_leaks_at_any_split(text: str, stops: list[str], sizes: list[int]) -> None:
    watcher, shown, place, stopped = StopStrings(tuple(stops)), "", 0, False
    for turn in range(len(text)):
        piece = text[place : place + sizes[turn % len(sizes)]]
        place += len(piece)
        passed = watcher.push(piece)
        shown += passed.text
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)
        if passed.stop is None:
            held = text[len(shown) : place]
            assert held == "" or any(stop.startswith(held) for stop in stops), "held back without need"
        if passed.stop is not None:
            stopped = True
            break
    assert shown + ("" if stopped else watcher.flush()) == cut(text, stops)


@settings(deadline=None, max_examples=40)
@given(
    stops=st.lists(st.text(st.sampled_from("the cason.🙂"), min_size=1, max_size=3), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_the_answer_is_the_plain_one_cut_at_the_first_stop(stops: list[str], seed: int) -> None:
    with make_runtime() as runtime:
        options = {"max_tokens": 40, "temperature": 1.0, "seed": seed}
        plain = runtime.generate("the cat", **options)
        pieces = list(runtime.stream("the cat", stop=stops, **options))
    shown = "".join(piece.text for piece in pieces)
    assert shown == cut(plain.text, stops)
    assert pieces[-1].finish_reason == ("stop" if cut(plain.text, stops) != plain.text else "length")


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    with make_runtime() as runtime:
        plain = runtime.generate("the cat", max_tokens=20, temperature=1.0, seed=5)
        last = plain.tokens[10]
        stopped = runtime.generate("the cat", max_tokens=20, temperature=1.0, seed=5, stop_tokens=[last])
        place = plain.tokens.index(last)
    assert stopped.tokens == plain.tokens[:place]
    assert stopped.text == codec().decode(
        [*codec().encode("the cat", add_special_tokens=True), *stopped.tokens]
    ).removeprefix("the cat")
    assert stopped.finish_reason == "stop"


def test_the_models_end_of_text_ends_it_unless_told_to_go_on() -> None:
    with make_runtime() as runtime:
        plain = runtime.generate("the cat", max_tokens=20)
    with make_runtime(eos=frozenset({plain.tokens[4]})) as runtime:
        ended = runtime.generate("the cat", max_tokens=20)
        ignored = runtime.generate("the cat", max_tokens=20, ignore_eos=True)
        both = runtime.generate("the cat", max_tokens=20, ignore_eos=True, stop_tokens=[plain.tokens[2]])
    assert ended.finish_reason == "stop" and ended.tokens == plain.tokens[: plain.tokens.index(plain.tokens[4])]
    assert ignored.tokens == plain.tokens and ignored.finish_reason == "length"
    assert both.tokens == plain.tokens[: plain.tokens.index(plain.tokens[2])]


def test_held_back_text_is_released_at_the_end() -> None:
    with make_runtime() as runtime:
        plain = runtime.generate("the cat", max_tokens=9)
        held = runtime.generate("the cat", max_tokens=9, stop=[plain.text[-2:] + "never"])
    assert held.text == plain.text and held.finish_reason == "length"
