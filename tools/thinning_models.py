"""Thinning's expectation by Monte Carlo, on small models of many kinds: ``nox -s thinning`` prints a table.

The mean gradient over many draws is compared with the exact one. A model has hundreds of parameters, and the worst of
hundreds of means is often more than 4 standard errors off by chance. So the draws are projected first: on the exact
gradient, which shrinks if a factor is left out; on the exact gradient of each parameter, which tells where; and on some
random directions. Each projection is one number per draw, and 4 standard errors are a fair bound for its mean.
"""

from __future__ import annotations

import copy
import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import families
import rowprop
import zoo
from zoo import Entry, Net, seq

Model = tuple[Callable[[], nn.Module], tuple[int, ...]]
"""What makes a model, and the shape of the rows that it takes."""
ROWS = 12
PICKED = (1, 3, 4, 5, 7, 9, 10, 11)
DIRECTIONS = 4


class Residual(nn.Module):
    """A block with a residual sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def out_and_state(width: int) -> nn.Module:
    """A block that returns a mapping, a tuple within it."""

    def forward(net: Any, x: Any) -> dict[str, Any]:
        y = net.layer(x["out"] if isinstance(x, dict) else x).tanh()
        return {"out": y, "state": (y.square(), None, torch.arange(3))}

    return Net(forward, layer=nn.Linear(width, width))


def unet(norm: bool = False) -> nn.Module:
    """Two scales with a skip connection: gradients of two thinnings meet."""

    def forward(net: Any, x: Tensor) -> Tensor:
        first = F.relu(net.norm(net.down[0](x)))
        low = F.relu(net.down[1](first))
        return net.head(F.relu(net.up[1](torch.cat([first, net.up[0](low)], 1)))).flatten(1)

    down = nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)])
    up = nn.ModuleList([nn.ConvTranspose2d(8, 4, 2, stride=2), nn.ConvTranspose2d(8, 4, 1)])
    return Net(forward, down=down, up=up, head=nn.Conv2d(4, 1, 1), norm=nn.BatchNorm2d(4) if norm else nn.Identity())


def branches() -> nn.Module:
    """Two blocks take the output of a BatchNorm: two draws, of which neither holds the other's rows, meet there."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.norm(net.enter(x)).relu()
        return net.leave(torch.cat([layer(x).tanh().mean((2, 3)) for layer in net.layers], 1))

    parts = {"enter": nn.Conv2d(1, 4, 3), "norm": nn.BatchNorm2d(4), "leave": nn.Linear(8, 3)}
    return Net(forward, **parts, layers=nn.ModuleList(nn.Conv2d(4, 4, 2) for _ in range(2)))


def bottleneck(before: int, after: int, stride: int, train: bool) -> nn.Module:
    """A ResNet's block."""
    first = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after).train(train)
    convs = nn.Sequential(*first, nn.ReLU(inplace=True), nn.Conv2d(after, after, 3, 1, 1, bias=False))
    skip = nn.Conv2d(before, after, 1, stride) if before != after else nn.Identity()
    return Net(lambda net, x: F.relu(net.convs(x) + net.skip(x)), convs=convs, skip=skip)


def resnet(train: bool = False) -> nn.Module:
    stage = nn.Sequential(bottleneck(3, 3, 1, train), bottleneck(3, 4, 2, train))
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), stage, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def layers(count: int, width: int = 4, **settings: Any) -> list[nn.Module]:
    settings = {"dropout": 0.0, "batch_first": True} | settings
    return [nn.TransformerEncoderLayer(width, 2, 2 * width, **settings) for _ in range(count)]


def vit() -> nn.Module:
    head = seq(lambda x: x[:, 0], nn.Linear(zoo.D, 3))  # at the first token
    conv, flatten, prepend = zoo.patches()
    patches = Net(lambda net, x: net.prepend(flatten(net.conv(x))), conv=conv, prepend=prepend)
    return nn.Sequential(patches, *layers(2, zoo.D, norm_first=True, activation="gelu"), nn.LayerNorm(zoo.D), head)


def ids_of(x: Tensor) -> Tensor:
    """Token ids from 0 to 8, of numbers."""
    return (x.abs() * 4).long().clamp(max=8)


