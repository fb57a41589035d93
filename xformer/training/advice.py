"""What to change when training cannot go on, and what is kept, as errors say it."""

from __future__ import annotations

from typing import Any

from xformer.memory import in_units
from xformer.runs.config import LoopSettings
from xformer.tree import flatten


def more_careful(settings: LoopSettings) -> str:
    """How to lower the learning rate, which a run that goes on cannot."""
    peak = "learning_rate_factor" if settings.learning_rate is None else "learning_rate"
    value = getattr(settings, peak)
    return f"by a smaller {peak} (it is {value:g}) or more warmup_steps, in a new run (--resume keeps it)"


def smaller_model(settings: LoopSettings) -> str:
    """How to need less memory where no batch has a part in it."""
    state = ', or optimizer = "adafactor", whose state is small' if settings.optimizer.startswith("adam") else ""
    return f"take a smaller model{state}"


def less_memory(settings: LoopSettings, model: Any, state: Any, most: float | None) -> str:
    """How to need less memory: for the model, or for a batch; most: bytes that there are, None where nobody knows."""
    # At least: gradients are like the parameters.
    least = sum(getattr(leaf, "nbytes", 0) for leaf in flatten((model, model, state))[0])
    size = "batch_tokens" if hasattr(settings, "batch_tokens") else "batch_size"
    batch = (
        f"lower {size} (it is {getattr(settings, size)}) and raise accumulate, or set rematerialize = true in [model]"
    )
    if most is None or not least:
        return batch
    taken = f"parameters, gradients and the optimizer's state alone take {in_units(least)} of {in_units(most)}"
    return f"{taken}: {smaller_model(settings) if least > most else batch}"


def kept(saved_step: int | None) -> str:
    """What an end in the middle leaves."""
    return "no state had been saved yet" if saved_step is None else f"the state of update {saved_step} is kept"
