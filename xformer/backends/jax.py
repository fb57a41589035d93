"""Adapt xformer to JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from xformer.backends.array_types import Device, DType, Shape
from xformer.backends.array_types import NativeArray as Array
from xformer.backends.library import RANDOM_BITS, Library, Table, compute


class JaxLibrary(Library, library="jax"):
    """Adapt xformer to JAX."""

    def canonical_dtype(self, dtype: DType) -> DType:
        """Return the 32-bit counterpart of a 64-bit dtype unless x64 is enabled."""
        return jax.dtypes.canonicalize_dtype(dtype)

    @property
    def index_dtype(self) -> DType:
        """Return int64, or int32 without x64."""
        return self.canonical_dtype(self.int64)

    def is_host_accessible(self, array: Array) -> bool:
        """Return whether the array has values, on the CPU."""
        # The device of an array that is sharded over several devices is a sharding, which has no platform.
        return not self.is_abstract(array) and getattr(array.device, "platform", "") == "cpu"

    def is_abstract(self, array: Array) -> bool:
        """Return whether the array is a tracer of `jax.jit` or `jax.grad`."""
        return isinstance(array, jax.core.Tracer)

    def rows_of_table(self, table: Table, rows: slice, dtype: DType, device: Device) -> Array:
        """Copy the rows, which are a constant of a jitted function."""
        return self._place(compute(table)[rows], dtype, device)

    def erf(self, x: Array) -> Array:
        """Compute erf by `jax.scipy`."""
        return jax.scipy.special.erf(x)

    def scatter_add(self, target: Array, indices: Array, updates: Array) -> Array:
        """Add by `at[].add`."""
        return target.at[indices].add(updates)

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        """Use `jax.lax.top_k`, which orders equal values by index."""
        return tuple(jax.lax.top_k(x, k))

    def set_item(self, x: Array, value: Any, key: Any) -> Array:
        """Set by `at[].set`, since arrays are immutable."""
        return x.at[key].set(value)

    def keep(self, array: Array) -> tuple[Array, None]:
        """Return the array, which is immutable."""
        return array, None

    def share_memory(self, x: Array, y: Array) -> bool:
        """Return False, since nothing writes into arrays."""
        return False

    def random_mask(self, key: int, threshold: int, shape: Shape, device: Device) -> Array:
        """Draw by `jax.random`, so that a jitted function can."""
        return self.counted_random_mask(key, 0, threshold, shape, device)

    def counted_random_mask(self, key: int, counter: Any, threshold: int, shape: Shape, device: Device) -> Array:
        """Read the counter in the jitted function, so that it draws another mask in each call."""
        low, high = key % 2**31 ^ counter & 2**31 - 1, key // 2**31 % 2**31 ^ counter >> 31
        stream = jax.random.fold_in(jax.random.key(low), high)
        return jax.random.randint(stream, shape, 0, 2**RANDOM_BITS, dtype="int32") < threshold

    def configure(self, *, dtype: str | None, num_threads: int) -> None:
        """Enable 64-bit dtypes if the command needs them."""
        if dtype == "float64":
            jax.config.update("jax_enable_x64", True)

    def register_pytree(self, cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
        """Make a class a JAX pytree whose children have attribute names as keys."""

        def flatten_with_keys(node: Any) -> tuple[Any, Any]:
            children, static = flatten(node)
            keys = map(jax.tree_util.GetAttrKey, static.names)
            return tuple(zip(keys, children, strict=True)), static

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
