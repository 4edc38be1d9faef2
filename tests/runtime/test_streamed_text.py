"""Streamed text has whole characters, and equals the decoding of all tokens at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st
from runtimes import TOKENIZERS, codec
from tokenizers import pre_tokenizers

from edgekit.errors import InvalidInput
from edgekit.runtime.generation.tokenizer import Codec, Detokeniser, read_eos


def pieces_of(stream: Detokeniser, tokens: list[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.flush()]


def any_tokens(name: str) -> st.SearchStrategy[list[int]]:
    size = codec(name).vocabulary
    torn = [token for token in range(size) if codec(name).is_byte(token)]
    one = st.integers(0, size - 1)
    return st.lists(st.one_of(one, st.sampled_from(torn)) if torn else one, max_size=30)


def written(name: str) -> st.SearchStrategy[list[int]]:
    """Real texts whose characters are split between tokens, as models split them."""
    letters = st.text(st.sampled_from("the cat 日本語🙂🙃éüß…\n\t  <s></s>[X] y‍\u200d"), max_size=40)
    return letters.map(lambda text: codec(name).encode(text, add_special_tokens=True))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip_special", [True, False], ids=["specials dropped", "specials kept"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_all_pieces_together_are_the_decoded_text(name: str, skip_special: bool, data: st.DataObject) -> None:
    tokens = data.draw(st.one_of(any_tokens(name), written(name)))
    pieces = pieces_of(codec(name).stream(skip_special=skip_special), tokens)
    assert "".join(pieces) == codec(name).decode(tokens, skip_special=skip_special)
    for piece in pieces:
        piece.encode()  # every piece, and so every prefix, is valid UTF-8: no half of a character


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "CTC"])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_text_continues_the_prompt_without_a_seam(name: str, data: st.DataObject) -> None:
    prompt = data.draw(written(name))
    tokens = data.draw(written(name))[1:]
    pieces = pieces_of(codec(name).stream(context=prompt), tokens)
    before = codec(name).decode(prompt[-16:])
    whole = codec(name).decode([*prompt[-16:], *tokens])
    if before.strip() and not before.endswith("\ufffd"):
        assert before + "".join(pieces) == whole
    else:
        assert "".join(pieces) == codec(name).decode(tokens)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name not in ("CTC", "no decoder", "word suffixes")])
def test_whole_characters_are_not_held_back(name: str) -> None:
    text = "the cat sat on the mat."
    tokens = codec(name).encode(text, add_special_tokens=False)
    shown = ""
    stream = codec(name).stream()
    for count, token in enumerate(tokens, 1):
        shown += stream.push(token)
        assert shown == codec(name).decode(tokens[:count])


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "CTC"])
@pytest.mark.parametrize("text", ["the cat" + " \n" * 400 + "sat", "   " * 400 + "the cat" + "\t" * 400])
def test_long_runs_of_blanks_are_exact_and_each_token_is_decoded_a_bounded_number_of_times(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = codec(name).encode(text, add_special_tokens=True)
    whole, decode, decoded = codec(name).decode(tokens), Codec.decode, 0

    def counting(self: Codec, some: Sequence[int], *, skip_special: bool = True) -> str:
        nonlocal decoded
        decoded += len(some)
        return decode(self, some, skip_special=skip_special)

    monkeypatch.setattr(Codec, "decode", counting)
    assert "".join(pieces_of(codec(name).stream(), tokens)) == whole
    assert decoded < 50 * len(tokens)


def test_incomplete_character_is_held_back() -> None:
    text = codec("byte-level BPE")
    ((letters, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🙃")  # one for each byte
    tokens = [text.tokenizer.token_to_id(letter) for letter in letters]
    stream = text.stream()
    assert [stream.push(token) for token in tokens] == ["", "", "", "🙃"]
    stream = text.stream()
    assert stream.push(tokens[0]) == ""
    assert stream.flush() == "\ufffd"


def test_bytes_that_are_no_characters_are_released_soon_and_decoded_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = codec("byte-level BPE")
    lone = one.tokenizer.token_to_id("¥")  # the byte A5, which begins no character
    begun = [one.tokenizer.token_to_id(letter) for letter in "æĹ"]  # two of the three bytes of 日
    decoded, decode = [0], one.decode

    def counted(tokens: list[int], **options: bool) -> str:
        decoded[0] += len(tokens)
        return decode(tokens, **options)

    monkeypatch.setattr(one, "decode", counted)
    for tokens in ([lone] * 4000, ([*begun, lone] + [lone] * 5) * 500, [*begun] * 2000):
        stream, pieces, decoded[0] = one.stream(), list[str](), 0
        for token in tokens:
            pieces.append(stream.push(token))
        assert decoded[0] < 60 * len(tokens)
        assert len("".join(pieces[:200])) > 40
        assert "".join(pieces) + stream.flush() == decode(tokens)


def test_a_run_of_raw_bytes_is_read_as_one() -> None:
    text = codec("SentencePiece, Llama 2")
    raw = [text.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "ü".encode()]
    stream = text.stream()
    assert [stream.push(token) for token in raw] == ["", ""]
    assert stream.push(text.tokenizer.token_to_id("a")) == "üa"
    broken = text.stream()
    assert broken.push(raw[0]) == ""
    assert broken.push(text.tokenizer.token_to_id("a")) == "\ufffda"


def test_the_space_between_prompt_and_answer_is_kept() -> None:
    text = codec("SentencePiece, Llama 2")
    prompt, answer = text.encode("the cat", add_special_tokens=True), text.tokenizer.token_to_id("▁sat")
    assert text.stream(context=prompt).push(answer) == " sat"
    assert text.stream().push(answer) == "sat"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"model": 1}', b"\xff\xfe", b'{"version": "1.0"}'])
def test_a_broken_tokenizer_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="not a tokenizer") as caught:
        Codec(data, "tokenizer.json")
    assert "\n" not in str(caught.value)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidInput, match="surrogate"):
        codec().encode("a\ud83d", add_special_tokens=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, {7}), ('{"eos_token_id": 3}', {3, 7}), ('{"eos_token_id": [3, 4]}', {3, 4, 7}), ("{}", {7})],
)
def test_every_end_of_text_counts(text: str | None, expected: set[int], tmp_path) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert read_eos(tmp_path, (7,)) == expected
