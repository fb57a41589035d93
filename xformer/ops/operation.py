"""An operation: a portable definition with its VJP, and a name under which kernels may replace it."""

from __future__ import annotations

from typing import Any

from xformer.autodiff import Implementation, Primitive
from xformer.kernels import registry


class Operation(Primitive):
    """A primitive that looks for a kernel first (see kernels/registry.py)."""

    def __init__(self, portable: Implementation) -> None:
        super().__init__(portable)
        registry.OPERATIONS.add(self.name)

    def choose(self, xp: Any, arrays: tuple[Any, ...], static: dict[str, Any]) -> Implementation:
        """Pick the kernel that supports the call, else the portable definition."""
        kernel = registry.find(self.name, xp, arrays, static)
        if kernel is None:
            return self.portable
        if registry.check_wanted(kernel):
            registry.check(kernel, self.portable, arrays, static)
        return Implementation(kernel.name, kernel.forward, kernel.vjp)
