"""The form of a saved state, which is checked before any of it is loaded."""

from __future__ import annotations

from typing import Any

from rowprop.checks import check_whole, is_number, shown
from rowprop.errors import InvalidInput

OWNER = "Thinning.load_state_dict"
EACH = "*"  # in a form: the form of all entries, whatever their names


def check_form(name: str, value: Any, form: Any) -> None:
    """Refuse a part of a saved state that has another form.

    A form is a mapping or a list of forms; True for a flag; an integer for a count; a number for numbers of 0 or more;
    and a positive number for positive ones.
    """
    kind, same = type(form).__name__, type(value) is type(form)
    if kind == "dict":
        if not same or not (EACH in form or set(value) == set(form)):
            raise _refused(name, value, f"a mapping with {', '.join(form)}")
        for key, held in value.items():
            check_form(f"{name}.{key}", held, form.get(EACH, form.get(key)))
    elif kind == "list":
        if not same or len(value) != len(form):
            raise _refused(name, value, f"a list of {len(form)} numbers")
        for one, like in zip(value, form, strict=True):
            check_form(name, one, like)
    elif kind == "bool":
        if not same:
            raise _refused(name, value, "True or False")
    elif kind == "int":
        check_whole(OWNER, name, value, 0)
    elif not is_number(value) or value < 0 or (form and not value):
        raise _refused(name, value, "a positive number" if form else "a number of 0 or more")


def _refused(name: str, value: object, needed: str) -> InvalidInput:
    return InvalidInput(f"{OWNER} got {name}={shown(value)} but {needed} was needed; save and load the state whole.")
