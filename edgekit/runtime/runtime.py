"""`Runtime`: generate, chat and stream with one open artifact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgekit.artifact.artifact import Artifact
from edgekit.artifact.sealed_adapters import sealed_adapter
from edgekit.common.histogram import Histogram
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy, apply_limits
from edgekit.errors import InvalidInput, InvalidOption, Unsupported
from edgekit.runtime.budget_share import BudgetShare
from edgekit.runtime.driver import Driver
from edgekit.runtime.generation.chat_template import ChatTemplate, Message
from edgekit.runtime.generation.reasoning import THINKING, ReasoningReader
from edgekit.runtime.generation.sampling import Sampler
from edgekit.runtime.generation.structured import Grammars
from edgekit.runtime.generation.thinking import after_thinking
from edgekit.runtime.generation.tokenizer import ENDLESS_TOKENS, Codec, check_size
from edgekit.runtime.generation.tool_calls import tool_names
from edgekit.runtime.guard import CrashGuard
from edgekit.runtime.loras import LoraRegistry
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.memory.report import MemoryBaseline, MemoryReport, report
from edgekit.runtime.metrics import Metrics
from edgekit.runtime.options import DraftName, GenerationParams, Options
from edgekit.runtime.prefix_cache import file as prefix_files
from edgekit.runtime.prefix_cache.tree import RUN_BYTES, Prefixes, PrefixKey, Reuse
from edgekit.runtime.pressure import PressureControl
from edgekit.runtime.prompts import Prompt, chat_bytes, check_messages, check_text
from edgekit.runtime.reading import TextReading
from edgekit.runtime.request import Request, RequestLimits, check_cache
from edgekit.runtime.scheduler import Scheduler
from edgekit.runtime.speculation.controller import DrafterFactory
from edgekit.runtime.speculation.speculation import Speculation, SpeculationReport
from edgekit.runtime.stream import Answer, Stream

if TYPE_CHECKING:
    from typing import Unpack

    from edgekit.contracts.engine import Engine


class Runtime(TextReading):
    """One open artifact; `edgekit.open` makes it. Threads may share it.

    The thread that waits for a piece runs the engine for all requests.
    """

    def __init__(
        self,
        engine: Engine,
        codec: Codec,
        *,
        kv_config: KVCacheConfig,
        policy: KVEvictionPolicy,
        sequences: int = 1,
        chunk_tokens: int = 256,
        eos: frozenset[int] = frozenset(),
        template: ChatTemplate | None = None,
        drafting: DrafterFactory | None = None,
        artifact: Artifact | None = None,
        budget: MemoryBudget | None = None,
        prefix_bytes: int = 0,
        baseline: MemoryBaseline | None = None,
        guard: CrashGuard | None = None,
    ) -> None:
        """`prefix_bytes`: the size of the prefix cache; 0 turns it off."""
        super().__init__()
        capabilities = engine.capabilities
        check_cache(policy, capabilities, kv_config.kv_bits)
        self.engine, self.codec, self.artifact = engine, codec, artifact
        self.policy, self.kv_config, self._baseline = policy, kv_config, baseline
        self.template = template or ChatTemplate({}, {})
        chunk_tokens = min(chunk_tokens, capabilities.max_chunk_tokens)
        self._limits = RequestLimits(capabilities, policy, kv_config, chunk_tokens, eos)
        self._drafting = drafting
        self._budget = budget or MemoryBudget()
        keeps = prefix_bytes and capabilities.can_save
        self._prefixes = Prefixes(self._budget, prefix_bytes, RUN_BYTES) if keeps else None
        self.sequences = max(1, min(sequences, capabilities.max_states))
        scheduler = Scheduler(
            engine,
            max_running=self.sequences,
            step_tokens=chunk_tokens,
            controller=drafting.controller if drafting else None,
            budget=self._budget,
            prefixes=self._prefixes,
        )
        self._driver = Driver(scheduler)
        self._adapters = LoraRegistry(engine, self._driver, self._budget, self._prefixes)
        share = BudgetShare(
            self._driver.exclusively, self._budget, self._prefixes, self.sequences * engine.state_bytes(kv_config)
        )
        self.template.share = self.codec.share = share
        self._grammars = Grammars(codec, capabilities.vocabulary, eos, share)
        self._is_closed, self._guard = False, guard
        self.pressure = PressureControl(self._driver, engine, self._prefixes, scheduler.watch)
        if guard is not None:
            scheduler.watch(guard)

    def generate(self, prompt: str, **options: Unpack[Options]) -> Answer:
        """Continue the text `prompt`, without a chat template. For messages, use `chat`.

        Takes the options of `Options`; raises the errors of `submit`.

            >>> runtime.generate("def add(a, b):", max_tokens=16).text
        """
        check_text(prompt)
        return self.submit(prompt, **options).answer()

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Answer `messages`, which the model's own chat template renders.

        Arguments and errors are as for `submit`. With `tools`, the calls in the answer are in `answer.tool_calls`.

            >>> answer = runtime.chat([{"role": "user", "content": "Name three rivers."}], max_tokens=40)
            >>> print(answer.text, answer.finish_reason)
        """
        check_messages(messages)
        return self.submit(messages, tools=tools, template_options=template_options, **options).answer()

    def complete(self, tokens: Sequence[int], **options: Unpack[Options]) -> Answer:
        """Continue a list of token ids. Takes the options of `Options`; raises the errors of `submit`."""
        return self.submit(tokens, **options).answer()

    def submit(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Queue a request and return its stream at once; all queued requests advance while any of them is read.

        `stream` is the same method, for answers that are read piece by piece.

        A prompt that begins like an earlier one of the same `tenant` reuses its keys and values. `context`, or
        `window` with `sinks` and `keep`, gives this request less cache than the runtime has.

            >>> streams = [runtime.submit(prompt) for prompt in prompts]  # answered together
            >>> answers = [stream.answer() for stream in streams]
            >>> for piece in runtime.stream("def add(a, b):"):
            ...     print(piece.text, end="", flush=True)

        Args:
            prompt: a text, a list of token ids or a list of messages.
            tools: functions that the model may call, as JSON objects; only with messages.
            template_options: variables for the chat template; only with messages.
            options: see `Options`.

        Raises:
            InvalidOption: an option is unknown or out of bounds.
            InvalidPrompt: the prompt or the messages cannot be used; TemplateRefused if the chat template says so.
            ContextExceeded: the prompt does not fit.
            Unsupported: this engine or model cannot do what the options ask.
        """
        return self.submit_several(prompt, 1, tools=tools, template_options=template_options, **options)[0]

    stream = submit

    def submit_several(
        self,
        prompt: Prompt,
        count: int,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> list[Stream]:
        """Queue `count` requests for independent answers to one prompt; their seeds are `seed` and the next ones."""
        self._driver.check_free()
        self._check_generates("generate")
        params = GenerationParams.parse(options)
        form, adapter, limits = params.response_format.given, params.scheduling.adapter, params.cache_limits
        policy, kv_config = apply_limits(
            self.policy, self.kv_config, limits.context, limits.window, limits.sinks, limits.keep
        )
        kv_config = self.pressure.kv_config(kv_config, policy)
        check_cache(policy, self._limits.capabilities, kv_config.kv_bits)
        request_limits = self._limits._replace(policy=policy, kv_config=self._adapters.kv_config(kv_config, adapter))
        tokens, context = self._encoded(prompt, tools, template_options, request_limits)
        names, is_chat = tool_names(tools or ()), isinstance(next(iter(prompt), None), Mapping)
        budget, vocabulary = params.stopping.thinking_tokens, self._limits.capabilities.vocabulary
        splits = is_chat or budget is not None
        begins_inside = splits and self.codec.decode(tokens[-8:], skip_special=False).rstrip().endswith(THINKING)
        requests = [
            Request(
                request_limits,
                tokens,
                Sampler(params.sampling.for_answer(index), vocabulary, tokens),
                params.stopping,
                self.codec.stream(context=context, skip_special=tools is None),
                grammar=after_thinking(
                    self._grammars.compile(*form) if form else None, budget, self.codec, vocabulary, begins_inside
                ),
                drafter_factory=self._drafter_factory(limits.drafting),
                reuse=self._reuse(params.scheduling.tenant, adapter, kv_config.kv_bits, policy),
                priority=params.scheduling.priority,
            )
            for index in range(count)
        ]
        schema = params.model_class or (form is not None and form[0] == "schema")
        streams = [
            Stream(self._driver, each, names, schema, ReasoningReader(is_inside=begins_inside) if splits else None)
            for each in requests
        ]
        self._driver.submit(*requests)
        return streams

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Return the token ids of `text`, as `generate` feeds them.

        A text that is far longer than `most` tokens raises `ContextExceeded` without being read to its end.
        """
        return self.codec.encode(text, add_special_tokens=add_special_tokens, most=most)

    @property
    def most_prompt_tokens(self) -> int:
        """The most tokens of a prompt; through a window, a text of 65,536 can be read."""
        return self._limits.prompt_tokens

    def check_size(self, text: str) -> None:
        """Raise `ContextExceeded` for a text that is too large for any prompt, by its bytes alone."""
        check_size(text, max(ENDLESS_TOKENS, self.most_prompt_tokens))

    def decode(self, tokens: Sequence[int]) -> str:
        return self.codec.decode(tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that `chat` feeds, as text."""
        most = chat_bytes(self._limits.prompt_tokens)
        return self.template.render(messages, tools=tools, template_options=template_options, most_bytes=most)

    @contextmanager
    def pin(self, prompt: Prompt, *, tenant: str = "", adapter: str | None = None) -> Iterator[int]:
        """Process a prompt, such as a system message, and keep it cached until the block ends.

        Yields the number of pinned tokens. Raises `InvalidInput` if the prefix cache is too small, and `Unsupported`
        without one.

            >>> with runtime.pin([{"role": "system", "content": instructions}]):
            ...     answer = runtime.chat([{"role": "system", "content": instructions}, question])
        """
        prefixes, tokens = self._prefix_cache(), self._encoded(prompt)[0]
        key = PrefixKey(tenant, adapter, self.kv_config.kv_bits)
        self.complete(tokens, max_tokens=1, ignore_eos=True, tenant=tenant, adapter=adapter)
        pinned = self._driver.exclusively(lambda: prefixes.pin(key, tokens))
        try:
            if pinned < len(tokens):
                raise InvalidInput(f"pin: {pinned} of {len(tokens)} tokens could be kept; open with more `prefixes`")
            yield pinned
        finally:
            if not self._is_closed:
                self._driver.exclusively(lambda: prefixes.unpin(key, tokens[:pinned]))

    def save_prefixes(self, path: str | Path) -> int:
        """Write the prefix cache to a file that only its owner can read; return the number of token runs in it."""
        prefixes = self._prefix_cache()
        return self._driver.exclusively(lambda: prefix_files.save(Path(path), prefixes, self._identity))

    def load_prefixes(self, path: str | Path) -> int:
        """Load a file that `save_prefixes` wrote for the same artifact; return the number of runs that fit.

        Raises `InvalidInput` for a file that is damaged, of another artifact, or writable by others.
        """
        prefixes = self._prefix_cache()
        return self._driver.exclusively(lambda: prefix_files.load(Path(path), prefixes, self.engine, self._identity))

    def load_adapter(self, name: str, path: str | Path | None = None) -> None:
        """Load a LoRA adapter for requests with `adapter=name`, from a PEFT folder or the artifact itself.

        Other requests continue. Raises `DoesNotFit` if memory is short, and `InvalidInput` or `Unsupported` for an
        adapter that cannot be used here.
        """
        if path is None:
            if self.artifact is None:
                raise InvalidInput("load_adapter: no artifact was opened that could hold it; give path")
            path = sealed_adapter(self.artifact.folder, name)
        self._adapters.load(name, Path(path))

    def drop_adapter(self, name: str) -> None:
        """Unload an adapter. Raises `InvalidInput` while a request uses it."""
        self._adapters.drop(name)

    @property
    def adapters(self) -> dict[str, int]:
        """The bytes of every loaded adapter, keyed by name."""
        return self._adapters.bytes

    def metrics(self) -> Metrics:
        """Return the counters since this runtime was opened."""
        return self._driver.metrics().model_copy(update=self.pressure.figures)

    def histograms(self) -> dict[str, Histogram]:
        """Return the distributions of latencies and lengths since this runtime was opened, by the names of `/metrics`.

        >>> with edgekit.open("my-artifact") as runtime:
        ...     runtime.generate("Once", max_tokens=20)
        ...     print(runtime.histograms()["inter_token_latency_seconds"].quantile(0.95))
        """
        return self._driver.histograms()

    def memory(self) -> MemoryReport:
        """Return predicted and measured memory by class. Raises `Unsupported` for a runtime without an artifact."""
        if self._baseline is None:
            raise Unsupported("memory: nothing was predicted for this runtime; open an artifact")
        return report(
            self._baseline,
            self.metrics(),
            self._budget.taken,
            self._grammars.bytes,
            (self.template.process_id, self._grammars.process_id),
            reserves_kv=self.engine.capabilities.reserves_kv,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences from the plan: the engine's notes, and the fallback steps taken because memory was short."""
        given_up = self._baseline.admitted.ladder if self._baseline else ()
        guarded = self._guard.notes if self._guard else ()
        return (*self.engine.notes, *guarded, *(f"memory was short: {step.change}" for step in given_up))

    def speculation(self) -> SpeculationReport | None:
        """Return the gain of drafting so far, and why it is on or off; None without adaptive drafting."""
        return self._drafting.report() if isinstance(self._drafting, Speculation) else None

    def step(self) -> None:
        """Run one step for all requests; for callers that read pieces by `Stream.poll`."""
        self._driver.step()

    def stalled_s(self) -> float:
        """Return for how many seconds requests have waited while no step began or ended; 0.0 if none waits."""
        return self._driver.stalled_s()

    def close(self) -> None:
        """Cancel all requests and release the engine; a running step ends early. Closing twice is allowed."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self.is_forked:
                return  # only the process that opened it may close it
            with ExitStack() as parts:  # closes all of them even if one fails, the last one first
                parts.callback(self._driver.close, self._interrupt, self._release)
                for worker in (self.template, self._grammars):
                    parts.callback(worker.close)  # a call that waits for it ends at once
        except BaseException:
            self._is_closed = False  # it may be tried again
            raise

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _release(self) -> None:
        with ExitStack() as parts:
            for part in (self.engine, self._drafting, self._guard):
                if part is not None:
                    parts.callback(part.close)

    def _interrupt(self) -> None:
        self.engine.interrupt()
        if isinstance(self._drafting, Speculation):
            self._drafting.interrupt()

    def _drafter_factory(self, drafting: bool | DraftName) -> DrafterFactory | None:
        if isinstance(drafting, bool) or self.pressure.pauses_drafting:
            return self._drafting if drafting is True and not self.pressure.pauses_drafting else None
        if not isinstance(self._drafting, Speculation):
            raise InvalidOption(f"drafting: this runtime was opened without {drafting}; open it with `draft`")
        return self._drafting.only(drafting)

    def _prefix_cache(self) -> Prefixes:
        if self._prefixes is None:
            raise Unsupported(
                "prefixes: none are kept by this runtime; open with `prefixes`, on an engine that can save"
            )
        return self._prefixes

    @property
    def _identity(self) -> str:
        return self.artifact.sha256 if self.artifact else ""

    def _reuse(self, tenant: str, adapter: str | None, kv_bits: int, policy: KVEvictionPolicy) -> Reuse | None:
        if self._prefixes is None:
            return None
        able = self.engine.capabilities
        can_keep = able.can_save_evicted and able.max_rewind != 0
        return Reuse(self._prefixes, PrefixKey(tenant, adapter, kv_bits), policy if can_keep else None)
