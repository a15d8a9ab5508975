"""Small models of every kind that people train, each with a batch and its losses, one per row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from rowprop.backprop.watch import Report
from rowprop.cost.flops import Flops, count_flops

N = 8
ROWS = (2, 5)
KEEP = len(ROWS) / N
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
T, V, D, H, C = 6, 11, 8, 2, 4  # steps, vocabulary, width, heads, classes

Batch = tuple[Tensor, ...]
Losses = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Entry:
    """A model, the ops at which its sliced gradient goes back to all rows, and the ops that no formula counts."""

    kind: str
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    losses: Losses
    densifies: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    share: float = 1.0
    """FLOPs of the sliced backward over the kept rows' share of the full backward; above 1 if a forward runs again."""

    def make(self, dtype: torch.dtype) -> tuple[nn.Module, Batch]:
        """The model and its batch, the same ones every time."""
        torch.manual_seed(0)
        model, batch = self.build().to(dtype), self.batch()
        return model, tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)


@dataclass(frozen=True)
class Backward:
    """The gradients, FLOPs and report of one backward."""

    grads: dict[str, Tensor | None]
    flops: Flops
    report: Report


def backward(
    entry: Entry, dtype: torch.dtype, choose: Callable[[Tensor], Tensor], prepare: Callable[[nn.Module], Any] = id
) -> Backward:
    """Run the entry's forward, choose losses, and backpropagate their mean. Dropout draws the same masks every time."""
    model, batch = entry.make(dtype)
    prepare(model)
    torch.manual_seed(1)
    losses = entry.losses(model, batch)
    assert losses.shape == (N,)
    with rowprop.watch() as report, count_flops() as flops:
        chosen = choose(losses)
        (chosen.sum() / max(1, len(chosen))).backward()
    return Backward({name: p.grad for name, p in model.named_parameters()}, flops, report)


def masked(entry: Entry, dtype: torch.dtype, rows: tuple[int, ...] = ROWS, **options: Any) -> Backward:
    """The oracle: plain indexing."""
    return backward(entry, dtype, lambda losses: losses[torch.tensor(rows, dtype=torch.int64)], **options)


def sliced(entry: Entry, dtype: torch.dtype, rows: tuple[int, ...] = ROWS) -> Backward:
    """The same through ``pick``."""
    return backward(entry, dtype, lambda losses: rowprop.pick(losses, torch.tensor(rows), batchnorm="exact"))


def skipping(entry: Entry, dtype: torch.dtype, rows: tuple[int, ...] = ROWS) -> Backward:
    """Plain indexing, with zeros skipped at the model's output."""

    def hook(model: nn.Module) -> None:
        rowprop.skip_zeros(model)
        rowprop.skip_zeros(getattr(model, "model", model))  # CLIP's losses call the model that is inside

    return masked(entry, dtype, rows, prepare=hook)


def errors(expected: Backward, actual: Backward) -> dict[str, float]:
    """The distance of the two gradients of each parameter; a parameter has a gradient in both backwards or in neither.

    Relative to the parameter's own gradient, unless this is tiny: the gradient of a key's bias is rounding only.
    """
    scale = max(float(g.abs().max()) for g in expected.grads.values() if g is not None)
    assert scale > 0
    found: dict[str, float] = {}
    for name, grad in expected.grads.items():
        other = actual.grads[name]
        assert (other is None) == (grad is None), name
        if grad is not None and other is not None:
            assert type(other) is Tensor, name
            found[name] = float((other - grad).abs().max()) / max(float(grad.abs().max()), 1e-2 * scale)
    return found


def assert_same(expected: Backward, actual: Backward, tolerance: float = TOLERANCE[torch.float32]) -> None:
    off = {name: error for name, error in errors(expected, actual).items() if not error <= tolerance}
    assert not off, off


ENTRIES: list[Entry] = []


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the model's logits; the mean over the places of a row, if it has several."""
    *inputs, target = batch
    logits = model(*inputs)
    losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return losses.view(len(target), -1).mean(1)


def by_element(loss: Callable[..., Tensor]) -> Losses:
    """The mean of a loss over the elements of each row's target, which may be its input."""
    return lambda model, batch: loss(model(batch[0]), batch[-1], reduction="none").flatten(1).mean(1)


def add(
    kind: str,
    batch: Callable[[], Batch],
    *builds: Callable[[], nn.Module],
    losses: Losses = classify,
    densifies: tuple[str, ...] = (),
    uncounted: tuple[str, ...] = (),
    share: float = 1.0,
    **named: Callable[[], nn.Module],
) -> None:
    """Enter models of one kind, batch and loss; each has the name of what builds it, or the one it is given."""
    for name, build in ({build.__name__: build for build in builds} | named).items():
        ENTRIES.append(Entry(kind, name, build, batch, losses, densifies, uncounted, share))


def image(size: int = 8, channels: int = 3, dims: int = 2) -> Callable[[], Batch]:
    return lambda: (torch.randn(N, channels, *[size] * dims), torch.randint(C, (N,)))


def vectors(*shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(N, *shape), torch.randint(C, (N,)))


def text(least: int = 0) -> Callable[[], Batch]:
    """Tokens and the class of the whole."""
    return lambda: (torch.randint(least, V, (N, T)), torch.randint(C, (N,)))


def language(*steps: int) -> Callable[[], Batch]:
    """Tokens and the next token at each; of several lengths, the last is that of the tokens to write."""
    return lambda: tuple(torch.randint(V, (N, size)) for size in [*(steps or (T,)), (steps or (T,))[-1]])


