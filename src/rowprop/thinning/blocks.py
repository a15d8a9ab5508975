"""The blocks of a model: the modules after which a gradient is thinned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rowprop.checks import shown
from rowprop.errors import InvalidInput

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def blocks_of(model: nn.Module, blocks: object) -> dict[str, nn.Module]:
    """The modules after which the gradient is thinned, by their names in the model.

    Args:
        model: The model.
        blocks: Names or modules; None for those that are found.

    Raises:
        InvalidInput: A name or a module is not in the model, or none is given or found.
    """
    if blocks is None:
        found = repeated_blocks(model)
        if not found:
            raise InvalidInput(
                f"thin got a {type(model).__name__} without blocks that repeat (children of one class in a ModuleList "
                "or a Sequential) but blocks to thin after were needed; name them, e.g. blocks=['encoder']."
            )
        return found
    if isinstance(blocks, (str, Tensor, nn.Module)) or not isinstance(blocks, Iterable):
        raise InvalidInput(f"thin got blocks={shown(blocks)} but a list of names or modules of the model was needed.")
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))
    modules = {name: module for name, module in named if name}
    names = {module: name for name, module in reversed(modules.items())}  # of several names the first one
    chosen: dict[str, nn.Module] = {}
    for block in cast("Iterable[object]", blocks):
        name = names.get(block) if isinstance(block, nn.Module) else block
        if not isinstance(name, str) or name not in modules:
            raise InvalidInput(
                f"thin got the block {shown(block)}, which is not in the model, but one of its modules was needed; "
                "[name for name, _ in model.named_modules()] lists their names."
            )
        if getattr(modules[name].forward, "__func__", None) is nn.Module.forward:
            raise InvalidInput(
                f"thin got the block {name}, a {type(modules[name]).__name__}, which has no forward of its own, but a "
                "module that is called was needed; name the modules that it holds."
            )
        chosen[name] = modules[name]
    if not chosen:
        raise InvalidInput("thin got no blocks but at least one was needed; leave out blocks to have them found.")
    return chosen


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that are found where none are given, by their names in the model; perhaps none."""
    return dict(_repeated(model, ""))


def _repeated(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    """The outermost children of ModuleLists and Sequentials whose class repeats there.

    Where several classes repeat, as in a Sequential of convolutions and norms, the one with the most parameters counts.
    A Sequential of blocks, as a stage of a ResNet, is no block itself.
    """
    children = list(module.named_children())
    if isinstance(module, _CONTAINERS):
        counts = Counter(type(child) for _, child in children)
        sizes = Counter[type]()
        for _, child in children:
            sizes[type(child)] += sum(1 if is_lazy(p) else p.numel() for p in child.parameters() if p.requires_grad)
        most = max((kind for kind in counts if counts[kind] > 1), key=lambda kind: sizes[kind], default=None)
        if most is not None and sizes[most]:
            for name, child in children:
                inner = list(_repeated(child, f"{prefix}{name}."))
                own = type(child) is most and not (inner and isinstance(child, _CONTAINERS))
                # A list is never called itself.
                if type(child) is most is nn.ModuleList and (own or len(list(child.children())) == 1):
                    yield from ((f"{prefix}{name}.{inside}", block) for inside, block in child.named_children())
                else:
                    yield from [(prefix + name, child)] if own else inner
            return
    for name, child in children:
        yield from _repeated(child, f"{prefix}{name}.")
