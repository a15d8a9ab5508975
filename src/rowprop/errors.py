"""The library's errors: one small tree, each a sentence that says what came, what was needed and what to do."""

from __future__ import annotations


class RowpropError(Exception):
    """Base of every error that rowprop raises on purpose."""


class InvalidInput(RowpropError, ValueError):
    """An argument has the wrong shape, dtype or range."""


class UnsupportedOperation(RowpropError, RuntimeError):
    """The operation asked for has no exact answer here, so it is refused instead of guessed."""


class RankFailed(RowpropError, RuntimeError):
    """Another rank of the group could not do its part; its own error says why."""


class MissingExtra(RowpropError, ImportError):
    """An optional dependency is not installed; the message carries the pip line."""
