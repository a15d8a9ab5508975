"""A counter of the waits of the host, and an emulated accelerator, on which no wait is hidden.

An accelerator works on after a call has returned. The host waits for it where an op must know numbers (``bool``,
``nonzero``, an index by a mask), and where numbers are copied from one to the other and the caller did not ask for an
asynchronous copy. ``Waits`` sees the ops, on CPU tensors. To see copies takes a second device, and ``Accelerator``
emulates one: its tensors claim a device of the kind that torch keeps for other people's backends, and hold their
numbers on the CPU. An op refuses tensors of both devices, as on a real device, and every copy between them is seen.

A process that has made an ``Accelerator`` has an accelerator for good (``torch.accelerator`` finds it), so tests do it
in a process of their own. An error inside of a backward ends that process.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import rowprop
from rowprop import host
from rowprop.backprop.autograd.rowgrad import RowGrad

SOURCE = str(Path(rowprop.__file__).parent)
READING = {
    *("_local_scalar_dense", "nonzero", "argwhere", "masked_select", "is_nonzero", "equal", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    *("repeat_interleave.Tensor", "multinomial", "histc", "_linalg_check_errors"),
}
"""Ops whose result, or whose size, the host must know before it goes on."""
MASKED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Ops that count the places of a mask among their indices."""


def name_of(func: Any) -> str:
    """The name of an op, with its overload where that is not the usual one."""
    name, _, overload = str(func).removeprefix("aten.").partition(".")
    return f"{name}.{overload}" if f"{name}.{overload}" in READING else name


