"""Tensor parallelism: the functions between plain tensors and DTensors, and collectives that have a gradient.

Between DTensors the gradient is a DTensor whose local tensor is the sliced gradient, so DTensor runs its ops on K rows.
The functions here move gradients between ranks. Each runs its own backward on a DTensor that has K rows.

Collectives must have the same sizes on all ranks. So a rule decides by what all ranks share: the rows, the global shape
and the placements, never by a value. Before the first collective of a backward the ranks compare their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist

from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.backward import outer
from rowprop.backprop.rows.refusals import NeedsAllRows, check_readable
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rules.functions import own_backward
from rowprop.backprop.rules.registry import function_rule
from rowprop.errors import InvalidInput


def _check(g: RowSlice, mesh: Any, shape: Sequence[int], *placements: Any) -> None:
    """Check that each rank holds all rows and as much of the other dimensions, and that all ranks keep the same."""
    for every in placements:
        dims = [getattr(placement, "dim", None) for placement in every]  # None: replicated, or to be summed
        for dim in {dim % len(shape) for dim in dims if dim is not None}:
            if g.layout.holds(dim):
                raise NeedsAllRows("the rows lie in a dimension that is sharded over the ranks")
            if shape[dim] % prod(mesh.shape[place] for place, other in enumerate(dims) if other == dim):
                raise NeedsAllRows("a dimension is sharded over the ranks in parts of different sizes")
    for place in range(mesh.ndim):
        _compare(g.rows, mesh.get_group(place))


def _compare(rows: RowSet, group: Any) -> None:
    """Raise an error unless all ranks of the group keep the same rows; compared once for each backward."""
    outer().of((rows, group), partial(_compared, rows, group))


def _compared(rows: RowSet, group: Any) -> None:
    index = rows.index
    check_readable(index, "whether all ranks of a tensor-parallel group keep the same rows")
    # Multiplied by odd 64-bit numbers, so that a sum tells apart which rows are kept and in which order.
    mixed = (index + 1) * 0x1E3779B97F4A7C15
    places = 2 * torch.arange(rows.kept, device=index.device) + 1
    number = ((mixed ^ (mixed >> 29)) * places).sum()
    both = torch.stack([number, ~number])
    dist.all_reduce(both, dist.ReduceOp.MAX, group)  # ~ turns the largest into the smallest
    if int(both[0]) != ~int(both[1]):
        raise InvalidInput(
            "the ranks of a tensor-parallel group picked different rows; broadcast the rows of one rank."
        )


def _with_shape(spec: Any, shape: Sequence[int]) -> Any:
    """The spec of a contiguous DTensor of another shape."""
    new, meta = copy(spec), spec.tensor_meta
    stride = torch.empty(shape, device="meta").stride()
    new.tensor_meta = meta._replace(shape=torch.Size(shape), stride=stride)
    return new


def _of_kept(g: RowSlice, spec: Any) -> Any:
    """The kept rows as a DTensor that has no other rows."""
    from torch.distributed.tensor import DTensor

    make: Any = DTensor
    return make(g.values, _with_shape(spec, g.kept_shape(spec.shape)), requires_grad=False)


def _around(g: RowSlice, out: Any, shape: Sequence[int]) -> Any:
    """A DTensor of the kept rows as one of all rows, whose local tensor is the sliced gradient."""
    return type(out)(RowGrad(_local(g, out._local_tensor)), _with_shape(out._spec, shape), requires_grad=False)


def _local(g: RowSlice, values: Any) -> RowSlice:
    return g.like(values.wait() if hasattr(values, "wait") else values)  # of a collective that still runs


@function_rule("torch.distributed.tensor._api._ToTorchTensor", positions=True)
def _to_local(node: Any, backward: Any, g: RowSlice) -> Any:
    spec = node.dtensor_spec
    _check(g, spec.mesh, spec.shape, spec.placements, node.grad_placements or ())
    out, *others = own_backward(node, g.values, dtensor_spec=_with_shape(spec, g.kept_shape(spec.shape)))
    return _around(g, out, spec.shape), *others


@function_rule("torch.distributed.tensor._api._FromTorchTensor", positions=True)
def _from_local(node: Any, backward: Any, g: RowSlice) -> Any:
    spec = node.apply.spec
    placements = getattr(node, "grad_placements", None) or ()  # torch 2.11 has none
    _check(g, spec.mesh, spec.shape, spec.placements, node.forward_input_placements, placements)
    out, *others = own_backward(node, _of_kept(g, spec))
    return _local(g, out), *others


@function_rule("torch.distributed.tensor._redistribute.Redistribute", positions=True)
def _redistribute(node: Any, backward: Any, g: RowSlice) -> Any:
    spec, before = node.apply.spec, node.current_spec
    _check(g, spec.mesh, spec.shape, spec.placements, before.placements)
    out, *others = own_backward(node, _of_kept(g, spec), current_spec=_with_shape(before, g.kept_shape(spec.shape)))
    return _around(g, out, spec.shape), *others


_REDUCED = {
    "megatron.core.tensor_parallel.mappings._CopyToModelParallelRegion": "group",
    "megatron.core.tensor_parallel.mappings._ReduceFromModelParallelRegion": None,
    "torch.distributed.nn.functional._AllReduce": "group",
    "torch._library.autograd.GeneratedBackwardFor__c10d_functional_all_reduce_default": "group_name",
    "torch._library.autograd.GeneratedBackwardFor__c10d_functional_wait_tensor_default": None,
    "transformers.distributed.parallel_utils._AllReduceBackward": "process_group",
    "transformers.distributed.parallel_utils._AllReduceForward": None,
    "transformers.distributed.parallel_utils._WaitTensor": None,
}
"""Functions whose gradient is summed over ranks entry by entry, with the attribute that holds the group; None: over
none."""


def _entry_by_entry(node: Any, backward: Any, g: RowSlice, group: str | None) -> Any:
    if group is not None:
        _compare(g.rows, _group(getattr(node, group)))
    # transformers' backward writes to the gradient, and others may hold the same values.
    return tuple(None if out is None else _local(g, out) for out in own_backward(node, g.values.clone()))


def _group(group: Any) -> Any:
    resolve: Any = cast(Any, dist).distributed_c10d._resolve_process_group
    return resolve(group) if isinstance(group, str) else group


for _name, _holder in _REDUCED.items():
    function_rule(_name, positions=True)(partial(_entry_by_entry, group=_holder))


_ALONG = {
    **{
        f"torch._library.autograd.GeneratedBackwardFor_{space}_{name}_default": (0, "group_name")
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor")
        for space in ("_c10d_functional", "_c10d_functional_autograd")
    },
    **{
        f"megatron.core.tensor_parallel.mappings._{name}Region": (0 if "Sequence" in name else -1, "group")
        for name in """ScatterToModelParallel GatherFromModelParallel ScatterToSequenceParallel
        GatherFromSequenceParallel ReduceScatterToSequenceParallel AllGatherFromTensorParallel
        ReduceScatterToTensorParallel""".split()
    },
}
"""Functions that gather parts of a dimension from ranks or scatter them: the dimension, and what holds the group."""


def _along(node: Any, backward: Any, g: RowSlice, dim: int, group: str) -> Any:
    if g.layout.holds(dim % g.ndim):
        return Densify("the rows lie in the dimension that is gathered from the ranks, or scattered to them")
    _compare(g.rows, _group(getattr(node, group)))
    out, *others = own_backward(node, g.values)
    return _local(g, out), *others


for _name, (_dim, _holder) in _ALONG.items():
    function_rule(_name, positions=True)(partial(_along, dim=_dim, group=_holder))


@function_rule("megatron.core.tensor_parallel.layers.LinearWithFrozenWeight", positions=True)
@function_rule("megatron.core.tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication", positions=True)
def _linear(node: Any, backward: Any, g: RowSlice) -> Any:
    """A linear layer that sums its input's gradient over ranks, and may add its weight's to ``weight.main_grad``."""
    options, saved = cast("dict[str, Any]", vars(node)), node.saved_tensors
    if options.get("sequence_parallel") or options.get("gtp_remat_size", 1) > 1:
        return Densify("the function gathers its input or its weight from the ranks")
    if options.get("grad_output_buffer") is not None:
        return Densify("the weight's gradient is computed later, from the inputs of all rows")
    if g.layout.holds(g.ndim - 1):
        return Densify("the rows lie in the dimension that the weight mixes")
    if node.allreduce_dgrad:
        _compare(g.rows, node.tp_group)
    kept = saved if len(saved) == 1 else (g.take(saved[0]), saved[1])
    out, *others = own_backward(node, g.values.contiguous(), saved_tensors=kept)
    return _local(g, out), *others
