"""Unsloth's kernels on the CPU, by Triton's interpreter, without a GPU and without the rest of unsloth.

Importing ``unsloth`` asks for a GPU and patches other libraries. The folder of its kernels is imported alone.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from tempfile import gettempdir

SWITCHES = "TRITON_INTERPRET UNSLOTH_ALLOW_CPU UNSLOTH_IS_PRESENT UNSLOTH_ZOO_DISABLE_GPU_INIT"


def install() -> bool:
    """Have ``unsloth.kernels`` imported on the CPU; whether unsloth, its zoo and Triton are there."""
    found = find_spec("unsloth")
    if found is None or not all(map(find_spec, ("unsloth_zoo", "triton"))):
        return False
    if "unsloth" in sys.modules:
        return True
    os.environ |= dict.fromkeys(SWITCHES.split(), "1")
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(Path(gettempdir(), "unsloth_compiled_cache"))  # not where tests run
    import triton.language.extra.libdevice
    import triton.runtime.interpreter

    assert found.submodule_search_locations is not None
    folder = Path(next(iter(found.submodule_search_locations)))
    for name, place in (("unsloth", folder), ("unsloth.kernels", folder / "kernels")):
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(place)]
        sys.modules[name] = module_from_spec(spec)
    ours, finders = {name: module for name, module in sys.modules.items() if is_triton(name)}, list(sys.meta_path)
    import unsloth_zoo  # noqa: F401  # puts its own empty Triton in the place of the real one

    for name in filter(is_triton, [*sys.modules]):
        del sys.modules[name]
    sys.modules.update(ours)
    sys.meta_path[:] = finders
    from unsloth.kernels import cross_entropy_loss, rope_embedding

    # A function that was bound before the interpreter replaces it does not run there; hints ask the GPU.
    cross_entropy_loss.triton_cast = lambda x, dtype: triton.language.cast(x, dtype)
    rope_embedding._eviction_hints_ok = lambda device: True
    return True


def is_triton(name: str) -> bool:
    return name.partition(".")[0] == "triton"
