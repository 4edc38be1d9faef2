"""Scales that serve the whole model: groups of four bits, tuned until the stored model predicts like the float model.

The integers stay as they are. Each scale has a factor, and the mean KL of the predictions on the calibration text goes
down by Adam's rule. A killed run goes on after its last step.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgekit.common.files import write_file
from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.quant_methods import (
    CalibratedMethod,
    IntegerRows,
    QuantizedPart,
    QuantJob,
    TwoPasses,
    WeightPart,
    capped,
    dequantise,
    final_norm,
    head_blocks,
    head_name,
    last_norm,
    parts_of,
    sequences_at_once,
    storable,
)

if TYPE_CHECKING:
    import torch

PASSES = 3  # over the text
SEQUENCES_A_STEP = 4
_RATE = 2e-3  # of the first steps, as a share of a scale; it falls to nothing along a half cosine
_WARM_STEPS = 3
_MEAN_KEPT, _SQUARE_KEPT = 0.9, 0.95
_STATE = ".scale_tuning.npy"


class ScaleTuning:
    """The factors of all scales of four-bit linears, and Adam's means, as rows of one array."""

    def __init__(self, base: NeutralWeights, job: QuantJob) -> None:
        import torch

        self._base, self._exact, self._place, self._device = base, job.read, job.folder / _STATE, job.device
        self._ids = torch.tensor(job.calibration.sequences).to(job.device)
        self._modules: dict[str, tuple[slice, tuple[int, int]]] = {}
        size = 0
        for tensor in (tensor for part in parts_of(base.model)[1:-1] for tensor in part.tensors):
            if tensor.role == "linear" and base.recipe.format_of(tensor).has_few_bits:
                outputs, groups = base.scales(tensor.module).shape
                self._modules[tensor.module] = slice(size, size + outputs * groups), (outputs, groups)
                size += outputs * groups
        self._names = {f"{module}.weight": module for module in self._modules}
        self._factors, self._mean, self._square = torch.zeros((3, size), device=job.device)
        self._done = self._load()

    def run(self, progress: Progress) -> None:
        """Make the steps that are left."""
        import torch

        model, length = self._base.model, self._ids.shape[1]
        at_once = sequences_at_once(model, length)
        layers, steps = len(model.layers), list(self._batches())
        if self._done == len(steps):
            return
        done, total = 0, layers * (len(self._ids) + 2 * PASSES * len(self._ids))
        note = ""

        def tick(what: str) -> None:
            progress(done, total, f"tuning scales: {what}{note}")

        def forward(ids: torch.Tensor) -> torch.Tensor:
            nonlocal done
            hidden = TwoPasses(model, self._exact, ids, tick).forward()
            done += layers * len(ids)
            return hidden

        targets = torch.cat([forward(ids) for ids in torch.split(self._ids, at_once)])
        done += 2 * layers * sum(len(chosen) for chosen in steps[: self._done])
        for number, chosen in enumerate(steps[self._done :], self._done + 1):
            gradient, loss = torch.zeros_like(self._factors), 0.0
            for some in torch.split(chosen, at_once):
                found, its_loss = self.gradient(self._ids[some], targets[some], tick)
                gradient, loss = gradient + found, loss + its_loss
                done += 2 * layers * len(some)
            note = f" (KL {loss / (len(chosen) * length):.4f})"
            self._step(gradient, number, len(steps))
            self._save(number)
        progress(total, total, f"tuning scales{note}")

    def scales(self, module: str, rows: slice | None = None) -> torch.Tensor:
        """Return the scales of a module as they are stored; scales that are not tuned stay as they were."""
        import torch

        scales = torch.from_numpy(self._base.scales(module, rows)).to(self._device)
        if module not in self._modules:
            return scales
        factors = self.of_module(self._factors, module)
        return storable(scales * (factors if rows is None else factors[rows]).exp())

    def _batches(self) -> Iterator[torch.Tensor]:
        """Return the indices of each step's sequences; every pass takes them in another order."""
        import torch

        for number in range(PASSES):
            order = torch.randperm(len(self._ids), generator=torch.Generator().manual_seed(number))
            yield from torch.split(order.to(self._device), SEQUENCES_A_STEP)

    def gradient(
        self, ids: torch.Tensor, target: torch.Tensor, tick: Callable[[str], None]
    ) -> tuple[torch.Tensor, float]:
        """Return the gradient at all factors of the KL summed over the tokens `ids`, and that sum.

        `target`: the hidden states [batch, length, hidden] after the float model's last layer.
        """
        import torch

        gradient = torch.zeros_like(self._factors)

        def note(module: str, inputs: torch.Tensor, weights: torch.Tensor, at: torch.Tensor) -> None:
            if module in self._modules:
                place, (outputs, groups) = self._modules[module]
                by_weight = (at.T @ inputs).mul_(weights)
                gradient[place] = by_weight.view(outputs, groups, -1).sum(-1).flatten()

        passes = TwoPasses(self._base.model, self._read, ids, tick)
        at_last, loss = self._head_gradient(passes.forward(), target)
        passes.backward(at_last, note)
        return gradient, loss

    def of_module(self, values: torch.Tensor, module: str) -> torch.Tensor:
        """Return a module's part [out, in/group] of values for all factors."""
        place, shape = self._modules[module]
        return values[place].view(shape)

    def _read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Read a tensor as it is stored, with its factors."""
        import torch

        module = self._names.get(name)
        if module is None:
            return torch.from_numpy(self._base.tensor(name, rows)).to(self._device)
        integers = torch.from_numpy(self._base.integers(module, rows)).to(self._device)
        return dequantise(integers, self.scales(module, rows))

    def _head_gradient(self, hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the gradient of the summed KL at the stored model's last layer, and that sum."""
        import torch

        model = self._base.model
        matrix, norm = head_name(model), last_norm(model)
        with torch.enable_grad():
            before = hidden.clone().requires_grad_()
            normed = final_norm(model, self._read(norm), before)
        own = normed.detach().flatten(0, 1)
        exact = final_norm(model, self._exact(norm), target).flatten(0, 1)

        def logits(block: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
            rows = self._read(matrix, block)
            capped_own, slope = capped(model, own @ rows.T)
            return rows, capped_own, capped(model, exact @ self._exact(matrix, block).T)[0], slope

        own_sum, exact_sum = torch.full((2, len(own), 1), -torch.inf, device=self._device)
        for block in head_blocks(model):
            _, of_own, of_exact, _ = logits(block)
            own_sum = torch.logaddexp(own_sum, of_own.logsumexp(-1, keepdim=True))
            exact_sum = torch.logaddexp(exact_sum, of_exact.logsumexp(-1, keepdim=True))
        pulled, loss = torch.zeros_like(own), 0.0
        for block in head_blocks(model):
            rows, of_own, of_exact, slope = logits(block)
            of_own, of_exact = of_own.sub_(own_sum), of_exact.sub_(exact_sum)
            shares = of_exact.exp()
            loss += float((shares * (of_exact - of_own)).sum())
            difference = of_own.exp_().sub_(shares)
            pulled.addmm_(difference if slope is None else difference.mul_(slope), rows)
        (at_last,) = torch.autograd.grad(normed, before, pulled.view_as(normed))
        return at_last, loss

    def _step(self, gradient: torch.Tensor, step: int, steps: int) -> None:
        """Move the factors by Adam's rule."""
        self._mean.mul_(_MEAN_KEPT).add_(gradient, alpha=1 - _MEAN_KEPT)
        self._square.mul_(_SQUARE_KEPT).addcmul_(gradient, gradient, value=1 - _SQUARE_KEPT)
        rate = _RATE * min(1.0, step / _WARM_STEPS) * 0.5 * (1 + math.cos(math.pi * step / (steps + 1)))
        size = (self._square / (1 - _SQUARE_KEPT**step)).sqrt_().add_(1e-12)
        self._factors.addcdiv_(self._mean, size, value=-rate / (1 - _MEAN_KEPT**step))

    def _save(self, steps: int) -> None:
        import torch

        state = [each.cpu() for each in (self._factors, self._mean, self._square)]
        data = io.BytesIO()
        np.save(data, torch.cat([torch.tensor([float(steps)]), *state]).numpy(), allow_pickle=False)
        write_file(self._place, data.getvalue())

    def _load(self) -> int:
        """Take the state that an interrupted run left, and return its steps."""
        import torch

        if not self._place.exists():
            return 0
        stored = torch.from_numpy(np.load(self._place, allow_pickle=False))
        self._factors, self._mean, self._square = stored[1:].view(3, -1).to(self._device)
        return int(stored[0])


class TunedScales(CalibratedMethod):
    """Copies the integers that gptq chose, with tuned scales."""

    base_method = "gptq"
    tuning_passes = PASSES
    note = "scales of four-bit linears were tuned on the calibration text, against the float model's predictions"

    def __init__(self, job: QuantJob) -> None:
        super().__init__(job)
        assert job.base is not None, "the weights of `base_method`"
        self._base, self._tuning = job.base, ScaleTuning(job.base, job)
        self._tuning.run(job.progress)

    def choose(self, part: WeightPart) -> QuantizedPart:
        mine = {tensor.module for tensor in part.tensors} & set(self._base.modules())
        matrices = [module for module in sorted(mine) if not self._base.format_of(module).is_float]
        return QuantizedPart(self.read, {}, {}, kept={module: self._rows_of(module) for module in matrices})

    def advance(self, part: WeightPart, shard: Path) -> None:
        """Nothing depends on the parts before."""

    def _rows_of(self, module: str) -> Callable[[slice], IntegerRows]:
        def rows_of(rows: slice) -> IntegerRows:
            return IntegerRows(self._base.integers(module, rows), self._tuning.scales(module, rows).cpu().numpy())

        return rows_of