class Net(nn.Module):
    """A module of these parts; its forward is a function of the module and its inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            self.register_buffer(name, part) if type(part) is Tensor else setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def as_modules(parts: tuple[Any, ...]) -> list[nn.Module]:
    return [p if isinstance(p, nn.Module) else Net(lambda _, *inputs, f=p: f(*inputs)) for p in parts]


def seq(*parts: Any) -> nn.Sequential:
    return nn.Sequential(*as_modules(parts))


def res(*parts: Any) -> Residual:
    return Residual(*as_modules(parts))


def frozen(model: nn.Module) -> nn.Module:
    """BatchNorm on running statistics that differ from their initial values."""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(m.running_mean, std=0.3)
            nn.init.uniform_(m.running_var, 0.5, 2.0)
            m.eval()
    return model


# --- nets of matrices ------------------------------------------------------------------------------------------------

ACTIVATIONS = """SiLU ELU LeakyReLU Softplus Mish Hardswish SELU CELU Hardsigmoid Sigmoid Tanh PReLU Softsign LogSigmoid
Tanhshrink""".split()


def mlp_every_activation() -> nn.Module:
    layers = [layer for name in ACTIVATIONS for layer in (nn.Linear(D, D), getattr(nn, name)())]
    return seq(nn.Linear(10, D), *layers, nn.Linear(D, C))


def highway() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        gate = net.gate(x).sigmoid()
        return gate * net.value(x).relu() + (1 - gate) * x

    return seq(*[Net(forward, value=nn.Linear(D, D), gate=nn.Linear(D, D)) for _ in range(2)], nn.Linear(D, C))


def swiglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


def kolmogorov_arnold() -> nn.Module:
    """Each edge a spline: here, Gaussian bumps."""
    centres = torch.linspace(-2, 2, 5)

    def bumps(x: Tensor) -> Tensor:
        return torch.exp(-((x.unsqueeze(-1) - centres.to(x)) ** 2)).flatten(1)

    return seq(bumps, nn.Linear(5 * D, D), bumps, nn.Linear(5 * D, C))


def radiance_field() -> nn.Module:
    def positions(x: Tensor) -> Tensor:
        waves = x.unsqueeze(-1) * 2.0 ** torch.arange(4).to(x)
        return torch.cat([waves.sin(), waves.cos()], -1).flatten(1)

    return seq(positions, nn.Linear(24, D), nn.ReLU(), nn.Linear(D, D), lambda x: torch.sin(30 * x), nn.Linear(D, C))


def neural_ode() -> nn.Module:
    """Euler steps with shared weights."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 0.3 * net.f(x)
        return net.head(x)

    return Net(forward, f=seq(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), head=nn.Linear(D, C))


def flow() -> nn.Module:
    """A spline's parameters are read at the entries inside of its range; of the two tails one has no entry."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h, out = net.first(x), torch.zeros(N, D).to(x)
        parameters = net.parameters_of(h).view(N, D, 3)
        inside, above = h.abs() <= 0.3, h > 100
        out[inside] = (parameters[inside].tanh().sum(-1)) * h[inside]
        out[~inside] = h[~inside]
        out[above] = h[above]
        return net.head(out)

    return Net(forward, first=nn.Linear(10, D), parameters_of=nn.Linear(D, 3 * D), head=nn.Linear(D, C))


def idle_experts() -> nn.Module:
    """Two of three experts get no row."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        out, none = h, h[:, 0] > 100
        for expert, at in zip(net.experts, (~none, none, none), strict=True):
            rows = at.nonzero()[:, 0]
            read = h[at] if expert is net.experts[1] else h.index_select(0, rows)
            out = out.index_add(0, rows, expert(read).tanh())
        return net.head(out)

    return Net(
        forward,
        first=nn.Linear(10, D),
        experts=nn.ModuleList(nn.Linear(D, D) for _ in range(3)),
        head=nn.Linear(D, C),
    )


def bilinear() -> nn.Module:
    parts = {"a": nn.Linear(D, 3), "b": nn.Linear(D, 5), "join": nn.Bilinear(3, 5, C)}
    return Net(lambda net, x: net.join(net.a(x), net.b(x)), **parts)


mlps = {
    "mlp": lambda: seq(nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, C)),
    "mlp_every_activation": mlp_every_activation,
}
gated = {
    "gated_linear_units": lambda: seq(nn.Linear(D, 2 * D), nn.GLU(), nn.Linear(D, 2 * D), swiglu, nn.Linear(D, C)),
    "weight_normed": lambda: seq(nn.utils.parametrizations.weight_norm(nn.Linear(D, D)), nn.Tanh(), nn.Linear(D, C)),
}
several = {"multi_label": lambda: seq(nn.Linear(10, D), nn.ReLU(), nn.Linear(D, C))}
each_label = by_element(F.binary_cross_entropy_with_logits)
add("MLP", vectors(10), flow, idle_experts, **mlps)
add("MLP", vectors(D), highway, bilinear, kolmogorov_arnold, neural_ode, **gated)
add("MLP", vectors(3), radiance_field)
add("MLP", lambda: (torch.randn(N, 10), torch.rand(N, C).round()), losses=each_label, **several)


def evidence(model: nn.Module, batch: Batch) -> Tensor:
    (x,) = batch
    out, mean, log_var = model(x)
    divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1)
    return F.binary_cross_entropy(out, x, reduction="none").sum(1) + divergence


def variational_autoencoder() -> nn.Module:
    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = net.encode(x).chunk(2, 1)
        return net.decode(mean + torch.randn_like(mean) * (0.5 * log_var).exp()), mean, log_var

    encode = seq(nn.Linear(10, D), nn.ReLU(), nn.Linear(D, 6))
    return Net(forward, encode=encode, decode=seq(nn.Linear(3, D), nn.ReLU(), nn.Linear(D, 10), nn.Sigmoid()))


