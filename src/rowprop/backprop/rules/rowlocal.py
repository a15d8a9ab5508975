"""The language that rules of aten ops are written in: arguments by the names of the op's schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial, wraps
from typing import Any

from torch import Tensor

from rowprop.backprop.rows.slice import Densify, RowSlice, whole_rows
from rowprop.backprop.rules.registry import Op, rule


@cache
def _schema(op: Any) -> tuple[dict[str, int], dict[str, Any]]:
    """The places of an op's arguments by name, and their defaults."""
    arguments: Any = op._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {a.name: place for place, a in enumerate(arguments)}, defaults


class Call:
    """A call of an op. Its arguments are attributes; one that was left out has its default."""

    __slots__ = ("args", "defaults", "kwargs", "op", "places")

    def __init__(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op: Any = op
        self.args = args
        self.kwargs = kwargs
        self.places, self.defaults = _schema(op)

    def __getattr__(self, name: str) -> Any:
        place = self.places[name]
        if place < len(self.args):
            return self.args[place]
        return self.kwargs[name] if name in self.kwargs else self.defaults[name]

    def first(self, *names: str) -> Any:
        """The value of the first of these arguments that the op has; None if it has none."""
        for name in names:
            if name in self.places:
                return getattr(self, name)
        return None

    def run(self, /, *first: Any, **changed: Any) -> Any:
        """The op's results with some arguments changed: the first ones, and others by name."""
        args, kwargs = [*first, *self.args[len(first) :]], self.kwargs
        for name, value in changed.items():
            if self.places[name] < len(args):
                args[self.places[name]] = value
            else:
                kwargs = {**kwargs, name: value}
        return self.op(*args, **kwargs)

    def other(self, op: Any, /, **given: Any) -> Any:
        """The results of another op, whose arguments are the given ones and those of the same names."""
        return op(**{name: given[name] if name in given else getattr(self, name) for name in _schema(op)[0]})


@cache
def _plan(op: Any) -> tuple[list[int], list[int], list[int]]:
    """The places of an op's gradients, of the further arguments with rows, and of a full shape."""
    required = [a.name for a in op._schema.arguments if str(a.type) == "Tensor"]
    places = _schema(op)[0]
    grads = [place for name, place in places.items() if name.startswith("grad")] or [0]
    others = [places[name] for name in required if places[name] not in grads]
    return grads, others, [place for name, place in places.items() if name in ("input_size", "input_sizes")]


def rowlocal(
    *keys: str, why: str = "the batch lies in space", positions: bool = False, maybe: tuple[str, ...] = ()
) -> Callable[[Callable[[Call, int], Iterable[int]]], Callable[..., Any]]:
    """Declare that ops treat the rows of their gradients alike, but for some dimensions.

    The decorated function is given a call and the gradient's number of dimensions, and returns the dimensions that the
    op mixes. If rows lie in one of these the op densifies, and the report says ``why``; rows that are positions become
    whole rows first. ``keys``, ``maybe`` and ``positions`` are as for :func:`~rowprop.backprop.rules.registry.rule`.

    The rest is in the op's schema. Gradients are called ``grad...``, or the first argument is the only one; several are
    sliced alike, or None. Each other tensor that has to be given has rows in the gradient's dimension; one that may be
    None is a weight. A shape called ``input_size`` is a full one. A result with as many dimensions as the gradient has
    rows; one with fewer is a sum over them.
    """

    def declare(mixed: Callable[[Call, int], Iterable[int]]) -> Callable[..., Any]:
        @wraps(mixed)
        def run(op: Op, *args: Any, **kwargs: Any) -> Any:
            grads, others, sizes = _plan(op)
            g = args[grads[0]]
            if len(grads) > 1:
                given = [args[place] for place in grads if args[place] is not None]
                g = given[0]
                if any(type(x) is not RowSlice or x.layout != g.layout for x in given):
                    return Densify(_OTHER)
            if type(g) is not RowSlice:
                return Densify(_OTHER)
            dims = {dim % g.ndim for dim in mixed(Call(op, args, kwargs), g.ndim)}
            if any(map(g.layout.holds, dims)):
                if not g.layout.minor:
                    return Densify(why)
                return run(op, *map(partial(whole_rows, mixed=dims), args), **kwargs)
            kept = list(args)
            for place in others:
                if type(args[place]) is RowSlice:
                    return Densify(_OTHER)
                kept[place] = g.take(args[place])
            for place in grads:
                if args[place] is not None:
                    kept[place] = args[place].values
            for place in sizes:
                kept[place] = g.kept_shape(args[place])
            out = op(*kept, **kwargs)
            if isinstance(out, Tensor):
                return g.like(out)
            return tuple(g.like(r) if r is not None and r.ndim == g.ndim else r for r in out)

        return rule(*keys, maybe=maybe, positions=positions)(run)

    return declare


_OTHER = "an operand other than the gradient is sliced, or two gradients not alike"
