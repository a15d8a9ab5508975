"""That a model is left as it was found: values, gradients, modes, buffers, hooks, and torch's random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def hooks_of(model: nn.Module) -> list[int]:
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


@contextmanager
def untouched(model: nn.Module, *leaves: Tensor) -> Iterator[None]:
    """Fail where the block leaves anything else of the model, of the gradients of ``leaves``, or of the random state.

    Gradients and buffers have to be the same objects with the same values.
    """
    tensors = [*model.parameters(), *leaves]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [(tensor.grad, None if tensor.grad is None else tensor.grad.clone()) for tensor in tensors]
    modes, buffers = [module.training for module in model.modules()], list(model.buffers())
    hooks, random = hooks_of(model), torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0, equal_nan=True)
    for tensor, (grad, values) in zip(tensors, grads, strict=True):
        assert tensor.grad is grad and (grad is None or torch.equal(grad, values))
    assert [module.training for module in model.modules()] == modes
    assert all(ours is theirs for ours, theirs in zip(model.buffers(), buffers, strict=True))
    assert hooks_of(model) == hooks