add("MLP", lambda: (torch.rand(N, 10),), variational_autoencoder, losses=evidence)


def shares() -> nn.Module:
    """A policy's actions and shares are drawn with their gradients: Beta and Dirichlet."""

    def forward(net: Any, x: Tensor) -> Tensor:
        a, b, c = (F.softplus(net.first(x)) + 0.5).split([D, D, 2 * D], 1)
        drawn = (
            torch.distributions.Beta(a, b).rsample(),
            torch.distributions.Dirichlet(c.unflatten(1, (2, D))).rsample(),
        )
        return net.head(torch.cat([drawn[0], drawn[1].flatten(1)], 1))

    return Net(forward, first=nn.Linear(10, 4 * D), head=nn.Linear(3 * D, C))


def matrices() -> nn.Module:
    """Exponentials, eigenvalues and systems of equations, as of rotations and of Gaussian processes."""

    def forward(net: Any, x: Tensor) -> Tensor:
        m = net.first(x).tanh().unflatten(1, (3, 3))
        factor = torch.linalg.cholesky(m @ m.mT + torch.eye(3).to(m))
        solved = torch.cholesky_solve(torch.matrix_exp(m), factor) + torch.linalg.eigvals(m + factor).abs().unsqueeze(2)
        return net.head(solved.flatten(1))

    return Net(forward, first=nn.Linear(10, 9), head=nn.Linear(9, C))


solves = "cholesky_solve _linalg_solve_ex linalg_solve_triangular _linalg_check_errors linalg_matrix_exp"
add("MLP", vectors(10), shares, uncounted=("_dirichlet_grad",))
add("MLP", vectors(10), matrices, uncounted=tuple(solves.split()))

# --- images ----------------------------------------------------------------------------------------------------------


def conv(a: int, b: int, norm: nn.Module) -> nn.Sequential:
    return seq(nn.Conv2d(a, b, 3, padding=1, bias=False), norm, nn.ReLU())


def small_cnn(norm: Callable[[int], nn.Module]) -> nn.Module:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(D, C))
    return seq(conv(3, D, norm(D)), nn.MaxPool2d(2), conv(D, D, norm(D)), *head)


groups = partial(nn.GroupNorm, 2)
channels_last = partial(Tensor.contiguous, memory_format=torch.channels_last)


def resnet() -> nn.Module:
    def block(a: int, b: int, stride: int) -> nn.Module:
        first = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
        body = seq(*first, nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b))
        skip = seq(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b)) if a != b else nn.Identity()
        return Net(lambda net, x: F.relu_(net.body(x).add_(net.skip(x))), body=body, skip=skip)

    stem = (nn.Conv2d(3, D, 3, padding=1), nn.BatchNorm2d(D), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return frozen(seq(*stem, block(D, D, 1), block(D, 12, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(12, C)))


def mobilenet() -> nn.Module:
    """Depthwise-separable, ReLU6, squeeze-excite."""
    gate = nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1), nn.Hardsigmoid()
    squeeze_excite = Net(lambda net, x: x * net.gate(x), gate=seq(*gate))
    depthwise = (nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
    block = res(nn.Conv2d(D, 16, 1), nn.ReLU6(), *depthwise, squeeze_excite, nn.Conv2d(16, D, 1), nn.BatchNorm2d(D))
    return frozen(seq(nn.Conv2d(3, D, 3, 2, 1), nn.Hardtanh(0, 6), block, lambda x: x.mean((2, 3)), nn.Linear(D, C)))


def convnext() -> nn.Module:
    def last(x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)

    scale = Net(lambda net, x: (net.gamma * x).permute(0, 3, 1, 2), gamma=nn.Parameter(torch.full((D,), 0.1)))
    depthwise = nn.Conv2d(D, D, 7, padding=3, groups=D)
    block = res(depthwise, last, nn.LayerNorm(D), nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D), scale)
    return seq(nn.Conv2d(3, D, 2, 2), block, lambda x: x.mean((-2, -1)), nn.LayerNorm(D), nn.Linear(D, C))


def pixel_shuffle() -> nn.Module:
    first = nn.Conv2d(3, 16, 3, padding=1), nn.PixelShuffle(2), nn.ZeroPad2d(1), nn.Conv2d(4, D, 3, 2), nn.Softplus()
    return seq(*first, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(D * 4, C))


def densenet() -> nn.Module:
    def dense(width: int) -> nn.Module:
        layers = seq(nn.GroupNorm(1, width), nn.ReLU(), nn.Conv2d(width, 4, 3, padding=1))
        return Net(lambda net, x: torch.cat([x, net.layers(x)], 1), layers=layers)

    return seq(dense(3), dense(7), dense(11), lambda x: x.amax((2, 3)), nn.Linear(15, C))


cnns = {
    "cnn_batchnorm_frozen": lambda: frozen(small_cnn(nn.BatchNorm2d)),
    "cnn_groupnorm": lambda: small_cnn(groups),
    "cnn_instancenorm": lambda: small_cnn(lambda width: nn.InstanceNorm2d(width, affine=True)),
    "cnn_channels_last": lambda: seq(channels_last, small_cnn(groups)),
    "resnet_channels_last": lambda: seq(channels_last, resnet()),
}
training = {"cnn_batchnorm_training": lambda: small_cnn(nn.BatchNorm2d)}
add("CNN", image(), resnet, mobilenet, convnext, pixel_shuffle, densenet, **cnns)
add("CNN", image(), densifies=("native_batch_norm_backward",), **training)


def unet() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        a = net.down1(x).relu()
        b = net.down2(a).relu()
        u = torch.cat([net.up2(net.middle(b)), b], 1)
        return net.head(torch.cat([net.up1(u), a], 1))

    down = {"down1": nn.Conv2d(3, 4, 3, padding=1), "down2": nn.Conv2d(4, D, 3, 2, 1)}
    middle = seq(nn.GroupNorm(2, D), nn.Conv2d(D, D, 3, 2, 1), nn.ReLU())
    up1 = seq(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2 * D, 4, 3, padding=1))
    return Net(forward, **down, middle=middle, up2=nn.ConvTranspose2d(D, D, 2, 2), up1=up1, head=nn.Conv2d(8, C, 1))


