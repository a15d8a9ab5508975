"""How aten ops act on a row-sliced gradient, a file per family. The import of this package fills the table."""

import importlib

for _family in """
attention embedding indexing libraries losses matmul norms pointwise recurrent reductions spatial views
""".split():
    importlib.import_module(f"{__name__}.{_family}")
