"""Code beside autograd's own: custom functions, hooks on leaves, gradients handed to the caller, torch's FLOP counter.

Custom functions may do anything with their gradient (numpy, Triton, in-place writes), so they receive a plain dense
one. The exception is a function with a rule, which says how the function acts on a sliced gradient.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # pyright: ignore[reportPrivateUsage]

from rowprop import native
from rowprop.backprop.autograd.rowgrad import RowGrad, go_native, in_full, inside, unwrap, wrap
from rowprop.backprop.backward import Backward, alone, outer, running
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import Densify, RowSlice, sliced_again
from rowprop.backprop.rows.zeros import Zeros
from rowprop.backprop.rules.apply import apply_rule
from rowprop.backprop.rules.registry import FUNCTION_MODULES, Rule, full_name, op_of, rule_of_function
from rowprop.backprop.watch import note, note_densified, note_function, watched

FUNCTION_MODULES.append("rowprop.backprop.autograd.parallel")


class _Override:
    """Runs in place of one node's backward, during one backward pass: where a gradient is sliced, the node's rule."""

    # Autograd's C++ node takes the Python backward as an attribute of the node, so one of the instance comes first.
    def __init__(self, node: Any, rule: Rule) -> None:
        self.node = weakref.ref(node)  # the node holds this object
        self.rule = rule
        self.users = 0  # several picks in one backward, a backward inside another
        self.undefined: tuple[bool, ...] = ()
        self.spec: Any = None  # of a gradient that is a DTensor
        self.left_out: tuple[bool, ...] = ()  # those among them that the function did not have filled with zeros
        self.handle = node.register_prehook(self.note_undefined)  # before autograd puts zeros in
        node.apply = self
        if getattr(node._forward_cls, "boxed_grads_call", False):
            node.apply_boxed = self.boxed

    @classmethod
    def put(cls, node: Any, rule: Rule) -> Callable[[], None]:
        """Put the rule in the place of the node's backward; returns a function that undoes it."""
        held = cast("_Override | None", vars(node).get("apply")) or cls(node, rule)
        held.users += 1
        return held.remove

    def note_undefined(self, grads: tuple[Any, ...]) -> None:
        self.undefined = tuple(g is None for g in grads)

    def __call__(self, *grads: Any) -> Any:
        node: Any = self.node()
        backward = partial(cast(Any, type(node)).apply, node)
        held = tuple(map(inside, grads))
        if any(type(g) is RowGrad for g in held):
            self.left_out, self.spec = tuple(g is None for g in grads), getattr(grads[0], "_spec", None)
            defined = [None if undefined else unwrap(g) for g, undefined in zip(held, self.undefined, strict=True)]
            outcome = Densify("its gradient is a DTensor")
            if self.spec is None or self.rule.family == "parallel":
                outcome = apply_rule(self.rule, node, [backward, *defined], {})
            name = node._forward_cls.__name__
            if type(outcome) is not Densify:
                note("sliced", name)
                return wrap(outcome)
            if any(type(g) is RowGrad and g.full is None for g in held):
                note_densified(name, outcome.reason)
        return backward(*map(in_full, grads))

    def boxed(self, box: list[Any]) -> Any:
        grads = tuple(box)
        box.clear()
        return self(*grads)

    def remove(self) -> None:
        self.users -= 1
        node = cast(Any, self.node())
        if self.users == 0 and node is not None:
            self.handle.remove()
            del node.apply
            vars(node).pop("apply_boxed", None)


# Functions that hand the gradient on untouched, so a sliced gradient may pass: torch's own, and one of checkpoint.py.
_TRANSPARENT = frozenset(
    {"BackwardHookFunctionBackward", "_DDPSinkBackward", "RegisterPostBackwardFunctionBackward", "_CatchBackward"}
)

