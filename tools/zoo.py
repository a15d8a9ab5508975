"""Small models of every kind that people train, each with a batch and its losses, one per row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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


def masked(entry: Entry, dtype: torch.dtype, rows: tuple[int, ...] = ROWS) -> Backward:
    """The oracle: plain indexing."""
    return backward(entry, dtype, lambda losses: losses[torch.tensor(rows, dtype=torch.int64)])


def sliced(entry: Entry, dtype: torch.dtype, rows: tuple[int, ...] = ROWS) -> Backward:
    """The same through ``pick``."""
    return backward(entry, dtype, lambda losses: rowprop.pick(losses, torch.tensor(rows), batchnorm="exact"))


def skipping(entry: Entry, dtype: torch.dtype, rows: tuple[int, ...] = ROWS) -> Backward:
    """Plain indexing, with zeros skipped at the model's output."""

    def hook(model: nn.Module) -> None:
        rowprop.skip_zeros(model)
        rowprop.skip_zeros(getattr(model, "model", model))  # CLIP's losses call the model that is inside

    return backward(entry, dtype, lambda losses: losses[torch.tensor(rows, dtype=torch.int64)], hook)


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


ENTRIES: list[Entry] = []


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the model's logits; the mean over the places of a row, if it has several."""
    *inputs, target = batch
    logits = model(*inputs)
    losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return losses.view(len(target), -1).mean(1)


def add(kind: str, batch: Callable[[], Batch], losses: Losses = classify, **options: Any) -> Callable[[Any], Any]:
    """Enter a model under the name of what builds it."""

    def enter(build: Any) -> Any:
        ENTRIES.append(Entry(kind, build.__name__, build, batch, losses, **options))
        return build

    return enter


def image(size: int = 8, channels: int = 3, dims: int = 2) -> Callable[[], Batch]:
    return lambda: (torch.randn(N, channels, *[size] * dims), torch.randint(C, (N,)))


def vectors(*shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(N, *shape), torch.randint(C, (N,)))


def text(steps: int = T) -> Callable[[], Batch]:
    """Tokens and the class of the whole."""
    return lambda: (torch.randint(V, (N, steps)), torch.randint(C, (N,)))


def language(steps: int = T) -> Callable[[], Batch]:
    """Tokens and the next token at each."""
    return lambda: (torch.randint(V, (N, steps)), torch.randint(V, (N, steps)))


class Apply(nn.Module):
    """A function as a module, to stand in an ``nn.Sequential``."""

    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *inputs: Tensor) -> Any:
        return self.f(*inputs)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def seq(*parts: Any) -> nn.Sequential:
    return nn.Sequential(*[p if isinstance(p, nn.Module) else Apply(p) for p in parts])


def res(*parts: Any) -> Residual:
    return Residual(*[p if isinstance(p, nn.Module) else Apply(p) for p in parts])


def frozen(model: nn.Module) -> nn.Module:
    """BatchNorm on running statistics that differ from their initial values."""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(m.running_mean, std=0.3)
            nn.init.uniform_(m.running_var, 0.5, 2.0)
            m.eval()
    return model


# --- nets of matrices ------------------------------------------------------------------------------------------------


@add("MLP", vectors(10))
def mlp():
    return seq(nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, C))


@add("MLP", vectors(10))
def mlp_every_activation():
    activations = [nn.SiLU(), nn.ELU(), nn.LeakyReLU(), nn.Softplus(), nn.Mish(), nn.Hardswish(), nn.SELU(), nn.CELU()]
    activations += [
        nn.Hardsigmoid(),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.PReLU(),
        nn.Softsign(),
        nn.LogSigmoid(),
        nn.Tanhshrink(),
    ]
    layers = [layer for a in activations for layer in (nn.Linear(D, D), a)]
    return seq(nn.Linear(10, D), *layers, nn.Linear(D, C))


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid()
        return gate * self.value(x).relu() + (1 - gate) * x


@add("MLP", vectors(D))
def highway():
    return seq(Highway(), Highway(), nn.Linear(D, C))


