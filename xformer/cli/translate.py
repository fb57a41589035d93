r"""`xformer translate`: translate lines of text.

Translate text with a public checkpoint (a directory in the Hugging Face format) or with the best model of a
training run: one line in, one line out, in the same order.

\b
A file         xformer translate --model run --input test.de --output out.en
Beam search    xformer translate --model run --input test.de --output out.en \
                 --num-beams 5 --length-penalty 0.6
A pipe         head -3 test.de | xformer translate --model run
Interactively  xformer translate --model run
A large file   xformer translate --model run --input news.de --corpus-out news.en.d --workers 4
On a cluster   xformer translate --model run --input news.de --corpus-out news.en.d \
                 --scheduler tcp://10.0.0.1:8786
A public model of many languages
               xformer translate --model nllb-200 --input test.de \
                 --source-language deu_Latn --target-language eng_Latn

Lines from a terminal or a pipe are translated as they arrive. Blank lines stay blank, and a line break inside an
output becomes a space. An output file appears when it is complete; a pipe or a device gets the lines at once. With
--corpus-out, several workers process chunks of the input, and the same command resumes after an interruption. With
--num-return-sequences above 1, or with --align, each output is a line of JSON with the number of its source line,
rank, score, text, and the alignment of its tokens.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from xformer.cli import _io
from xformer.cli._corpus import ChunkFunction, CorpusOptions, process_file
from xformer.cli._options import COMPUTING, DATA, ModelOption, config_options, file_option
from xformer.config import field_names, option, take_options
from xformer.generation import GenerationConfig
from xformer.pipelines import ChunkOutput, Output, TextToText, Translator, check_source_lengths
from xformer.pipelines.options import SearchOptions
from xformer.runs.console import make_console, plural, progress_bar
from xformer.text import MAX_CHARACTERS
from xformer.text.corpus import one_line


class LineOptions(SearchOptions):
    r"""Arguments of `TextToText.batches_of_ids` that are options of translate and summarize.

    Args:
        align: Write JSON with the source token that each token attends to most.
        source_language: Language of the input, for models of many languages, e.g. deu_Latn.
        target_language: Language of the output.
        max_source_length: Maximum tokens of a line.
        long_lines: What to do with longer lines: an error, an empty output, or cut to the maximum. \[default: error,
            or blank with --corpus-out]
    """

    align: bool = option(default=False, panel="Search")
    source_language: str | None = option(default=None, panel=DATA)
    target_language: str | None = option(default=None)
    max_source_length: int = option(default=1024, at_least=1, panel=COMPUTING)
    long_lines: str | None = option(default=None, choices=("error", "blank", "cut"))


def line_command(pipeline_type: type[TextToText]) -> Callable[..., None]:
    """Return the command that writes an output of a pipeline for each line of its input."""
    names = [
        *("num_beams", "num_return_sequences", "length_penalty", "align"),
        *("max_new_tokens", "target_length", "length_unit"),
        *("prefix", "sequence_bias", "no_repeat_ngram_size"),
        *(("source_language", "target_language") if pipeline_type is Translator else ()),
        *("temperature", "top_k", "top_p", "seed"),
        *("max_source_length", "long_lines", "batch_tokens"),
        *field_names(CorpusOptions),
    ]
    decorate = config_options(GenerationConfig, LineOptions, CorpusOptions, names=names)
    return decorate(functools.partial(_transform_lines, pipeline_type))


def _transform_lines(
    pipeline_type: type[TextToText],
    model: ModelOption,
    source: Annotated[str, file_option("--input", "Texts, one per line; - is standard input.")] = "-",
    output: Annotated[str, file_option("--output", "Outputs; - is standard output.")] = "-",
    *,
    settings: dict[str, Any],
    loading: dict[str, Any],
) -> None:
    """Write an output for each line: those of a stream as they arrive, a file only if all its lines are valid."""
    corpus = CorpusOptions.pop_from(settings)
    options = LineOptions(**take_options(LineOptions, settings))
    languages = {"source_language": options.source_language, "target_language": options.target_language}
    loading |= {name: value for name, value in languages.items() if value is not None}
    GenerationConfig(**settings)  # refuses contradictions before the model is loaded
    output = corpus.output_path(output)
    _io.check_output(output, [source], model)
    if corpus.corpus_out is not None:
        arguments = {"options": options.to_dict(), "generation": settings}
        function = ChunkFunction(process_chunk, pipeline_type, model, loading, arguments)
        _print_notes(process_file(function, source, output, corpus), options)
        return
    pipeline = _io.load_pipeline(pipeline_type, model, **loading)
    lines = _Lines(pipeline, options, GenerationConfig.resolve(pipeline.defaults, settings))
    if _io.is_terminal(source):
        make_console(stderr=True).print("type a line; Ctrl-D ends the input")
    chunks: Iterable[list[Sequence[int]]] = lines.encode_chunks(source)
    total = None
    if not _io.is_stream(source):
        chunks = list(chunks)
        total = sum(1 for encoded in chunks for ids in encoded if ids)
    num_done = num_shown = 0

    def advance(count: int) -> None:
        nonlocal num_shown
        num_shown += count
        text = f"{num_shown:,} lines done" if total is None else f"{num_shown:,} of {total:,} lines"
        update(description=text, completed=num_shown)

    visible = output != _io.STANDARD or not sys.stdout.isatty()
    with _io.open_output(output) as write, progress_bar(total=total, visible=visible) as update:
        for encoded in chunks:
            write(lines.transform(encoded, num_done, advance))
            num_done += len(encoded)
    _print_notes(lines.counts, options, pipeline.max_source_tokens)


translate = line_command(Translator)


def process_chunk(
    pipeline: TextToText, lines: list[str], first_index: int, *, options: dict[str, Any], generation: dict[str, Any]
) -> ChunkOutput:
    """Return the outputs for a chunk of a large file; this is what its workers run."""
    settings = LineOptions(**options | {"long_lines": options["long_lines"] or "blank"})
    chunk = _Lines(pipeline, settings, GenerationConfig.resolve(pipeline.defaults, generation))
    # Without lines, a blank one: it costs nothing, and phrases and prefixes are checked.
    outputs = chunk.transform(chunk.encode(lines or [""], "line", first_index + 1), first_index)
    return ChunkOutput("".join(f"{line}\n" for line in outputs).encode(), +chunk.counts)


@dataclass
class _Lines:
    """A pipeline, the settings of a command, and the numbers of lines that were not processed as a whole."""

    pipeline: TextToText
    options: LineOptions
    config: GenerationConfig
    counts: Counter[str] = field(default_factory=Counter)

    def encode_chunks(self, source: str) -> Iterator[list[Sequence[int]]]:
        """Yield the token ids of the input in chunks."""
        name, first_number = _io.STANDARD_INPUT if source == _io.STANDARD else source, 1
        for lines in _io.read_chunks(source):
            yield self.encode(lines, f"{name} line", first_number)
            first_number += len(lines)

    def encode(self, lines: list[str], name: str, first_number: int) -> list[Sequence[int]]:
        """Return the token ids of lines, and count those that were truncated or too long."""
        limit, is_error = self.options.max_source_length, self.options.long_lines in (None, "error")
        # A line of a megabyte is cut before it is tokenized.
        texts = lines if is_error else [line[: MAX_CHARACTERS + 1] for line in lines]
        encoded, num_truncated = self.pipeline.truncate(self.pipeline.token_ids(texts))
        self.counts["truncated"] += num_truncated
        if is_error:
            check_source_lengths(encoded, limit, name=name, first_number=first_number)
        for row, ids in enumerate(encoded):
            if len(ids) > limit or len(texts[row]) > MAX_CHARACTERS:
                self.counts["long"] += 1
                is_blank = self.options.long_lines == "blank"
                encoded[row] = [] if is_blank else self.pipeline.tokenizers.cut_source(ids, limit)
        return [array("i", ids) for ids in encoded]  # a file is held in memory

    def transform(
        self, encoded: Sequence[Sequence[int]], first_index: int, advance: Callable[[int], None] = lambda count: None
    ) -> list[str]:
        """Return the lines to write for consecutive sources, and count outputs that reached the length limit."""
        names = ("align", "target_length", "length_unit", "prefix", "sequence_bias", "seed", "batch_tokens")
        arguments = {name: getattr(self.options, name) for name in names}
        results: list[list[Output]] = [[] for _ in encoded]
        for batch in self.pipeline.batches_of_ids(encoded, self.config, first_index=first_index, **arguments):
            for row, outputs in batch:
                results[row] = outputs
                self.counts["unfinished"] += not outputs[0].finished
            advance(len(batch))
        rows = zip(encoded, results, itertools.count(first_index + 1))
        return [line for row in rows for line in self._format(*row)]

    def _format(self, ids: Sequence[int], outputs: list[Output], number: int) -> Iterator[str]:
        """Yield the lines written for one input line: its text, or a JSON object for each output."""
        if self.config.num_return_sequences == 1 and not self.options.align:
            yield one_line(outputs[0].text) if outputs else ""
            return
        for rank, output in enumerate(outputs, start=1):
            fields = _io.fields_of(output, "score", "log_probability", "finished", "text")
            entry = {"line": number, "rank": rank, **fields}
            if output.alignment is not None:
                entry["source_tokens"] = self.pipeline.source_tokenizer.tokens([*ids, *self.pipeline.suffix])
                entry["tokens"] = self.pipeline.target_tokenizer.tokens(output.tokens)
                entry["alignment"] = output.alignment
            yield json.dumps(entry, ensure_ascii=False)


def _print_notes(counts: Mapping[str, int], options: LineOptions, max_source_tokens: int | None = None) -> None:
    """Report on stderr the lines that were not processed as a whole."""
    notes = {name: count for name, count in counts.items() if count}
    console = make_console(stderr=True)
    if "truncated" in notes:
        limit = "" if max_source_tokens is None else f" to {plural(max_source_tokens, 'token')}"
        console.print(f"note: {plural(notes['truncated'], 'source')} truncated{limit}, as in training")
    if "long" in notes:
        treatment = "cut" if options.long_lines == "cut" else "left blank"
        limit = plural(options.max_source_length, "token")
        console.print(f"note: {plural(notes['long'], 'line')} of more than {limit} {treatment} (--max-source-length)")
    if "unfinished" in notes:
        hint = "--max-new-tokens" if options.target_length is None else "--num-beams, --set length_tolerance=..."
        outputs = plural(notes["unfinished"], "output")
        console.print(f"note: {outputs} reached the length limit and may be incomplete ({hint})")
