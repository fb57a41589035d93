"""Fast replacements of operations, one module a library, behind one seam (`registry`).

`xformer.kernels.explain(...)` says which path serves a call and why the others do not.
"""

from xformer.kernels.registry import Kernel, explain, register

__all__ = ["Kernel", "explain", "register"]
