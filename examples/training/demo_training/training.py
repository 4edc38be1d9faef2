"""Trains one model on one row of tokens. A killed run continues with the same result.

The batch of a step follows from (seed, step) and nothing else is random, so a checkpoint holds weights, the optimisers'
state and three numbers. Checkpoints are safetensors: nothing is unpickled.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from edgekit.common.files import write_file
from examples.training.demo_training.llama import Llama, Shape


@dataclass(frozen=True)
class Pace:
    """Settings of a training run, which ends at `tokens` or `minutes`, whichever comes first."""

    tokens: int | None
    minutes: float | None
    batch_windows: int
    micro_windows: int
    rate: float
    warmup_steps: int
    matrices: str = "muon"
    length: int = 512
    # The part at the end that is read in longer windows, so that all positions of the rope are known; as many tokens
    # a step as before.
    ending: float = 0.2
    ending_length: int = 2048
    # The part at the end in which the rate falls to zero.
    decay: float = 0.6
    weight_decay: float = 0.1
    clip: float = 1.0
    # The part of the draft's loss that is its distance to the target's distribution.
    distil: float = 0.9
    checkpoint_minutes: float = 5.0
    seed: int = 0

    @property
    def step_tokens(self) -> int:
        return self.batch_windows * self.length


@dataclass
class Progress:
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def share(self, pace: Pace) -> float:
        """Completed share of the run, 0 to 1."""
        by_tokens = self.tokens / pace.tokens if pace.tokens else 0.0
        by_time = self.seconds / (60 * pace.minutes) if pace.minutes else 0.0
        return min(1.0, max(by_tokens, by_time))


def learning_rate(pace: Pace, progress: Progress) -> float:
    """Up in a line, flat, then down to zero in a line: its end does not have to be known at its beginning."""
    rising = min(1.0, (progress.step + 1) / max(1, pace.warmup_steps))
    falling = min(1.0, (1.0 - progress.share(pace)) / pace.decay)
    return pace.rate * rising * falling


class Windows:
    """Windows of length + 1 tokens, in a new order each time all were seen."""

    def __init__(self, tokens: np.ndarray, length: int, seed: int) -> None:
        self._tokens, self._length, self._seed = tokens, length, seed
        self.count = (len(tokens) - 1) // length
        if self.count < 1:
            raise SystemExit(f"{len(tokens)} tokens are fewer than one window of {length}; give more source")
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def batch(self, step: int, size: int) -> Tensor:
        """The windows of one step, [size, length + 1]."""
        rows = [self._window(step * size + index) for index in range(size)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _window(self, index: int) -> np.ndarray:
        epoch, place = divmod(index, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(self.count)
        start = int(self._order[place]) * self._length
        return self._tokens[start : start + self._length + 1]


class Stage:
    """Training of one model, with its checkpoint."""

    def __init__(
        self,
        name: str,
        model: Llama,
        pace: Pace,
        folder: Path,
        device: torch.device,
        bf16: bool,
        compiled: bool = False,
    ) -> None:
        self.name, self.model, self.pace, self.progress = name, model.to(device), pace, Progress()
        self.is_done = False
        self._device, self._bf16 = device, bf16
        self._loss: Callable[[Tensor, Llama | None], Tensor] = self._of_part
        if compiled:
            self._loss = torch.compile(self._of_part, dynamic=False)  # once for each of the two lengths
        self._optimisers = _optimisers(model, pace)
        self._checkpoint, self._log = folder / f"{name}.safetensors", folder / f"{name}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def train(self, tokens: np.ndarray, teacher: Llama | None = None) -> bool:
        """Train until the pace's end; False where a signal asked to stop first. Either way a checkpoint stands."""
        lengths = (self.pace.length, self.pace.ending_length)
        windows = {length: Windows(tokens, length, self.pace.seed) for length in lengths}
        saved_at = shown_at = time.monotonic()
        with _asked_to_stop() as asked:
            while not self.is_done and not asked:
                started = time.monotonic()
                rate = learning_rate(self.pace, self.progress)
                length = lengths[self.progress.share(self.pace) >= 1.0 - self.pace.ending]
                batch = windows[length].batch(self.progress.step, self.pace.step_tokens // length)
                loss = self._step(batch, rate, teacher)
                now = time.monotonic()
                self.progress.step += 1
                self.progress.tokens += self.pace.step_tokens
                self.progress.seconds += now - started
                self.is_done = self.progress.share(self.pace) >= 1.0
                self._note(loss, rate)
                if now - shown_at > 30 or self.is_done:
                    shown_at = now
                    print(f"{self.where()}, loss {loss:.3f}, rate {rate:.2e}", flush=True)
                if now - saved_at > 60 * self.pace.checkpoint_minutes:
                    saved_at = now
                    self.save()
        self.save()
        return self.is_done

    def where(self) -> str:
        done = self.progress
        speed = done.tokens / max(done.seconds, 1e-9)
        return (
            f"{self.name}: step {done.step}, {done.tokens / 1e6:.2f} M tokens, {done.seconds / 60:.1f} min, "
            f"{speed:,.0f} tokens/s, {done.share(self.pace):.0%}"
        )

    def save(self) -> None:
        """Write weights, optimisers and progress to one file, which is whole or absent."""
        tensors = {f"model.{name}": each.contiguous() for name, each in self.model.state_dict().items()}
        for number, optimiser in enumerate(self._optimisers):
            for index, state in optimiser.state_dict()["state"].items():
                tensors |= {f"optimiser.{number}.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
        done = self.progress
        metadata = {
            "shape": self.model.shape.as_text(),
            "progress": json.dumps([done.step, done.tokens, done.seconds]),
            "done": json.dumps(self.is_done),
        }
        write_file(self._checkpoint, save({name: each.cpu() for name, each in tensors.items()}, metadata))

    def resume(self) -> bool:
        """Go on from the checkpoint; False where there is none."""
        if not self._checkpoint.exists():
            self._log.unlink(missing_ok=True)
            return False
        with safe_open(self._checkpoint, "pt") as file:
            metadata = file.metadata()
            if metadata["shape"] != self.model.shape.as_text():
                raise SystemExit(f"{self._checkpoint}: of another shape, {metadata['shape']}; use another --out")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.model.load_state_dict(_under("model.", tensors))
        for number, optimiser in enumerate(self._optimisers):
            whole = optimiser.state_dict()
            whole["state"] = {}
            for name, tensor in _under(f"optimiser.{number}.", tensors).items():
                index, _, key = name.partition(".")
                whole["state"].setdefault(int(index), {})[key] = tensor
            optimiser.load_state_dict(whole)
        self.progress = Progress(*json.loads(metadata["progress"]))
        self.is_done = json.loads(metadata["done"]) or self.progress.share(self.pace) >= 1.0
        self._forget_steps_after_the_checkpoint()
        return True

    def _step(self, batch: Tensor, rate: float, teacher: Llama | None) -> float:
        total = 0.0
        at_once = max(1, self.pace.micro_windows * self.pace.length // (batch.shape[1] - 1))
        parts = torch.split(batch.to(self._device), at_once)
        for part in parts:
            loss = self._loss(part, teacher) * (len(part) / len(batch))
            torch.autograd.backward(loss)
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.pace.clip)
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return total

    def _of_part(self, part: Tensor, teacher: Llama | None) -> Tensor:
        """The loss of some windows; one function, so that compiled the logits are never written in float32."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            logits = self.model(part[:, :-1]).flatten(0, 1).float()
            with torch.no_grad():
                taught = teacher(part[:, :-1]).flatten(0, 1).float() if teacher is not None else None
        plain = functional.cross_entropy(logits, part[:, 1:].flatten())
        if taught is None:
            return plain
        distance = functional.kl_div(
            logits.log_softmax(-1), taught.log_softmax(-1), reduction="batchmean", log_target=True
        )
        return (1 - self.pace.distil) * plain + self.pace.distil * distance

    def _note(self, loss: float, rate: float) -> None:
        line = {"step": self.progress.step, "tokens": self.progress.tokens, "loss": loss, "rate": rate}
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _forget_steps_after_the_checkpoint(self) -> None:
        """A killed run noted steps that no checkpoint holds; they are done again."""
        if self._log.exists():
            whole = [line for line in self._log.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
            kept = [line for line in whole if json.loads(line)["step"] <= self.progress.step]
            write_file(self._log, "".join(f"{line}\n" for line in kept).encode())


def fresh_or_continued(shape: Shape, init_from: Path | None, seed: int) -> Llama:
    """A model with new weights, or with the weights of a folder, which then says its shape."""
    from examples.training.demo_training.llama import read_model

    return read_model(init_from) if init_from else Llama(shape, seed)


def _optimisers(model: Llama, pace: Pace) -> list[torch.optim.Optimizer]:
    """Muon (or AdamW) for the matrices between the layers; AdamW for the embedding, and for norms without decay."""
    named = list(model.named_parameters())
    norms = [each for _, each in named if each.ndim == 1]
    embedding = [each for name, each in named if name == "embed_tokens.weight"]
    matrices = [each for name, each in named if each.ndim == 2 and name != "embed_tokens.weight"]
    plain: list[dict[str, object]] = [
        {"params": embedding, "weight_decay": pace.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    if pace.matrices == "adamw":
        plain.append({"params": matrices, "weight_decay": pace.weight_decay})
        return [torch.optim.AdamW(plain, lr=pace.rate, betas=(0.9, 0.95))]
    muon = torch.optim.Muon(
        matrices, lr=pace.rate, weight_decay=pace.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    return [torch.optim.AdamW(plain, lr=pace.rate, betas=(0.9, 0.95)), muon]


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that a step in flight ends and is saved; a second one ends at once."""
    asked: list[int] = []
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    try:
        for each in before:
            signal.signal(each, ask)
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
