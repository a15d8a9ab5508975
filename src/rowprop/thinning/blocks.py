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
    """The modules after which the gradient is thinned, by name; ``blocks=None``: the repeated blocks of the model."""
    if blocks is None:
        if not (found := repeated_blocks(model)):
            repeat = "blocks that repeat (children of one class in a ModuleList or a Sequential)"
            needed = "blocks to thin after were needed; name them, e.g. blocks=['encoder']."
            raise InvalidInput(f"thin got a {type(model).__name__} without {repeat} but {needed}")
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
            needed = "one of its modules was needed; [name for name, _ in model.named_modules()] lists their names."
            raise InvalidInput(f"thin got the block {shown(block)}, which is not in the model, but {needed}")
        if getattr(modules[name].forward, "__func__", None) is nn.Module.forward:
            got = f"the block {name}, a {type(modules[name]).__name__}, which has no forward of its own,"
            needed = "a module that is called was needed; name the modules that it holds."
            raise InvalidInput(f"thin got {got} but {needed}")
        chosen[name] = modules[name]
    if not chosen:
        raise InvalidInput("thin got no blocks but at least one was needed; leave out blocks to have them found.")
    return chosen


def repeated_blocks(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The outermost children of ModuleLists and Sequentials whose class repeats there, by their names; perhaps none.

    Where several classes repeat, as in a Sequential of convolutions and norms, the one with the most parameters counts.
    A Sequential of blocks, as a stage of a ResNet, is no block itself.
    """
    most, found = None, dict[str, nn.Module]()
    if isinstance(module, _CONTAINERS):
        counts, sizes = Counter(map(type, module.children())), Counter[type]()
        for child in module.children():
            sizes[type(child)] += sum(1 if is_lazy(p) else p.numel() for p in child.parameters() if p.requires_grad)
        repeated = (kind for kind in counts if counts[kind] > 1 and sizes[kind])
        most = max(repeated, key=lambda kind: sizes[kind], default=None)
    for name, child in module.named_children():
        inner = repeated_blocks(child, f"{prefix}{name}.")
        own = type(child) is most and not (inner and isinstance(child, _CONTAINERS))
        # A list is never called itself.
        if type(child) is most is nn.ModuleList and (own or len(list(child.children())) == 1):
            found |= {f"{prefix}{name}.{inside}": block for inside, block in child.named_children()}
        else:
            found |= {prefix + name: child} if own else inner
    return found
