"""From documents to summaries."""

from __future__ import annotations

from xformer.pipelines.text_to_text import TextToText


class Summarizer(TextToText):
    """Summarises: `Summarizer.from_pretrained("run")([document], desired_length=10, length_unit="words")`.

    A document is split into sentences, which the model sees with separators between them.
    """

    task = "summarization"
