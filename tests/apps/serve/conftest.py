"""A server of the tiny model for each file, and OpenAI's own client of it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from serving import Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ollama=True) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0) as found:
        yield found
