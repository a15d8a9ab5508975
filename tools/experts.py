"""Mixtures of experts, as transformers and others route tokens: from (N, T, width) to (N * T, width)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from rule_cases import aten, param

WIDTH, COUNT, CHOICES = 8, 4, 2
EXPERTS = [param(*shape) for shape in ((WIDTH, COUNT), (COUNT, WIDTH, 8), (COUNT, 8), (COUNT, 8, WIDTH))]
router, gates_up, biases_up, down = EXPERTS


def chosen(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens (N * T, width), and of each token the weights and the numbers of its experts."""
    tokens = x.reshape(-1, WIDTH)
    weights, numbers = (tokens @ router).softmax(-1).topk(CHOICES, -1)
    return tokens, weights / weights.sum(-1, keepdim=True), numbers


def one_expert(x: Tensor, number: Tensor | int) -> Tensor:
    return (x @ gates_up[number] + biases_up[number]).relu() @ down[number]


def loop(x: Tensor) -> Tensor:
    """transformers, "eager": each expert reads its tokens, and adds to them."""
    tokens, weights, numbers = chosen(x)
    out = torch.zeros_like(tokens)
    reads = F.one_hot(numbers, COUNT).permute(2, 1, 0)
    for number in reads.sum((1, 2)).nonzero().flatten():
        choice, token = torch.where(reads[number])
        out.index_add_(0, token, one_expert(tokens[token], number) * weights[token, choice, None])
    return out


def grouped(x: Tensor) -> Tensor:
    """transformers, "grouped_mm": tokens sorted by expert, one product per group, back by the inverse permutation."""
    tokens, weights, numbers = chosen(x)
    ordered, order = numbers.reshape(-1).sort()
    ends = ordered.bincount(minlength=COUNT).cumsum(0, dtype=torch.int32)
    up = aten._grouped_mm(tokens[order // CHOICES].float(), gates_up.float(), ends).double() + biases_up[ordered]
    out = aten._grouped_mm(up.relu().float(), down.float(), ends).double() * weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return out[back].view(len(tokens), CHOICES, WIDTH).sum(1)


def batched(x: Tensor) -> Tensor:
    """transformers, "batched_mm": a copy of an expert's weights for each token."""
    tokens, weights, numbers = chosen(x)
    numbers = numbers.reshape(-1)
    up = torch.bmm(tokens.repeat_interleave(CHOICES, 0).unsqueeze(1), gates_up[numbers]).squeeze(1) + biases_up[numbers]
    out = torch.bmm(up.relu().unsqueeze(1), down[numbers]).squeeze(1) * weights.reshape(-1, 1)
    return out.view(len(tokens), CHOICES, WIDTH).sum(1)


def every(x: Tensor) -> Tensor:
    """Llama 4: each expert computes all tokens, most of them times a score of nearly 0."""
    tokens = x.reshape(-1, WIDTH)
    values, numbers = (tokens @ router).topk(1, -1)
    scores = torch.full((len(tokens), COUNT), -9.0, dtype=x.dtype).scatter(1, numbers, values).sigmoid()
    spread = tokens.repeat(COUNT, 1) * scores.t().reshape(-1, 1)
    up = torch.bmm(spread.view(COUNT, -1, WIDTH), gates_up) + biases_up[:, None]
    return torch.bmm(up.relu(), down).sum(0)


def places(x: Tensor) -> Tensor:
    """Switch, GShard: each expert has places for some tokens, and products with one-hot tensors fill them."""
    _, weights, numbers = chosen(x)
    hot = F.one_hot(numbers, COUNT)
    rank = hot.flatten(0, 1).cumsum(0).view(hot.shape) - 1
    sent = (F.one_hot(rank.clamp(0, 5), 6) * ((rank < 6) * hot)[..., None]).double()
    read = torch.einsum("sec,sd->ecd", sent.sum(1), x.reshape(-1, WIDTH))
    out = (torch.einsum("ecd,edh->ech", read, gates_up) + biases_up[:, None]).relu() @ down
    return torch.einsum("sec,ecd->sd", (sent * weights[..., None, None]).sum(1), out)


def gathered(x: Tensor) -> Tensor:
    """Tokens are gathered in the order of their experts, and results added back by scatter_add."""
    tokens, weights, numbers = chosen(x)
    order = numbers.reshape(-1).argsort(stable=True)
    number, place = numbers.reshape(-1)[order], (order // CHOICES)[:, None].expand(-1, WIDTH)
    up = torch.bmm(tokens.gather(0, place).unsqueeze(1), gates_up[number]).squeeze(1) + biases_up[number]
    out = torch.bmm(up.relu().unsqueeze(1), down[number]).squeeze(1) * weights.reshape(-1)[order, None]
    return torch.zeros_like(tokens).scatter_add(0, place, out)


def masked(x: Tensor) -> Tensor:
    """Each expert reads and writes the tokens under a mask over batch and time."""
    _, weights, numbers = chosen(x)
    weights, numbers, out = weights.view(*x.shape[:2], -1), numbers.view(*x.shape[:2], -1), torch.zeros_like(x)
    for number in range(COUNT):
        for choice in range(CHOICES):
            mask = numbers[..., choice] == number
            out[mask] = out[mask] + one_expert(x[mask], number) * weights[..., choice][mask][:, None]
    return out.reshape(-1, WIDTH)


UNITED = "the rows that gradients of several picks have together"
BACK = {"whether tokens are back in the sequences that they came from", "how many kept tokens lie in each sequence"}
READ = {"the number of kept rows that an index reads", UNITED, *BACK}
ROUTINGS: dict[str, tuple[Callable[[Tensor], Tensor], set[str]]] = {
    "loop": (loop, READ),
    "batched": (batched, set()),
    "every": (every, set()),
    "places": (places, set()),
    "gathered": (gathered, READ),
    "masked": (masked, {"the number of a mask's entries", *READ}),
}
"""Each routing, and what the host may wait for where the values lie on a device."""
if hasattr(aten, "_grouped_mm"):
    ROUTINGS["grouped_mm"] = grouped, {UNITED, *BACK}
