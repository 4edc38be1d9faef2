"""What users hold: `open` an artifact, then generate, stream, chat. Everything else in this package serves this face.

It knows no engine by name, and not how one is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from edgekit.artifact import Artifact
from edgekit.cache import CachePolicy, Storage, hold
from edgekit.errors import InvalidInput, Unsupported
from edgekit.runtime import prefix_files
from edgekit.runtime.adapters import Adapters
from edgekit.runtime.drafting import Source
from edgekit.runtime.drafting.speculation import Speculation, SpeculationReport
from edgekit.runtime.ledger import Ledger
from edgekit.runtime.loop import Loop
from edgekit.runtime.memory_report import Contract, MemoryReport, report
from edgekit.runtime.metrics import Metrics
from edgekit.runtime.options import Options, Way, understood
from edgekit.runtime.prefixes import Prefixes, PrefixKey, Reuse
from edgekit.runtime.sampling import Sampler
from edgekit.runtime.sequence import Bounds
from edgekit.runtime.sequence import Sequence as Living
from edgekit.runtime.stream import Answer, Stream
from edgekit.runtime.structured import Grammars
from edgekit.runtime.template import ChatTemplate, Message
from edgekit.runtime.text import Codec
from edgekit.runtime.tools import tool_names

if TYPE_CHECKING:
    from typing import Unpack

    from edgekit.interfaces import Abilities, Engine

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


class Runtime:
    """One open artifact. Safe to use from several threads; whoever waits for a piece drives the engine for all."""

    def __init__(
        self,
        engine: Engine,
        codec: Codec,
        *,
        storage: Storage,
        policy: CachePolicy,
        sequences: int = 1,
        chunk_tokens: int = 256,
        eos: frozenset[int] = frozenset(),
        template: ChatTemplate | None = None,
        drafting: Source | None = None,
        artifact: Artifact | None = None,
        ledger: Ledger | None = None,
        prefix_bytes: int = 0,
        contract: Contract | None = None,
    ) -> None:
        """`prefix_bytes`: at most how much of what was computed for a prompt is kept for the next; 0: nothing."""
        able = engine.abilities
        check_window(policy, able)
        if storage.kv_bits not in able.kv_bits:
            raise Unsupported(f"kv_bits: {storage.kv_bits} is not among {able.kv_bits}, which this engine holds")
        self.engine, self.codec, self.artifact = engine, codec, artifact
        self.policy, self.storage, self._contract = policy, storage, contract
        self.template = template or ChatTemplate({}, {})
        chunk = min(chunk_tokens, able.max_chunk_tokens)
        self._bounds = Bounds(able, policy, storage, chunk, eos)
        self._drafting = drafting
        self._grammars = Grammars(codec, able.vocabulary, eos)
        self._ledger = ledger or Ledger()
        self._prefixes = Prefixes(self._ledger, prefix_bytes) if prefix_bytes and able.can_save else None
        self.sequences = max(1, min(sequences, able.max_states))
        self._loop = Loop(
            engine,
            max_running=self.sequences,
            budget_tokens=chunk,
            pace=drafting.pace if drafting else None,
            ledger=self._ledger,
            prefixes=self._prefixes,
        )
        self._adapters = Adapters(engine, self._loop, self._ledger, self._prefixes)
        self._closed = False

    def generate(self, prompt: str, **options: Unpack[Options]) -> Answer:
        """Go on from `prompt`."""
        return self.submit(prompt, **options).answer()

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Answer `messages`, rendered by the model's own template; tool calls come back as objects."""
        return self.submit(messages, tools=tools, template_options=template_options, **options).answer()

    def complete(self, tokens: Sequence[int], **options: Unpack[Options]) -> Answer:
        """Go on from a list of tokens, taken as they are."""
        return self.submit(tokens, **options).answer()

    def stream(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """The answer to a text, a list of tokens or a list of messages, piece by piece."""
        return self.submit(prompt, tools=tools, template_options=template_options, **options)

    def submit(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Queue a request and return at once. Several advance together while any of them is read.

        One step of `priority` is worth ten seconds of waiting. What was computed for a prompt is used again for others
        that begin alike, within one `tenant`: no time of one tells another what it asked. `context`, or `window` with
        `sinks`, keeps less of this request than the runtime could; `drafting=False` leaves it undrafted, and `ngram`,
        `early-exit` or `model` takes only that one of the runtime's drafters.
        """
        wish = understood(options)
        tokens, context = self._encoded(prompt, tools, template_options)
        shape, adapter, keeping = wish.shape.chosen, wish.queueing.adapter, wish.keeping
        policy, storage = hold(self.policy, self.storage, keeping.context, keeping.window, keeping.sinks)
        check_window(policy, self._bounds.abilities)
        sequence = Living(
            self._bounds._replace(policy=policy, storage=self._adapters.storage(storage, adapter)),
            tokens,
            Sampler(wish.sampling, self._bounds.abilities.vocabulary, tokens),
            wish.stopping,
            self.codec.stream(context=context, skip_special=tools is None),
            grammar=self._grammars.compile(*shape) if shape else None,
            source=self._source(keeping.drafting),
            reuse=self._reuse(wish.queueing.tenant, adapter),
            priority=wish.queueing.priority,
        )
        self._loop.submit(sequence)
        return Stream(self._loop, sequence, tool_names(tools or ()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of `text`, as `generate` would feed them."""
        return self.codec.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.codec.decode(tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that `chat` would feed, as text."""
        return self.template.render(messages, tools=tools, template_options=template_options)

    @contextmanager
    def pin(self, prompt: Prompt, *, tenant: str = "", adapter: str | None = None) -> Iterator[int]:
        """Compute a prompt once, a system message say, and keep it resident until the block ends. Yields its tokens."""
        prefixes, tokens = self._kept(), self._encoded(prompt, None, None)[0]
        key = self._prefix_key(tenant, adapter)
        self.complete(tokens, max_tokens=1, ignore_eos=True, tenant=tenant, adapter=adapter)
        pinned = self._loop.exclusively(lambda: prefixes.pin(key, tokens))
        try:
            if pinned < len(tokens):
                raise InvalidInput(f"pin: {pinned} of {len(tokens)} tokens could be kept; open with more `prefixes`")
            yield pinned
        finally:
            if not self._closed:
                self._loop.exclusively(lambda: prefixes.unpin(key, tokens[:pinned]))

    def save_prefixes(self, path: str | Path) -> int:
        """Write what is resident to a file that only you can read; how many runs. It belongs to this artifact."""
        prefixes = self._kept()
        return self._loop.exclusively(lambda: prefix_files.save(Path(path), prefixes, self._identity))

    def load_prefixes(self, path: str | Path) -> int:
        """Read such a file again, as far as there is room; how many runs."""
        prefixes = self._kept()
        return self._loop.exclusively(lambda: prefix_files.load(Path(path), prefixes, self.engine, self._identity))

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Make the LoRA in a PEFT folder ready for requests that say `adapter=name`. Others notice nothing."""
        self._adapters.load(name, Path(path))

    def drop_adapter(self, name: str) -> None:
        """Forget it and give its memory back; refused while a request names it."""
        self._adapters.drop(name)

    @property
    def adapters(self) -> dict[str, int]:
        """What is loaded, and the bytes of each."""
        return self._adapters.bytes

    def _source(self, wish: bool | Way) -> Source | None:
        """Who drafts for a request with that wish."""
        if isinstance(wish, bool):
            return self._drafting if wish else None
        if not isinstance(self._drafting, Speculation):
            raise InvalidInput(f"drafting: this runtime was opened without {wish}; open it with `draft`")
        return self._drafting.only(wish)

    def _kept(self) -> Prefixes:
        if self._prefixes is None:
            raise Unsupported("prefixes: none are kept here; open with `prefixes`, on an engine that can save")
        return self._prefixes

    @property
    def _identity(self) -> str:
        return self.artifact.sha256 if self.artifact else ""

    def _prefix_key(self, tenant: str, adapter: str | None) -> PrefixKey:
        return PrefixKey(tenant, adapter, self.storage.kv_bits)

    def _reuse(self, tenant: str, adapter: str | None) -> Reuse | None:
        return Reuse(self._prefixes, self._prefix_key(tenant, adapter)) if self._prefixes is not None else None

    def metrics(self) -> Metrics:
        """What this runtime has done so far."""
        return self._loop.metrics()

    def memory(self) -> MemoryReport:
        """Predicted and measured memory by class, as of now; only for a runtime that was opened from an artifact."""
        if self._contract is None:
            raise Unsupported("memory: nothing was predicted for this runtime; open an artifact")
        return report(self._contract, self.metrics(), adapter_bytes=self._ledger.taken.get("adapters", 0))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not as planned or asked here: what the engine says, and what memory pressure took."""
        given_up = self._contract.admitted.ladder if self._contract else ()
        return (*self.engine.notes, *(f"memory was short: {step.change}" for step in given_up))

    def speculation(self) -> SpeculationReport | None:
        """What drafting came to so far, and why it is on or off; None where there is none that adapts."""
        return self._drafting.report() if isinstance(self._drafting, Speculation) else None

    def drive(self) -> None:
        """One step of the engine for all requests; for callers that deliver pieces by `Stream.poll`."""
        self._loop.drive()

    def close(self) -> None:
        """Cancel what is running and release the engine. Closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        self._loop.close()
        self.template.close()
        self._grammars.close()
        if self._drafting is not None:
            self._drafting.close()
        self.engine.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encoded(
        self,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] | None,
        template_options: Mapping[str, Any] | None,
    ) -> tuple[list[int], list[int]]:
        """The prompt's tokens, and those that the answer's text goes on from (none: it begins afresh)."""
        if isinstance(prompt, str):
            _refuse_chat_options(tools, template_options)
            tokens = self.codec.encode(prompt, add_special_tokens=True)
            return tokens, tokens
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise InvalidInput("a prompt is a text, a list of tokens or a list of messages")
        if all(type(token) is int for token in prompt):
            _refuse_chat_options(tools, template_options)
            given = [token for token in prompt if isinstance(token, int)]
            known = all(0 <= token < self._bounds.abilities.vocabulary for token in given)
            return given, given if known else []  # unknown ones are refused where the request is made
        if any(not isinstance(message, Mapping) for message in prompt):
            raise InvalidInput("a prompt is a text, a list of whole numbers (tokens) or a list of messages")
        messages = [message for message in prompt if isinstance(message, Mapping)]
        text = self.template.render(messages, tools=tools, template_options=template_options)
        return self.codec.encode(text, add_special_tokens=False), []


def check_window(policy: CachePolicy, abilities: Abilities) -> None:
    """Refused where the engine cannot keep it."""
    if policy.window is not None and not abilities.can_evict:
        raise Unsupported("window: this engine cannot evict tokens; open it without a window")


def _refuse_chat_options(tools: object, template_options: object) -> None:
    for name, value in (("tools", tools), ("template_options", template_options)):
        if value is not None:
            raise InvalidInput(f"{name}: belongs to a chat; give a list of messages as the prompt")
