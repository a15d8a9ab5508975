"""The package is small, stands alone, and shows what it says."""

import subprocess
import sys
from pathlib import Path

import jax
from jax.extend.core import primitives

import rowprop_jax
from rowprop_jax import walk

FILES = sorted(Path(rowprop_jax.__file__).parent.glob("*.py"))


def test_at_most_710_lines():
    assert sum(len(file.read_text().splitlines()) for file in FILES) <= 710


def test_the_public_names():
    shown = {
        name for name, held in vars(rowprop_jax).items() if not name.startswith("_") and not hasattr(held, "__path__")
    }
    modules = {file.stem for file in FILES}
    assert rowprop_jax.__all__ == sorted(rowprop_jax.__all__) and shown - modules == set(rowprop_jax.__all__)


def test_it_needs_jax_alone():
    # Red with `import numpy` replaced by a package that jax does not ask for.
    code = "import sys, jax; old = set(sys.modules); import rowprop_jax; print(*(set(sys.modules) - old))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    homes = {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names)
    assert "rowprop_jax" in homes and homes <= {"rowprop_jax", "jax", "jaxlib"}


def test_each_rule_is_of_a_primitive_that_jax_has():
    # Red with `scatter_mul` for `scatter-mul`: JAX's names are these strings, and a wrong one is a rule for nothing.
    known = {held.name for home in (jax.lax, primitives) for name, held in vars(home).items() if name.endswith("_p")}
    assert walk.RULES.keys() - known == set(ELSEWHERE)


ELSEWHERE = ["random_wrap", "random_unwrap", "random_clone", "pvary"]
