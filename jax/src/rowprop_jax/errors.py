"""What rowprop_jax raises on purpose: one sentence with what was given, what was needed, and what to do."""

__all__ = ["InvalidInput", "UnsupportedOperation"]


class InvalidInput(ValueError):
    """An argument has the wrong shape, dtype or range."""


class UnsupportedOperation(RuntimeError):
    """Rows mix in the backward, or nothing proves that they do not, so no other gradient is returned in silence."""
