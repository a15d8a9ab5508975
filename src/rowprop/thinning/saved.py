"""The form of a saved state, which is checked before any of it is loaded."""

from __future__ import annotations

from typing import Any, cast

from rowprop.checks import check_whole, is_number, shown
from rowprop.errors import InvalidInput

OWNER = "Thinning.load_state_dict"
EACH = "*"
"""In a form: the form of all entries, whatever their names."""


def check_form(name: str, value: object, form: object) -> None:
    """Refuse a part of a saved state that has another form.

    Args:
        name: Its name in the state.
        value: The part.
        form: A mapping or a list of forms; True for a flag; a whole number or a number, of which each stands for those
            of 0 or more, and a positive one for positive ones.
    """
    if isinstance(form, dict):
        forms: dict[str, Any] = form
        entries = cast("dict[object, object]", value)
        if not isinstance(value, dict) or not (EACH in forms or set(entries) == set(forms)):
            raise _refused(name, value, f"a mapping with {', '.join(forms)}")
        for key, held in entries.items():
            if not isinstance(key, str):
                raise _refused(name, value, "a mapping of names")
            check_form(f"{name}.{key}", held, forms.get(EACH, forms.get(key)))
    elif isinstance(form, list):
        numbers: list[Any] = form
        held = cast("list[object]", value)
        if not isinstance(value, list) or len(held) != len(numbers):
            raise _refused(name, value, f"a list of {len(numbers)} numbers")
        for one, like in zip(held, numbers, strict=True):
            check_form(name, one, like)
    elif isinstance(form, bool):
        if not isinstance(value, bool):
            raise _refused(name, value, "True or False")
    elif isinstance(form, int):
        check_whole(OWNER, name, value, 0)
    elif not is_number(value) or cast("float", value) < 0 or (form and not value):
        raise _refused(name, value, "a positive number" if form else "a number of 0 or more")


def _refused(name: str, value: object, needed: str) -> InvalidInput:
    return InvalidInput(
        f"{OWNER} got {name}={shown(value)} but {needed} was needed; save and load the state whole, with one version "
        "of rowprop."
    )