# The nodes of split, chunk and unbind join the gradients of their outputs, and put in zeros for outputs without one.
_JOINS = ("SplitBackward", "SplitWithSizesBackward", "UnsafeSplit", "UnbindBackward")

# The nodes of reads at an index, which may have read nothing: an expert without tokens, a mask without entries.
_READS = ("IndexBackward", "IndexSelectBackward")

AccumulateGrad: type[Any] = cast(Any, torch)._C._functions.AccumulateGrad  # the nodes of leaves

# The nodes whose formulas (derivatives.yaml) make zeros like an input, not like the gradient. Some of them take complex
# numbers, too, whose gradient is not zero.
_STEPS = re.compile("(Eq|Ne|Ge|Gt|Le|Lt|Poisson|Normal|Bernoulli|Copysign|Nextafter|Sgn|Angle)Backward[0-9]+")

# Types of nodes that are autograd's own formulas and need nothing: a type is read faster than a name.
_ORDINARY: set[type[Any]] = set()


def prepare(start: Any, rows: RowSet, *, slices: bool = True) -> bool:
    """Keep sliced gradients from foreign code upstream of the node ``start``, for the backward now running.

    Custom functions without a rule receive a plain tensor. So do hooks on leaves, and the inputs whose gradient
    ``torch.autograd.grad`` returns. All other nodes upstream are autograd's own formulas. ``slices`` tells whether
    ``start`` makes the sliced gradient, as :func:`~rowprop.pick`'s node does. Otherwise a hook of its tensor hands a
    sliced gradient to it. Each node of the graph is prepared once. Returns whether ``start`` itself has to hand on, or
    be handed, a dense gradient.
    """
    held = running()
    with held.lock:
        # Nothing is sliced yet, and no other backward works with the ops that the extension registers for.
        if native.extension is None and len(held.nodes) == 1 and alone():
            go_native()
        if start not in held.nodes:
            held.ends += _prepare(start, rows, slices, held)
        if not slices:
            return start in held.plain
        return (start, 0) in held.dense or type(start.next_functions[0][0]) is AccumulateGrad


def _prepare(start: Any, rows: RowSet, slices: bool, held: Backward) -> list[Callable[[], Any]]:
    """Prepare the nodes that are not prepared yet; returns functions that undo it."""
    undo = _step_aside()
    special = None if watched() else _special(start, held)
    nodes = upstream(start, held.nodes) if special is None else special
    leaves: list[Any] = []
    for node in nodes:
        kind: type[Any] = node.__class__
        if kind is AccumulateGrad:
            leaves.append(node)
            continue
        if kind in _ORDINARY or (node is start and slices):
            continue
        name = node.name()
        in_python = isinstance(node, BackwardCFunction)
        is_foreign = name not in _TRANSPARENT if in_python else name.startswith("torch::autograd::CppNode")
        if is_foreign:
            function = getattr(node, "_forward_cls", None)
            rule = None if function is None else rule_of_function(function)
            undo.append(_densify_inputs(node, name, function) if rule is None else _Override.put(node, rule))
        elif name.startswith(_JOINS):
            undo.append(node.register_prehook(note_unused).remove)
        elif _STEPS.fullmatch(name):
            undo.append(node.register_hook(_slice_zeros).remove)
        elif name.startswith("LogcumsumexpBackward"):
            undo += _take_rows_alike(node)
        elif name.startswith(_READS):
            if 0 in node._input_metadata[0].shape:
                undo.append(node.register_prehook(partial(_read_nothing, rows)).remove)
        elif name.startswith("NllLossBackward"):
            if _loss_is_parallel(node):
                undo += _slice_parallel_loss(node)
        elif name == "torch::autograd::CopySlices":
            undo += _mark_copying(node)
        elif name == kind.__name__ and not in_python:
            _ORDINARY.add(kind)
    if special is not None:
        native.extension.learn([node for node in special if node.__class__ in _ORDINARY])
    if watched():
        products = [node for node in nodes if node.name().startswith(_PRODUCTS)]
        undo += [node.register_prehook(_report_full(node.name(), rows.num_rows)).remove for node in products]
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
        held.hooked.update([leaf for leaf in leaves if leaf.variable._backward_hooks])
    held.plain.update(held.hooked, _returned(nodes, leaves, held))
    if held.plain:
        edges = ((node, place, to) for node in nodes for place, (to, _) in enumerate(node.next_functions))
        dense = [(node, place) for node, place, to in edges if to in held.plain]
        held.dense.update(dense)
        undo += [
            node.register_hook(_densify_output(place, node.next_functions[place][0] in held.hooked)).remove
            for node, place in dense
            if node is not start or not slices
        ]
    return undo