class Texts(nn.Module):
    """Token ids to one number per position (``causal``), or to a few per row: GPT and BERT."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(5, 4)
        self.layers = nn.ModuleList(layers(2, norm_first=causal, activation="gelu"))
        self.causal = causal
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        ids = ids_of(x)
        h = self.words(ids) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=h.dtype) if self.causal else None
        empty = None if self.causal else ids.eq(0) & torch.arange(5).gt(2)
        for layer in self.layers:
            h = layer(h, src_mask=mask, src_key_padding_mask=empty)
        return h @ self.words.weight.T if self.causal else self.head(h[:, 0].tanh())


def turn() -> nn.Module:
    """Puts sequences before rows, or rows before sequences."""
    return Net(lambda _, x: x.transpose(0, 1))


def turned() -> nn.Module:
    """Sequences come first in its blocks."""
    return nn.Sequential(nn.Linear(3, 4), turn(), *layers(2, batch_first=False), turn(), nn.Linear(4, 3))


def recurrent() -> nn.Module:
    """Blocks whose outputs are (outputs, (h, c))."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x, (h, _) = layer(x)
        return net.head(x[:, -1] + h[-1])

    lstms = nn.ModuleList(nn.LSTM(inputs, 4, batch_first=True) for inputs in (3, 4))
    return Net(forward, layers=lstms, head=nn.Linear(4, 3))


def mixing() -> nn.Module:
    """An MLP-Mixer's block: over tokens, then over channels."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = x + F.gelu(net.tokens(x.transpose(1, 2))).transpose(1, 2)
        return x + F.gelu(net.channels(x))

    return Net(forward, tokens=nn.Linear(5, 5), channels=nn.Linear(3, 3))


class Checkpointed(nn.Module):
    """Blocks in their order, some ``times``; in checkpoints of ``size`` of them if ``reentrant`` is given."""

    def __init__(self, *layers: nn.Module, times: int = 1, reentrant: bool | None = None, size: int = 1) -> None:
        super().__init__()
        self.layers, self.times, self.reentrant, self.size = nn.ModuleList(layers), times, reentrant, size

    def forward(self, x: Tensor) -> Tensor:
        for begin in [*range(0, len(self.layers), self.size)] * self.times:
            part = nn.Sequential(*self.layers[begin : begin + self.size])
            x = part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)
        return x


def of_blocks(*layers: nn.Module) -> nn.Sequential:
    """Blocks of a layer and what bends its output."""
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))


def mlp() -> nn.Module:
    return nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(6, 6), nn.ReLU(inplace=True))])


def cnn(norm: bool) -> nn.Module:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), *([nn.BatchNorm2d(b).eval()] if norm else []), nn.ReLU(inplace=True)]

    blocks = [layer for channels in (1, 4, 4) for layer in block(channels, 4)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))


IMAGES = (3, 8, 8)


def features() -> nn.Module:
    """Statistics of so many values as there are rows."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(8, 3))


MODELS: dict[str, Model] = {
    "mlp": (mlp, (6,)),
    "residual": (lambda: nn.Sequential(nn.Linear(5, 6), Residual(6), Residual(6), nn.Linear(6, 3)), (5,)),
    "outputs in a mapping": (lambda: nn.Sequential(*(out_and_state(4) for _ in range(3))), (4,)),
    "cnn": (lambda: cnn(False), (1, 6, 6)),
    "cnn, batch norm in evaluation": (lambda: cnn(True), (1, 6, 6)),
    "resnet, batch norm in evaluation": (resnet, (1, 6, 6)),
    "u-net": (unet, (1, 4, 4)),
    "densenet": (zoo.densenet, IMAGES),
    "vit": (vit, IMAGES),
    "bert": (lambda: Texts(False), (5,)),
    "gpt": (lambda: Texts(True), (5,)),
    "sequence first": (turned, (5, 3)),
    "lstm": (recurrent, (5, 3)),
    "mixer": (lambda: nn.Sequential(mixing(), mixing()), (5, 3)),
    "shared blocks": (lambda: Checkpointed(Residual(5), Residual(5), times=2), (5,)),  # as in ALBERT
}


OF_TOKENS = ("vit", "bert", "gpt", "sequence first", "mixer")
"""Models whose tokens are drawn, too."""


def of_transformers(entry: Entry) -> nn.Module:
    """A model of the table of families, without dropout: token ids to the logits of each token."""
    return Net(lambda net, x: net.entry.model(input_ids=ids_of(x)).logits, entry=entry.build().eval())


