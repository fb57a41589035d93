"""One path at a time: greedy search and sampling."""

from __future__ import annotations

from dataclasses import dataclass

from xformer.backends import Array, array_namespace, to_host
from xformer.generation.hypothesis import Hypothesis, best_first
from xformer.generation.logits_processors import log_sum_exp, process
from xformer.generation.sampling import draw, truncate
from xformer.generation.scoring import Path, score
from xformer.generation.task import DecodingTask


@dataclass
class Walk:
    """One output on its way. state: "going", "ended" by eos, or "cut" at the limit."""

    sentence: int
    sample: int
    tokens: list[int]
    log_probability: float = 0.0
    state: str = "going"

    @property
    def path(self) -> Path:
        """What there is of it, to be scored."""
        return Path(self.sentence, self.tokens, self.log_probability, self.state == "ended")

    def follow(self, token: int, log_probability: float, task: DecodingTask) -> None:
        """Go one token further; at the limit, only the end counts."""
        if self.state != "going":
            return
        if token == task.eos_id:
            self.state = "ended"
        elif len(self.tokens) == task.ranges[self.sentence].maximum or not task.fits(
            self.sentence, [*self.tokens, token]
        ):
            self.state = "cut"
            return
        else:
            self.tokens.append(token)
            if task.eos_id is None and len(self.tokens) == task.ranges[self.sentence].maximum:
                self.state = "cut"  # no need to see the next token
        self.log_probability += log_probability


def search_stepwise(task: DecodingTask) -> list[list[Hypothesis]]:
    """At each step take the most probable token, or draw one: options.num_return_sequences samples a sentence.

    Sentences that are finished leave the batch. Samples are independent, so they may be equal; best score first.
    """
    samples = task.options.num_return_sequences if task.uniforms is not None else 1
    walks = [
        [Walk(sentence, sample, list(prefix[: task.lead])) for sample in range(samples)]
        for sentence, prefix in enumerate(task.prefixes)
    ]
    cache, logits = task.start()
    if samples > 1:
        rows = [sentence for sentence in range(task.sentences) for _ in range(samples)]
        cache.reorder(rows)
        logits = task.take(logits, rows)
    active = list(walks)
    while True:
        tokens = _advance(task, logits, [walk for group in active for walk in group])
        going = [place for place, group in enumerate(active) if any(walk.state == "going" for walk in group)]
        if not going:
            break
        if len(going) < len(active):
            rows = [place * samples + sample for place in going for sample in range(samples)]
            cache.reorder(rows, going)
            active, tokens = [active[place] for place in going], [tokens[row] for row in rows]
        logits = task.step([[token] for token in tokens], cache)
    return [best_first(score(task, [walk.path for walk in group])) for group in walks]


def _advance(task: DecodingTask, logits: Array, walks: list[Walk]) -> list[int]:
    """Take each row's next token."""
    logits = process(task, logits, [walk.tokens for walk in walks], [walk.sentence for walk in walks])
    xp = array_namespace(logits)
    if task.uniforms is None:
        chosen = xp.argmax(logits, axis=-1)
    else:
        uniforms = [task.uniforms[walk.sentence][walk.sample][len(walk.tokens)] for walk in walks]
        chosen = draw(truncate(logits, task.options), uniforms)
    gained = xp.take_along_axis(logits, xp.expand_dims(chosen, axis=-1), axis=-1) - log_sum_exp(logits)
    # The first read waits for the step; the second finds its work done.
    tokens, gains = to_host(chosen).tolist(), to_host(gained)[:, 0].tolist()
    for walk, token, gain in zip(walks, tokens, gains, strict=True):
        walk.follow(token, gain, task)
    return tokens  # type: ignore[no-any-return]
