"""The output layer of a `Transformer`: one that shares its matrix with the embedding, or a given
one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnzoo.core.checks import shown
from attnzoo.core.registry import get_variant
from attnzoo.nn.adaptive_softmax import AdaptiveSoftmax
from attnzoo.nn.output_layer import OutputLayer


def output_of(
    embed: nn.Embedding, output: Any, params: dict[str, Any] | None
) -> OutputLayer | AdaptiveSoftmax:
    """The layer that the arguments ``output`` and ``output_params`` of `Transformer` describe."""
    if params is not None and not isinstance(params, dict):
        raise TypeError(f"output_params must be a dict or None, got {shown(params)}")
    if isinstance(output, (OutputLayer, AdaptiveSoftmax)):
        if params is not None:
            raise TypeError("output_params must be None if output is a layer, got a dict")
        for name, size, wanted in (
            ("in_features", output.in_features, embed.embedding_dim),
            ("num_classes", output.num_classes, embed.num_embeddings),
        ):
            if size != wanted:
                raise ValueError(f"output must have {name} = {wanted}, got {size}")
        return output
    if not isinstance(output, str):
        raise TypeError(
            "output must be the name of a variant, an OutputLayer, a MixtureOutput or an "
            f"AdaptiveSoftmax, got {shown(output)}"
        )
    # The matrix has the device and the dtype of the embedding, and the bias needs the same.
    if fixed := {"in_features", "num_classes", "variant", "device", "dtype"} & set(params or {}):
        raise TypeError(f"output_params must not have {', '.join(sorted(fixed))}")
    return TiedOutput(embed, output, params or {})


class TiedOutput(OutputLayer):
    """An output layer that reads its matrix from an embedding.

    The matrix is a parameter of the embedding only: state dicts have it once, and ``to_empty`` or
    sharding cannot separate the two.
    """

    def __init__(self, embed: nn.Embedding, variant: str, params: dict[str, Any]) -> None:
        sizes = embed.embedding_dim, embed.num_embeddings
        bias = get_variant(variant).output_bias is not None
        super().__init__(*sizes, variant, **{"bias": bias, **params})
        del self._parameters["weight"]
        self.tie(embed)

    def tie(self, embed: Any) -> None:
        """Reads the matrix from ``embed`` from now on.

        Raises:
            ValueError: ``embed`` has no weight of shape (V, d).
        """
        weight, shape = getattr(embed, "weight", None), (self.num_classes, self.in_features)
        if not isinstance(weight, Tensor) or weight.shape != shape:
            actual = shown(embed) if not isinstance(weight, Tensor) else tuple(weight.shape)
            raise ValueError(
                f"embed must have a weight of shape {shape}, because the output layer shares it, "
                f"got {actual}"
            )
        self.__dict__["tied"] = embed  # not as a submodule, because the model has it already

    def shard_classes(self, mesh: Any) -> OutputLayer:
        """Raises a ValueError: the embedding needs all classes."""
        raise ValueError(
            "output must not share the embedding's matrix if its classes are sharded: give "
            "Transformer an OutputLayer as output"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "tied" in self.__dict__:
            raise AttributeError(
                "output.weight is the embedding's matrix: set embed.weight instead"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "tied" in self.__dict__:
            return self.__dict__["tied"].weight
        return super().__getattr__(name)

    def _get_name(self) -> str:
        return "OutputLayer"

    def reset_parameters(self) -> None:
        """Sets the bias and the variant's parameters to their initial values."""
        if self.bias is not None:
            nn.init.constant_(self.bias, self.bias_start)
        self._reset(self.parameter_tensors())