@add("MLP", vectors(D))
def gated_linear_units():
    def swiglu(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return F.silu(a) * b

    return seq(nn.Linear(D, 2 * D), nn.GLU(), nn.Linear(D, 2 * D), swiglu, nn.Linear(D, C))


@add("MLP", vectors(D))
def weight_normed():
    return seq(nn.utils.parametrizations.weight_norm(nn.Linear(D, D)), nn.Tanh(), nn.Linear(D, C))


@add("MLP", vectors(D))
def bilinear():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.join = nn.Linear(D, 3), nn.Linear(D, 5), nn.Bilinear(3, 5, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.join(self.a(x), self.b(x))

    return Net()


@add("MLP", vectors(D))
def kolmogorov_arnold():
    """Each edge a spline: here, Gaussian bumps."""
    centres = torch.linspace(-2, 2, 5)

    def bumps(x: Tensor) -> Tensor:
        return torch.exp(-((x.unsqueeze(-1) - centres.to(x)) ** 2)).flatten(1)

    return seq(bumps, nn.Linear(5 * D, D), bumps, nn.Linear(5 * D, C))


@add("MLP", vectors(3))
def radiance_field():
    def positions(x: Tensor) -> Tensor:
        waves = x.unsqueeze(-1) * 2.0 ** torch.arange(4).to(x)
        return torch.cat([waves.sin(), waves.cos()], -1).flatten(1)

    return seq(positions, nn.Linear(24, D), nn.ReLU(), nn.Linear(D, D), lambda x: torch.sin(30 * x), nn.Linear(D, C))


def each_class(model: nn.Module, batch: Batch) -> Tensor:
    x, target = batch
    return F.binary_cross_entropy_with_logits(model(x), target, reduction="none").mean(1)


@add("MLP", lambda: (torch.randn(N, 10), torch.rand(N, C).round()), each_class)
def multi_label():
    return seq(nn.Linear(10, D), nn.ReLU(), nn.Linear(D, C))


@add("MLP", vectors(D))
def neural_ode():
    """Euler steps with shared weights."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.head = seq(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + 0.3 * self.f(x)
            return self.head(x)

    return Net()


# --- images ----------------------------------------------------------------------------------------------------------


def conv(a: int, b: int, norm: nn.Module, **options: Any) -> nn.Sequential:
    return seq(nn.Conv2d(a, b, 3, padding=1, bias=False, **options), norm, nn.ReLU())


def small_cnn(norm: Callable[[int], nn.Module]) -> nn.Module:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(D, C))
    return seq(conv(3, D, norm(D)), nn.MaxPool2d(2), conv(D, D, norm(D)), *head)


@add("CNN", image())
def cnn_batchnorm_frozen():
    return frozen(small_cnn(nn.BatchNorm2d))


@add("CNN", image(), densifies=("native_batch_norm_backward",))
def cnn_batchnorm_training():
    return small_cnn(nn.BatchNorm2d)


@add("CNN", image())
def cnn_groupnorm():
    return small_cnn(lambda width: nn.GroupNorm(2, width))


@add("CNN", image())
def cnn_instancenorm():
    return small_cnn(lambda width: nn.InstanceNorm2d(width, affine=True))


@add("CNN", image())
def cnn_channels_last():
    return seq(lambda x: x.contiguous(memory_format=torch.channels_last), small_cnn(lambda w: nn.GroupNorm(2, w)))


@add("CNN", image())
def resnet():
    def block(a: int, b: int, stride: int) -> nn.Module:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = seq(
                    nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                    nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b),
                )  # fmt: skip
                self.skip = seq(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b)) if a != b else nn.Identity()

            def forward(self, x: Tensor) -> Tensor:
                return F.relu_(self.body(x).add_(self.skip(x)))

        return Block()

    stem = (nn.Conv2d(3, D, 3, padding=1), nn.BatchNorm2d(D), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return frozen(seq(*stem, block(D, D, 1), block(D, 12, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(12, C)))


@add("CNN", image())
def resnet_channels_last():
    return seq(lambda x: x.contiguous(memory_format=torch.channels_last), resnet())


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = seq(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 4, 1), nn.ReLU(), nn.Conv2d(4, width, 1), nn.Hardsigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


@add("CNN", image())
def mobilenet():
    """Depthwise-separable, ReLU6, squeeze-excite."""
    depthwise = (nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
    block = res(nn.Conv2d(D, 16, 1), nn.ReLU6(), *depthwise, SqueezeExcite(16), nn.Conv2d(16, D, 1), nn.BatchNorm2d(D))
    return frozen(seq(nn.Conv2d(3, D, 3, 2, 1), nn.Hardtanh(0, 6), block, lambda x: x.mean((2, 3)), nn.Linear(D, C)))


@add("CNN", image())
def convnext():
    def last(x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.full((D,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.gamma * x).permute(0, 3, 1, 2)

    depthwise = nn.Conv2d(D, D, 7, padding=3, groups=D)
    block = res(depthwise, last, nn.LayerNorm(D), nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D), Scale())
    return seq(nn.Conv2d(3, D, 2, 2), block, lambda x: x.mean((-2, -1)), nn.LayerNorm(D), nn.Linear(D, C))


def each_pixel(model: nn.Module, batch: Batch) -> Tensor:
    x, target = batch
    return F.nll_loss(model(x).log_softmax(1), target, reduction="none").mean((1, 2))


def segmentation() -> Batch:
    return torch.randn(N, 3, 8, 8), torch.randint(C, (N, 8, 8))


@add("CNN", segmentation, each_pixel)
def unet():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, D, 3, 2, 1)
            self.middle = seq(nn.GroupNorm(2, D), nn.Conv2d(D, D, 3, 2, 1), nn.ReLU())
            self.up2 = nn.ConvTranspose2d(D, D, 2, 2)
            self.up1 = seq(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2 * D, 4, 3, padding=1))
            self.head = nn.Conv2d(8, C, 1)

        def forward(self, x: Tensor) -> Tensor:
            a = self.down1(x).relu()
            b = self.down2(a).relu()
            u = torch.cat([self.up2(self.middle(b)), b], 1)
            return self.head(torch.cat([self.up1(u), a], 1))

    return Net()


@add("CNN", segmentation, each_pixel)
def dilated_segmentation():
    """Nearest upsampling, dilation, reflection padding, average pooling."""
    up = nn.Upsample(scale_factor=2, mode="nearest")
    dilated = nn.Conv2d(D, D, 3, padding=2, dilation=2, padding_mode="reflect")
    return seq(nn.Conv2d(3, D, 3, padding=1), nn.AvgPool2d(2), dilated, nn.LeakyReLU(), up, nn.Conv2d(D, C, 1))


@add("CNN", image())
def pixel_shuffle():
    return seq(
        nn.Conv2d(3, 16, 3, padding=1), nn.PixelShuffle(2), nn.ZeroPad2d(1), nn.Conv2d(4, D, 3, 2), nn.Softplus(),
        nn.MaxPool2d(4), nn.Flatten(), nn.Linear(D * 4, C),
    )  # fmt: skip


@add("CNN", image())
def densenet():
    class Dense(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv = seq(nn.GroupNorm(1, width), nn.ReLU(), nn.Conv2d(width, 4, 3, padding=1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, self.conv(x)], 1)

    return seq(Dense(3), Dense(7), Dense(11), lambda x: x.amax((2, 3)), nn.Linear(15, C))


@add("CNN", image(6, 2, 3))
def cnn_3d():
    return seq(
        nn.Conv3d(2, D, 3, padding=1), nn.GroupNorm(2, D), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(D, D, 2),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(D, C),
    )  # fmt: skip


@add("CNN", image(12, 3, 1))
def temporal_convolutions():
    """Causal, dilated, grouped, 1d."""

    def causal(dilation: int) -> nn.Module:
        pad = nn.ConstantPad1d((2 * dilation, 0), 0.0)
        return res(pad, nn.Conv1d(D, D, 3, dilation=dilation, groups=2), nn.ReLU(), nn.Dropout(0.1))

    return seq(nn.Conv1d(3, D, 1), causal(1), causal(2), nn.AvgPool1d(2), lambda x: x[..., -1], nn.Linear(D, C))


class Gated(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(D, 2 * D, 2, dilation=dilation), nn.Conv1d(D, 2 * D, 1)
        self.dilation = dilation

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = self.conv(F.pad(x, (self.dilation, 0))).split(D, dim=1)
        residual, more = self.out(value.tanh() * gate.sigmoid()).chunk(2, dim=1)
        return x + residual, skip + more


@add("CNN", language())
def wavenet():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(V, D), nn.Conv1d(D, V, 1)
            self.layers = nn.ModuleList([Gated(1), Gated(2)])

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens).transpose(1, 2)
            skip = torch.zeros_like(x)
            for layer in self.layers:
                x, skip = layer(x, skip)
            return self.head(skip.relu()).transpose(1, 2)

    return Net()


def reconstruction(model: nn.Module, batch: Batch) -> Tensor:
    (x,) = batch
    return F.mse_loss(model(x), x, reduction="none").mean((1, 2, 3))


@add("CNN", lambda: (torch.randn(N, 3, 8, 8),), reconstruction)
def autoencoder():
    return seq(
        nn.Conv2d(3, D, 3, 2, 1), nn.ReLU(), nn.Conv2d(D, 4, 3, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(4, D, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(D, 3, 3, 2, 1, output_padding=1),
    )  # fmt: skip


def evidence(model: nn.Module, batch: Batch) -> Tensor:
    (x,) = batch
    out, mean, log_var = model(x)
    divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1)
    return F.binary_cross_entropy(out, x, reduction="none").sum(1) + divergence


@add("MLP", lambda: (torch.rand(N, 10),), evidence)
def variational_autoencoder():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = seq(nn.Linear(10, D), nn.ReLU(), nn.Linear(D, 6))
            self.decode = seq(nn.Linear(3, D), nn.ReLU(), nn.Linear(D, 10), nn.Sigmoid())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_var = self.encode(x).chunk(2, 1)
            return self.decode(mean + torch.randn_like(mean) * (0.5 * log_var).exp()), mean, log_var

    return Net()


def similar(model: nn.Module, batch: Batch) -> Tensor:
    a, b, same = batch
    cosine = F.cosine_similarity(model(a), model(b))
    return F.smooth_l1_loss(cosine, same, reduction="none")


@add("metric", lambda: (torch.randn(N, D), torch.randn(N, D), torch.rand(N).round()), similar)
def siamese():
    return seq(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, D))


def triplet(model: nn.Module, batch: Batch) -> Tensor:
    a, b, c = (F.normalize(model(t), dim=1) for t in batch)
    return F.triplet_margin_loss(a, b, c, margin=1.0, reduction="none")


@add("metric", lambda: tuple(torch.randn(N, 3, 8, 8) for _ in range(3)), triplet)
def triplets():
    return small_cnn(lambda width: nn.GroupNorm(2, width))


# --- attention -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention; ``core`` is what happens between the projections."""

    def __init__(self, core: Callable[..., Tensor], kv_heads: int = H) -> None:
        super().__init__()
        self.core, self.kv_heads = core, kv_heads
        width = D // H
        self.q, self.k, self.v = (nn.Linear(D, heads * width) for heads in (H, kv_heads, kv_heads))
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        parts = ((self.q, x, H), (self.k, memory, self.kv_heads), (self.v, memory, self.kv_heads))
        q, k, v = (p(t).unflatten(-1, (heads, -1)).transpose(1, 2) for p, t, heads in parts)
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


def block(
    core: Callable[..., Tensor], norm: Callable[[int], nn.Module] = nn.LayerNorm, **options: Any
) -> nn.Sequential:
    feed_forward = res(norm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
    return seq(res(norm(D), Attention(core, **options)), feed_forward)


class Tokens(nn.Module):
    """Token and position embeddings."""

    def __init__(self, steps: int = T) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(V, D), nn.Embedding(steps, D)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.place(torch.arange(tokens.shape[1]))


def language_model(*layers: Any, steps: int = T) -> nn.Module:
    return seq(Tokens(steps), *layers, nn.LayerNorm(D), nn.Linear(D, V))


sdpa = F.scaled_dot_product_attention


def by_hand(bias: Callable[[Tensor], Tensor] = lambda scores: scores) -> Callable[..., Tensor]:
    """Attention written out, with something done to the scores."""
    return lambda q, k, v: bias(q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def ahead(steps: int) -> Tensor:
    return torch.ones(steps, steps, dtype=torch.bool).triu(1)


class Prepend(nn.Module):
    """A learned class token, and positions."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, D))
        self.place = nn.Parameter(torch.randn(1, steps + 1, D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.place


@add("ViT", image())
def vit():
    patches = (nn.Conv2d(3, D, 4, 4), lambda x: x.flatten(2).transpose(1, 2), Prepend(4))
    return seq(*patches, block(sdpa), block(sdpa), nn.LayerNorm(D), lambda x: x[:, 0], nn.Linear(D, C))


@add("ViT", image())
def vit_written_to():
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

    patches = (nn.Conv2d(3, D, 4, 4), lambda x: x.flatten(2).transpose(1, 2), Prepend(4))
    return seq(*patches, block(pooled), written, block(pooled), written, lambda x: x[:, 0], nn.Linear(D, C))


@add("ViT", image())
def vit_written_out():
    """Patches by unfolding, attention by einsum, pooled by the mean."""

    def patches(x: Tensor) -> Tensor:
        return x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)

    def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        return torch.einsum("bhqk,bhkd->bhqd", F.dropout(scores.softmax(-1), 0.1), v)

    return seq(patches, nn.Linear(48, D), block(einsum), lambda x: x.mean(1), nn.Linear(D, C))


@add("ViT", image())
def mlp_mixer():
    mix = res(nn.LayerNorm(D), lambda x: x.transpose(1, 2), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4), lambda x: x.mT)
    channels = res(nn.LayerNorm(D), nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D))
    return seq(nn.Conv2d(3, D, 4, 4), lambda x: x.flatten(2).mT, mix, channels, lambda x: x.mean(1), nn.Linear(D, C))


@add("ViT", image())
def swin():
    """Shifted windows: roll, partition, a relative-position bias, roll back."""

    class Windows(nn.Module):
        def __init__(self, shift: int) -> None:
            super().__init__()
            self.shift, self.bias = shift, nn.Parameter(torch.randn(9, H))
            self.register_buffer("place", torch.tensor([[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]))
            self.attend = Attention(by_hand(lambda s: s + self.bias[self.place].permute(2, 0, 1)))

        def forward(self, x: Tensor) -> Tensor:  # (N, 4, 4, D)
            n = len(x)
            x = x.roll((-self.shift, -self.shift), (1, 2))
            x = x.view(n, 2, 2, 2, 2, D).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, D)
            x = self.attend(x)
            x = x.view(n, 2, 2, 2, 2, D).permute(0, 1, 3, 2, 4, 5).reshape(n, 4, 4, D)
            return x.roll((self.shift, self.shift), (1, 2))

    class Merge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reduce = nn.Linear(4 * D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.reduce(torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1))

    layers = (res(nn.LayerNorm(D), Windows(0)), res(nn.LayerNorm(D), Windows(1)), Merge())
    return seq(
        nn.Conv2d(3, D, 2, 2), lambda x: x.permute(0, 2, 3, 1), *layers, lambda x: x.mean((1, 2)), nn.Linear(D, C)
    )


@add("encoder", text())
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(D, H, 16, 0.1, batch_first=True)
    return seq(Tokens(), nn.TransformerEncoder(layer, 2), lambda x: x[:, 0], nn.Linear(D, C))


@add("encoder", text())
def transformer_encoder_sequence_first():
    layer = nn.TransformerEncoderLayer(D, H, 16, 0.0, activation="gelu", norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return seq(Tokens(), lambda x: x.transpose(0, 1), encoder, lambda x: x.mean(0), nn.Linear(D, C))


@add(
    "encoder",
    lambda: (torch.randint(V, (N, T)), torch.arange(T) >= torch.randint(2, T, (N, 1)), torch.randint(C, (N,))),
)
def transformer_encoder_padded():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(D, H, 16, 0.0, batch_first=True)
            self.embed, self.encoder = Tokens(), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(D, C)

        def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
            x = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
            real = (~padding).unsqueeze(-1).to(x)
            return self.head((x * real).sum(1) / real.sum(1))

    return Net()


@add("causal", language())
def gpt():
    causal = lambda q, k, v: sdpa(q, k, v, is_causal=True)  # noqa: E731
    return language_model(block(causal), block(causal))


@add("causal", language())
def gpt_float_mask():
    mask = torch.zeros(T, T).masked_fill(ahead(T), -math.inf)
    return language_model(block(lambda q, k, v: sdpa(q, k, v, attn_mask=mask.to(q))))


@add("causal", language())
def gpt_bool_mask():
    mask = ~ahead(T)[None, None]
    return language_model(block(lambda q, k, v: sdpa(q, k, v, attn_mask=mask)))


@add("causal", language(N))
def gpt_mask_as_long_as_the_batch():
    mask = torch.zeros(N, N).masked_fill(ahead(N), -math.inf)
    return language_model(block(lambda q, k, v: sdpa(q, k, v, attn_mask=mask.to(q))), steps=N)


@add("causal", language())
def gpt_masked_by_hand():
    mask = ahead(T)
    return language_model(block(by_hand(lambda scores: scores.masked_fill(mask, -math.inf))))


@add("causal", language())
def gpt_tied():
    """The embedding is the output layer too; query, key and value in one product."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv, self.out = nn.Embedding(V, D), nn.Linear(D, 3 * D), nn.Linear(D, D)
            self.norm = nn.LayerNorm(D)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            n, t, _ = x.shape
            q, k, v = self.qkv(self.norm(x)).view(n, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
            x = x + self.out(sdpa(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, D))
            return x @ self.embed.weight.T

    return Net()


@add("causal", language())
def llama():
    """Rotary positions, RMSNorm, grouped queries, SwiGLU."""
    angles = torch.arange(T).float()[:, None] * 10.0 ** -torch.arange(D // H // 2).float()
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos.to(x) + torch.cat([-b, a], -1) * sin.to(x)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(H, dim=1) for t in (k, v))
        return sdpa(rotate(q), rotate(k), v, is_causal=True)

    class RMS(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    class SwiGLU(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(D, 16), nn.Linear(D, 16), nn.Linear(16, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x))

    layer = (res(RMS(), Attention(core, kv_heads=1)), res(nn.RMSNorm(D), SwiGLU()))
    return seq(nn.Embedding(V, D), *layer, RMS(), nn.Linear(D, V, bias=False))


@add("causal", language())
def grouped_queries():
    """Fewer key and value heads, left to the kernel."""
    return language_model(block(lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), kv_heads=1))


@add("causal", language())
def alibi():
    slopes = 2.0 ** -torch.arange(1, H + 1).float()
    distance = (torch.arange(T)[None] - torch.arange(T)[:, None]).float()
    bias = (slopes[:, None, None] * distance).masked_fill(ahead(T), -math.inf)
    return language_model(block(by_hand(lambda scores: scores + bias.to(scores))))


@add("encoder", text())
def relative_positions():
    """T5's learned bias, through the kernel's mask."""

    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Embedding(2 * T - 1, H)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            place = torch.arange(T)[None] - torch.arange(T)[:, None] + T - 1
            return sdpa(q, k, v, attn_mask=self.bias(place).permute(2, 0, 1).unsqueeze(0).to(q))

    return seq(Tokens(), block(Core()), lambda x: x.mean(1), nn.Linear(D, C))


@add("encoder", lambda: (torch.randint(V, (N, T)), torch.randint(V, (N, 4)), torch.randint(V, (N, 4))))
def encoder_decoder():
    """Cross attention."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target, self.encoder = Tokens(), Tokens(), block(sdpa)
            self.own, self.cross = Attention(lambda q, k, v: sdpa(q, k, v, is_causal=True)), Attention(sdpa)
            self.head = nn.Linear(D, V)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory, x = self.encoder(self.source(source)), self.target(target)
            x = x + self.own(x)
            return self.head(x + self.cross(x, memory))

    return Net()


@add("encoder", lambda: (torch.randint(V, (N, T)), torch.randint(V, (N, 4)), torch.randint(V, (N, 4))))
def nn_transformer():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = Tokens(), Tokens()
            self.model = nn.Transformer(D, H, 1, 1, 16, 0.0, batch_first=True)
            self.head = nn.Linear(D, V)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(4).to(self.head.weight.dtype)
            return self.head(self.model(self.source(source), self.target(target), tgt_mask=mask))

    return Net()


def each_real_token(model: nn.Module, batch: Batch) -> Tensor:
    """Padding carries no loss, and a row's loss is the mean over its own tokens."""
    tokens, target = batch
    losses = F.cross_entropy(model(tokens).transpose(1, 2), target, ignore_index=-100, reduction="none")
    return losses.sum(1) / (target != -100).sum(1)


def padded_language() -> Batch:
    target = torch.randint(V, (N, T)).masked_fill(torch.arange(T) >= torch.randint(2, T + 1, (N, 1)), -100)
    return torch.randint(V, (N, T)), target


@add("causal", padded_language, each_real_token)
def gpt_padded():
    return language_model(block(lambda q, k, v: sdpa(q, k, v, is_causal=True)))


@add("encoder", text())
def attention_pooling():
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(D, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.score(x.tanh()).softmax(1) * x).sum(1)

    return seq(nn.Embedding(V, D), nn.Linear(D, D), Pool(), nn.Linear(D, C))


@add("causal", language())
def linear_attention():
    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
        return torch.einsum("bhtd,bhtde->bhte", q, memory) / (q * k.cumsum(2)).sum(-1, keepdim=True)

    return language_model(block(core))


@add("encoder", text(), uncounted=("_fft_c2c",))
def fourier_mixing():
    return seq(Tokens(), res(lambda x: torch.fft.fft2(x).real), nn.LayerNorm(D), lambda x: x.mean(1), nn.Linear(D, C))


# --- mixtures of experts ---------------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self, route: str) -> None:
        super().__init__()
        self.route = route
        self.gate = nn.Linear(D, 3)
        self.experts = nn.ModuleList([seq(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        if self.route == "dense":
            gates = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights)
            return torch.stack([e(x) for e in self.experts], -1) @ gates.unsqueeze(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            y = weights[rows, place, None] * expert(x[rows])
            out = out.index_add(0, rows, y) if self.route == "index_add" else out.index_put((rows,), y, accumulate=True)
        return out


@add("MoE", vectors(D))
def experts_dense():
    return seq(nn.Linear(D, D), Experts("dense"), lambda x: x.squeeze(-1), nn.Linear(D, C))


@add("MoE", vectors(D))
def experts_index_add():
    return seq(nn.Linear(D, D), Experts("index_add"), nn.Linear(D, C))


@add("MoE", vectors(D))
def experts_index_put():
    return seq(nn.Linear(D, D), Experts("index_put"), nn.Linear(D, C))


@add("MoE", text())
def experts_tokens():
    """Every token routed on its own: the batch is merged with the steps."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = Experts("index_add")

        def forward(self, x: Tensor) -> Tensor:
            return self.moe(x.flatten(0, 1)).view_as(x)

    return seq(nn.Embedding(V, D), block(sdpa), res(Net()), lambda x: x.mean(1), nn.Linear(D, C))


# --- steps in time ---------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], last: bool = True, **options: Any) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(V, D), kind(D, D, batch_first=True, **options)
        self.head = nn.Linear(2 * D if options.get("bidirectional") else D, C)

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.rnn(self.embed(tokens))
        return self.head(out[:, -1])


@add("recurrent", text())
def rnn():
    return Recurrent(nn.RNN)


@add("recurrent", text())
def gru():
    return Recurrent(nn.GRU, num_layers=2, dropout=0.1)


@add("recurrent", text(), share=1.5)
def lstm():
    return Recurrent(nn.LSTM)


@add("recurrent", text(), share=1.5)
def lstm_bidirectional():
    return Recurrent(nn.LSTM, num_layers=2, bidirectional=True)


@add("recurrent", text(), share=1.5)
def lstm_sequence_first():
    def last(out: tuple[Tensor, Any]) -> Tensor:
        return out[1][0][-1]

    return seq(nn.Embedding(V, D), lambda x: x.transpose(0, 1), nn.LSTM(D, D), last, nn.Linear(D, C))


@add("recurrent", text())
def gru_bidirectional_sequence_first():
    def mean(out: tuple[Tensor, Tensor]) -> Tensor:
        return out[0].mean(0)

    return seq(
        nn.Embedding(V, D), lambda x: x.transpose(0, 1), nn.GRU(D, D, bidirectional=True), mean, nn.Linear(2 * D, C)
    )


@add("recurrent", text())
def lstm_cells_with_layernorm():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.norm, self.head = (
                nn.Embedding(V, D),
                nn.LSTMCell(D, D),
                nn.LayerNorm(D),
                nn.Linear(D, C),
            )

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            h = c = x.new_zeros(len(x), D)
            for step in x.unbind(1):
                h, c = self.cell(step, (h, c))
                h = self.norm(h)
            return self.head(h)

    return Net()


@add("recurrent", language())
def state_space():
    """Mamba's selective scan, step by step and gathered by stack."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inputs, self.head = nn.Embedding(V, D), nn.Linear(D, 2 * D + 6), nn.Linear(D, V)
            self.conv = nn.Conv1d(D, D, 3, padding=2, groups=D)
            self.log_a = nn.Parameter(torch.randn(D, 3))

        def forward(self, tokens: Tensor) -> Tensor:
            u = self.embed(tokens)
            u = F.silu(self.conv(u.mT)[..., : u.shape[1]].mT)
            delta, gate, b, c = self.inputs(u).split([D, D, 3, 3], -1)
            delta = F.softplus(delta).unsqueeze(-1)
            decay, drive = torch.exp(-delta * self.log_a.exp()), delta * b.unsqueeze(2) * u.unsqueeze(-1)
            state, states = torch.zeros_like(drive[:, 0]), []
            for step in range(u.shape[1]):
                state = decay[:, step] * state + drive[:, step]
                states.append(state)
            y = (torch.stack(states, 1) @ c.unsqueeze(-1)).squeeze(-1)
            return self.head(y * F.silu(gate))

    return Net()


@add("recurrent", language(), densifies=("gt.Scalar", "log"))
def scan():
    """The same as products and sums along the steps."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inputs, self.head = nn.Embedding(V, D), nn.Linear(D, 2 * D), nn.Linear(D, V)

        def forward(self, tokens: Tensor) -> Tensor:
            decay, drive = self.inputs(self.embed(tokens)).chunk(2, -1)
            total = (0.5 + 0.5 * decay.sigmoid()).cumprod(1)
            return self.head(total * (drive / total).cumsum(1) + drive.logcumsumexp(1))

    return Net()


def alignment(model: nn.Module, batch: Batch) -> Tensor:
    x, target = batch
    scores = model(x).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((N,), 10), torch.full((N,), 3)
    return F.ctc_loss(scores, target, *lengths, reduction="none")


@add(
    "recurrent",
    lambda: (torch.randn(N, 10, 3), torch.randint(1, C, (N, 3))),
    alignment,
    uncounted=("_ctc_loss_backward",),
)
def speech():
    return seq(nn.Linear(3, D), nn.GRU(D, D, batch_first=True), lambda out: out[0], nn.Linear(D, C))


# --- embeddings and sets ---------------------------------------------------------------------------------------------


@add("embedding", text())
def embedding_bag():
    return seq(nn.EmbeddingBag(V, D, mode="mean"), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, C))


@add("embedding", lambda: (torch.randint(1, V, (N, T)), torch.randint(C, (N,))))
def embedding_convolution():
    embed = nn.Embedding(V, D, padding_idx=0)
    return seq(embed, lambda x: x.mT, nn.Conv1d(D, D, 3), nn.ReLU(), lambda x: x.max(-1).values, nn.Linear(D, C))


@add("embedding", lambda: (torch.randn(N, 5), torch.randint(V, (N, 3)), torch.rand(N).round()), lambda m, b: m(*b))
def recommender():
    """DLRM: dense and sparse features, all pairs of inner products, BCE."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.tables = nn.Linear(5, D), nn.ModuleList([nn.Embedding(V, D) for _ in range(3)])
            self.top = seq(nn.Linear(D + 6, D), nn.ReLU(), nn.Linear(D, 1))

        def forward(self, dense: Tensor, sparse: Tensor, click: Tensor) -> Tensor:
            x = self.dense(dense).relu()
            parts = torch.stack([x, *[table(sparse[:, i]) for i, table in enumerate(self.tables)]], 1)
            i, j = torch.tril_indices(4, 4, -1)
            pairs = torch.bmm(parts, parts.mT)[:, i, j]
            logit = self.top(torch.cat([x, pairs], 1)).squeeze(1)
            return F.binary_cross_entropy_with_logits(logit, click, reduction="none")

    return Net()


@add("set", vectors(7, 3))
def deep_sets():
    return seq(
        nn.Linear(3, D), nn.ReLU(), nn.Linear(D, D), lambda x: x.sum(1), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, C)
    )


@add("set", vectors(7, 3))
def point_net():
    """Shared 1x1 convolutions, a learned transform, the maximum over the points."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transform, self.head = nn.Linear(3, 9), nn.Linear(D, C)
            self.features = seq(nn.Conv1d(3, D, 1), nn.GroupNorm(2, D), nn.ReLU(), nn.Conv1d(D, D, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.bmm(x, self.transform(x.mean(1)).view(-1, 3, 3))
            return self.head(self.features(x.mT).max(2)[0])

    return Net()


@add("set", lambda: (torch.randn(N, 5, 3), (torch.rand(N, 5, 5) > 0.5).float(), torch.randint(C, (N,))))
def graph_convolution():
    """Message passing over dense adjacencies."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(3, D), nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            edges = edges / edges.sum(-1, keepdim=True).clamp(min=1)
            x = (edges @ self.first(x)).relu()
            return self.head((edges @ self.second(x)).relu().mean(1))

    return Net()