def _special(start: Any, held: Backward) -> list[Any] | None:
    """The nodes upstream that the extension does not know to need nothing; None: Python has to walk over them all."""
    made = native.extension
    return None if made is None else held.of("walked", made.Walked).special(start)


def note_unused(grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A hook on a node that puts in zeros for undefined gradients: tells a sliced one, in a new wrapper, where."""
    # Only a read could tell the zeros from a dense gradient later.
    first = next((place for place, g in enumerate(grads) if _rows_of(g) is not None), None)
    unused = tuple(place for place, g in enumerate(grads) if g is None)
    if first is None or not unused:
        return None
    noted = RowGrad.in_python(unwrap(grads[first]))
    noted.unused = unused
    return (*grads[:first], noted, *grads[first + 1 :])


def _read_nothing(rows: RowSet, grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A hook on a node whose gradient has no entry: its result is zeros, which stay sliced beside a sliced gradient."""
    (grad,) = grads
    return (RowGrad(Zeros(grad.shape, grad.dtype, grad.device, rows)),) if _is_dense(grad) else None


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value) is not RowGrad


def _rows_of(value: Any) -> RowSet | None:
    inner = unwrap(value) if type(value) is RowGrad else None
    return inner.rows if type(inner) is RowSlice or type(inner) is Zeros else None


