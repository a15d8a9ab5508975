"""Count the FLOPs of a training step by part: forward, backward to the inputs, backward to the weights, update."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.pick import BatchNorm, pick
from rowprop.checks import check_choice, check_graph, check_kind, check_losses_fn, check_tick
from rowprop.cost.flops import counting
from rowprop.cost.measure import Tick, ignored
from rowprop.cost.where import Modules, current_node, next_number
from rowprop.scoring import LossesFn, losses_of
from rowprop.selection.selectors import check_fraction, count_kept
from rowprop.state import backward_undone

Part = Literal["forward", "backward_input", "backward_weight", "backward_recomputed"]
PARTS: tuple[Part, ...] = get_args(Part)
ByOp = dict[str, dict[str, int]]
"""FLOPs by part and op; a part or an op without any is left out."""
UPDATE_FLOPS = {"sgd": 2, "momentum": 4, "adam": 14, "adamw": 15}
"""Of each optimizer, per parameter and step; ``docs/flops.md`` has the arithmetic."""


@dataclass(frozen=True)
class ModuleFlops:
    """The FLOPs of one module itself, without the modules inside it.

    ``module`` is its path (the root's: its class), ``kind`` its class; ops outside of all modules go by ``losses_fn``.
    The figures are those of :class:`StepFlops`.
    """

    module: str
    kind: str
    forward_flops: int
    backward_input_flops: int
    backward_weight_flops: int
    backward_recomputed_flops: int
    by_op: ByOp


@dataclass(frozen=True)
class StepFlops:
    """The count of :func:`count_step`.

    Attributes:
        num_rows: N.
        num_kept: K, the rows that the backward paid for.
        forward_flops: Of all N rows.
        backward_input_flops: Of the backward to the activations: the chain from the losses to the batch.
        backward_weight_flops: Of the backward to parameters, and to tensors computed from parameters alone.
        backward_recomputed_flops: Of forwards that run again inside the backward (checkpoints).
        update_flops: Of the update of ``optimizer``, from its formula.
        num_parameters: How many numbers got a gradient, and so an update.
        uncounted: Ops without a known formula, with the number of calls; they are in no number of FLOPs.
        by_op: By part and op.
        modules: By module, in the order of ``model.named_modules()``; modules without any are left out.
    """

    num_rows: int
    num_kept: int
    forward_flops: int
    backward_input_flops: int
    backward_weight_flops: int
    backward_recomputed_flops: int
    update_flops: int
    optimizer: str
    num_parameters: int
    uncounted: dict[str, int]
    by_op: ByOp
    modules: list[ModuleFlops]

    def __repr__(self) -> str:
        counts = f"forward {self.forward_flops:,}, backward {self.backward_flops:,}, update {self.update_flops:,}"
        return f"StepFlops({counts}; backward over forward {self.ratio:.3f})"

    @property
    def backward_flops(self) -> int:
        """The three parts of the backward together."""
        return self.backward_input_flops + self.backward_weight_flops + self.backward_recomputed_flops

    @property
    def ratio(self) -> float:
        """Backward over forward, the update left out; NaN where nothing was counted."""
        return self.backward_flops / self.forward_flops if self.forward_flops else math.nan

    @property
    def ratio_with_update(self) -> float:
        """Backward and update over forward."""
        return (self.backward_flops + self.update_flops) / self.forward_flops if self.forward_flops else math.nan

    def to_dict(self) -> dict[str, Any]:
        """As numbers, texts, lists and dicts that JSON holds; NaN becomes None."""
        ratios = {"ratio": self.ratio, "ratio_with_update": self.ratio_with_update}
        numbers = {name: None if math.isnan(value) else value for name, value in ratios.items()}
        return asdict(self) | {"backward_flops": self.backward_flops} | numbers


def count_step(
    model: nn.Module,
    batch: Any,
    losses_fn: LossesFn,
    *,
    keep: float | None = None,
    optimizer: str = "sgd",
    batchnorm: BatchNorm = None,
    tick: Tick | None = None,
) -> StepFlops:
    """Run a training step, without the update, and count its FLOPs.

    An op of the backward counts for a weight if its result goes, without another product in between, to a parameter or
    to a tensor that the forward computed from parameters and buffers alone; else for an input.

    Args:
        model: An ``nn.Module``, also on the device ``meta``, where nothing is computed.
        batch: The whole batch, N rows.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, 1)``.
        keep: Count the backward of ``rowprop.pick`` of this fraction of rows, in (0, 1]. Default None: of all rows.
        optimizer: ``"sgd"`` (default), ``"momentum"``, ``"adam"`` or ``"adamw"``.
        batchnorm: How a sliced backward treats training BatchNorm, see :func:`rowprop.pick`. Default None.
        tick: Called before the forward and before the backward. Default None.

    Raises:
        InvalidInput: An argument is out of its range, or the losses have no graph. Errors of ``losses_fn`` pass.

    Cost:
        One step with Python at every op; all that a backward node computes is held until it is done. Parameters,
        gradients, buffers and the random state are put back.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> flops = count_step(model, torch.randn(6, 4), lambda model, x: model(x).square())
        >>> flops.forward_flops, flops.backward_input_flops, flops.backward_weight_flops, flops.update_flops
        (480, 96, 480, 98)
    """
    check_kind("count_step", "model", model, nn.Module, "a torch.nn.Module was needed.")
    check_losses_fn("count_step", losses_fn)
    check_choice("count_step", "optimizer", optimizer, tuple(UPDATE_FLOPS))
    check_tick("count_step", tick)
    if keep is not None:
        check_fraction("count_step", "keep", keep)
    tell, seen = tick or ignored, _StepCounter(model)
    with backward_undone(model, batch), torch.enable_grad(), seen.hooks, seen.modules.tracked(), counting(seen.ran):
        tell("counting the forward", 0.0)
        losses = losses_of(losses_fn, model, batch, counted=any(p.is_meta for p in model.parameters()))
        tell("counting the backward", 1 / 3)  # the backward has about two ops for each op of the forward
        check_graph(losses)
        num_rows = num_kept = losses.shape[0]
        if keep is not None:
            num_kept = count_kept(keep, num_rows)
            rows = torch.tensor([place * num_rows // num_kept for place in range(num_kept)])  # evenly spaced
            losses = pick(losses, rows.to(losses.device), batchnorm=batchnorm)
        cast(Any, losses.mean()).backward()
        num_parameters = sum(p.numel() for p in model.parameters() if p.grad is not None)
    kinds, found = seen.modules.kinds, seen.by_module
    return StepFlops(
        num_rows=num_rows, num_kept=num_kept, num_parameters=num_parameters, optimizer=optimizer,
        update_flops=UPDATE_FLOPS[optimizer] * num_parameters, uncounted=seen.uncounted, **_figures(seen.by_op),
        modules=[ModuleFlops(path, kind, **_figures(found[path])) for path, kind in kinds.items() if path in found],
    )  # fmt: skip


def _figures(by_op: ByOp) -> dict[str, Any]:
    return {f"{part}_flops": sum(by_op.get(part, {}).values()) for part in PARTS} | {"by_op": by_op}


class _StepCounter:
    """Adds up FLOPs by part, module and op.

    It follows which tensors, and the backward nodes of which ops, come from parameters and buffers alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = Modules(model)
        self.hooks = ExitStack()
        self.by_op: ByOp = {}
        self.by_module: dict[str, ByOp] = {}
        self.uncounted: dict[str, int] = {}
        self._leaves = set(model.parameters())
        self._constant = {_memory(t) for t in (*model.parameters(), *model.buffers())}
        self._constant_nodes: set[int] = set()
        self._last_number = next_number()
        self._running: dict[Any, _Running] = {}

    def ran(self, name: str, flops: tuple[int, ...] | None, func: Any, inputs: Any, out: Any) -> None:
        """Follow the op; note its FLOPs now, or in a backward node when the node is done."""
        if flops is None:
            self.uncounted[name] = self.uncounted.get(name, 0) + 1
            flops = ()
        node = current_node()
        if node is None or torch.is_grad_enabled():
            self._follow_forward(func, inputs, out)
            part = "forward" if node is None else "backward_recomputed"
            self._add(self.modules.running[-1], part, name, sum(flops))
        elif hasattr(node, "variable"):  # it adds up the gradient of this leaf
            self._add(self.modules.of(node), "backward_input", name, sum(flops))
        else:
            if node not in self._running:
                self._running[node] = _Running()
                self.hooks.callback(node.register_hook(partial(self._finish, node)).remove)
            self._running[node].ran(name, flops, inputs, out)

    def _add(self, module: str, part: Part, op: str, flops: int) -> None:
        for by_op in (self.by_op, self.by_module.setdefault(module, {})) if flops else ():
            ops = by_op.setdefault(part, {})
            ops[op] = ops.get(op, 0) + flops

    def _follow_forward(self, func: Any, inputs: Any, out: Any) -> None:
        read, made = _memories(inputs), _memories(out)
        # A tensor made without reading another is a constant, unless its numbers are drawn at random.
        drawn = not read and torch.Tag.nondeterministic_seeded in func.tags
        constant = not drawn and self._constant.issuperset(read)
        if constant:
            self._constant |= made
        else:
            self._constant -= made
        number = next_number()
        if number > self._last_number:  # of the nodes made since the last op, the last one is this op's
            self._last_number = number
            if constant:
                self._constant_nodes.add(number - 1)

    def _finish(self, node: Any, grads: tuple[Tensor | None, ...], _: Any) -> None:
        """Split the FLOPs of a node that has run into the weights' share and the inputs'."""
        to_weights, to_inputs = set[int](), set[int]()
        for grad, (upstream, _) in zip(grads, node.next_functions, strict=False):
            if grad is not None and upstream is not None:
                (to_weights if self._is_weight(upstream) else to_inputs).add(_memory(grad))
        module, running = self.modules.of(node), self._running.pop(node)
        # An op is for weights whose result went to them alone, with no product in between.
        for_weights = running.of(to_weights) - running.of(to_inputs) - running.read
        for place, (name, flops) in enumerate(running.ops):
            self._add(module, "backward_weight" if place in for_weights else "backward_input", name, flops)

    def _is_weight(self, node: Any) -> bool:
        """Whether a node's forward result is a parameter, or is computed from parameters and buffers alone."""
        if hasattr(node, "variable"):
            return node.variable in self._leaves
        if isinstance(node, BackwardCFunction):  # a custom function, whose first op may not read all of its inputs
            upstream = [u for u, _ in cast(Any, node).next_functions]
            return all(u is not None and self._is_weight(u) for u in upstream)
        return node._sequence_nr() in self._constant_nodes


