"""Fast implementations of operations, one package per library, and the registry that selects them.

`explain(lambda: model(x))` lists which implementation runs each operation, and why other kernels do not.
"""

from xformer.kernels.registry import Kernel, explain, register

__all__ = ["Kernel", "explain", "register"]