def _slice_zeros(grad_inputs: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A hook on a node that makes plain zeros of its inputs' shapes: hand them on sliced as its gradient is."""
    g = unwrap(grads[0])
    if type(g) is not RowSlice:
        return None

    def of_rows(zeros: Any) -> Any:
        if not _is_dense(zeros) or zeros.shape != g.shape or zeros.is_complex():
            return zeros
        return RowGrad(Zeros(g.shape, zeros.dtype, zeros.device, g.rows, g.layout))

    return tuple(map(of_rows, grad_inputs))


def upstream(start: Any, known: set[Any] | None = None) -> list[Any]:
    """The node and all that its gradient goes on to, each once; they join what is known, with all upstream of it."""
    nodes: list[Any] = [start]
    known = {None} if known is None else known
    known.add(start)
    for node in nodes:
        if node.__class__ is not AccumulateGrad:
            for edge, _ in node.next_functions:
                if edge not in known:
                    known.add(edge)
                    nodes.append(edge)
    return nodes


def _step_aside() -> list[Callable[[], Any]]:
    """Make torch's own FLOP counter leave sliced gradients to their rules, so that it counts the ops at K rows."""
    # A mode sees an op, and the shape that the gradient claims, before a subclass does. If it answers NotImplemented,
    # the rule runs and the mode sees the rule's ops.
    undo: list[Callable[[], Any]] = []
    for mode in cast("list[Any]", _get_current_dispatch_mode_stack()):
        if type(mode).__module__ == "torch.utils.flop_counter" and "__torch_dispatch__" not in vars(mode):
            mode.__torch_dispatch__ = MethodType(_count_unless_sliced, mode)
            undo.append(partial(delattr, mode, "__torch_dispatch__"))
    return undo


def _count_unless_sliced(counter: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    own = counter.__class__.__torch_dispatch__
    measured = any(type(g) is RowGrad and g.sliced is not None and g.sliced.rows.makers for g in args)  # by find_zeros
    if RowGrad in types and not measured:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore
        return own(counter, func, types, args, kwargs)


def _take_rows_alike(node: Any) -> list[Callable[[], Any]]:
    """Have a node's formula computed on the kept rows, though its steps map zero to infinity and back."""

    def enter(grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
        g = unwrap(grads[0])
        if type(g) is not RowSlice or g.layout.minor or g.rows.absent is not None or g.values.is_complex():
            return None  # complex numbers have another formula
        if g.layout.holds(node._saved_dim % 2**64 % (2**64 - g.ndim)):  # -1 is saved as 2**64 - 1
            return None
        inside = RowGrad.in_python(g)
        inside.alike = True
        return (inside,)

    def leave(grad_inputs: tuple[Any, ...], _: Any) -> None:
        for grad in grad_inputs:
            if type(grad) is RowGrad:
                grad.alike = False

    return [node.register_prehook(enter).remove, node.register_hook(leave).remove]


def _loss_is_parallel(node: Any) -> bool:
    """Whether ``loss_parallel`` is active, and would run this node of a cross-entropy if its losses are DTensors."""
    loaded: Any = sys.modules.get("torch.distributed.tensor.parallel.loss")
    handlers = () if loaded is None else loaded.DTensor._op_dispatcher._custom_op_handlers
    active = torch.ops.aten.nll_loss_backward.default in handlers
    return active and node.next_functions[0][0].name().startswith("LogSoftmaxBackward")


def _slice_parallel_loss(node: Any) -> list[Callable[[], Any]]:
    """Have ``loss_parallel`` compute all rows from the loss to the log-softmax, and hand on the kept ones."""
    held: list[RowSlice] = []
    softmax = node.next_functions[0][0]

    def enter(grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
        g = inside(grads[0])
        if g is grads[0] or type(g.sliced) is not RowSlice or g.full is not None:
            return None
        held.append(g.sliced)
        return (in_full(grads[0]),)

    def leave(grad_inputs: tuple[Any, ...], _: Any) -> tuple[Any, ...] | None:
        if not held:
            return None
        g, (out, *others) = held.pop(), grad_inputs
        sliced = RowGrad(sliced_again(out.to_local(), g.rows, g.layout))
        return type(out)(sliced, out._spec, requires_grad=False), *others

    return [held.clear, node.register_prehook(enter).remove, softmax.register_hook(leave).remove]


def _mark_copying(node: Any) -> list[Callable[[], Any]]:
    """Mark the rows while a node undoes an in-place op on a view: a copy made then is not for a leaf."""
    held: list[RowSet] = []

    def enter(grads: tuple[Any, ...]) -> None:
        held.extend(rows.origin or rows for rows in map(_rows_of, grads) if rows is not None)
        for rows in held:
            rows.mark(True)

    def plainly(g: Any, to: Any) -> Any:
        """One row as a plain tensor, unless it is put among all rows again."""
        rows = None if to is None or to.name().startswith(("AsStrided", "Select")) else _rows_of(g)
        return g.plain() if rows is not None and rows.lender is not None and rows.lender.selected else g

    def leave(grads: tuple[Any, ...] = (), _: Any = None) -> tuple[Any, ...]:
        while held:
            held.pop().mark(False)
        return tuple(plainly(g, to) for g, (to, _) in zip(grads, node.next_functions, strict=False))

    return [leave, node.register_prehook(enter).remove, node.register_hook(leave).remove]


# Nodes whose cost is a model's. The gradient of a parameter that the forward computes seldom goes through one of them.
_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Scaled")


_SUMMED = "rows were summed into one another, or attention='exact' gave every token's keys and values a gradient"


def _report_full(name: str, num_rows: int) -> Callable[[tuple[Any, ...]], None]:
    """Report a gradient of all rows where nothing was densified, such as a sum over rows that is used further."""

    def holds_all(shape: Sequence[int]) -> bool:
        first, second = (*shape, 0, 0)[:2]
        return first == num_rows or first * second == num_rows or (second == num_rows and len(shape) > 2)

    def hook(grads: tuple[Any, ...]) -> None:
        dense = [grad for grad in grads if isinstance(grad, Tensor) and type(grad) is not RowGrad]
        shapes = [grad.shape for grad in dense if not grad.is_nested]
        if len(shapes) == len(grads) and any(map(holds_all, shapes)) and not outer().densified:
            note_densified(name, f"a gradient of all rows comes to it: above, {_SUMMED}")

    return hook


def _returned(nodes: list[Any], leaves: list[Any], held: Backward) -> set[Any]:
    """The nodes whose gradient ``torch.autograd.grad`` returns to the caller; none under ``backward()``."""
    # One that also flows on cannot be told from others: it stays sliced, and acts as a plain tensor.
    found: set[Any] = set()
    is_run: Callable[[Any], bool] = torch._C._will_engine_execute_node  # pyright: ignore[reportPrivateUsage]

    def runs(node: Any) -> bool:
        try:
            return is_run(node)
        except RuntimeError:  # the answer for a leaf whose gradient is returned
            found.add(node)
            return False

    if not held.limited:
        try:
            held.limited = not all(map(is_run, leaves))
        except RuntimeError:
            held.limited = True
    if not held.limited:
        return found
    for leaf in leaves:
        runs(leaf)
    active = {node for node in nodes if node.__class__ is not AccumulateGrad and runs(node)} | found

    def goes_on(node: Any) -> bool:
        edges = [edge for edge, _ in node.next_functions if edge is not None]
        return any(edge in active or edge in held.plain or (edge in held.nodes and runs(edge)) for edge in edges)

    return found | {node for node in active if not goes_on(node)}


def _densify_inputs(node: Any, name: str, function: Any) -> Callable[[], None]:
    def hook(grads: tuple[Any, ...]) -> tuple[Any, ...]:
        if any(type(grad) is RowGrad and grad.full is None for grad in map(inside, grads)):
            what, remedy = f"{name}, a custom autograd function,", "declare it by rowprop.rowwise"
            if function is None:
                what, remedy = f"{name}, in C++,", "call it in an autograd.Function of your own with rowprop.rowwise"
            elif (op := op_of(function)) is not None:
                what = f"{op}, an op of torch.library,"
            note_densified("custom function", f"{what} has a dense gradient; if it treats rows alike, {remedy}")
            note_function(name if function is None else full_name(function), partial(_offered, node, grads))
        return tuple(map(in_full, grads))

    return node.register_prehook(hook).remove


def _offered(node: Any, grads: Sequence[Any]) -> str:
    """What a report says of a custom function that ran at full size."""
    inner = [unwrap(grad) if type(grad) is RowGrad else grad for grad in grads]
    if not isinstance(node, BackwardCFunction) or not any(type(g) is RowSlice for g in inner):
        return "not tried: it is in C++, or has a gradient of zeros"
    from rowprop.backprop.rules import inference  # only here: few backwards need it

    return inference.offer(node, inner)


def _densify_output(place: int, hooked: bool) -> Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...] | None]:
    """Hand on a dense gradient to a leaf's hook, which may write to it, or a copy to the caller: others stay sliced."""

    def hook(grad_inputs: tuple[Any, ...], _: tuple[Any, ...]) -> tuple[Any, ...] | None:
        grad = grad_inputs[place]
        if type(grad) is not RowGrad:
            dense = in_full(grad)
            return None if dense is grad else (*grad_inputs[:place], dense, *grad_inputs[place + 1 :])
        dense = grad.plain() if hooked else grad.copied()
        return (*grad_inputs[:place], dense, *grad_inputs[place + 1 :])

    return hook
