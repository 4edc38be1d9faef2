"""Converts a GGUF file's tokenizer to Hugging Face's files, and checks the result against the file.

Two kinds are supported: byte-level BPE (`gpt2`), with the pre-tokenizer that `tokenizer.ggml.pre` names, and
SentencePiece (`llama`), whose merges follow from the scores of its tokens. The error for any other kind names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgekit.errors import InvalidInput, Unsupported, quote_short
from edgekit.model.gguf_splits import SPLITS, Split
from edgekit.model.tokenizer_file import load_tokenizer

MAX_TOKENS = 1 << 20
MAX_ADDED, MAX_ADDED_CHARACTERS = 1 << 16, 1 << 20  # every text is searched for all of them
MAX_CUTS = 1 << 28  # characters compared to derive the merges of SentencePiece
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"

# Control tokens that end a text or a turn, in addition to the file's ids.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "</s>",
    "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
_KEYS = {
    "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "eot_token_id",
    "eom_token_id", "unknown_token_id", "seperator_token_id", "separator_token_id", "padding_token_id",
    "mask_token_id", "cls_token_id", "add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix",
    "remove_extra_whitespaces", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id",
    "fim_rep_token_id", "fim_sep_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id",
}  # fmt: skip
_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"

# Text that is encoded and decoded to check the tokenizer.
_SAMPLE = (
    "The quick brown fox jumps over 13 lazy dogs; 1,234.56 of them don't care.\n\n    if x == 0:\n\t\treturn 'done'\n"
    'Zażółć gęślą jaźń — «Привет, мир!» 你好，世界。 こんにちは 안녕하세요 مرحبا 👋🏽 ∑∫√ <tag attr="v">&amp;</tag>\r\n'
)


def tokenizer_files(metadata: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """Return `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and any chat template."""
    vocabulary = _Vocabulary(metadata, where)
    tokenizer = vocabulary.tokenizer()
    data = _json(tokenizer)
    _check(data, vocabulary)
    files = {
        "tokenizer.json": data,
        "tokenizer_config.json": _json(vocabulary.config()),
        "generation_config.json": _json(vocabulary.generation()),
    }
    template = metadata.get(_TEMPLATE)
    if template is not None:
        if not isinstance(template, str):
            raise InvalidInput(f"{where}: {_TEMPLATE}: {quote_short(template)} is not a text; convert the model again")
        files["chat_template.jinja"] = template.encode()
    return files


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class _Vocabulary:
    """The tokens of a file with their kinds, scores and special ids, checked."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata, self.where = metadata, where
        self.model, self.pre = self._text("model"), self._text("pre", "")
        if self.model not in ("gpt2", "llama"):
            raise Unsupported(
                f"{where}: {_KEY}model: {quote_short(self.model)} is not supported; supported: gpt2, llama"
            )
        self._refuse_others()
        self.tokens = self._tokens()
        kinds = self._numbers("token_type", len(self.tokens))
        self.kinds = [_NORMAL] * len(self.tokens) if kinds is None else [int(kind) for kind in kinds]
        if unknown := set(self.kinds) - {_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE}:
            raise Unsupported(f"{where}: {_KEY}token_type: {quote_short(min(unknown))} is not a known type of token")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise InvalidInput(
                f"{where}: {_KEY}tokens: the token {quote_short(twice)} occurs twice; convert the model again"
            )
        self.split = self._split() if self.model == "gpt2" else None
        self.bos, self.eos = self._id("bos_token_id"), self._id("eos_token_id")
        self.unknown, self.padding = self._id("unknown_token_id"), self._id("padding_token_id")
        self.add_bos = self._flag("add_bos_token", self.split.add_bos if self.split else True)
        self.add_eos = self._flag("add_eos_token", False)
        self.add_space = self._flag("add_space_prefix", self.model == "llama")
        for name in ("add_sep_token", "remove_extra_whitespaces"):
            if self._flag(name, False):
                raise Unsupported(f"{where}: {_KEY}{name} is true, which is not supported")
        if (self.add_bos and self.bos is None) or (self.add_eos and self.eos is None):
            raise InvalidInput(f"{where}: a bos or eos token is to be added and has no id; convert the model again")
        if self.model == "gpt2" and self.add_space:
            raise Unsupported(f"{where}: {_KEY}add_space_prefix is true, which is not supported for gpt2")

    def _refuse_others(self) -> None:
        for key in self._metadata:
            if key.startswith(_KEY) and key.removeprefix(_KEY) not in _KEYS:
                raise Unsupported(
                    f"{self.where}: {quote_short(key)} is not known, and leaving it out could make another "
                    f"tokenizer of it; "
                    "export from the original checkpoint"
                )

    def _split(self) -> Split:
        split = SPLITS.get(self.pre)
        if split is None:
            raise Unsupported(
                f"{self.where}: {_KEY}pre: {quote_short(self.pre)} is a way to split text that is not supported; "
                f"supported: {', '.join(SPLITS)}"
            )
        return split

    def _get(self, name: str) -> Any:
        return self._metadata.get(_KEY + name)

    def _refusal(self, name: str, why: str) -> InvalidInput:
        return InvalidInput(
            f"{self.where}: {_KEY}{name}: {quote_short(self._get(name))} {why}; convert the model again"
        )

    def _text(self, name: str, default: str | None = None) -> str:
        value = self._get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self._refusal(name, "is not a text")
        return value

    def _flag(self, name: str, default: bool) -> bool:
        value = self._get(name)
        if value is not None and not isinstance(value, bool):
            raise self._refusal(name, "is neither true nor false")
        return default if value is None else value

    def _id(self, name: str) -> int | None:
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._refusal(name, "is not a token's id")
        # Old converters write an id outside the vocabulary for "none".
        return value if value < len(self.tokens) else None

    def _tokens(self) -> list[str]:
        stored = self._get("tokens")
        if not isinstance(stored, Sequence) or isinstance(stored, str) or not 0 < len(stored) <= MAX_TOKENS:
            raise self._refusal("tokens", f"is not a list of 1 to {MAX_TOKENS:,} texts")
        tokens = []
        for index, token in enumerate(stored):
            try:
                tokens.append(token.decode() or f"[EMPTY_{index}]")
            except UnicodeDecodeError as error:
                raise InvalidInput(
                    f"{self.where}: {_KEY}tokens: token {index:,}, {quote_short(token)}, is not UTF-8; convert the "
                    f"model again"
                ) from error
        return tokens

    def _numbers(self, name: str, count: int) -> Any:
        value = self._get(name)
        if value is not None and (not hasattr(value, "tolist") or len(value) != count):
            raise self._refusal(name, f"does not hold one number for each of {count:,} tokens")
        return None if value is None else value.tolist()

    def tokenizer(self) -> dict[str, Any]:
        """Return `tokenizer.json`."""
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            **(self._byte_level() if self.model == "gpt2" else self._sentence_piece()),
            "post_processor": self._post_processor(),
        }

    def added(self) -> list[int]:
        """Return the ids of tokens matched in a text before pre-tokenization."""
        return [index for index, kind in enumerate(self.kinds) if kind in (_CONTROL, _USER)]

    def _added(self) -> list[dict[str, Any]]:
        added = []
        if (
            len(self.added()) > MAX_ADDED
            or sum(len(self.tokens[index]) for index in self.added()) > MAX_ADDED_CHARACTERS
        ):
            raise self._refusal("token_type", "marks too many tokens as control or user-defined ones")
        for index in self.added():
            token = self.tokens[index]
            added.append(
                {
                    "id": index,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": self._strips_after(token),
                    "normalized": False,
                    "special": self.kinds[index] == _CONTROL,
                }
            )
        return added

    def _strips_after(self, token: str) -> bool:
        """Return True for Phi-3's SentencePiece tokens that strip the spaces after them: all but three."""
        is_phi3 = self.model == "llama" and self._metadata.get("general.architecture") == "phi3"
        return is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")

    def _byte_level(self) -> dict[str, Any]:
        assert self.split is not None
        steps: list[dict[str, Any]] = []
        if self.split.single_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.split.pattern is not None:
            pattern = {"Regex": self.split.pattern}
            steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": self.split.pattern is None,
        }
        steps.append(byte_level)
        return {
            "normalizer": {"type": "NFC"} if self.split.composed else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": {**byte_level, "use_regex": True},
            "model": self._bpe(self._stored_merges(), byte_fallback=False, ignore_merges=self.split.ignore_merges),
        }

    def _sentence_piece(self) -> dict[str, Any]:
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        undo = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        decoders: list[dict[str, Any]] = [undo, {"type": "ByteFallback"}, {"type": "Fuse"}]
        if self.add_space:
            normalizer: dict[str, Any] = {
                "type": "Sequence",
                "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replace],
            }
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        else:
            normalizer = replace
        return {
            "normalizer": normalizer,
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._bpe(self._scored_merges(), byte_fallback=True, ignore_merges=False),
        }

    def _bpe(self, merges: list[tuple[str, str]], *, byte_fallback: bool, ignore_merges: bool) -> dict[str, Any]:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": self.tokens[self.unknown] if byte_fallback and self.unknown is not None else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": byte_fallback,
            "byte_fallback": byte_fallback,
            "ignore_merges": ignore_merges,
            "vocab": self.ids,
            # A text takes four bytes less than a pair, but tokens with spaces could not be told apart.
            "merges": merges if any(" " in token for token in self.ids) else [*map(" ".join, merges)],
        }

    def _stored_merges(self) -> list[tuple[str, str]]:
        stored = self._get("merges")
        if not isinstance(stored, Sequence) or isinstance(stored, str):
            raise self._refusal("merges", "is not a list of texts")
        merges = []
        for index, item in enumerate(stored):
            # The first of the two may itself begin with a space; it is never empty.
            first, _, second = item.decode("utf-8", "replace").partition(" ")
            if first + second not in self.ids or first not in self.ids or second not in self.ids:
                raise InvalidInput(
                    f"{self.where}: {_KEY}merges: merge {index:,}, {quote_short(item)}, is not of two tokens into one; "
                    "convert the model again"
                )
            merges.append((first, second))
        return merges

    def _scored_merges(self) -> list[tuple[str, str]]:
        """Return every pair of tokens that joins to a third, the best score of the third first."""
        scores = self._numbers("scores", len(self.tokens))
        if scores is None:
            raise self._refusal("scores", "is missing")
        plain = {token: index for token, index in self.ids.items() if self.kinds[index] == _NORMAL}
        if sum(len(token) ** 2 for token in plain) > MAX_CUTS:
            raise self._refusal("tokens", "holds too many long tokens to find their merges")
        merges: list[tuple[float, int, int, int]] = []
        for token, index in plain.items():
            for cut in range(1, len(token)):
                first = plain.get(token[:cut])
                if first is not None and (second := plain.get(token[cut:])) is not None:
                    merges.append((-scores[index], index, first, second))
        merges.sort()
        return [(self.tokens[first], self.tokens[second]) for _, _, first, second in merges]

    def _post_processor(self) -> dict[str, Any] | None:
        before = [self.bos] if self.add_bos and self.bos is not None else []
        after = [self.eos] if self.add_eos and self.eos is not None else []
        if not before and not after:
            return (
                {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
                if (self.model == "gpt2")
                else None
            )

        def template(*texts: tuple[str, int]) -> list[dict[str, Any]]:
            pieces: list[dict[str, Any]] = []
            for name, kind in texts:
                pieces += [{"SpecialToken": {"id": self.tokens[index], "type_id": kind}} for index in before]
                pieces.append({"Sequence": {"id": name, "type_id": kind}})
                pieces += [{"SpecialToken": {"id": self.tokens[index], "type_id": kind}} for index in after]
            return pieces

        return {
            "type": "TemplateProcessing",
            "single": template(("A", 0)),
            "pair": template(("A", 0), ("B", 1)),
            "special_tokens": {
                self.tokens[index]: {"id": self.tokens[index], "ids": [index], "tokens": [self.tokens[index]]}
                for index in {*before, *after}
            },
        }

    def config(self) -> dict[str, Any]:
        """Return `tokenizer_config.json`."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
            "clean_up_tokenization_spaces": False,
        }
        named = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": self.unknown, "pad_token": self.padding}
        return config | {name: self.tokens[index] for name, index in named.items() if index is not None}

    def generation(self) -> dict[str, Any]:
        """Return `generation_config.json`, with every token that ends a text."""
        named = [self.eos, self._id("eot_token_id"), self._id("eom_token_id")]
        known = [self.ids.get(token) for token in _ENDS]
        ends = [index for index in named if index is not None]
        ends += [index for index in known if index is not None and self.kinds[index] == _CONTROL]
        config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))}
        for name, index in (("bos_token_id", self.bos), ("pad_token_id", self.padding)):
            config |= {} if index is None else {name: index}
        return config

    def ids_of_config(self) -> dict[str, int]:
        """Return the ids that `config.json` repeats."""
        named = {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.padding}
        return {name: index for name, index in named.items() if index is not None}


def token_ids(metadata: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return `bos_token_id`, `eos_token_id` and `pad_token_id` for `config.json`."""
    return _Vocabulary(metadata, where).ids_of_config()


def _check(data: bytes, vocabulary: _Vocabulary) -> None:
    """Raise if the tokenizer yields other ids than the file's, or loses text."""
    tokenizer = load_tokenizer(data, vocabulary.where)
    for index in vocabulary.added():
        token = vocabulary.tokens[index]
        ids = tokenizer.encode(token, add_special_tokens=False).ids
        if ids != [index]:
            raise InvalidInput(
                f"{vocabulary.where}: the token {quote_short(token)} encodes to {quote_short(ids)} and not to its "
                f"id {index}; "
                "the file's tokenizer is not one of the known kinds"
            )
    ids = tokenizer.encode(_SAMPLE, add_special_tokens=False).ids
    text = tokenizer.decode(ids, skip_special_tokens=False)
    # Text after an added token gets a space in front, so decoding may return extra spaces.
    same = text.split() == _SAMPLE.split() if vocabulary.add_space else text == _SAMPLE
    if not same:
        raise InvalidInput(
            f"{vocabulary.where}: a text comes back as {quote_short(text)} after encoding and decoding; "
            "the file's tokenizer is not one of the known kinds"
        )
