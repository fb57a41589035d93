"""What to change when training cannot go on, and what is kept, as errors say it."""

from __future__ import annotations

from xformer.training.settings import LoopSettings


def more_careful(settings: LoopSettings) -> str:
    """How to lower the learning rate."""
    peak = "learning_rate_factor" if settings.learning_rate is None else "learning_rate"
    return f"by {peak} or more warmup_steps"


def less_memory(settings: LoopSettings) -> str:
    """How to need less memory."""
    size = "batch_tokens" if hasattr(settings, "batch_tokens") else "batch_size"
    return (
        f"lower {size} (it is {getattr(settings, size)}) and raise accumulate, or set rematerialize = true in [model]"
    )


def kept(saved_step: int | None) -> str:
    """What an end in the middle leaves."""
    return "no state had been saved yet" if saved_step is None else f"the state of update {saved_step} is kept"