def dilated_segmentation() -> nn.Module:
    """Nearest upsampling, dilation, reflection padding, average pooling."""
    up = nn.Upsample(scale_factor=2, mode="nearest")
    dilated = nn.Conv2d(D, D, 3, padding=2, dilation=2, padding_mode="reflect")
    return seq(nn.Conv2d(3, D, 3, padding=1), nn.AvgPool2d(2), dilated, nn.LeakyReLU(), up, nn.Conv2d(D, C, 1))


each_pixel = {"losses": by_element(F.cross_entropy)}
add("CNN", lambda: (torch.randn(N, 3, 8, 8), torch.randint(C, (N, 8, 8))), unet, dilated_segmentation, **each_pixel)


def cnn_3d() -> nn.Module:
    first = nn.Conv3d(2, D, 3, padding=1), nn.GroupNorm(2, D), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(D, D, 2)
    return seq(*first, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(D, C))


def temporal_convolutions() -> nn.Module:
    """Causal, dilated, grouped, 1d."""

    def causal(dilation: int) -> nn.Module:
        pad = nn.ConstantPad1d((2 * dilation, 0), 0.0)
        return res(pad, nn.Conv1d(D, D, 3, dilation=dilation, groups=2), nn.ReLU(), nn.Dropout(0.1))

    return seq(nn.Conv1d(3, D, 1), causal(1), causal(2), nn.AvgPool1d(2), lambda x: x[..., -1], nn.Linear(D, C))


def wavenet() -> nn.Module:
    def gated(net: Any, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = net.conv(F.pad(x, (*net.conv.dilation, 0))).split(D, dim=1)
        residual, more = net.out(value.tanh() * gate.sigmoid()).chunk(2, dim=1)
        return x + residual, skip + more

    def forward(net: Any, tokens: Tensor) -> Tensor:
        x = net.embed(tokens).transpose(1, 2)
        skip = torch.zeros_like(x)
        for layer in net.layers:
            x, skip = layer(x, skip)
        return net.head(skip.relu()).transpose(1, 2)

    layers = [
        Net(gated, conv=nn.Conv1d(D, 2 * D, 2, dilation=dilation), out=nn.Conv1d(D, 2 * D, 1)) for dilation in (1, 2)
    ]
    return Net(forward, embed=nn.Embedding(V, D), head=nn.Conv1d(D, V, 1), layers=nn.ModuleList(layers))


def autoencoder() -> nn.Module:
    encoder = nn.Conv2d(3, D, 3, 2, 1), nn.ReLU(), nn.Conv2d(D, 4, 3, 2, 1), nn.ReLU()
    last = nn.ConvTranspose2d(D, 3, 3, 2, 1, output_padding=1)
    return seq(*encoder, nn.ConvTranspose2d(4, D, 4, 2, 1), nn.ReLU(), last)


add("CNN", image(6, 2, 3), cnn_3d)
add("CNN", image(12, 3, 1), temporal_convolutions)
add("CNN", language(), wavenet)
add("CNN", lambda: (torch.randn(N, 3, 8, 8),), autoencoder, losses=by_element(F.mse_loss))


def similar(model: nn.Module, batch: Batch) -> Tensor:
    a, b, same = batch
    return F.smooth_l1_loss(F.cosine_similarity(model(a), model(b)), same, reduction="none")


def triplet(model: nn.Module, batch: Batch) -> Tensor:
    a, b, c = (F.normalize(model(t), dim=1) for t in batch)
    return F.triplet_margin_loss(a, b, c, margin=1.0, reduction="none")


pairs = {"siamese": lambda: seq(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, D))}
add("metric", lambda: (torch.randn(N, D), torch.randn(N, D), torch.rand(N).round()), losses=similar, **pairs)
add("metric", lambda: tuple(torch.randn(3, N, 3, 8, 8)), losses=triplet, triplets=lambda: small_cnn(groups))

