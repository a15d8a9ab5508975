"""Compiled regions whose backward runs on the kept rows."""

from rowprop.backprop.compiled.lowering import backend, compiled_elsewhere

__all__ = ["backend", "compiled_elsewhere"]
