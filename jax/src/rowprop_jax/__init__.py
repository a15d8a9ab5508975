"""The backward of the rows of a batch that matter, at the cost of these rows, for JAX."""

from rowprop_jax.sliced import InvalidInput, UnsupportedOperation, skip_zeros, vjp
from rowprop_jax.step import Record, Verification, top_k, uniform, value_and_grad, verify

__all__ = [
    "InvalidInput", "Record", "UnsupportedOperation", "Verification", "skip_zeros", "top_k", "uniform",
    "value_and_grad", "verify", "vjp",
]  # fmt: skip
__version__ = "0.1.0"
