"""Mixed precision (Micikevicius et al., 2018): forward and backward in 16 bits, parameters and their updates in 32.

`autocast` rounds the parameters of a loss before they are used. Rounding is part of what is differentiated, and its
derivative converts the gradients back to float32. bfloat16 has the range of float32; for float16, a `GradScaler` keeps
small gradients from underflowing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xformer.backends import Array, array_namespace, device, dtype_name
from xformer.errors import BackendError, ConfigError
from xformer.ops.optimizers import cast
from xformer.tree import flatten_parameters

PRECISIONS = ("float32", "bfloat16", "float16")
_INITIAL_SCALE, _MAX_SCALE = 2.0**16, 2.0**24
_GROWTH_INTERVAL = 2000


@dataclass(frozen=True)
class GradScaler:
    """The dynamic scale of the loss (section 3.2 of the paper).

    Attributes:
        scale: Factor of the loss, a power of two, so that scaling changes no bits of values in range; 1 never grows.
        growth_tracker: Number of steps made with this scale.
    """

    scale: float = 1.0
    growth_tracker: int = 0

    @classmethod
    def init(cls, precision: str) -> GradScaler:
        """Return the initial scale for a precision: 65536 for float16, else 1."""
        return cls(_INITIAL_SCALE if precision == "float16" else 1.0)

    def growth(self) -> GradScaler:
        """Return the scale after a finite step: doubled after every 2000 of them, up to 2^24."""
        if self.scale == 1.0:
            return self
        grows = self.growth_tracker + 1 == _GROWTH_INTERVAL and self.scale < _MAX_SCALE
        return GradScaler(2.0 * self.scale) if grows else GradScaler(self.scale, self.growth_tracker + 1)

    def backoff(self) -> GradScaler | None:
        """Return half the scale, after an overflow; None if the scale cannot have been the reason."""
        return GradScaler(0.5 * self.scale) if self.scale > 2.0 else None


def autocast(precision: str, loss_fn: Callable[..., Array]) -> Callable[..., Array]:
    """Return the same loss (model, batch, rng) -> scalar for a model whose parameters are rounded to a precision."""
    if precision == "float32":
        return loss_fn

    def rounded(model: Any, batch: Any, rng: Any = None) -> Array:
        leaves, rebuild = flatten_parameters(model)
        return loss_fn(rebuild(cast(*leaves, dtype=precision)), batch, rng)

    return rounded


def check_precision(precision: str, model: Any) -> None:
    """Check that a model can be trained in a precision.

    Args:
        precision: One of `PRECISIONS`.
        model: The model, or any tree of arrays.

    Raises:
        ConfigError: For parameters that are not float32.
        BackendError: If the backend cannot compute in this precision.
    """
    if precision == "float32":
        return
    leaves = flatten_parameters(model)[0]
    dtypes = {dtype_name(leaf.dtype) for leaf in leaves} - {"float32"}
    if dtypes:
        received = f"precision is {precision!r} and the model has parameters of dtype {', '.join(sorted(dtypes))}"
        expected = "mixed precision requires float32 parameters: make the model with dtype='float32'"
        raise ConfigError(f"{received}; {expected}")
    xp = array_namespace(*leaves)
    try:
        zeros = xp.zeros((16, 16), dtype=xp.dtype_named(precision), device=device(leaves[0]))
        xp.exp(zeros @ zeros)
    except Exception as error:  # each library raises its own exceptions
        reason = " ".join(str(error).split())
        received = f"precision is {precision!r}, but {xp.name} cannot compute in it on this device ({reason})"
        raise BackendError(f"{received}; use another precision or backend") from error
