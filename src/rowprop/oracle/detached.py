"""The meaning of ``attention="cut"`` as dense code, put in the place of torch's attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Detached:
    """A context in which attention detaches keys and values at the tokens that are not kept, within one sequence.

    It stands in the place of ``torch.nn.functional.scaled_dot_product_attention``, which nn.MultiheadAttention calls as
    well. ``kept`` has the shape of the losses: ``(N, T)``, ``(N, H, W)`` or flattened. The loss of token ``t`` comes
    from position ``t``; behind those with a loss sequences may have more positions, one where losses are flattened.
    """

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept
        self.calls = 0
        self._replaced = F.scaled_dot_product_attention

    def __enter__(self) -> Detached:
        self._replaced = F.scaled_dot_product_attention  # the user's own, where it is patched
        F.scaled_dot_product_attention = self.attend
        return self

    def __exit__(self, *exception: object) -> None:
        F.scaled_dot_product_attention = self._replaced

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As ``scaled_dot_product_attention``, with keys and values detached."""
        kept = self._of(key.shape[0], query.shape[-2])
        if key.ndim > 2 and key.shape[-2] == query.shape[-2] and kept is not None:
            self.calls += 1
            here = kept.view(-1, *[1] * (key.ndim - 3), key.shape[-2], 1)
            key, value = (torch.where(here, tensor, tensor.detach()) for tensor in (key, value))
        return self._replaced(query, key, value, *args, **kwargs)

    def _of(self, rows: int, length: int) -> Tensor | None:
        """Which positions of these sequences are kept, ``(rows, length)``; None if the losses are of others."""
        if self.kept.ndim > 1:
            kept = self.kept.flatten(1)
        elif self.kept.numel() in (rows * length, rows * (length - 1)):
            kept = self.kept.view(rows, -1)
        else:
            return None
        more = length - kept.shape[1]
        return F.pad(kept, (0, more)) if more >= 0 and kept.shape[0] == rows else None
