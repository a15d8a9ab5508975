"""Sphinx: the repository's own pages, where they lie, and the reference of every public name."""

import re
import sys
import zlib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

import rowprop  # noqa: E402
from names import homes_of, names_of, namespaces  # noqa: E402

project, author, release = "rowprop", "the rowprop authors", rowprop.__version__
project_copyright = "the rowprop authors; Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx"]

# The pages link to each other by relative paths, which a code host follows as well, so the source is the repository.
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/results/*.md", "notebooks/*.ipynb"]
exclude_patterns = [".*", "build", "dist", "src", "tests", "tools", "examples", "runs", "rowprop-compare"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebook holds its outputs, so that a code host shows them too; a test runs it
highlight_language = "text"

html_theme = "furo"  # light and dark
html_title = f"rowprop {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_custom_sections = ["Cost", "Bias", "Exactness", "Source"]

# torch's own inventory needs a network, which a build must not. These are the names that docstrings and signatures use.
TORCH = "https://docs.pytorch.org/docs/stable/"
TORCH_NAMES = {
    "torch.Tensor": ("class", "tensors.html"),
    "torch.Generator": ("class", "generated/torch.Generator.html"),
    "torch.device": ("class", "tensor_attributes.html"),
    "torch.dtype": ("class", "tensor_attributes.html"),
    "torch.nn.Module": ("class", "generated/torch.nn.Module.html"),
    "torch.nn.functional.cross_entropy": ("function", "generated/torch.nn.functional.cross_entropy.html"),
    "torch.optim.Optimizer": ("class", "optim.html"),
    "torch.utils.data.DataLoader": ("class", "data.html"),
    "torch.utils.data.Dataset": ("class", "data.html"),
    "torch.utils.data.Sampler": ("class", "data.html"),
}


def torch_inventory() -> str:
    """Write an inventory of torch's names into the build folder, and return its path."""
    lines = [f"{name} py:{kind} 1 {page}#{name} -\n" for name, (kind, page) in TORCH_NAMES.items()]
    head = "# Sphinx inventory version 2\n# Project: torch\n# Version: \n# The rest is compressed using zlib.\n"
    file = ROOT / "build" / "torch.inv"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(head.encode() + zlib.compress("".join(lines).encode()))
    return str(file)


intersphinx_mapping = {"torch": (TORCH, torch_inventory())}


def with_toctrees(app: Sphinx, page: str, source: list[str]) -> None:
    """Order the pages as the sections of the first page do; results of benchmarks are found by links alone."""
    if page == root_doc:
        placed = set[str]()
        for part in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
            linked = re.findall(r"\]\(([\w./-]+)\.(?:md|ipynb)\)", part)
            entries = [re.sub("^[.][.]/", "/", name) for name in dict.fromkeys(linked) if name not in placed]
            placed |= set(linked)
            caption = part.partition("\n")[0]
            source[0] += "\n".join(["\n```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```\n"])
    elif page.startswith("benchmarks/"):
        source[0] = f"---\norphan: true\n---\n{source[0]}"


def check_names(app: Sphinx, env: Any) -> None:
    """Complain of each public name that no page documents."""
    documented = env.get_domain("py").objects
    for module in namespaces():
        for name, held in names_of(module).items():
            if f"rowprop.{name}" not in documented and not homes_of(module, name, held) & documented.keys():
                logging.getLogger(__name__).warning("no page documents %s.%s", module.__name__, name)


def with_stars(app: Sphinx, what: str, name: str, held: Any, options: Any, lines: list[str]) -> None:
    """Escape the stars of ``model, losses_fn, **options:``, which napoleon does for a name that stands alone."""
    lines[:] = [re.sub(r"^( *\w+, .*)\*\*(\w+:)", r"\1\\*\\*\2", line) for line in lines]


def once(app: Sphinx, what: str, name: str, held: Any, skip: bool, options: Any) -> bool | None:
    """Leave a name at the top of rowprop to its own page: a name on two pages is a reference to neither."""
    return (app.env.docname != "docs/api/top" and getattr(rowprop, name, None) is held) or None


def setup(app: Sphinx) -> None:
    """Register the steps above: Sphinx calls this."""
    app.connect("autodoc-process-docstring", with_stars, priority=100)
    app.connect("autodoc-skip-member", once)
    app.connect("source-read", with_toctrees)
    app.connect("env-check-consistency", check_names)
