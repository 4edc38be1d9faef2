"""Quantising on another device: only the device of the tensors differs, and none is left on the processor.

The second device is torch's `meta`, behind which a dispatcher keeps the numbers: it computes as the processor does, but
refuses to mix tensors of both, and numpy refuses its tensors, as those of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from edgekit.common.content_store import ContentStore
from edgekit.contracts.neutral import CalibrationFact, NeutralWeights
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import InvalidInput, TargetFailed, Unsupported
from edgekit.quant import compute
from edgekit.quant.calibration import Calibration
from edgekit.quant.compute import device_for
from edgekit.quant.pipeline import neutral_weights

pytestmark = pytest.mark.quantize

OTHER = torch.device("meta")
# All that computes in a way of its own.
CHOSEN = ("llama", "phi3", "gemma2", "gemma4", "lfm2", "qwen3_5", "qwen3_moe", "gpt_oss")


class OnOtherDevice(torch.Tensor):
    """A tensor of the other device; `numbers` is on the processor."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> OnOtherDevice:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device=OTHER, requires_grad=numbers.requires_grad,
        )  # fmt: skip
        made.numbers = numbers
        return made  # type: ignore[no-any-return]

    def tolist(self) -> list[Any]:
        """Torch has this for every device, but not for classes like this one."""
        found: list[Any] = self.numbers.tolist()
        return found

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(function, args, kwargs or {})


def computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operator on the processor, for tensors and results of the other device."""
    asked = kwargs.get("device")
    given: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, given.append, (args, kwargs))
    others = [isinstance(each, OnOtherDevice) for each in given]
    copies = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    on_processor = [each for each, is_other in zip(given, others, strict=True) if not is_other and each.dim()]
    if any(others) and on_processor and not copies:
        raise RuntimeError(f"{function}: tensors of the processor and of the other device")
    if asked == OTHER:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map_only(OnOtherDevice, lambda each: each.numbers, (args, kwargs))
    found = function(*args, **kwargs)
    stays = asked is None and (others[0] if copies and others else any(others))
    if not (stays or asked == OTHER):
        return found
    known = {id(each.numbers): each for each in given if isinstance(each, OnOtherDevice)}
    with torch.inference_mode(False):  # a class like this one has no views in that mode
        return tree_map_only(
            torch.Tensor, lambda each: known[id(each)] if id(each) in known else OnOtherDevice(each), found
        )


class OtherDevice(TorchDispatchMode):
    """Makes tensors that are asked for on the other device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(function, args, kwargs or {})


@contextmanager
def other_device() -> Iterator[torch.device]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a mode holds for one thread
    try:
        with OtherDevice():
            yield OTHER
    finally:
        torch.set_num_threads(threads)


def rule_text(count: int = 8, length: int = 32, vocabulary: int = 160) -> Calibration:
    rows = tuple(
        tuple(3 + (seed * 7 + step * step) % (vocabulary - 3) for step in range(length)) for seed in range(count)
    )
    return Calibration(
        rows, CalibrationFact(sha256="0" * 64, description="a rule", sequences=count, tokens=count * length)
    )


def made(folder: Path, store: str, device: Any, method: Any) -> NeutralWeights:
    text = rule_text()
    return neutral_weights(
        folder / "model",
        named_recipe("balanced" if method == "gptq" else "s4-g32"),
        method=method,
        calibration=text,
        store=ContentStore(folder / store),
        compute=device,
    )


def test_the_other_device_refuses_tensors_of_the_processor() -> None:
    with other_device() as device:
        ours = torch.ones(3, device=device)
        assert ours.device == device
        assert (ours + 1).device == device
        with pytest.raises(RuntimeError, match="of the processor and of the other device"):
            ours + torch.ones(3)
        with pytest.raises((RuntimeError, TypeError)):
            ours.numpy()
        assert (ours + 1).cpu().numpy().tolist() == [2, 2, 2]


@pytest.mark.parametrize(("family", "method"), [("llama", "awq"), *((family, "gptq") for family in CHOSEN)])
def test_another_device_chooses_the_same_integers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, method: str
) -> None:
    monkeypatch.setattr(compute, "_has_bfloat16", lambda: False)  # as on the other device
    kind, config = models.EVERY[family]
    models.write_model(tmp_path / "model", kind, config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours = made(tmp_path, "ours", "cpu", method)
    finally:
        torch.set_num_threads(threads)
    with other_device() as device:
        theirs = made(tmp_path, "theirs", device, method)
    assert "computed by torch on meta, where edgekit was never tried" in theirs.manifest.notes
    # A processor sums one half of the symmetric second moments, other devices both: integers at a tie may differ, and
    # then those that are rounded after them.
    matrices = [module for module in ours.modules() if not ours.format_of(module).is_float]
    differing = [float((ours.integers(module) != theirs.integers(module)).mean()) for module in matrices]
    assert sum(differing) / len(differing) < 0.1
    lost = [sum(each.output_error or 0 for each in made.manifest.statistics.values()) for made in (ours, theirs)]
    assert lost[1] == pytest.approx(lost[0], rel=0.02)


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_torch_does_not_find_is_refused(name: Any) -> None:
    if device_for(None).type == name:
        pytest.skip(f"{name} is here")
    with pytest.raises(Unsupported, match=f"compute {name}: torch .* finds no such device here; leave it out"):
        device_for(name)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(InvalidInput, match="compute: must be cpu, cuda, mps, found 'tpu'"):
        device_for("tpu")  # type: ignore[arg-type]


def test_torch_takes_a_gpu_that_it_finds() -> None:
    expected = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert device_for(None).type == expected


def test_linears_are_multiplied_in_bfloat16_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weights = torch.randn(3, 5, 64), torch.randn(32, 64, requires_grad=True)
    exact = inputs @ weights.T
    monkeypatch.setattr(compute, "_has_bfloat16", lambda: True)
    rounded = compute.product_on(torch.device("cpu"))(inputs, weights)
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, exact)
    assert (rounded - exact).norm() < 0.005 * exact.norm()
    (own,) = torch.autograd.grad(rounded.sum(), weights)
    (wanted,) = torch.autograd.grad(exact.sum(), weights)
    assert (own - wanted).norm() < 0.02 * wanted.norm()
    assert torch.equal(compute.product_on(OTHER)(inputs, weights), exact), "a GPU computes in float32"
    monkeypatch.setattr(compute, "_has_bfloat16", lambda: False)
    assert torch.equal(compute.product_on(torch.device("cpu"))(inputs, weights), exact)


def test_the_processor_goes_on_where_a_gpu_that_nobody_named_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's `meta` itself, which has no numbers, fails at once."""
    kind, config = models.EVERY["llama"]
    models.write_model(tmp_path / "model", kind, config)
    with pytest.raises(TargetFailed, match=r"compute meta: torch: .*; with compute cpu, the same command continues"):
        made(tmp_path, "named", OTHER, "gptq")
    monkeypatch.setattr(compute, "device_for", lambda given: OTHER)
    weights = made(tmp_path, "chosen", None, "gptq")
    assert not any("computed by torch" in note for note in weights.manifest.notes)
    assert "the processor goes on" in caplog.text