# --- attention -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention; ``core`` is what happens between the projections."""

    def __init__(self, core: Callable[..., Tensor], kv_heads: int = H) -> None:
        super().__init__()
        self.core, self.kv_heads = core, kv_heads
        self.q, self.k, self.v = (nn.Linear(D, heads * D // H) for heads in (H, kv_heads, kv_heads))
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        parts = ((self.q, x, H), (self.k, memory, self.kv_heads), (self.v, memory, self.kv_heads))
        q, k, v = (p(t).unflatten(-1, (heads, -1)).transpose(1, 2) for p, t, heads in parts)
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


def block(core: Callable[..., Tensor], **options: Any) -> nn.Sequential:
    feed_forward = res(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
    return seq(res(nn.LayerNorm(D), Attention(core, **options)), feed_forward)


def embedded(steps: int = T) -> nn.Module:

    def forward(net: Any, tokens: Tensor) -> Tensor:
        return net.token(tokens) + net.place(torch.arange(tokens.shape[1]))

    return Net(forward, token=nn.Embedding(V, D), place=nn.Embedding(steps, D))


def language_model(*layers: Any, steps: int = T) -> nn.Module:
    return seq(embedded(steps), *layers, nn.LayerNorm(D), nn.Linear(D, V))


sdpa = F.scaled_dot_product_attention
causal = partial(sdpa, is_causal=True)
mean = partial(torch.mean, dim=1)


def by_hand(bias: Callable[[Tensor], Tensor] = lambda scores: scores) -> Callable[..., Tensor]:
    """Attention written out, with something done to the scores."""
    return lambda q, k, v: bias(q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def ahead(steps: int) -> Tensor:
    return torch.ones(steps, steps, dtype=torch.bool).triu(1)


def patches() -> tuple[Any, ...]:
    """Patches of an image, a learned class token before them, and positions."""
    learned = {"cls": nn.Parameter(torch.randn(1, 1, D)), "place": nn.Parameter(torch.randn(1, 5, D))}
    prepend = Net(lambda net, x: torch.cat([net.cls.expand(len(x), -1, -1), x], 1) + net.place, **learned)
    return nn.Conv2d(3, D, 4, 4), lambda x: x.flatten(2).transpose(1, 2), prepend


def vit_written_to() -> nn.Module:
    """In place, to some tokens of a gradient that is sliced over class tokens: to all but these, as in MViT v2."""

    def pooled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = by_hand()(q, k, v)
        out[:, :, 1:, :] += q[:, :, 1:, :]
        return out

    def written(x: Tensor) -> Tensor:
        x = x * 2
        x[:, 1:3, :2] = x[:, 3:, 1:3]
        x[:, 2:] *= 3
        x[:, 0].tanh_()
        return x

    return seq(*patches(), block(pooled), written, block(pooled), written, lambda x: x[:, 0], nn.Linear(D, C))


def vit_written_out() -> nn.Module:
    """Patches by unfolding, attention by einsum, pooled by the mean."""

    def unfolded(x: Tensor) -> Tensor:
        return x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)

    def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        return torch.einsum("bhqk,bhkd->bhqd", F.dropout(scores.softmax(-1), 0.1), v)

    return seq(unfolded, nn.Linear(48, D), block(einsum), mean, nn.Linear(D, C))


def mlp_mixer() -> nn.Module:
    mix = res(nn.LayerNorm(D), lambda x: x.transpose(1, 2), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4), lambda x: x.mT)
    channels = res(nn.LayerNorm(D), nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D))
    return seq(nn.Conv2d(3, D, 4, 4), lambda x: x.flatten(2).mT, mix, channels, mean, nn.Linear(D, C))


def swin() -> nn.Module:
    """Shifted windows: roll, partition, a relative-position bias, roll back."""

    def windows(shift: int) -> nn.Module:
        def forward(net: Any, x: Tensor) -> Tensor:  # (N, 4, 4, D)
            parts = x.roll((-shift, -shift), (1, 2)).view(-1, 2, 2, 2, 2, D).permute(0, 1, 3, 2, 4, 5)
            x = net.attend(parts.reshape(-1, 4, D)).view(-1, 2, 2, 2, 2, D).permute(0, 1, 3, 2, 4, 5)
            return x.reshape(-1, 4, 4, D).roll((shift, shift), (1, 2))

        net = Net(forward, bias=nn.Parameter(torch.randn(9, H)))
        net.register_buffer("place", torch.tensor([[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]))
        net.attend = Attention(by_hand(lambda s: s + net.bias[net.place].permute(2, 0, 1)))
        return net

    def merge(x: Tensor) -> Tensor:
        return torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)

    layers = res(nn.LayerNorm(D), windows(0)), res(nn.LayerNorm(D), windows(1)), merge, nn.Linear(4 * D, D)
    first = nn.Conv2d(3, D, 2, 2), lambda x: x.permute(0, 2, 3, 1)
    return seq(*first, *layers, lambda x: x.mean((1, 2)), nn.Linear(D, C))


vits = {"vit": lambda: seq(*patches(), block(sdpa), block(sdpa), nn.LayerNorm(D), lambda x: x[:, 0], nn.Linear(D, C))}
add("ViT", image(), **vits)
add("ViT", image(), vit_written_to, vit_written_out, mlp_mixer, swin)


def transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 16, 0.1, batch_first=True)
    return seq(embedded(), nn.TransformerEncoder(layer, 2), lambda x: x[:, 0], nn.Linear(D, C))


def transformer_encoder_sequence_first() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 16, 0.0, activation="gelu", norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return seq(embedded(), lambda x: x.transpose(0, 1), encoder, lambda x: x.mean(0), nn.Linear(D, C))


def relative_positions() -> nn.Module:
    """T5's learned bias, through the kernel's mask."""
    place = torch.arange(T)[None] - torch.arange(T)[:, None] + T - 1

    def core(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=net.bias(net.place).permute(2, 0, 1).unsqueeze(0).to(q))

    attention = block(Net(core, bias=nn.Embedding(2 * T - 1, H), place=place))
    return seq(embedded(), attention, mean, nn.Linear(D, C))


def attention_pooling() -> nn.Module:
    pool = Net(lambda net, x: (net.score(x.tanh()).softmax(1) * x).sum(1), score=nn.Linear(D, 1))
    return seq(nn.Embedding(V, D), nn.Linear(D, D), pool, nn.Linear(D, C))


mixing = {
    "fourier_mixing": lambda: seq(
        embedded(), res(lambda x: torch.fft.fft2(x).real), nn.LayerNorm(D), mean, nn.Linear(D, C)
    )
}
add("encoder", text(), transformer_encoder, transformer_encoder_sequence_first, relative_positions, attention_pooling)
add("encoder", text(), uncounted=("_fft_c2c",), **mixing)


