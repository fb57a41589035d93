"""Mixed precision (Micikevicius et al., 2018): forward and backward in 16 bits, parameters and their updates in 32.

A loss `autocast` another precision rounds the parameters first. Rounding is thus part of what is differentiated,
and its derivative brings the gradients back to float32. bfloat16 has the range of float32; float16 has not, and there
a `GradScaler` keeps small cotangents from becoming zero.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xformer.backends import Array, array_namespace, backend_name, device, dtype_name, dtype_named, is_floating
from xformer.errors import BackendError, ConfigError
from xformer.ops.cast import cast
from xformer.tree import flatten

PRECISIONS = ("float32", "bfloat16", "float16")
_FIRST_SCALE, _LARGEST_SCALE = 2.0**16, 2.0**24
_UPDATES_TO_GROW = 2000


@dataclass(frozen=True)
class GradScaler:
    """What the loss is multiplied by before it is differentiated (section 3.2 of the paper).

    value: a power of two, so that scaling changes no bits of what stays in range; 1, which stays as it is, is none.
    updates: made with it so far.
    """

    value: float = 1.0
    updates: int = 0

    @classmethod
    def init(cls, precision: str) -> GradScaler:
        """What training in a precision begins with."""
        return cls(_FIRST_SCALE if precision == "float16" else 1.0)

    def grown(self) -> GradScaler:
        """The scale after one more update: doubled after every 2000 of them, up to 2^24."""
        if self.value == 1.0:
            return self
        grows = self.updates + 1 == _UPDATES_TO_GROW and self.value < _LARGEST_SCALE
        return GradScaler(2.0 * self.value) if grows else GradScaler(self.value, self.updates + 1)

    def halved(self) -> GradScaler | None:
        """The scale after a gradient that was too large for it; None where that cannot have been the reason."""
        return GradScaler(0.5 * self.value) if self.value > 2.0 else None


UNSCALED = GradScaler()


def autocast(precision: str, loss: Callable[..., Array]) -> Callable[..., Array]:
    """The same loss, (model, batch, rng=None) -> scalar, of a model whose parameters are rounded to a precision."""
    return loss if precision == "float32" else functools.partial(_of_rounded, loss=loss, precision=precision)


def _of_rounded(model: Any, batch: Any, rng: Any = None, *, loss: Callable[..., Array], precision: str) -> Array:
    leaves, rebuild = flatten(model)
    floating = [is_floating(leaf.dtype) for leaf in leaves]
    rounded = iter(cast(*itertools.compress(leaves, floating), dtype=precision))
    pairs = zip(leaves, floating, strict=True)
    return loss(rebuild([next(rounded) if each else leaf for leaf, each in pairs]), batch, rng)


def check_precision(precision: str, model: Any) -> None:
    """Raise ConfigError unless a model can be trained in a precision, BackendError unless its library can.

    model: or any tree of arrays.
    """
    if precision == "float32":
        return
    leaves = flatten(model)[0]
    found = {dtype_name(leaf.dtype) for leaf in leaves} - {"float32"}
    if found:
        raise ConfigError(
            f"precision is {precision!r} and the model has parameters of {', '.join(sorted(found))}; mixed precision "
            "keeps them in float32: make the model with dtype='float32'"
        )
    xp = array_namespace(*leaves)
    try:
        none = xp.zeros((16, 16), dtype=dtype_named(xp, precision), device=device(leaves[0]))
        xp.exp(none @ none)
    except Exception as error:  # each library has errors of its own
        reason = " ".join(str(error).split())
        raise BackendError(
            f"precision is {precision!r}, in which {backend_name(xp)} cannot compute here ({reason}); choose another "
            "precision or backend"
        ) from error
