"""Optimizers: `state = optimizer.initial(model)`, then `model, state = optimizer.update(...)` a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from xformer.ops.adam import adam, zero_moment
from xformer.tree import flatten, map_arrays


class AdamState(NamedTuple):
    """Updates made so far, and the running means of gradients and squared gradients (trees like the model)."""

    step: int
    first: Any
    second: Any


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015), with the Transformer's constants (Vaswani et al., 2017, section 5.3)."""

    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9

    def initial(self, model: Any) -> AdamState:
        """The state before the first update: all moments zero."""
        return AdamState(0, map_arrays(zero_moment, model), map_arrays(zero_moment, model))

    def update(
        self, model: Any, gradients: Any, state: AdamState, learning_rate: float, *, gradient_scale: float = 1.0
    ) -> tuple[Any, AdamState]:
        """Make one update; `model` and `state` are consumed (buffers may be written where the library allows).

        gradient_scale: a factor for all gradients, so that clipping costs no pass over them.
        """
        leaves, rebuild = flatten(model)
        rows = zip(leaves, flatten(gradients)[0], flatten(state.first)[0], flatten(state.second)[0], strict=True)
        updated = [
            adam(
                *row,
                learning_rate=learning_rate,
                step=state.step + 1,
                beta1=self.beta1,
                beta2=self.beta2,
                epsilon=self.epsilon,
                gradient_scale=gradient_scale,
            )
            for row in rows
        ]
        parameters, first, second = ([item[i] for item in updated] for i in range(3))
        return rebuild(parameters), AdamState(state.step + 1, rebuild(first), rebuild(second))
