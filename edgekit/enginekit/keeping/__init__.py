"""Scores of cached tokens, from their keys and values alone: which are worth keeping in a window. One file a scorer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit.enginekit.keeping.keydiff import keydiff
from edgekit.enginekit.keeping.lagkv import lagkv
from edgekit.enginekit.keeping.valuediff import valuediff
from edgekit.errors import UnknownName

Scorer: TypeAlias = Callable[[NDArray[np.float32], NDArray[np.float32]], NDArray[np.float32]]
"""Scores the tokens of one head from their keys and values [token, head_dim]; a higher score is worth more."""

SCORERS: dict[str, Scorer] = {"valuediff": valuediff, "keydiff": keydiff, "lagkv": lagkv}


def consensus(name: str, layers: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> NDArray[np.float32]:
    """Return the mean score of each token over all heads of all layers; each head's scores have the same deviation.

    `layers` are keys and values [kv_head, token, head_dim]. Copies are of one head at a time.
    """
    if name not in SCORERS:
        raise UnknownName("scorer", name, SCORERS)
    score = SCORERS[name]
    total: NDArray[np.float32] | None = None
    for keys, values in layers:
        for key, value in zip(keys, values, strict=True):
            found = score(key.astype(np.float32, copy=False), value.astype(np.float32, copy=False))
            found = (found - found.mean()) / np.float32(found.std() + 1e-9)
            total = found if total is None else total + found
    assert total is not None, "the model has no keys and values"
    return np.nan_to_num(total)
