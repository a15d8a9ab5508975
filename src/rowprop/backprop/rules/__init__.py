"""How aten ops act on a row-sliced gradient, a file per family. The import of this package fills the table.

``libraries`` and ``kernels``, the rules of other packages' functions, are imported when a custom function is first met.
"""

import importlib

for _family in """
attention embedding indexing losses matmul norms pointwise recurrent reductions spatial views
""".split():
    importlib.import_module(f"{__name__}.{_family}")
