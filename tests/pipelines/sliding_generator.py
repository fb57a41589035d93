"""A text generator for tests of texts that outgrow the context."""

from xformer.pipelines import TextGenerator


class SlidingGenerator(TextGenerator):
    """A generator whose context slides by default."""

    def outputs(self, prompts, config=None, **options):
        return super().outputs(prompts, config, **{"context": "slide", **options})

    def stream(self, prompt, config=None, **options):
        return super().stream(prompt, config, **{"context": "slide", **options})