ENTRIES = {entry.name: entry for entry in families.TRANSFORMERS}
TRANSFORMERS: dict[str, Model] = {
    f"{family} of transformers": (partial(of_transformers, ENTRIES[f"{family}, sdpa"]), (5,))
    for family in "Llama Phi Qwen2 GPT-2 OPT GPT-NeoX BERT RoBERTa".split()
}
"""Their tokens are drawn where transformers is installed, as in ``nox -s integrations``."""

BATCHNORM: dict[str, Model] = {
    "resnet, batch norm in training": (lambda: resnet(train=True), (1, 6, 6)),
    "u-net, batch norm in training": (lambda: unet(norm=True), (1, 4, 4)),
    "branches, batch norm in training": (branches, (1, 5, 5)),
    "features, batch norm in training": (features, (8,)),
}


def step(name: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    """One of the models in float64, and a function that returns losses of its rows, in an order, differing in size."""
    return prepared(*(MODELS | BATCHNORM | TRANSFORMERS)[name], *((0.7, 1.4) if name in BATCHNORM else ()))


def prepared(
    make: Callable[[], nn.Module], shape: tuple[int, ...], least: float = 0.05, most: float = 2.0
) -> tuple[nn.Module, Callable[..., Tensor]]:
    """As :func:`step`, of a model that takes rows of this shape."""
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(ROWS, *shape, dtype=torch.float64)
    target = torch.randn(ROWS, dtype=torch.float64)
    scale = torch.linspace(least, most, ROWS, dtype=torch.float64)[torch.randperm(ROWS)].square()

    def losses(order: Tensor | slice = slice(None)) -> Tensor:
        out = model(x[order])
        found = [out] if isinstance(out, Tensor) else [out["out"], out["state"][0]]
        return sum((o.flatten(1).square().mean(1) - target[order]).square() * scale[order] for o in found)

    return model, losses


def gradient(model: nn.Module, loss: Tensor, *, again: bool = False) -> Tensor:
    """The gradient of all parameters, one vector; ``again``: the graph stays for another backward."""
    model.zero_grad()
    loss.backward(retain_graph=again)
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def kept(handle: rowprop.thinning.Thinning) -> dict[str, float]:
    """The record of the last backward, also where the numbers of a device are read later."""
    handle.state_dict()
    return handle.record.keep


def resumed(
    model: nn.Module, step: Callable[[int], object], tau: float, at: int = 23, more: int = 20, unit: Any = "row"
) -> rowprop.thinning.Thinning:
    """Train, save after some steps, and train more; then do the latter again, and expect the same bit for bit.

    A step goes backward, perhaps several times, and is given its number. The handle of the first training comes back.
    """

    def train(handle: rowprop.thinning.Thinning, steps: range) -> list[rowprop.thinning.ThinRecord]:
        optimizer, records = torch.optim.SGD(model.parameters(), 0.01), []
        for number in steps:
            optimizer.zero_grad()
            step(number)
            optimizer.step()
            records.append(handle.record)
        return records

    handle = rowprop.thin(model, tau=tau, unit=unit)
    train(handle, range(at))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "thinning": handle.state_dict()}, file)
    told = handle.record
    records = train(handle, range(at, at + more))
    expected = copy.deepcopy(model.state_dict())
    handle.remove()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    again = rowprop.thin(model, tau=tau, unit=unit)
    again.load_state_dict(saved["thinning"])
    assert (again.record.passes, again.record.reason) == (told.passes, told.reason)
    pairs = zip(train(again, range(at, at + more)), records, strict=True)
    assert all(record == before for record, before in pairs if record.keep)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(value, saved["model"][name]) for name, value in model.state_dict().items())
    return handle


def bisected(f: Callable[[float], float]) -> float:
    """The positive number at which an increasing function is 0."""
    low, high = 1e-80, 1e80
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return high


def capped(norms: Tensor, count: float) -> Tensor:
    """The probabilities min(1, c * norm) that add up to a count."""
    return (norms * bisected(lambda c: float((norms * c).clamp(max=1).sum()) - count)).clamp(max=1)


def spread(norms: Tensor, p: Tensor) -> float:
    """The variance that draws with probabilities add to a sum: the sum of (1 - p) / p * norm^2."""
    return float(((1 - p) / p * norms.square())[norms > 0].sum())


@dataclass
class Outcome:
    """Draws of a gradient against the exact one.

    Attributes:
        off: For each projection, by how many standard errors the mean over the draws is off.
        bias: The mean's distance from the exact gradient, over its norm; a part of it is noise.
        noise: The standard error of ``bias``, over the same norm.
        moved: The share of parameters whose gradient differs from draw to draw.
    """

    off: Tensor
    bias: float
    noise: float
    moved: float


