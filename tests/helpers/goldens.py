"""Write down what a checkout plans, exports, says and answers, so that two checkouts can be compared.

    python tests/helpers/goldens.py write before.json            # of this checkout
    PYTHONPATH=OTHER:OTHER/targets python ... write after.json   # of another one
    python tests/helpers/goldens.py compare before.json after.json

For changes of structure: nothing of this may change but what the change is about. Texts and hashes depend on the
processor, so both are written on one machine; `--only plans,commands,messages,names` are the parts that do not.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

DEVICES = (
    "iphone-15-pro",
    "pixel-9",
    "macbook-m4-16gb",
    "jetson-orin-nano-8gb",
    "laptop-x86-8gb",
    "raspberry-pi-5-8gb",
)
TARGETS = ("onnx", "mlx", "llamacpp", "executorch")
RECIPES = ("s8", "s4-g32", "s4-g128")
PROMPTS = (
    "def add(a, b):",
    "The sky is",
    "import os\n\n",
    "for i in range(",
    "class Stack:",
    "Once",
    "x = [",
    "return ",
)
Golden = dict[str, Any]


def plans() -> Golden:
    """Plans of the bundled model for devices, targets, recipes, windows and contexts; or why there is none."""
    import edgekit

    requests: list[dict[str, Any]] = [{"device": device} for device in DEVICES]
    requests += [{"device": "laptop-x86-8gb", "target": target} for target in TARGETS]
    requests += [
        {"device": "laptop-x86-8gb", "target": target, "recipe": recipe} for target in TARGETS for recipe in RECIPES
    ]
    for device in DEVICES:
        requests += [
            {"device": device, "context": 512, "window": 128, "sinks": 4},
            {"device": device, "sequences": 4, "prefer": "memory"},
            {"device": device, "memory": 20 << 20},
        ]
    return {
        json.dumps(each): _told(lambda each=each: edgekit.plan("demo", **each).model_dump(mode="json"))
        for each in requests
    }


def exports() -> Golden:
    """The files' hashes and the self-check of exports of the bundled model."""
    import edgekit

    found: Golden = {}
    for target in TARGETS:
        for recipe in RECIPES:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder, "out")

                def made(target: str = target, recipe: str = recipe, out: Path = out) -> Golden:
                    artifact = edgekit.export(
                        "demo", out, "laptop-x86-8gb", target=target, recipe=recipe, effort="quick", context=512
                    )
                    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != "manifest.json")
                    hashes = {str(path.relative_to(out)): _sha256(path) for path in files}
                    return {"files": hashes, "self_check": artifact.manifest.self_check}

                found[f"{target} {recipe}"] = _told(made)
    return found


def texts() -> Golden:
    """Greedy and sampled texts of the bundled model on every engine, from prompts that share beginnings."""
    import edgekit

    found: Golden = {}
    for target in TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "out")
            options: dict[str, Any] = {"target": target, "recipe": "s4-g32", "effort": "quick", "context": 256}

            def answers(out: Path = out, options: dict[str, Any] = options) -> list[str]:
                edgekit.export("demo", out, "laptop-x86-8gb", **options)
                with edgekit.open(out, sequences=4) as runtime:
                    return [
                        runtime.generate(
                            prompt + " " * (place % 5), max_tokens=16, temperature=0.8 * (place % 2), seed=place
                        ).text
                        for place in range(400)
                        for prompt in [PROMPTS[place % len(PROMPTS)]]
                    ]

            found[target] = _told(answers)
    return found


def names() -> Golden:
    """The public names of every package that has some."""
    packages = ("edgekit", "edgekit.testing", "edgekit.contracts", "edgekit.apps.serve", "edgekit.apps.lab")
    return {name: _told(lambda name=name: sorted(import_module(name).__all__)) for name in packages}


def commands() -> Golden:
    """The help of every command."""
    from edgekit.cli import command as root

    found: Golden = {}

    def visit(command: click.Command, context: click.Context, path: str) -> None:
        found[path] = command.get_help(context)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                visit(child, click.Context(child, context, name, terminal_width=100), f"{path} {name}")

    visit(root, click.Context(root, info_name="edgekit", terminal_width=100), "edgekit")
    return found


def messages() -> Golden:
    """Every message that is raised with one of edgekit's errors, with its blanks named by what fills them."""
    import edgekit

    base = Path(edgekit.__file__).parent
    found: set[str] = set()
    for path in [*base.rglob("*.py"), *(base.parent / "targets").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                error = ast.unparse(node.exc.func)
                found |= {f"{error}: {ast.unparse(each)}" for each in node.exc.args if _is_text(each)}
    return {"raised": sorted(found)}


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in ast.walk(node)
    )


def _told(make: Callable[[], Any]) -> Any:
    """Return a result, or the error in words."""
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {re.sub(r'/tmp/[^ /:]+', '/tmp/…', str(error))}"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


PARTS: dict[str, Callable[[], Golden]] = {
    "names": names, "commands": commands, "messages": messages, "plans": plans, "exports": exports, "texts": texts,
}  # fmt: skip


@click.group()
def main() -> None:
    """Compare two checkouts by what they do."""


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--only", default=",".join(PARTS), help="Parts, with commas between them.")
def write(file: Path, only: str) -> None:
    """Write FILE."""
    os.environ["EDGEKIT_ENGINES"] = "profile"  # plans do not depend on earlier measurements
    found = json.loads(file.read_text()) if file.exists() else {}
    for name in only.split(","):
        found[name] = PARTS[name]()
        click.echo(f"{name}: {len(found[name])} entries")
        file.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False))


@main.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
def compare(before: Path, after: Path) -> None:
    """Print what differs."""
    one, other = (json.loads(path.read_text()) for path in (before, after))
    count = 0
    for path, old, new in _differences(one, other, ""):
        count += 1
        click.echo(f"{path}\n  before: {_short(old)}\n  after:  {_short(new)}")
    click.echo(f"{count} differences")
    sys.exit(count > 0)


def _differences(old: Any, new: Any, path: str) -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [each for key in keys for each in _differences(old.get(key), new.get(key), f"{path}/{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and path.startswith("/texts"):
        return [(f"{path}[{place}]", a, b) for place, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(each, str) for each in [*old, *new]):
        gone, come = sorted(set(old) - set(new)), sorted(set(new) - set(old))
        return [(path, each, None) for each in gone] + [(path, None, each) for each in come]
    return [] if old == new else [(path, old, new)]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) < 300 else f"{text[:300]}…"


if __name__ == "__main__":
    main()
