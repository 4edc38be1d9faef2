"""What one token costs: the bytes that it reads and caches, and the operations that it needs. Pure arithmetic."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from edgekit.contracts.plan import MemoryFacts
from edgekit.contracts.recipe import Recipe, tensors_alike
from edgekit.contracts.recurrent import recurrent_bytes
from edgekit.contracts.stored_weights import stored_weight_bytes
from edgekit.model.parts import Layer
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor


class CacheFormat(NamedTuple):
    """How a target stores keys and values."""

    scale_bits: int = 32  # per group of quantised keys and values; 0: the scales are fixed
    # The first size that divides the head is the group; if none does, the last. Without any, the whole head is.
    groups: tuple[int, ...] = (64, 32)
    step_tokens: int = 1  # a cache's tokens are rounded up to a multiple
    bounds_windows: bool = False  # True: sliding-window layers store only their window

    def tokens(self, tokens: int) -> int:
        """Return the tokens for which a cache of `tokens` tokens has room."""
        return -(-tokens // self.step_tokens) * self.step_tokens

    def layer_tokens(self, layer: Layer, tokens: int) -> int:
        """Return the tokens of a layer that are stored."""
        return min(tokens, layer.window or tokens) if self.bounds_windows else tokens

    def kv_bytes(self, model: ModelSpec, tokens: int, kv_bits: int) -> int:
        """Return the bytes of one sequence's keys and values."""
        stored = self.tokens(tokens)
        return sum(
            count * (self.layer_tokens(layer, stored) * self._token_bits(layer, kv_bits) // 8)
            for layer, count in storing_layers(model)
        )

    def state_bytes(self, model: ModelSpec, tokens: int, kv_bits: int) -> int:
        """Return the bytes of one sequence's cache: its keys and values, and its recurrent part."""
        return recurrent_bytes(model, tokens) + self.kv_bytes(model, tokens, kv_bits)

    def _token_bits(self, layer: Layer, kv_bits: int) -> int:
        values, groups = 2 * layer.kv_heads * layer.head_dim, self.groups or (layer.head_dim,)
        group = next((group for group in groups if layer.head_dim % group == 0), groups[-1])
        return values * kv_bits + (-(-values // group) * self.scale_bits if kv_bits < 16 else 0)


def kv_bytes(model: ModelSpec, tokens: int, kv_bits: int, *, scale_bits: int = 32) -> int:
    """Return the bytes of one sequence's keys and values, where windowed layers store only their window."""
    return CacheFormat(scale_bits, bounds_windows=True).kv_bytes(model, tokens, kv_bits)


@lru_cache(maxsize=64)
def storing_layers(model: ModelSpec) -> tuple[tuple[Layer, int], ...]:
    """Return the different layers that cache keys and values, and how many of each; an encoder caches nothing."""
    return tuple(Counter(layer for layer in model.layers if layer.stores_kv and not model.encoder).items())


def touched_weight_bytes(model: ModelSpec, recipe: Recipe, memory: MemoryFacts) -> int:
    """Return the stored weight bytes that decoding one token reads: no other embedding rows, no idle experts."""
    stored = stored_weight_bytes(model, recipe, memory)
    return round(stored * touched_share(model, recipe))


def touched_share(model: ModelSpec, recipe: Recipe, tokens: int = 1) -> float:
    """Return the share of the stored weights that a step of `tokens` decoded tokens reads."""
    alike = tensors_alike(model, recipe)
    sizes = [(each.tensor, each.number * each.format.bytes(each.tensor.shape)) for each in alike]
    return sum(size * _used(model, tensor, tokens) for tensor, size in sizes) / sum(size for _, size in sizes)


@lru_cache(maxsize=64)
def active_parameters(model: ModelSpec) -> int:
    """Return the number of parameters that one token is multiplied with."""
    return max(1, round(sum(tensor.size * _used(model, tensor) for tensor in model.tensors())))


def operations_per_token(model: ModelSpec) -> int:
    """Return the operations of one prompt token in the model's matrices, without the head, which few tokens pass."""
    return max(1, 2 * (active_parameters(model) - model.vocab_size * model.hidden_size))


def _used(model: ModelSpec, tensor: Tensor, tokens: int = 1) -> float:
    """Return the share of a tensor that `tokens` read: their rows of an untied embedding, or their experts."""
    if tensor.role == "embedding":
        is_head = model.tied and tensor.shape[-1] == model.hidden_size
        return 1.0 if is_head else min(1.0, tokens / tensor.shape[0])
    if tensor.is_of_expert and model.experts is not None:
        idle = 1 - model.experts.active / model.experts.count  # assumes that tokens choose experts independently
        return 1 - float(idle**tokens)
    return 1.0
