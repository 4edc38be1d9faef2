"""The Node example gives the same logits and texts as Python, is typed, and refuses changed files."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from edgekit_onnx.engine import OnnxEngine

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.contracts.engine import Chunk

# The package takes 290 MB, so it is installed by tests that may take long.
pytestmark = [pytest.mark.onnx, pytest.mark.long, pytest.mark.usefixtures("own_operators")]
EXAMPLE = Path(__file__).parents[2] / "examples/node"
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ERR_SOCKET_TIMEOUT")
PROMPTS = ("import numpy as np", "def main():\n", "class Größe 🙂:")
LOGITS = """
import { writeFileSync } from 'node:fs';
import { Model } from './model.mjs';
const [folder, ids, out] = process.argv.slice(2);
const model = await Model.open(folder);
const rows = [];
for (const fed of JSON.parse(ids)) rows.push((await model.feed(fed)).slice());
writeFileSync(out, Buffer.concat(rows.map((row) => Buffer.from(row.buffer, row.byteOffset, row.byteLength))));
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its packages."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if int(subprocess.run(["node", "--version"], capture_output=True, text=True).stdout[1:].split(".")[0]) < 20:
        pytest.skip("node is older than 20")
    folder = tmp_path_factory.mktemp("node")
    for path in EXAMPLE.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=600)
    if any(code in done.stderr for code in UNREACHABLE):
        pytest.skip(f"npm cannot reach its registry: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    (folder / "logits.mjs").write_text(LOGITS)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(arguments), cwd=folder, capture_output=True, text=True, timeout=300)


def test_logits_are_those_of_python_to_the_bit(node: Path, demo_artifact: Path, tmp_path: Path) -> None:
    artifact, fed = open_artifact(demo_artifact), [[11, 500, 7, 42, 99, 1234, 8], [3], [777], [5, 6]]
    engine, rows = OnnxEngine(artifact.plan, artifact.folder), []
    state = engine.start(artifact.plan.storage)
    for ids in fed:
        rows.append(engine.forward([Chunk(state, ids, 1)])[0][0].copy())
    engine.close()
    out = tmp_path / "logits"
    done = run(node, "node", "logits.mjs", str(demo_artifact), json.dumps(fed), str(out))
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.frombuffer(out.read_bytes(), np.float32).reshape(len(fed), -1), np.stack(rows))


def test_texts_are_those_of_python(node: Path, demo_artifact: Path, demo: edgekit.Runtime) -> None:
    for prompt in PROMPTS:
        done = run(node, "node", "chat.mjs", str(demo_artifact), prompt, "--raw")
        expected = demo.generate(prompt, max_tokens=64, temperature=0).text
        assert done.stdout == expected + "\n", done.stderr
    question = "Write a function that adds two numbers."
    done = run(node, "node", "chat.mjs", str(demo_artifact), question)
    expected = demo.chat([{"role": "user", "content": question}], max_tokens=64, temperature=0).text
    assert done.stdout == expected + "\n", done.stderr


def test_a_changed_file_is_refused(node: Path, demo_artifact: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(demo_artifact, changed)
    with (changed / "weights.bin").open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    done = run(node, "node", "chat.mjs", str(changed), "hello")
    assert done.returncode != 0
    assert "weights.bin is not the file that the manifest describes" in done.stderr


def test_the_example_is_typed(node: Path) -> None:
    done = run(node, "npm", "run", "--silent", "check")
    assert done.returncode == 0, done.stdout
