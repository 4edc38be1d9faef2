"""The arguments and the result of one `edgekit run`, by either loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from edgekit.cli._answers import Answering
from edgekit.common.base import Frozen
from edgekit.common.options import Option
from edgekit.errors import InvalidInput
from edgekit.runtime.generation.chat_template import ChatTemplate
from edgekit.runtime.open_options import OpenOptions


class RunOptions(Frozen):
    """The options of prompt, batch and output."""

    as_chat: Annotated[bool | None, Option(name="chat", negative="raw")] = Field(
        default=None, description="Apply the chat template (the default if there is one), or send PROMPT as it is."
    )
    batch: Path | None = Field(
        default=None, description="A jsonl file of prompts, answered together; PROMPT is then left out."
    )
    output: Annotated[Path | None, Option(short="o")] = Field(
        default=None, description="The file for the batch's answers; prompts that it answers already are skipped."
    )
    native: bool = Field(
        default=False,
        description="Generate with the native library (edgekit-native) instead of the Python loop; for artifacts of"
        " onnx and executorch.",
    )
    stats: bool = Field(default=False, description="Show predicted and measured time, speed and memory on stderr.")
    json_: Annotated[bool, Option(name="json")] = Field(
        default=False, description="Print one JSON object instead of streamed text."
    )


class RunArguments(Frozen):
    """The arguments of one run, without the prompt."""

    choice: RunOptions
    answering: Answering
    generation: dict[str, Any]
    opening: OpenOptions


class RunResult(NamedTuple):
    """An answer and the figures of --stats and --json."""

    text: str
    finish_reason: str
    seed: int
    tokens: int
    figures: dict[str, Any]
    is_interrupted: bool

    @property
    def shown(self) -> dict[str, Any]:
        """The object that --json prints."""
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "tokens": self.tokens,
            "statistics": self.figures,
        }


def prompt_of(text: str, given: RunArguments, template: ChatTemplate) -> str | Sequence[Mapping[str, Any]]:
    """Return the text, or the messages of a chat where the options or the template ask for it."""
    system = given.answering.system
    if not (template.exists if given.choice.as_chat is None else given.choice.as_chat):
        if system is not None:
            raise InvalidInput("--system: needs the chat template; leave out --raw, or put it into the prompt")
        return text
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": text}]
