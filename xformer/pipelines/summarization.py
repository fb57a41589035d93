"""From documents to summaries."""

from __future__ import annotations

from xformer.pipelines.text_to_text import TextToText


class Summarizer(TextToText):
    """Summarises: `Summarizer.from_pretrained("run")([document], desired_length=10, length_unit="words")`.

    A document is split into sentences, which the model sees with separators between them.
    """

    task = "summarization"

    @property
    def usual_limit(self) -> int | None:
        """Four times as many tokens as summaries have on average, plus 20: twice a document would be no limit."""
        return None if self.mean_length is None else round(4 * self.mean_length) + 20