class _Running:
    """The ops that one backward node has run, and whose results went into which tensors."""

    def __init__(self) -> None:
        self.ops: list[tuple[str, int]] = []  # names and FLOPs
        self.read: set[int] = set()  # indices of the ops whose results went into a product
        self.sources: dict[int, set[int]] = {}  # by a tensor's memory: places of the ops that it was computed by
        self.held: list[Any] = []  # keeps tensors alive, so that no other tensor gets their memory

    def ran(self, name: str, flops: tuple[int, ...], inputs: Any, out: Any) -> None:
        """Note an op with its FLOPs: one number for each output, or one for all."""
        before = self.of(_memories(inputs))
        if any(flops):
            self.read |= before
        self.held.append(out)
        for place, output in enumerate(list(out) if len(flops) > 1 else [out]):
            mine = before
            if place < len(flops) and flops[place]:
                mine = before | {len(self.ops)}
                self.ops.append((name, flops[place]))
            for memory in _memories(output):
                self.sources[memory] = self.sources.get(memory, set()) | mine

    def of(self, memories: set[int]) -> set[int]:
        """Places of the ops that the tensors in these memories were computed by."""
        return set[int]().union(*(self.sources.get(memory, set()) for memory in memories))


def _memories(tree: Any) -> set[int]:
    return {_memory(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


def _memory(tensor: Tensor) -> int:
    """The number of the memory that a tensor and its views share."""
    if type(tensor) is RowGrad:
        held = tensor.full if tensor.sliced is None else getattr(tensor.sliced, "values", None)
        return id(tensor) if held is None else _memory(held)
    try:
        return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or a wrapper without memory
        return id(tensor)
