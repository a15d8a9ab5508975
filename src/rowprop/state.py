"""Restore state that a measurement must not change: random state, buffers, modes, gradients and parameters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.batch import tensors


@contextmanager
def buffers_kept(modules: list[nn.Module]) -> Generator[None]:
    """Put every buffer of ``modules`` back as found, in object and in value."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in kept:
            setattr(module, name, buffer)  # a forward may have bound a new tensor instead of writing into the old
            # Through .data: the values equal the ones that an earlier graph saved, so its version check must not trip.
            buffer.data.copy_(value)


@contextmanager
def modes_kept(modules: list[nn.Module]) -> Generator[None]:
    """Put the modes of ``modules`` back as found."""
    modes = [module.training for module in modules]
    try:
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training


@contextmanager
def evaluating(modules: list[nn.Module]) -> Generator[None]:
    """Put ``modules`` in evaluation mode inside the block."""
    with modes_kept(modules):
        for module in modules:
            module.training = False
        yield


def leaves_of(model: nn.Module, batch: object) -> list[Tensor]:
    """The tensors in which a backward may leave a gradient."""
    return [*model.parameters(), *(t for t in tensors(batch) if t.is_leaf and t.requires_grad)]


@contextmanager
def backward_undone(model: nn.Module, batch: object) -> Generator[None]:
    """Put back the gradients, which start as None, the buffers, the modes and the random state after the block."""
    modules, leaves = list(model.modules()), leaves_of(model, batch)
    grads = [leaf.grad for leaf in leaves]
    with rng_kept(modules, batch), buffers_kept(modules), modes_kept(modules):
        try:
            for leaf in leaves:
                leaf.grad = None
            yield
        finally:
            for leaf, grad in zip(leaves, grads, strict=True):
                leaf.grad = grad


@contextmanager
def step_undone(model: nn.Module, batch: object) -> Generator[dict[Tensor, Tensor]]:
    """As :func:`backward_undone`; also restores the parameters' values, and yields a copy of them."""
    values: dict[Tensor, Tensor] = {p: p.detach().clone() for p in model.parameters()}
    with backward_undone(model, batch):
        try:
            yield values
        finally:
            for parameter, value in values.items():
                if not torch.equal(parameter, value):
                    parameter.data.copy_(value)


def device_of(model: object, batch: object) -> torch.device | None:
    """The device of the model's parameters or else of the batch; None if neither has tensors."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((tensor.device for tensor in chain(parameters, tensors(batch))), None)


def devices_of(modules: list[nn.Module], batch: object) -> set[torch.device]:
    """Where the batch and the parameters are."""
    devices = {tensor.device for tensor in tensors(batch)}
    return devices | {parameter.device for module in modules for parameter in module.parameters(recurse=False)}


@contextmanager
def rng_kept(modules: list[nn.Module], batch: object) -> Generator[None]:
    """Put the random state of the CPU and of every device involved back as found."""
    devices = devices_of(modules, batch)
    fork_rng = cast("Callable[..., AbstractContextManager[None]]", cast("Any", torch.random).fork_rng)
    with ExitStack() as stack:
        stack.enter_context(fork_rng(devices=[]))
        for kind in {device.type for device in devices} - {"cpu", "meta"}:
            indices = [device.index for device in devices if device.type == kind]
            stack.enter_context(fork_rng(devices=indices, device_type=kind))
        yield


def rng_states(devices: Iterable[torch.device]) -> list[Tensor]:
    """The random state of the CPU and of every accelerator among ``devices``."""
    found = sorted({device for device in devices if device.type not in ("cpu", "meta")}, key=str)
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in found)]