def transformer_encoder_padded() -> nn.Module:
    def forward(net: Any, tokens: Tensor, padding: Tensor) -> Tensor:
        x = net.encoder(net.embed(tokens), src_key_padding_mask=padding)
        real = (~padding).unsqueeze(-1).to(x)
        return net.head((x * real).sum(1) / real.sum(1))

    layer = nn.TransformerEncoderLayer(D, H, 16, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return Net(forward, embed=embedded(), encoder=encoder, head=nn.Linear(D, C))


def encoder_decoder() -> nn.Module:

    def forward(net: Any, source: Tensor, target: Tensor) -> Tensor:
        memory, x = net.encoder(net.source(source)), net.target(target)
        x = x + net.own(x)
        return net.head(x + net.cross(x, memory))

    parts = {"encoder": block(sdpa), "own": Attention(causal), "cross": Attention(sdpa), "head": nn.Linear(D, V)}
    return Net(forward, source=embedded(), target=embedded(), **parts)


def nn_transformer() -> nn.Module:
    def forward(net: Any, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(4).to(net.head.weight.dtype)
        return net.head(net.model(net.source(source), net.target(target), tgt_mask=mask))

    model = nn.Transformer(D, H, 1, 1, 16, 0.0, batch_first=True)
    return Net(forward, source=embedded(), target=embedded(), model=model, head=nn.Linear(D, V))


def padding() -> Tensor:
    """Which tokens are padding: those behind the first two or more of each row."""
    return torch.arange(T) >= torch.randint(2, T + 1, (N, 1))


add("encoder", language(T, 4), encoder_decoder, nn_transformer)
add("encoder", lambda: (language()()[0], padding(), torch.randint(C, (N,))), transformer_encoder_padded)


def masked_gpt(mask: Tensor) -> nn.Module:
    """The mask goes to the kernel, as it is or as numbers."""
    mask = mask if mask.dtype == torch.bool else mask.masked_fill(ahead(len(mask)), -math.inf)
    attend = block(lambda q, k, v: sdpa(q, k, v, attn_mask=mask if mask.dtype == torch.bool else mask.to(q)))
    return language_model(attend, steps=mask.shape[-1])


def gpt_tied() -> nn.Module:
    """The embedding is the output layer too; query, key and value in one product."""

    def forward(net: Any, tokens: Tensor) -> Tensor:
        x = net.embed(tokens)
        n, t, _ = x.shape
        q, k, v = net.qkv(net.norm(x)).view(n, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        x = x + net.out(causal(q, k, v).transpose(1, 2).reshape(n, t, D))
        return x @ net.embed.weight.T

    layers = {"embed": nn.Embedding(V, D), "qkv": nn.Linear(D, 3 * D), "out": nn.Linear(D, D)}
    return Net(forward, **layers, norm=nn.LayerNorm(D))


def llama() -> nn.Module:
    """Rotary positions, RMSNorm, grouped queries, SwiGLU."""
    angles = torch.arange(T).float()[:, None] * 10.0 ** -torch.arange(D // H // 2).float()
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos.to(x) + torch.cat([-b, a], -1) * sin.to(x)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(H, dim=1) for t in (k, v))
        return causal(rotate(q), rotate(k), v)

    def rms(net: Any, x: Tensor) -> Tensor:
        return net.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    norms = [Net(rms, weight=nn.Parameter(torch.ones(D))) for _ in range(2)]
    layers = {"gate": nn.Linear(D, 16), "up": nn.Linear(D, 16), "down": nn.Linear(16, D)}
    swiglu = Net(lambda net, x: net.down(F.silu(net.gate(x)) * net.up(x)), **layers)
    blocks = res(norms[0], Attention(core, kv_heads=1)), res(nn.RMSNorm(D), swiglu)
    return seq(nn.Embedding(V, D), *blocks, norms[1], nn.Linear(D, V, bias=False))


def alibi() -> nn.Module:
    slopes = 2.0 ** -torch.arange(1, H + 1).float()
    distance = (torch.arange(T)[None] - torch.arange(T)[:, None]).float()
    bias = (slopes[:, None, None] * distance).masked_fill(ahead(T), -math.inf)
    return language_model(block(by_hand(lambda scores: scores + bias.to(scores))))


def linear_attention() -> nn.Module:
    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
        return torch.einsum("bhtd,bhtde->bhte", q, memory) / (q * k.cumsum(2)).sum(-1, keepdim=True)

    return language_model(block(core))


grouped = {"grouped_queries": lambda: language_model(block(partial(causal, enable_gqa=True), kv_heads=1))}
decoders = {
    "gpt": lambda: language_model(block(causal), block(causal)),
    "gpt_float_mask": lambda: masked_gpt(torch.zeros(T, T)),
    "gpt_bool_mask": lambda: masked_gpt(~ahead(T)[None, None]),
    "gpt_masked_by_hand": lambda: language_model(
        block(by_hand(lambda scores: scores.masked_fill(ahead(T), -math.inf)))
    ),
}
add("causal", language(N), gpt_mask_as_long_as_the_batch=lambda: masked_gpt(torch.zeros(N, N)))
add("causal", language(), gpt_tied, llama, **grouped)
add("causal", language(), alibi, linear_attention, **decoders)


def each_real_token(model: nn.Module, batch: Batch) -> Tensor:
    """Padding carries no loss, and a row's loss is the mean over its own tokens."""
    tokens, target = batch
    losses = F.cross_entropy(model(tokens).transpose(1, 2), target, ignore_index=-100, reduction="none")
    return losses.sum(1) / (target != -100).sum(1)


def padded_language() -> Batch:
    tokens, target = language()()
    return tokens, target.masked_fill(padding(), -100)


add("causal", padded_language, losses=each_real_token, gpt_padded=lambda: language_model(block(causal)))

# --- mixtures of experts ---------------------------------------------------------------------------------------------


def experts(route: str) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        weights, chosen = net.gate(x).softmax(-1).topk(2, -1)
        if route == "dense":
            gates = torch.zeros_like(net.gate(x)).scatter(-1, chosen, weights)
            return (torch.stack([e(x) for e in net.experts], -1) @ gates.unsqueeze(-1)).squeeze(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(net.experts):
            rows, place = torch.where(chosen == number)
            y = weights[rows, place, None] * expert(x[rows])
            out = out.index_add(0, rows, y) if route == "index_add" else out.index_put((rows,), y, accumulate=True)
        return out

    each = [seq(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)) for _ in range(3)]
    return Net(forward, gate=nn.Linear(D, 3), experts=nn.ModuleList(each))


def experts_tokens() -> nn.Module:
    """Every token routed on its own: the batch is merged with the steps."""
    routed = Net(lambda net, x: net.moe(x.flatten(0, 1)).view_as(x), moe=experts("index_add"))
    return seq(nn.Embedding(V, D), block(sdpa), res(routed), mean, nn.Linear(D, C))


routes = {
    f"experts_{route}": lambda route=route: seq(nn.Linear(D, D), experts(route), nn.Linear(D, C))
    for route in ("dense", "index_add", "index_put")
}
add("MoE", vectors(D), **routes)
add("MoE", text(), experts_tokens)

# --- steps in time ---------------------------------------------------------------------------------------------------


def recurrent(kind: type[nn.RNNBase], **options: Any) -> nn.Module:
    layer = kind(D, D, batch_first=True, **options)
    head = nn.Linear(2 * D if options.get("bidirectional") else D, C)
    return seq(nn.Embedding(V, D), layer, lambda out: out[0][:, -1], head)


def sequence_first(layer: nn.Module, last: Callable[[Any], Tensor], width: int) -> nn.Module:
    return seq(nn.Embedding(V, D), lambda x: x.transpose(0, 1), layer, last, nn.Linear(width, C))


def lstm_cells_with_layernorm() -> nn.Module:
    def forward(net: Any, tokens: Tensor) -> Tensor:
        x = net.embed(tokens)
        h = c = x.new_zeros(len(x), D)
        for step in x.unbind(1):
            h, c = net.cell(step, (h, c))
            h = net.norm(h)
        return net.head(h)

    layers = {"embed": nn.Embedding(V, D), "cell": nn.LSTMCell(D, D), "norm": nn.LayerNorm(D), "head": nn.Linear(D, C)}
    return Net(forward, **layers)


of_both = lambda: sequence_first(nn.GRU(D, D, bidirectional=True), lambda out: out[0].mean(0), 2 * D)  # noqa: E731
layers = {
    "gru_bidirectional_sequence_first": of_both,
    "rnn": lambda: recurrent(nn.RNN),
    "gru": lambda: recurrent(nn.GRU, num_layers=2, dropout=0.1),
}
lstms = {
    "lstm": lambda: recurrent(nn.LSTM),
    "lstm_bidirectional": lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm_sequence_first": lambda: sequence_first(nn.LSTM(D, D), lambda out: out[1][0][-1], D),
}
add("recurrent", text(), lstm_cells_with_layernorm, **layers)
add("recurrent", text(), share=1.5, **lstms)


def state_space() -> nn.Module:
    """Mamba's selective scan, step by step and gathered by stack."""

    def forward(net: Any, tokens: Tensor) -> Tensor:
        u = net.embed(tokens)
        u = F.silu(net.conv(u.mT)[..., : u.shape[1]].mT)
        delta, gate, b, c = net.inputs(u).split([D, D, 3, 3], -1)
        delta = F.softplus(delta).unsqueeze(-1)
        decay, drive = torch.exp(-delta * net.log_a.exp()), delta * b.unsqueeze(2) * u.unsqueeze(-1)
        state, states = torch.zeros_like(drive[:, 0]), []
        for step in range(u.shape[1]):
            state = decay[:, step] * state + drive[:, step]
            states.append(state)
        y = (torch.stack(states, 1) @ c.unsqueeze(-1)).squeeze(-1)
        return net.head(y * F.silu(gate))

    layers = {"embed": nn.Embedding(V, D), "inputs": nn.Linear(D, 2 * D + 6), "head": nn.Linear(D, V)}
    conv = nn.Conv1d(D, D, 3, padding=2, groups=D)
    return Net(forward, **layers, conv=conv, log_a=nn.Parameter(torch.randn(D, 3)))


def scan() -> nn.Module:
    """The same as products and sums along the steps."""

    def forward(net: Any, tokens: Tensor) -> Tensor:
        decay, drive = net.inputs(net.embed(tokens)).chunk(2, -1)
        total = (0.5 + 0.5 * decay.sigmoid()).cumprod(1)
        return net.head(total * (drive / total).cumsum(1) + drive.logcumsumexp(1))

    return Net(forward, embed=nn.Embedding(V, D), inputs=nn.Linear(D, 2 * D), head=nn.Linear(D, V))


def source_separation() -> nn.Module:
    """A mask of the spectrum, and the sound of it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        window = torch.hann_window(8).to(x)
        z = torch.stft(x, 8, 2, window=window, return_complex=True)
        mask = net.mask(torch.view_as_real(z).permute(0, 2, 1, 3).flatten(2)).unflatten(2, (5, 2)).permute(0, 2, 1, 3)
        return torch.istft(z * torch.view_as_complex(mask.contiguous()), 8, 2, window=window, length=x.shape[-1])

    return Net(forward, mask=seq(nn.Linear(10, D), nn.Tanh(), nn.Linear(D, 10)))


def solver() -> nn.Module:
    """A differential equation, solved at some times; its states lie in a buffer with time in front."""

    def forward(net: Any, x: Tensor) -> Tensor:
        states = torch.zeros(T, *x.shape).to(x)
        states[0] = x
        for t in range(1, T):
            x = x + net.slope(x) / T
            states[t] = x
        return net.head(torch.cat([states[-1], states.mean(0)], 1))

    return Net(forward, slope=seq(nn.Linear(D, D), nn.Tanh()), head=nn.Linear(2 * D, C))


def rows_written_in_place() -> nn.Module:
    """Some rows of the batch are set, others are changed."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.into(x).tanh() * 1
        h[3] = 0
        h[5] = net.missing
        h[1:5] = net.into(x[:4])
        h[:, 2] = 0
        h[::2].mul_(net.missing)
        return net.head(h)

    return Net(forward, into=nn.Linear(D, D), head=nn.Linear(D, C), missing=nn.Parameter(torch.randn(D)))


sounds = {"losses": by_element(F.mse_loss), "uncounted": ("_fft_r2c",)}
add("recurrent", lambda: (torch.randn(N, 32), torch.randn(N, 32)), source_separation, **sounds)
add("recurrent", language(), state_space)
add("recurrent", language(), scan)
add("recurrent", vectors(D), solver)
# On a device nothing tells how many of the kept rows lie in a range, so all of them go to what was written there.
add("MLP", vectors(D), rows_written_in_place, share=1.2)


def alignment(model: nn.Module, batch: Batch) -> Tensor:
    x, target = batch
    lengths = torch.full((N,), 10), torch.full((N,), 3)
    return F.ctc_loss(model(x).log_softmax(-1).transpose(0, 1), target, *lengths, reduction="none")


speech = {"speech": lambda: seq(nn.Linear(3, D), nn.GRU(D, D, batch_first=True), lambda out: out[0], nn.Linear(D, C))}
ctc = {"losses": alignment, "uncounted": ("_ctc_loss_backward",)}
add("recurrent", lambda: (torch.randn(N, 10, 3), torch.randint(1, C, (N, 3))), **speech, **ctc)

# --- embeddings and sets ---------------------------------------------------------------------------------------------


def embedding_convolution() -> nn.Module:
    embed = nn.Embedding(V, D, padding_idx=0)
    return seq(embed, lambda x: x.mT, nn.Conv1d(D, D, 3), nn.ReLU(), lambda x: x.max(-1).values, nn.Linear(D, C))


bags = {"embedding_bag": lambda: seq(nn.EmbeddingBag(V, D), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, C))}
add("embedding", text(), **bags)
add("embedding", text(least=1), embedding_convolution)


def recommender() -> nn.Module:
    """DLRM: dense and sparse features, all pairs of inner products, BCE."""

    def forward(net: Any, dense: Tensor, sparse: Tensor, click: Tensor) -> Tensor:
        x = net.dense(dense).relu()
        parts = torch.stack([x, *[table(sparse[:, i]) for i, table in enumerate(net.tables)]], 1)
        i, j = torch.tril_indices(4, 4, -1)
        pairs = torch.bmm(parts, parts.mT)[:, i, j]
        logit = net.top(torch.cat([x, pairs], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logit, click, reduction="none")

    tables = nn.ModuleList([nn.Embedding(V, D) for _ in range(3)])
    top = seq(nn.Linear(D + 6, D), nn.ReLU(), nn.Linear(D, 1))
    return Net(forward, dense=nn.Linear(5, D), tables=tables, top=top)


of_model = {"losses": lambda model, batch: model(*batch)}
add("embedding", lambda: (torch.randn(N, 5), torch.randint(V, (N, 3)), torch.rand(N).round()), recommender, **of_model)


def deep_sets() -> nn.Module:
    each = nn.Linear(3, D), nn.ReLU(), nn.Linear(D, D)
    return seq(*each, lambda x: x.sum(1), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, C))


def point_net() -> nn.Module:
    """Shared 1x1 convolutions, a learned transform, the maximum over the points."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = torch.bmm(x, net.transform(x.mean(1)).view(-1, 3, 3))
        return net.head(net.features(x.mT).max(2)[0])

    features = seq(nn.Conv1d(3, D, 1), nn.GroupNorm(2, D), nn.ReLU(), nn.Conv1d(D, D, 1))
    return Net(forward, transform=nn.Linear(3, 9), features=features, head=nn.Linear(D, C))


def ragged_sets() -> nn.Module:
    """Points of all sets, end to end, and the mean of each set."""

    def forward(net: Any, x: Tensor) -> Tensor:
        points = net.each(x.flatten(0, 1))
        return net.head(torch.segment_reduce(points, "mean", lengths=torch.full((N,), x.shape[1])))

    return Net(forward, each=nn.Linear(3, D), head=nn.Linear(D, C))


add("set", vectors(7, 3), deep_sets, point_net)
add("set", vectors(7, 3), ragged_sets, uncounted=("_segment_reduce_backward",))


def graph_convolution() -> nn.Module:
    """Message passing over dense adjacencies."""

    def forward(net: Any, x: Tensor, edges: Tensor) -> Tensor:
        edges = edges / edges.sum(-1, keepdim=True).clamp(min=1)
        x = (edges @ net.first(x)).relu()
        return net.head((edges @ net.second(x)).relu().mean(1))

    return Net(forward, first=nn.Linear(3, D), second=nn.Linear(D, D), head=nn.Linear(D, C))


add("set", lambda: (torch.randn(N, 5, 3), torch.rand(N, 5, 5).round(), torch.randint(C, (N,))), graph_convolution)
