"""JSON objects that carry their own hash: the last field, `seal`, is the sha256 of all bytes before it.

A seal detects damage. It does not prove origin: anyone who can change the object can seal it again.
"""

from __future__ import annotations

import hashlib
import re

from pydantic import BaseModel

from edgekit.common.parsing import Model, parse_json, validate
from edgekit.errors import DamagedArtifact, InvalidInput, quote_short

_END = b"\n}\n"
_SEALED = re.compile(rb'(?P<body>.*),\n "seal": "(?P<seal>[0-9a-f]{64})"\n}\n', re.DOTALL)


def to_sealed_json(value: BaseModel) -> bytes:
    """Return `value` as canonical JSON with its seal: equal values give equal bytes."""
    return add_seal((value.model_dump_json(indent=1) + "\n").encode())


def add_seal(data: bytes) -> bytes:
    """Append a seal as the last field of the JSON object `data`, whose last line is its closing brace."""
    assert data.endswith(_END), data[-20:]
    body = data.removesuffix(_END)
    return body + b',\n "seal": "' + hashlib.sha256(body).hexdigest().encode() + b'"' + _END


def read_sealed_json(
    data: bytes, model: type[Model], where: str, *, versions: int, sealed_since: int, fix: str
) -> tuple[Model, bool]:
    """Read an object that `to_sealed_json` wrote; return it, and whether it was sealed.

    `versions` is the newest readable version; versions before `sealed_since` have no seal. Raises `InvalidInput`
    for another version or an invalid field, and `DamagedArtifact`, with `fix` as its advice, for a wrong seal.
    """
    version = parse_json(data, where).get("version")
    if type(version) is not int:
        raise InvalidInput(f"{where}: has no version, so it is no manifest; {fix}")
    if version > versions:
        raise InvalidInput(
            f"{where}: manifest version {quote_short(version)}, this edgekit reads up to {versions}; upgrade edgekit"
        )
    match = _SEALED.fullmatch(data)
    if match is None and version >= sealed_since:
        raise DamagedArtifact(f"{where}: its seal is missing or damaged; {fix}")
    if match is None:
        return validate(data, model, where), False
    if hashlib.sha256(match["body"]).hexdigest().encode() != match["seal"]:
        raise DamagedArtifact(f"{where}: its bytes are not those that were sealed; {fix}")
    return validate(match["body"] + _END, model, where), True
