"""Cheap scores for images: the same losses, of the images made smaller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from rowprop.errors import InvalidInput


@dataclass(frozen=True)
class Downscaled:
    """Score rows by their losses on smaller images.

    At half the size a convolutional network's forward costs about a quarter. Give it as the ``scorer`` of
    :class:`rowprop.SelectiveBackprop` with the engine ``recompute``, the model being one that takes any image size.

    Args:
        function: ``(model, batch)`` to losses, as ``losses_fn``.
        scale: Factor of both sides, in (0, 1); default 0.5. Sides are rounded down, to no less than one pixel.

    Returns:
        When called with the model and the batch: what ``function`` returns for the batch with every 4-dimensional
        floating tensor, ``(N, C, H, W)``, scaled bilinearly. Other entries are passed on as they are.

    Raises:
        InvalidInput: ``scale`` is outside (0, 1).

    Bias:
        The scores rank rows by another input than the one trained on; the gradient of the rows that are kept is theirs.

    Example:
        >>> losses_fn = lambda model, batch: model(batch).flatten(1).mean(1)
        >>> import torch
        >>> Downscaled(losses_fn)(lambda images: images.new_ones(images.shape), torch.zeros(2, 3, 8, 8))
        tensor([1., 1.])

    References:
        mosaicml/composer, ``composer/algorithms/selective_backprop``, ``scale_factor`` (0.5 by default).
    """

    function: Callable[[Any, Any], Tensor]
    scale: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.scale < 1:
            raise InvalidInput(
                f"Downscaled got scale={self.scale!r} but a factor in (0, 1) was needed; 0.5 halves both sides."
            )

    def __call__(self, model: Any, batch: Any) -> Tensor:
        """Return the losses of the scaled batch."""
        return self.function(model, tree_map_only(Tensor, self._scaled, batch))

    def _scaled(self, entry: Tensor) -> Tensor:
        if not is_image(entry):
            return entry
        size = [max(1, int(self.scale * side)) for side in entry.shape[2:]]
        return F.interpolate(entry, size, mode="bilinear", align_corners=False)


def is_image(entry: Tensor) -> bool:
    """Whether a batch's tensor is of the shape and dtype of images."""
    return entry.dim() == 4 and entry.is_floating_point()
