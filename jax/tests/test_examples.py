"""The examples of Flax, Equinox and Optax train on digits by each method."""

import importlib

import pytest


@pytest.mark.parametrize("library", ["optax", "equinox", "flax"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the libraries' own
def test_an_example_trains_by_each_method(library, capsys):
    # Red with the gradient's sign turned round, and with rows of another batch.
    found = importlib.import_module(f"{library}_digits").main()
    assert capsys.readouterr().out.count("\n") == 3
    assert list(found) == ["full", "OHEM", "random"]
    assert min(found.values()) > 0.85, found