def compared(
    model: nn.Module, loss: Callable[[], Tensor], exact: Tensor, draws: int, *, fresh: bool = False
) -> Outcome:
    """Draw gradients of a thinned model; ``fresh``: with a forward for each."""
    sizes = [p.numel() for p in model.parameters()]
    parts = torch.block_diag(*(part.unsqueeze(1) for part in exact.split(sizes)))
    random = torch.randn(len(exact), DIRECTIONS, dtype=exact.dtype, generator=torch.Generator().manual_seed(5))
    onto = torch.cat([exact.unsqueeze(1), random, parts], 1)
    graph = None if fresh else loss()
    seen: list[Tensor] = []
    total, squares = torch.zeros_like(exact), torch.zeros_like(exact)
    for _ in range(draws):
        drawn = gradient(model, loss()) if graph is None else gradient(model, graph, again=True)
        total += drawn
        squares += drawn.square()
        seen.append(drawn @ onto)
    found = torch.stack(seen)
    error, norms = found.std(0) / draws**0.5, onto.norm(dim=0)
    varies = error > 1e-12 * norms * exact.norm()
    off = found.mean(0) - exact @ onto
    assert float(off[~varies].abs().max() if bool((~varies).any()) else 0) <= 1e-9 * float((norms * exact.norm()).max())
    mean = total / draws
    variance = (squares / draws - mean.square()).clamp_min(0)
    moved = float((variance > 1e-20 * exact.square().max()).double().mean())
    bias, noise = float((mean - exact).norm() / exact.norm()), float((variance.sum() / draws).sqrt() / exact.norm())
    return Outcome(off[varies] / error[varies], bias, noise, moved)


def thinned(
    name: str, picked: bool, draws: int, *, shuffled: bool = True, unit: Any = "row", keep: float = 0.5
) -> Outcome:
    """Draws of the gradient of one of ``MODELS`` or ``BATCHNORM``, there of a batch with its rows in any order."""
    model, losses = step(name)
    numbers = torch.Generator().manual_seed(2)
    mixes = name in BATCHNORM

    def loss() -> Tensor:
        order = torch.randperm(ROWS, generator=numbers) if mixes and shuffled else torch.arange(ROWS)
        rows = order.argsort()[list(PICKED)].sort().values
        return rowprop.pick(losses(order), rows, batchnorm="rows").mean() if picked else losses(order).mean()

    exact = gradient(model, loss())
    handle = rowprop.thin(model, keep=keep, unit=unit, generator=torch.Generator().manual_seed(1))
    with rowprop.watch() as report:
        gradient(model, loss())
    assert not (mixes and report.densified), report
    assert 0 < max(kept(handle).values()) < keep + 0.2
    return compared(model, loss, exact, draws, fresh=mixes)


def main(draws: int = 5000, ending: str = "") -> int:
    """Print a line for each model whose title ends so; how many are off, which BatchNorm in training mode may be.

    For unequal probabilities the estimate there is nearly unbiased only: these lines inform, and fail nothing.
    """
    torch.set_num_threads(1)
    failed = 0
    print(f"{draws} draws, keep .5; in standard errors, the worst projection of the mean gradient; bias: the mean's")
    print("distance from the exact gradient, over its norm (noise in it)", flush=True)
    cases = [(name, name, True, "row") for name in (*MODELS, *BATCHNORM)]
    cases += [(f"{name}, rows in one order", name, False, "row") for name in BATCHNORM]
    installed = TRANSFORMERS if find_spec("transformers") else ()
    cases += [(f"{name}, tokens", name, True, "token") for name in (*OF_TOKENS, *installed)]
    for title, name, shuffled, unit in cases:
        if not title.endswith(ending):
            continue
        begun = time.process_time()
        count = draws // 5 if name in BATCHNORM else draws
        found = [thinned(name, picked, count, shuffled=shuffled, unit=unit) for picked in (False, True)]
        failed += name not in BATCHNORM and max(float(f.off.abs().max()) for f in found) >= 4
        alone, after = (f"{float(f.off.abs().max()):5.2f}, bias {f.bias:.3f} ({f.noise:.3f})" for f in found)
        print(f"{title:50} alone {alone}   after pick {after}   {time.process_time() - begun:5.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000, *sys.argv[2:]))
