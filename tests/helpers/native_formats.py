"""Damaged files for the native library, more than `native_fuzzing.py` has: each is opened, or refused in one line.

python tests/helpers/native_formats.py --count 100000
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import fuzzing
from chat_templates import CHATS, FAMILIES, SPECIAL, WEATHER
from fuzzing import JsonFormat
from narrow_graphs import compiled
from stored_formats import TEXT, Artifacts, OnnxArtifacts
from template_snippets import EXPRESSIONS, MESSAGES, TEMPLATES

from edgekit.apps.native.build import build
from edgekit.apps.native.library import NativeLibrary
from edgekit.artifact.artifact import MANIFEST, verify
from edgekit.common.sealed_json import add_seal
from edgekit.errors import EdgekitError, InvalidInput


def opened() -> NativeLibrary:
    return NativeLibrary(build(sanitize="NATIVE_SANITIZE" in os.environ))


class NativeTemplates(JsonFormat):
    """Chat templates; each renders several chats."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._library = opened()
        sources = [*FAMILIES.values(), *TEMPLATES, *(f"{{{{ {each} }}}}" for each in EXPRESSIONS)]
        for number, source in enumerate(sources):
            path = folder / f"{number}.jinja"
            path.write_text(source)
            if not self._refusals(path):
                self.add(path)
        self._pieces = [piece for source in sources for piece in re.findall(r"\w+|[^\w\s]+|\s+", source)]

    def damaged(self, path: Path, whole: bytes, draw: random.Random) -> bytes:
        """Half of the changes are to bytes; the others put pieces of other templates in the place of some."""
        if draw.random() < 0.5:
            return super().damaged(path, whole, draw)
        pieces = re.findall(r"\w+|[^\w\s]+|\s+", whole.decode())
        for _ in range(draw.randint(1, 6)):
            place = draw.randrange(len(pieces))
            pieces[place : place + draw.randrange(3)] = draw.choices(self._pieces, k=draw.randrange(4))
            pieces = pieces or [" "]
        return "".join(pieces).encode()

    def read(self, path: Path) -> None:
        for error in self._refusals(path):
            raise error

    def _refusals(self, path: Path) -> list[InvalidInput]:
        """The errors of several chats; none where the last is rendered."""
        template, refusals = self._library.read_template(json.dumps(SPECIAL).encode(), path.read_bytes()), []
        try:
            for chat in (CHATS["tool calls"], CHATS["parts"], MESSAGES):
                try:
                    template.render(chat, tools=[WEATHER])
                    refusals = []
                except InvalidInput as error:
                    refusals.append(error)
        finally:
            template.close()
        return refusals


class NativeArtifacts(OnnxArtifacts):
    """Every text file of an artifact, sealed again; each is opened and answers a prompt."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._library = opened()

    def read(self, path: Path) -> None:
        manifest = path.parent / "manifest.json"
        self.seal_with(path, manifest)
        try:
            model = self._library.open(path.parent)
            try:
                model.generate(model.tokenizer.encode(TEXT)[:20], max_tokens=2, ignores_ends=True)
            finally:
                model.close()
        finally:
            if path != manifest:
                manifest.write_bytes(self.wholes[manifest])


class NativeGraphs(OnnxArtifacts):
    """Graphs that are audited, and whose cache is made narrower; what onnxruntime then takes is its own matter."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._narrow, self.wholes = compiled(folder), {}
        for path in sorted((folder / "a.edgekit").glob("body-*.onnx")):
            self.add(path)

    def read(self, path: Path) -> None:
        data = path.read_bytes()
        for bits in (16, 8):
            self._narrow(data, bits)


class NativeManifests(Artifacts):
    """Manifests, their list of files and chunks damaged most; both languages take or refuse the same ones."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._library, manifest = opened(), folder / "a.edgekit" / MANIFEST
        value = json.loads(manifest.read_bytes())
        del value["seal"]
        for name, fact in value["files"].items():
            data = (manifest.parent / name).read_bytes()
            parts = [data[start : start + 1000] for start in range(0, min(len(data), 4000), 1000)]
            parts.append(data[sum(map(len, parts)) :])
            fact["chunks"] = [{"bytes": len(part), "sha256": sha256(part).hexdigest()} for part in parts if part]
        manifest.write_bytes(add_seal((json.dumps(value, indent=1) + "\n").encode()))
        self.wholes = {}
        self.add(manifest)

    def damaged(self, path: Path, whole: bytes, draw: random.Random) -> bytes:
        """Most changes are to the files; what a plan may hold is read by Python alone."""
        if draw.random() < 0.1:
            return super().damaged(path, whole, draw)
        value = json.loads(whole)
        del value["seal"]
        fields = [each for each in fuzzing.fields_of(value) if each[0][:1] != ("plan",)]
        return add_seal((fuzzing.damaged_fields(value, draw, fields) + "\n").encode())

    def read(self, path: Path) -> None:
        found = [_refusal(lambda: verify(path.parent)), _refusal(lambda: self._library.verify(path.parent))]
        by_python, by_library = found
        # The library does not read the rest of a manifest: plans, tools and origins may be any JSON for it, but for
        # whole numbers beyond 64 bits.
        if by_library is not None and by_python is None and "out of range" not in str(by_library):
            raise AssertionError(f"only the library refuses it: {by_library}")
        if by_python is not None and by_library is None and "files" in str(by_python):
            raise AssertionError(f"only Python refuses it: {by_python}")
        for error in found:
            if error is not None:
                raise error


def _refusal(work: Callable[[], object]) -> EdgekitError | None:
    try:
        work()
    except EdgekitError as error:
        return error
    return None


FORMATS = {
    "native-template": NativeTemplates,
    "native-manifest": NativeManifests,
    "native-artifact": NativeArtifacts,
    "native-graph": NativeGraphs,
}

if __name__ == "__main__":
    sys.exit(fuzzing.run(FORMATS, "Read damaged files with the native library."))
