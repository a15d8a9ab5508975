"""Any engine against ``masked``, which is slow and obviously right, on the user's own model and batch."""

import typing as _typing

from rowprop.lazy import on_first_use as _on_first_use

if _typing.TYPE_CHECKING:
    from rowprop.oracle.results import Verification as Verification
else:  # not for type checkers: to them a module with __getattr__ has every attribute
    __all__, __getattr__, __dir__ = _on_first_use(__name__, {"results": "Verification"}, [])