def reads(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an op must know numbers of its tensors on the host."""
    name = name_of(func)
    if name in MASKED:
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return name in READING


def place() -> str:
    """The function of rowprop that calls, after the class of its object or else after its module."""
    frame: Any = sys._getframe(1)
    while frame is not None and (
        not frame.f_code.co_filename.startswith(SOURCE)
        or frame.f_code.co_name[0] == "<"
        or frame.f_code is host.reach.__code__
    ):
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    module = Path(frame.f_code.co_filename).relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".")
    owner = type(frame.f_locals["self"]).__name__ if "self" in frame.f_locals else module
    return f"{owner}.{frame.f_code.co_name}".removesuffix(".__call__").removesuffix("._choose")


class Waits(TorchDispatchMode):
    """Counts the ops that must know the numbers of a tensor: on a device, the host would wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    @property
    def count(self) -> int:
        return len(self.seen)

    def note(self, what: str) -> None:
        self.seen.append(f"{what} in {place()}")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if RowGrad in types:
            return NotImplemented  # its rule comes first, and calls the ops that are counted
        if reads(func, args):
            self.note(name_of(func))
        return func(*args, **(kwargs or {}))


class OnDevice(Tensor):
    """A tensor on the emulated device. Its numbers are in ``held``, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls: type[OnDevice], held: Tensor) -> OnDevice:
        place = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        self = Tensor._make_wrapper_subclass(cls, held.shape, **place, dtype=held.dtype, device=DEVICE)
        self.held = held
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # a reading of its own kind would count
        return f"OnDevice({self.held!r})"

    def tolist(self) -> Any:
        ACTIVE[-1].note("tolist")
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return ACTIVE[-1].run(func, types, args, kwargs or {})


class Event:
    """A mark in the queue of the device. Its time is the number of ops before it, in milliseconds."""

    def __init__(self, **_: Any) -> None:
        self.ops = 0

    def record(self, *_: Any) -> None:
        self.ops = ACTIVE[-1].ops

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return float(end.ops - self.ops)

    def synchronize(self) -> None:
        ACTIVE[-1].note("event")


MODULE = SimpleNamespace(
    Event=Event,
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
    get_rng_state=lambda device=None: torch.get_rng_state(),
    set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    memory_allocated=lambda device=None: 0,
    max_memory_allocated=lambda device=None: 0,
    reset_peak_memory_stats=lambda device=None: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
)
"""What torch asks of the module of a device."""
DEVICE = torch.device("privateuseone", 0)
ACTIVE: list[Accelerator] = []
LIBRARY = torch.library.Library("aten", "IMPL")


def _made(make: Any, *size: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Tensor:
    return OnDevice(make(*size, **{name: value for name, value in kwargs.items() if value is not None}))


def _copy_from(source: Tensor, target: OnDevice, non_blocking: bool = False) -> Tensor:
    ACTIVE[-1].note("copy to the device")
    target.held.copy_(source)
    return target


class _MadeOnDevice(TorchFunctionMode):
    """Sees tensors that are made of Python's numbers: they are copied to the device, and the host waits."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == DEVICE.type:
            return ACTIVE[-1].sent(func(*args, **kwargs | {"device": "cpu"}))
        if func is Tensor.new_tensor and isinstance(args[0], OnDevice) and kwargs.get("device") is None:
            return ACTIVE[-1].sent(args[0].held.new_tensor(*args[1:], **kwargs))
        return func(*args, **kwargs)


class Accelerator(Waits):
    """Emulates an accelerator inside the block, and writes down what the host waits for."""

    ready = False

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.set_up()

    @classmethod
    def set_up(cls) -> None:
        """Make the device known to torch; before the first backward of the process, which starts a thread for it."""
        if not Accelerator.ready and hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                backend_registration._setup_privateuseone_for_python_backend("emulated", MODULE)
            # Below the dispatch to Python, in an index that is a list: a tensor is made, and the list copied to it.
            for name, made in (("empty.memory_format", torch.empty), ("empty_strided", torch.empty_strided)):
                LIBRARY.impl(name, partial(_made, made), "PrivateUse1")
            LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
            torch.accelerator.synchronize = lambda *_: None  # torch's own asks a device for queues, and this has none
            Accelerator.ready = True

    def __enter__(self) -> Accelerator:
        ACTIVE.append(self)
        self._functions = _MadeOnDevice()
        self._functions.__enter__()
        self._synchronize = torch.accelerator.synchronize
        torch.accelerator.synchronize = lambda *_: self.note("synchronize")
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.accelerator.synchronize = self._synchronize
        self._functions.__exit__(*raised)
        ACTIVE.remove(self)

    def put(self, value: Any) -> Any:
        """A model, or tensors nested, on the device; not counted."""
        if isinstance(value, nn.Module):
            for module in value.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    setattr(module, name, nn.Parameter(OnDevice(parameter.detach()), parameter.requires_grad))
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, OnDevice(buffer))
            return value
        return tree_map_only(Tensor, OnDevice, value)

    def sent(self, held: Tensor) -> Tensor:
        """A tensor that the host has sent and waited for."""
        self.note("copy to the device")
        return OnDevice(held)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.run(func, types, args, kwargs or {})

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on the CPU, and give its result the device that it belongs to."""
        if any(not issubclass(kind, OnDevice) and kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a sliced gradient: its rule comes first, and calls the ops that run
        if func.overloadpacket is torch.ops.aten.to:  # a rule calls it whole; its parts say whether anything is copied
            return func.decompose(*args, **kwargs)
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        ours = [value for value in given if isinstance(value, OnDevice)]
        target = kwargs.get("device")
        to_us = bool(ours) if target is None else torch.device(target).type == DEVICE.type
        self.ops += to_us
        self._look(func, args, kwargs, given, to_us)
        if target is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        back = {id(value.held): value for value in ours}  # an op in place returns the tensor that it was given

        def wrapped(value: Tensor) -> Tensor:
            if id(value) in back or isinstance(value, OnDevice):
                return back.get(id(value), value)
            return OnDevice(value.resolve_conj().resolve_neg()) if to_us else value  # flags would have to be copied

        held = tree_map_only(OnDevice, lambda value: value.held, (args, kwargs))
        out = func(*held[0], **held[1])
        if torch.Tag.inplace_view in func.tags:  # a tensor of the device has a shape and strides of its own
            with no_dispatch():
                func(*args, **kwargs)
        return tree_map_only(Tensor, wrapped, out)

    def refuse(self, why: str) -> None:
        raise RuntimeError(why)

    def _look(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor], to_us: bool) -> None:
        """Note a wait; refuse tensors of two devices in one op, as a device does."""
        name = name_of(func)
        ours = [value for value in given if isinstance(value, OnDevice)]
        theirs = [value for value in given if not isinstance(value, OnDevice) and value.dim() > 0]
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
            crosses = isinstance(source, OnDevice) != (to_us if name == "_to_copy" else isinstance(args[0], OnDevice))
            blocks = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if crosses and blocks and source.numel() > 0:
                self.note("copy to the host" if isinstance(source, OnDevice) else "copy to the device")
        elif ours and theirs and name in MASKED:
            self.note("copy to the device")  # of the index
        elif ours and theirs:
            self.refuse(f"{name} got tensors on the device and on the host")
        if ours and reads(func, args):
            self.note(name)


TURNED = [getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")]


def there(value: Tensor, device: torch.device) -> Tensor:
    """A plain tensor on a device, in memory as it is here: an expanded index stays expanded."""
    value = value.detach().resolve_conj().resolve_neg()
    if device == DEVICE:
        return OnDevice(value)
    if value.layout is not torch.strided:
        return value.to(device)
    memory = value.untyped_storage().to(device=device)
    empty = torch.empty(0, dtype=value.dtype, device=device)
    return empty.set_(cast(Any, memory), value.storage_offset(), value.shape, value.stride())


class Moving(TorchFunctionMode):
    """Runs a forward that was written for the CPU on a device: a tensor moves when it meets one from there.

    A leaf that needs a gradient moves at once and receives the gradient of the leaf in its place. :meth:`stop` ends the
    help: from then on, operands on both devices are a fault.
    """

    def __init__(self, device: torch.device = DEVICE) -> None:
        super().__init__()
        self._device = device
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}
        self._moves = True

    def stop(self) -> None:
        """Leave every tensor where it is, from now on."""
        self._moves = False

    def _leaf(self, leaf: Tensor) -> Tensor:
        if id(leaf) not in self._leaves:
            moved = there(leaf, self._device).requires_grad_()
            moved.register_post_accumulate_grad_hook(
                lambda other: setattr(leaf, "grad", other.grad.held if self._device == DEVICE else other.grad.cpu())
            )
            self._leaves[id(leaf)] = leaf, moved
        return self._leaves[id(leaf)][1]

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return value
        if not value.requires_grad:
            return there(value, self._device)
        return self._leaf(value) if value.is_leaf else value.to(self._device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asks = getattr(func, "__name__", "") in ("__get__", "__set__", "requires_grad_") and func not in TURNED
        if asks or not self._moves:
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(x.device.type == self._device.type or (x.is_leaf and x.requires_grad) for x in tensors):
            args, kwargs = tree_unflatten([self._moved(leaf) for leaf in leaves], spec)
        return func(*args, **kwargs)
