"""Further inputs of some layers: a per-layer embedding, and the keys and values of an earlier layer (Gemma 4).

The input of a layer is a few values for each token: a row of a second embedding, mixed with a projection of the first.
It depends on the token alone, so it is computed once for each different token of a text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from edgekit.quant.shards import ReadRows

    KeysValues = tuple[torch.Tensor, torch.Tensor]


class SideInputs:
    """The per-layer inputs of one batch of texts, and the keys and values that later layers read again."""

    def __init__(self, inputs: torch.Tensor | None = None, where: torch.Tensor | None = None) -> None:
        self._inputs, self._where = inputs, where  # [different tokens, layers × size]; [batch, length]
        self.kept: dict[int, KeysValues] = {}  # by layer: [batch, heads, length, head_dim]

    def input_of(self, index: int, size: int) -> torch.Tensor:
        """Return the input [batch, length, size] of layer `index`."""
        assert self._inputs is not None and self._where is not None, "the model has per-layer inputs"
        return self._inputs[:, index * size : (index + 1) * size][self._where]

    def keep(self, spec: ModelSpec, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the keys and values of layer `index` if a later layer reads them."""
        if any(spec.kv_owner(later) == index for later in range(index + 1, len(spec.layers))):
            self.kept[index] = keys, values


def layer_inputs(spec: ModelSpec, ids: torch.Tensor, embedded: torch.Tensor, read: ReadRows) -> SideInputs:
    """Return the per-layer inputs of the tokens `ids` [batch, length], whose scaled embeddings are `embedded`."""
    import torch

    if spec.per_layer_input is None:
        return SideInputs()
    size = spec.per_layer_input.size
    tokens, where = torch.unique(ids, return_inverse=True)
    places = torch.arange(ids.numel(), device=ids.device)
    first = torch.empty_like(tokens).scatter_(0, where.flatten(), places)
    table = f"{spec.prefix}embed_tokens_per_layer.weight"
    looked_up = torch.cat([read(table, slice(token, token + 1)) for token in tokens.tolist()]) * size**0.5
    projected = embedded.flatten(0, 1)[first] @ read(f"{spec.prefix}per_layer_model_projection.weight").T
    by_layer = (projected * spec.hidden_size**-0.5).unflatten(-1, (-1, size))
    mixed = normed(by_layer, spec.norm_epsilon) * read(f"{spec.prefix}per_layer_projection_norm.weight")
    return SideInputs((mixed.flatten(-2) + looked_up) * 2**-0.5, where)


def normed(values: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the values, each row divided by its root mean square."""
    import torch

    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
