"""The settings of a server. The same fields are options of `edgekit serve` and of `edgekit.apps.serve.app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.options import ByteCount, Option
from edgekit.route import RoutePolicy, ServerUrl

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class ServerSettings(Frozen):
    """The address of a server, its access rules and its limits."""

    host: str = Field(
        default="127.0.0.1", description="The address to listen on; all but loopback addresses need --api-key-file."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8080, description="The port; 0: any that is free.")
    api_key_file: Annotated[Path | None, Option(metavar="FILE")] = Field(
        default=None, description="A file with one line for each key: a name and the key, or sha256: and its hash."
    )
    allowed_hosts: Annotated[tuple[str, ...], Option(name="allowed-host", metavar="NAME")] = Field(
        default=(), description="Another name under which clients may call this server."
    )
    allowed_origins: Annotated[tuple[str, ...], Option(name="allowed-origin", metavar="ORIGIN")] = Field(
        default=(), description="A web page's origin that may call this server, e.g. https://example.org."
    )
    max_queued: Annotated[int, Field(ge=0, le=65536)] = Field(
        default=64, description="Answers that may wait for each model; more are refused with status 503."
    )
    max_per_key: Annotated[int, Field(ge=1)] = Field(
        default=32, description="Requests of one key at a time; more are refused with status 429."
    )
    memory: ByteCount | None = Field(
        default=None, description="Limit of this process's private memory, e.g. 4GiB; free memory limits it too."
    )
    keep_alive_s: Annotated[float, Field(ge=0, le=31_536_000, strict=False)] | None = Field(
        default=None,
        description="Seconds after which an unused model is closed; without it 300, or never where only one is served.",
    )
    prefixes: Annotated[Path | None, Option(metavar="FOLDER")] = Field(
        default=None, description="Keep cached prefixes of prompts in this folder, for the next start."
    )
    timeout_s: Annotated[float, Field(gt=0, le=86400, strict=False)] = Field(
        default=600.0, description="Most seconds of one request."
    )
    drain_s: Annotated[float, Field(ge=0, le=3600, strict=False)] = Field(
        default=30.0, description="Seconds that running answers get to finish when the server is stopped."
    )
    overflow: Annotated[ServerUrl | None, Option(metavar="URL")] = Field(
        default=None,
        description="Redirect requests that do not fit or would wait too long to this OpenAI-compatible server (its URL"
        " ends in /v1); without it, they are refused.",
    )
    overflow_model: Annotated[str | None, Option(metavar="MODEL")] = Field(
        default=None,
        description="Answer conversations that would wait too long with this served model instead, which the answer"
        " names; without it, they are refused.",
    )
    ollama: bool = Field(default=False, description="Answer Ollama's /api/ too.")
    page: Annotated[bool, Option(negative="no-page")] = Field(default=True, description="Serve a chat page at /.")
    strict: bool = Field(
        default=False, description="Refuse requests with unknown fields, instead of reporting them in a header."
    )

    @property
    def overflow_policy(self) -> RoutePolicy | None:
        """The policy for requests that cannot be answered now; None: they are refused."""
        if self.overflow is None and self.overflow_model is None:
            return None
        return RoutePolicy(server=self.overflow, has_smaller=self.overflow_model is not None)
