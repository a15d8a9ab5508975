"""Scores that cost next to nothing, because they are functions of the logits that the forward has made anyway.

The losses function returns them beside the losses::

    def losses_fn(model, batch):
        logits = model(batch["x"])
        losses = F.cross_entropy(logits, batch["y"], reduction="none")
        return rowprop.Scored(losses, gradient_norm(logits, batch["y"]))

Shapes: N rows, C classes, ``...`` positions (tokens, pixels) that share the classes' layer.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from rowprop.checks import check_numbers, check_whole
from rowprop.errors import InvalidInput
from rowprop.host import waits
from rowprop.scoring.losses import per_row_mean


@torch.no_grad()
def gradient_norm(
    logits: Tensor, targets: Tensor, features: Tensor | None = None, *, ignore_index: int = -100
) -> Tensor:
    """Norm of the gradient of each row's cross entropy with respect to its logits.

    That is ``||softmax(logits) - onehot(target)||``, between 0 and the square root of 2. Katharopoulos and Fleuret show
    that, up to a factor that all rows share, it bounds the norm of the row's gradient with respect to all parameters,
    so rows drawn in proportion to it give an unbiased gradient of little variance. Paul et al. call it EL2N.

    Args:
        logits: Shape ``(N, C)`` or ``(N, C, ...)``, as :func:`torch.nn.functional.cross_entropy` takes them: tokens of
            a language model, ``(N, T, C)``, come as ``logits.transpose(1, 2)``.
        targets: Classes, shape ``(N,)`` or ``(N, ...)``, whole numbers; or a share of each class, of the shape of
            ``logits``, floating (mixup, label smoothing).
        features: Input of the last layer, shape ``(N, D)`` or ``(N, D, ...)``. Default None: not used. With it the
            result is the norm of the gradient with respect to the weight and the bias of a last linear layer.
        ignore_index: Target of the positions that do not count; default -100.

    Returns:
        Shape ``(N,)``, at least float32, without a graph. Of several positions the mean over the ones that count, 0
        where none does.

    Raises:
        InvalidInput: The shapes do not fit together, or (on the CPU) there is no such class.

    Cost:
        One copy of the logits in at least float32; no copy to the host.

    Notes:
        Exact for one position per row. For several, the gradient of the row's mean loss is a mean of vectors, and the
        mean of their norms, given here, bounds its norm from above. A last layer without a bias would have
        ``||features||`` in the place of the square root of ``||features||**2 + 1``, which is used.

    Example:
        >>> gradient_norm(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0]))
        tensor([0.7071, 0.1686])

    References:
        Katharopoulos and Fleuret, "Not All Samples Are Created Equal: Deep Learning with Importance Sampling", ICML
        2018, arXiv:1803.00942; Paul, Ganguli and Dziugaite, "Deep Learning on a Data Diet", NeurIPS 2021,
        arXiv:2107.07075.
    """
    logits = _checked("gradient_norm", logits)
    check_numbers("gradient_norm", "targets", targets)
    if targets.is_floating_point():
        if targets.shape != logits.shape:
            raise _misfit("gradient_norm", logits, targets, tuple(logits.shape))
        shares, counted = targets.to(logits.dtype), None
        error = logits.softmax(1).mul_(shares.sum(1, keepdim=True)).sub_(shares)
    else:
        index, counted = _classes("gradient_norm", logits, targets, ignore_index)
        error = logits.softmax(1).scatter_add_(1, index, logits.new_full((), -1.0).expand(index.shape))
    norms = cast("Tensor", torch.linalg.vector_norm(error, dim=1))
    if features is not None:
        check_numbers("gradient_norm", "features", features)
        if features.shape[:1] + features.shape[2:] != norms.shape:
            raise _misfit("gradient_norm", logits, features, (logits.shape[0], "D", *logits.shape[2:]), "features")
        norms = norms * (features.to(norms.dtype).square().sum(1) + 1).sqrt()
    return per_row_mean(norms, counted)


@torch.no_grad()
def margin(logits: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """How far the best wrong class is ahead of the right one, in logits; larger = harder.

    Above 0 the row is classified wrongly, far below 0 confidently right. It does not flatten out as losses and
    probabilities do, so rows that are all but learnt keep an order.

    Args:
        logits: Shape ``(N, C)`` or ``(N, C, ...)``, at least two classes; see :func:`gradient_norm`.
        targets: Classes, shape ``(N,)`` or ``(N, ...)``, whole numbers.
        ignore_index: Target of the positions that do not count; default -100.

    Returns:
        Shape ``(N,)``, at least float32, without a graph. Of several positions the mean over the ones that count, 0
        where none does.

    Raises:
        InvalidInput: The shapes do not fit together, or there is one class only.

    Cost:
        One copy of the logits in at least float32; no copy to the host.

    Example:
        >>> margin(torch.tensor([[3.0, 1.0, 0.0], [3.0, 1.0, 0.0]]), torch.tensor([0, 1]))
        tensor([-2.,  2.])

    References:
        Crammer and Singer, "On the Algorithmic Implementation of Multiclass Kernel-based Vector Machines", JMLR 2001
        (their margin, with the sign turned).
    """
    logits = _checked("margin", logits)
    if logits.shape[1] < 2:
        raise InvalidInput(
            f"margin got logits of shape {tuple(logits.shape)} but at least two classes were needed, "
            "to compare; for one logit per row use the loss as the score."
        )
    index, counted = _classes("margin", logits, targets, ignore_index)
    right = logits.gather(1, index)
    wrong = logits.scatter(1, index, -torch.inf).amax(1, keepdim=True)
    return per_row_mean((wrong - right).squeeze(1), counted)


@torch.no_grad()
def entropy(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """How undecided the model is, in nats, whatever the targets say: between 0 and ``log(C)``.

    Mislabeled rows, on which losses are large for good, are not preferred for their wrong label.

    Args:
        logits: Shape ``(N, C)`` or ``(N, C, ...)``; see :func:`gradient_norm`.
        mask: Which positions count, not zero, shape ``(N, ...)``; see :func:`rowprop.scoring.per_row_mean`. Default
            None: all.

    Returns:
        Shape ``(N,)``, at least float32, without a graph. Of several positions the mean over the ones that count, 0
        where none does.

    Raises:
        InvalidInput: The shapes do not fit together.

    Cost:
        Two copies of the logits in at least float32; no copy to the host.

    Example:
        >>> entropy(torch.tensor([[0.0, 0.0], [9.0, 0.0]]))
        tensor([0.6931, 0.0012])

    References:
        Settles, "Active Learning Literature Survey", University of Wisconsin-Madison, 2009 (uncertainty sampling).
    """
    shares = _checked("entropy", logits).softmax(1)
    return per_row_mean(-torch.xlogy(shares, shares).sum(1), mask)


def _checked(name: str, logits: Tensor) -> Tensor:
    """Logits in at least float32."""
    check_numbers(name, "logits", logits, "a tensor was needed; of a model's output, logits_of takes it.")
    if logits.dim() < 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise InvalidInput(
            f"{name} got logits of shape {tuple(logits.shape)} and dtype {logits.dtype} but floating ones of shape "
            "(N, C) or (N, C, ...), of at least one class, were needed; of a model's output, logits_of takes them."
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _classes(name: str, logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Indices (N, 1, ...) of the target classes, any class where ignored, and where they count, (N, ...)."""
    shape = logits.shape[:1] + logits.shape[2:]
    check_numbers(name, "targets", targets)
    check_whole(name, "ignore_index", ignore_index, -(2**63), "a whole number was needed.")
    if targets.shape != shape or targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise _misfit(name, logits, targets, tuple(shape))
    counted = targets != ignore_index
    classes = torch.where(counted, targets, 0).long()
    if not waits(classes):  # elsewhere torch's own assertion says so, and nobody waits
        outside = (classes < 0) | (classes >= logits.shape[1])
        if bool(outside.any()):
            raise InvalidInput(
                f"{name} got the class {int(classes[outside][0])} but classes 0 to {logits.shape[1] - 1} were needed, "
                f"or ignore_index={ignore_index}."
            )
    return classes.unsqueeze(1), counted


def _misfit(
    name: str, logits: Tensor, other: Tensor, wanted: tuple[object, ...], what: str = "targets"
) -> InvalidInput:
    shape = ", ".join(map(str, wanted)) + ("," if len(wanted) == 1 else "")
    return InvalidInput(
        f"{name} got {what} of shape {tuple(other.shape)} and dtype {other.dtype} for logits of shape "
        f"{tuple(logits.shape)} but shape ({shape}) was needed; the classes are the logits' dimension 1, so tokens "
        "come as `logits.transpose(1, 2)`."
    )
