"""Thinning: rows are dropped from the backward at random; the gradient equals the full one in expectation."""

import typing as _typing

from rowprop.lazy import on_first_use as _on_first_use

if _typing.TYPE_CHECKING:
    from rowprop.thinning.handle import Thinning as Thinning
    from rowprop.thinning.handle import ThinRecord as ThinRecord
else:  # not for type checkers: to them a module with __getattr__ has every attribute
    __all__, __getattr__, __dir__ = _on_first_use(__name__, {"handle": "ThinRecord Thinning"}, [])
