"""A second device in the CPU's memory: values as on the CPU, and an accelerator's refusals and waits.

A tensor of this device holds a tensor of the CPU, which does the work. So torch's own checks, and the library's, see a
device that is not the CPU, while the gradients can be compared with the CPU's. Two faults show that no run on the CPU
shows: a call whose operands lie on both devices, and a read that makes the host wait for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from rowprop.backprop import rowgrad
from rowprop.backprop.sliced import Densify

NAME = "elsewhere"
SHAPED_BY_VALUES = {"nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "bincount"}
READ = {"_local_scalar_dense", "equal", "is_nonzero", *SHAPED_BY_VALUES}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # their indices may lie on the CPU
_kept: list[Any] = []


@dataclass
class Seen:
    """What happened on the second device.

    Attributes:
        reads: For each op, how often the host had to wait for the device, for a number or for the shape of a result.
        faults: A line for each call whose operands lie on both devices, and for each rule that raised.
    """

    reads: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


seen = Seen()


def set_up() -> bool:
    """Make the device known to torch; False where torch is too old. It has to be before the first backward."""
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register
    except ImportError:
        return False
    if not _kept:
        register(NAME)
        library = torch.library.Library("aten", "IMPL")
        library.impl("empty.memory_format", _made_by(torch.empty), "PrivateUse1")
        library.impl("empty_strided", _made_by(torch.empty_strided), "PrivateUse1")
        library.impl("_copy_from", _copy_from, "PrivateUse1")
        _kept.append(library)
    return True


def is_set_up() -> bool:
    """Whether tests can use the device in this process."""
    return bool(_kept)


def _made_by(make: Any) -> Callable[..., Tensor]:
    def made(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Tensor:
        return There(make(*args, **{name: value for name, value in kwargs.items() if value is not None}))

    return made


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    here(target).copy_(here(source))
    return target


class There(Tensor):
    """A tensor of the second device; ``held`` is its content."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        size = held.shape, held.stride(), held.storage_offset()
        self = Tensor._make_wrapper_subclass(cls, *size, dtype=held.dtype, device=torch.device(NAME, 0))
        self.held = held
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"There({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(kind, There) for kind in types):
            return NotImplemented  # a sliced gradient knows what to do with its operands
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else NAME
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        _note(name, args, kwargs, target)
        out = func(*tree_map(here, args), **tree_map(here, kwargs))
        if torch.Tag.inplace_view in func.tags:  # this tensor has a shape and strides of its own
            with no_dispatch():
                func(*args, **kwargs)
        first = func._schema.arguments[0].alias_info if func._schema.arguments else None
        if first is not None and first.is_write:
            return args[0]
        return tree_map(there, out) if target == NAME else out


def _note(name: str, args: Any, kwargs: Any, target: str) -> None:
    """Note a wait of the host, and operands on both devices."""
    operands = tree_flatten((args, kwargs))[0]
    if name in INDEXING:
        masks = any(type(i) is There and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        waits, operands = masks, tree_flatten((args[:1], args[2:], kwargs))[0]
    elif name == "repeat_interleave":
        waits = kwargs.get("output_size") is None
    elif name in ("_to_copy", "copy_"):
        waits, operands = target == "cpu" or (name == "copy_" and type(args[0]) is not There), []
    else:
        waits = name in READ
    seen.reads[name] += waits
    apart = [value for value in operands if isinstance(value, Tensor) and type(value) is not There and value.ndim]
    if apart:
        seen.faults.append(f"{name}: operands lie on {NAME} and, of shape {tuple(apart[0].shape)}, on the CPU")


def here(value: Any) -> Any:
    """The content of a tensor of the second device; anything else as it is."""
    return value.held if type(value) is There else value


def there(value: Any) -> Any:
    """A tensor of the CPU as the content of one of the second device; anything else as it is."""
    return There(value.resolve_conj().resolve_neg()) if type(value) is Tensor else value


TURNED = [getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")]


class Moving(TorchFunctionMode):
    """Runs a forward that was written for the CPU on the second device: each tensor moves when it meets one from there.

    A leaf that needs a gradient moves at once and receives the gradient of the leaf in its place. :meth:`stop` ends the
    help: from then on, operands on both devices are a fault.
    """

    def __init__(self) -> None:
        super().__init__()
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}
        self._moves = True

    def stop(self) -> None:
        """Leave every tensor where it is, from now on."""
        self._moves = False

    def _leaf(self, leaf: Tensor) -> Tensor:
        if id(leaf) not in self._leaves:
            moved = There(leaf.detach()).requires_grad_()
            moved.register_post_accumulate_grad_hook(lambda other: setattr(leaf, "grad", here(other.grad)))
            self._leaves[id(leaf)] = leaf, moved
        return self._leaves[id(leaf)][1]

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return value
        return self._leaf(value) if value.is_leaf and value.requires_grad else value.to(NAME)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asks = getattr(func, "__name__", "") in ("__get__", "__set__", "requires_grad_") and func not in TURNED
        if asks or not self._moves:
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(type(leaf) is There or (leaf.is_leaf and leaf.requires_grad) for leaf in tensors):
            args, kwargs = tree_unflatten([self._moved(leaf) for leaf in leaves], spec)
        return func(*args, **kwargs)


@contextmanager
def watching() -> Generator[Seen]:
    """Note what happens on the second device, from zero.

    The backward runs in this thread, and a rule that raises densifies: an error that leaves a backward would end the
    process, because torch asks Python for the device while it unwinds.
    """
    seen.reads.clear()
    seen.faults.clear()
    run = rowgrad.apply_rule

    def guarded(rule: Any, op: Any, *operands: Any) -> Any:
        try:
            return run(rule, op, *operands)
        except Exception as error:
            seen.faults.append(f"the rule of {op}: {type(error).__name__}: {error}".partition("\n")[0])
            return Densify("its rule raised")

    rowgrad.apply_rule = guarded
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield seen
    finally:
        rowgrad.apply_rule = run
