"""Options that several commands share, and what a wish is made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import ValidationError

from edgekit.errors import InvalidInput, clip
from edgekit.planning import find_recipe
from edgekit.resolve import Wish
from edgekit.units import parse_bytes

Command = TypeVar("Command", bound=Callable[..., Any])

_WISHES = (
    click.option("--context", type=int, help="Tokens of context; without it, what the model and the device allow."),
    click.option("--sequences", type=int, default=1, show_default=True, help="Sequences held at once."),
    click.option("--window", type=int, help="Keep only this many tokens in the cache, sinks included."),
    click.option("--sinks", type=int, default=0, show_default=True, help="First tokens that a window never drops."),
    click.option("--kv-bits", type=int, help="Bits of a key or value; without it, the most that fit."),
    click.option("--min-quality", type=float, help="Least share of tokens whose top choice must stay (0 to 1)."),
    click.option("--max-memory", help="Most memory, e.g. 1.5GiB."),
    click.option("--min-tokens-per-second", type=float, help="Least decoding speed."),
    click.option("--max-first-token", type=float, help="Most seconds to the first token of a 512-token prompt."),
    click.option(
        "--prefer",
        type=click.Choice(["balanced", "speed", "memory", "quality"]),
        default="balanced",
        show_default=True,
        help="What to choose by, among what fits.",
    ),
    click.option("--per-device", is_flag=True, help="Choose a recipe for each device, instead of one for all."),
    click.option("--draft", help="A draft model beside the model: its memory is planned too."),
    click.option("--target", help="Only this target: onnx, mlx, executorch or an installed one."),
    click.option("--recipe", help="Only this recipe: a name, or a YAML file of rules."),
    click.option("--os-version", help="Plan for this OS version instead of the profile's."),
    click.option("--entitlement", multiple=True, help="An entitlement the app has; may be given several times."),
    click.option(
        "--exit",
        "exits",
        type=int,
        multiple=True,
        help="A layer after which drafts may leave (run --draft early-exit); may be given several times.",
    ),
    click.option(
        "--adapter-rank",
        type=int,
        default=0,
        help="Leave room for LoRA adapters of at most this rank (run --adapter).",
    ),
    click.option("--threads", type=int, help="Threads, instead of one a core."),
    click.option(
        "--profiles", type=Path, multiple=True, help="A folder of your own profiles; may be given several times."
    ),
)


def wish_options(command: Command) -> Command:
    """Every option that a `Wish` is made of, and those that go with it."""
    for option in reversed(_WISHES):
        command = option(command)
    return command


def make_wish(options: dict[str, Any]) -> Wish:
    """A `Wish` from the command line; a value out of range is refused with the option's name."""
    memory, recipe = options["max_memory"], options["recipe"]
    try:
        return Wish(
            context=options["context"],
            sequences=options["sequences"],
            window=options["window"],
            sinks=options["sinks"],
            kv_bits=options["kv_bits"],
            min_quality=options["min_quality"],
            max_memory_bytes=None if memory is None else parse_bytes(memory, "--max-memory"),
            min_tokens_per_second=options["min_tokens_per_second"],
            max_first_token_s=options["max_first_token"],
            prefer=options["prefer"],
            target=options["target"],
            recipe=None if recipe is None else find_recipe(recipe),
            os_version=options["os_version"],
            entitlements=tuple(options["entitlement"]),
            exits=tuple(options["exits"]),
            adapter_rank=options["adapter_rank"],
            threads=options["threads"],
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        names = {"exits": "exit", "max_memory_bytes": "max_memory", "max_first_token_s": "max_first_token"}
        name = names.get(field, field)
        raise InvalidInput(f"--{name.replace('_', '-')} {clip(first['input'])}: {first['msg']}") from error
