"""What a rule does at an op, written down as steps that native dispatch replays in C++.

A step is an op of aten on tensors that the rule was given or made; a gather of the kept rows; or something that
follows from the rows' index alone. The extension replays the steps for a call whose key is equal: the op, its arguments
that are no tensors, the sizes, strides and dtypes of its tensors, the layouts, and the rows' traits; the number of kept
rows may be another one, see native.cpp. A rule that depends on more says so by :func:`rowprop.native.reads`, and is not
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rowprop import native


def derived(rows: Any, which: tuple[str, tuple[Any, ...], int | None]) -> Tensor:
    """What follows from the index of a row set: the name of its method, the arguments, the place in the result."""
    name, about, place = which
    found = getattr(rows, name)
    found = found(*about) if about else found
    return found if place is None else found[place]


_FOLLOW = frozenset({"first", "again", "indices"})
"""The methods of a row set that return tensors of K entries and nothing else."""
_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Recorder(TorchDispatchMode):
    """Records a rule. Register 0 is the rows' index; then come the tensors among the arguments, then what is made."""

    def __init__(
        self, call: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any], rows_of: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self._call = call  # what the extension says of this call, see native.cpp
        self.steps: list[tuple[Any, ...]] = []
        self.why: str | None = None  # the rule cannot be recorded
        self.rows: Any = None
        self.count = 1
        self._at: dict[int, int] = {}  # the register of each tensor, by its id
        self._alive: list[Tensor] = []  # so that no id comes up again
        self._rows_of = rows_of
        schema = op._schema.arguments
        self.takes = ["Tensor" in str(about.type) for about in schema]
        for place, (about, takes) in enumerate(zip(schema, self.takes, strict=True)):
            if takes:
                for each in _listed(args[place] if place < len(args) else kwargs.get(about.name)):
                    self._argument(each)
        self._inputs = self.count
        if self.rows is None:
            self.why = "no gradient is sliced"
        else:
            if id(self.rows.index) in self._at:
                self.why = "an operand is the index of the rows"
            self._know(self.rows.index, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing torch._dynamo at the first op, which takes two seconds."""
        return False

    def __enter__(self) -> Any:
        native.thread.recorder = self
        return super().__enter__()

    def __exit__(self, *error: object) -> Any:
        native.thread.recorder = None
        return super().__exit__(*error)

    def _argument(self, value: Any) -> None:
        held = self._rows_of(value)
        if held is not None:
            if self.rows is not None and held.rows is not self.rows:
                self.why = "gradients of different rows meet"
            self.rows, value = held.rows, held.values
        if isinstance(value, Tensor):
            self._know(value, self.count)
        self.count += 1

    def _know(self, tensor: Tensor, register: int) -> None:
        self._at.setdefault(id(tensor), register)
        self._alive.append(tensor)

    def register(self, tensor: Tensor | None) -> int:
        """The register of a tensor that is known; -1 for none."""
        if tensor is None:
            return -1
        found = self._at.get(id(tensor))
        if found is None:
            self.why = self.why or f"a tensor of shape {tuple(tensor.shape)} comes from elsewhere"
            return 0
        return found

    def _made(self, out: Any) -> int:
        if not isinstance(out, Tensor):
            return -1
        if id(out) not in self._at:
            self._know(out, self.count)
            self.count += 1
        return self._at[id(out)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given: list[tuple[Any, ...]] = []
        for place, about in enumerate(func._schema.arguments):
            if place >= len(args) and about.name not in kwargs:
                given.append(("default",))
                continue
            value: Any = args[place] if place < len(args) else kwargs[about.name]
            if isinstance(value, Tensor):
                given.append(("one", self.register(value)))
            elif any(isinstance(each, Tensor) for each in _listed(value)):
                given.append(("list", [self.register(each) for each in value]))
            else:
                given.append(("const", value))
        if not _BY_VALUES.isdisjoint(func.tags) and not _indexes_by_numbers(func, args):
            self.why = self.why or "a value is read"
        if not func._schema.name.startswith("aten::"):
            self.why = self.why or f"it runs {func}"
        if torch.is_grad_enabled():  # some kernels save what their backward needs only then
            self.why = self.why or "it runs a forward"
        out = func(*args, **kwargs)
        made = [self._made(each) for each in _listed(out)]
        self.steps.append((func._schema.name, func._schema.overload_name, given, made))
        return out

    def gather(self, tensor: Tensor, layout: Any, make: Callable[[], Tensor]) -> Tensor:
        """Record a gather, whose result C++ remembers as Python does."""
        source, begun = self.register(tensor), len(self.steps)
        out = make()
        steps = self.steps[begun:]
        inner = [step for step in steps if step[0] != ""]
        if inner:  # what follows from the rows is used by others, too, also where the gather is remembered
            follows = [step for step in steps if step[0] == ""]
            self.steps[begun:] = [*follows, (None, source, layout.numbers(), inner, self._made(out))]
        return out

    def follows(self, rows: Any, name: str, about: tuple[Any, ...], found: Any) -> None:
        """Record the use of something that follows from the rows' index."""
        if rows is not self.rows or name not in _FOLLOW:
            self.why = self.why or f"it asks the rows for {name}"
            return
        for place, each in enumerate(cast("list[Tensor]", found)) if isinstance(found, list) else [(None, found)]:
            if id(each) not in self._at:
                self.steps.append(("", (name, about, place), self._made(each)))

    def finish(self, name: str, out: Any, views: bool) -> None:
        """Give the recipe, or the reason why there is none, to the extension."""
        is_list = type(out) is list
        outs: list[tuple[int, list[int] | None, list[int]]] = []
        for each in _listed(out):
            held = self._rows_of(each)
            if held is not None and held.rows is self.rows:
                outs.append((self.register(held.values), held.layout.numbers(), list(held.shape)))
            elif each is None or type(each) is Tensor:
                outs.append((self.register(each), None, []))
                if views:
                    self.why = self.why or "a view of the gradient is a plain tensor"
            else:
                self.why = self.why or "a result of another kind"
        known = {-1, *range(self._inputs)}
        if not _in_order(self.steps, known) or not known.issuperset(at for at, _, _ in outs):
            self.why = self.why or "it uses a step of a gather"
        recording = None if self.why else (self.steps, self.count, outs, is_list, views, name, self.takes)
        self._put(recording)

    def _put(self, recording: Any) -> None:
        """Hand on the recording, for all numbers of kept rows between those of this call and of earlier ones."""
        kept, earlier = self._call
        low, high, before = earlier or (kept, kept, recording)
        try:
            both = _for_both(before, recording, kept, low, low == high)
            native.extension.put(both, min(low, kept), max(high, kept), False, self.why or "")
        except (RuntimeError, TypeError, ValueError):  # C++ takes no such argument, or not for several numbers
            native.extension.put(None, kept, kept, earlier is not None, "C++ takes no such argument")


@dataclass(frozen=True)
class Multiple:
    """A number in a recording that is this factor times the number of kept rows."""

    factor: int


def _for_both(one: Any, now: Any, kept: int, low: int, once: bool) -> Any:
    """A recording at ``low`` kept rows, or for several numbers if not ``once``, that also holds at ``kept``."""
    if type(one) is type(now) and isinstance(one, (list, tuple)):
        some, others = cast("list[Any]", one), cast("list[Any]", now)
        if len(some) == len(others):
            both = [_for_both(a, b, kept, low, once) for a, b in zip(some, others, strict=True)]
            return both if isinstance(one, list) else tuple(both)
    elif isinstance(one, Multiple):
        if one.factor * kept == now:
            return one
    elif one is now or (type(one) is type(now) and one == now):
        return one
    elif type(one) is int and type(now) is int and once and one % low == 0 and one // low * kept == now:
        return Multiple(one // low)
    raise ValueError("the rule does something else with another number of kept rows")


def _in_order(steps: Sequence[tuple[Any, ...]], known: set[int]) -> bool:
    """Whether each step uses registers that are known before it; those that it sets join them.

    The registers that a gather sets for itself do not: they are empty where its result is remembered.
    """
    for step in steps:
        if step[0] is None:
            if step[1] not in known or not _in_order(step[3], set(known)):
                return False
        elif step[0]:
            used = [at for kind, *value in step[2] if kind in ("one", "list") for at in _listed(value[0])]
            if not known.issuperset(used):
                return False
        known.update(step[3] if step[0] else [step[-1]])
    return True


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, (list, tuple)) else [value]


def _indexes_by_numbers(func: Any, args: Sequence[Any]) -> bool:
    """Whether an op of indexing is given whole numbers: then its result has their shape, whatever they are."""
    return func._schema.name == "aten::index" and all(i is None or i.dtype == torch.int64 for i in args[1])
