"""How aten ops act on a row-sliced gradient, a file per family. The import of this package fills the table."""

from rowprop.backprop.rules import (
    attention,
    convolution,
    embedding,
    flex,
    float8,
    fourier,
    indexing,
    liger,
    losses,
    matmul,
    norms,
    pointwise,
    recurrent,
    reductions,
    spatial,
    views,
)

__all__ = [
    "attention",
    "convolution",
    "embedding",
    "flex",
    "float8",
    "fourier",
    "indexing",
    "liger",
    "losses",
    "matmul",
    "norms",
    "pointwise",
    "recurrent",
    "reductions",
    "spatial",
    "views",
]
