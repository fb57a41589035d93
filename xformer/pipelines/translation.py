"""From sentences to translations."""

from __future__ import annotations

from xformer.pipelines.text_to_text import TextToText


class Translator(TextToText):
    """Translates: `Translator.from_pretrained("run")(["Ein Mann schläft ."], beam_size=5)`."""

    task = "translation"
