"""The cost of a step: counted and measured, not guessed."""

import typing as _typing

from rowprop.lazy import on_first_use as _on_first_use

if _typing.TYPE_CHECKING:
    from rowprop.cost import count as count
    from rowprop.cost import profile as profile
    from rowprop.cost import timing as timing
    from rowprop.cost.flops import count_flops as count_flops
    from rowprop.cost.plan import Plan as Plan
else:  # not for type checkers: to them a module with __getattr__ has every attribute
    __all__, __getattr__, __dir__ = _on_first_use(
        __name__, {"flops": "count_flops", "plan": "Plan"}, ["count", "profile", "timing"]
    )
