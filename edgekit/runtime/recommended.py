"""The sampling that a model's authors recommend, used for chats unless the user chooses otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.common.parsing import read_json
from edgekit.errors import InvalidInput
from edgekit.runtime.options import GenerationParams

CHAT_TEMPERATURE = 0.7  # without a temperature in generation_config.json
_FROM_CONFIG = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class ChatSampling(NamedTuple):
    """The sampling options of a chat without a `temperature` from the user, and their source."""

    options: dict[str, Any]
    source: str


def chat_sampling(folder: Path, given: Mapping[str, Any]) -> ChatSampling:
    """Return the sampling that the model's `generation_config.json` recommends, else a temperature of 0.7."""
    if "temperature" in given:
        return ChatSampling({}, "as given")
    path = folder / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    recommended = {name: config[name] for name in _FROM_CONFIG if type(config.get(name)) in (int, float)}
    if config.get("do_sample") is not False and "temperature" in recommended:
        if recommended.get("top_k") == 0:
            del recommended["top_k"]  # 0 means no limit there
        options = {name: value if name == "top_k" else float(value) for name, value in recommended.items()}
        try:
            GenerationParams.parse(options)
            return ChatSampling(options, "from generation_config.json")
        except InvalidInput:
            pass
    return ChatSampling({"temperature": CHAT_TEMPERATURE}, "the default of chat")
