"""The models that `rowprop compare` trains: small ones written plainly, or any callable."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowprop.app.model import make_model
from rowprop.errors import InvalidInput, foreign
from rowprop_lab.data import ROW_TOKENS


class ConvNet(nn.Sequential):
    """Three convolutions and a linear layer, no normalisation: images (N, C, H, W) -> (N, num_classes)."""

    def __init__(self, num_classes: int, in_channels: int, width: int = 64) -> None:
        super().__init__(
            nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(8 * width, num_classes),
        )  # fmt: skip


class Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a way around them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, whose sides are the input's over the stride."""
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """A small residual network with BatchNorm for images of about 28x28: (N, C, H, W) -> (N, num_classes)."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.stages = nn.Sequential(Block(32, 32, stride=1), Block(32, 64, stride=2), Block(64, 128, stride=2))
        self.head = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (N, num_classes)."""
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


class TextNet(nn.Module):
    """Word vectors, two convolutions over them and their mean: tokens (N, T), 0 for no word -> (N, num_classes)."""

    def __init__(self, num_classes: int, num_words: int, width: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, 64, padding_idx=0)
        self.body = nn.Sequential(
            nn.Conv1d(64, width, 3, padding=1), nn.ReLU(), nn.Conv1d(width, width, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (N, num_classes)."""
        is_word = (tokens != 0).unsqueeze(1)  # (N, 1, T)
        features = self.body(self.embedding(tokens).transpose(1, 2)) * is_word
        return self.head(features.sum(2) / is_word.sum(2).clamp_min(1))


class Layer(nn.Module):
    """Attention, as a rule to the tokens before alone, and a layer for each token: (N, T, width) -> the same."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens with what they read from the others."""
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.mixed(self.norm1(x)).chunk(3, dim=2)
        )
        read = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(read.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A small transformer over patches of 4x4, for images of at most 32x32: (N, C, H, W) -> (N, num_classes)."""

    def __init__(self, num_classes: int, in_channels: int, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(in_channels, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(64, width))
        self.layers = nn.Sequential(*(Layer(width, heads=width // 32, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (N, num_classes)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.layers(x + self.positions[: x.shape[1]])).mean(1))


class GPT(nn.Module):
    """A small decoder with learned positions: tokens (N, T) -> logits of the next token (N, T, num_words)."""

    def __init__(self, num_classes: int, num_words: int, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, width)
        self.positions = nn.Parameter(torch.zeros(ROW_TOKENS, width))
        self.layers = nn.Sequential(*(Layer(width, heads=width // 32) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (N, T, num_words)."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.layers(x)))


MODELS: dict[str, type[nn.Module]] = dict(convnet=ConvNet, resnet=ResNet, vit=ViT, textnet=TextNet, gpt=GPT)


def build_model(name: str, num_classes: int, num_inputs: int) -> nn.Module:
    """Build a model of MODELS, or the one that ``module:callable`` returns, as for the other commands.

    One of MODELS takes images of ``num_inputs`` channels, or so many different tokens, to ``num_classes`` logits.

    Raises:
        InvalidInput: The name is unknown, or the callable fails, returns no ``nn.Module`` or brings its own losses.
    """
    if name in MODELS:
        return MODELS[name](num_classes, num_inputs)
    if ":" not in name:
        raise InvalidInput(f"model {name!r} is unknown; the models are {', '.join(MODELS)} and module:callable.")
    model, _, losses_fn = make_model(name)  # a batch that comes with it is for the other commands
    if losses_fn is not None:
        raise InvalidInput(f"model {name!r} brings its own losses; cross entropy is compared; return (model, batch).")
    return model


def check_model(model: nn.Module, name: str, images: Tensor, num_classes: int) -> None:
    """Refuse a model that fails on these rows in evaluation mode, or does not return logits (rows, num_classes)."""
    batch = f"a batch of shape {tuple(images.shape)}"
    with foreign(f"model {name!r} failed on {batch}"), torch.no_grad():
        logits: object = model.eval()(images)
    wanted = (len(images), num_classes)
    if not isinstance(logits, Tensor) or logits.shape != wanted:
        found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        needed = f"logits of shape {wanted} were needed: one number per row and class."
        raise InvalidInput(f"model {name!r} returned {found} for {batch}, but {needed}")
