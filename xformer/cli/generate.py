r"""`xformer generate`: continue prompts with a language model.

Continue prompts with a public language model (a directory in the Hugging Face format, or a GGUF file) or
with the best model of a run of train-lm, and print prompt and continuation.

\b
A sample          xformer generate --model run
From a prompt     xformer generate --model run --prompt "ROMEO:" --seed 1
Three per prompt  xformer generate --model run --prompt "ROMEO:" --prompt "JULIET:" --num-return-sequences 3
From a pipe       echo "ROMEO:" | xformer generate --model run
Prompts from a file, one per line, as lines of JSON
                  xformer generate --model run --input prompts.txt --json --output out.jsonl

\b
Many prompts in resumable chunks, on four processes
                  xformer generate --model run --input prompts.txt --json --corpus-out texts.d --workers 4

\b
An answer of an instruction model
                  xformer generate --model SmolLM2-135M-Instruct --chat --prompt "What is the capital of France?"
A conversation    xformer generate --model SmolLM2-135M-Instruct --chat

Prompts are read from standard input, one per line, if neither --prompt nor --input is given and it is not a
terminal. Without a prompt, and for an empty line of the input, generation starts as on a new line. By default at
most 500 tokens are generated: by the settings of a public checkpoint, or sampled with temperature 0.8 from the 200
most probable tokens. An option replaces only its own default; --temperature 0 always takes the most probable token,
and --num-beams turns sampling off. Each run samples the same texts; another --seed gives others. With --chat, each
prompt starts a new conversation; only messages that are typed on a terminal continue one. On a terminal the text
appears as it is generated. Several texts are separated by a line of dashes. Texts that do not fit into the context
of the model are refused; with --context slide, its first half is dropped when it is full.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import sys
import time
import timeit
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np

from xformer.cli import _io
from xformer.cli._corpus import ChunkFunction, CorpusOptions, process_file
from xformer.cli._options import DATA, DraftModelOption, ModelOption, config_options, file_option
from xformer.config import Config, field_names, option, take_options
from xformer.errors import ConfigError, XformerError
from xformer.generation import GenerationConfig
from xformer.generation.engine import run_steps
from xformer.pipelines import ChunkOutput, Output, Prompt, TextGenerator
from xformer.pipelines.options import SearchOptions
from xformer.runs.console import make_console
from xformer.threads import num_threads, parallel_map

_NO_PROMPT = "--chat needs a prompt; add --prompt or --input, or write to standard input"
_SEPARATOR = "-" * 15
_END_OF_INPUT = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"


class InputOptions(Config):
    """The prompts of generate, and the form of its output.

    Args:
        prompt: Text to continue; repeatable.
        chat: Answer the prompts with the chat template of the model.
        system: System message before each prompt of --chat.
        json: Write one JSON object per text: line, prompt, rank, log_probability, text (the continuation).
        verbose: Report how fast tokens follow the first one, and how fast weights are read.
    """

    prompt: tuple[str, ...] = option(default=(), panel=DATA)
    chat: bool = option(default=False)
    system: str | None = option(default=None)
    json: bool = option(default=False)
    verbose: bool = option(default=False)


_OPTIONS = [
    *field_names(InputOptions),
    *("max_new_tokens", "num_return_sequences", "context"),
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("num_beams", "sequence_bias", "stop", "no_repeat_ngram_size", "repetition_penalty"),
    *("num_draft_tokens", "prompt_lookup_num_tokens", "batch_tokens"),
    *field_names(CorpusOptions),
]


@config_options(GenerationConfig, InputOptions, SearchOptions, CorpusOptions, names=_OPTIONS)
def generate(
    model: ModelOption,
    draft_model: DraftModelOption = None,
    source: Annotated[str | None, file_option("--input", "Prompts, one per line; - is standard input.")] = None,
    output: Annotated[str, file_option("--output", "Texts; - is standard output.")] = "-",
    *,
    settings: dict[str, Any],
    loading: dict[str, Any],
) -> None:
    """Continue prompts."""
    inputs = InputOptions(**take_options(InputOptions, settings))
    if inputs.prompt and source is not None:
        raise ConfigError("--prompt and --input are both given; expected only one of them")
    if inputs.system is not None and not inputs.chat:
        raise ConfigError("--system needs --chat; add --chat")
    is_open = source is None and not inputs.prompt
    if is_open and sys.stdin is not None and not sys.stdin.isatty():
        source = _io.STANDARD
    is_conversation = inputs.chat and is_open and source is None
    shows_text = not inputs.json and output == _io.STANDARD and sys.stdout is not None and sys.stdout.isatty()
    if is_conversation and (sys.stdin is None or not shows_text):
        raise ConfigError(_NO_PROMPT)
    prompts = list(inputs.prompt) or [""]
    corpus = CorpusOptions.pop_from(settings)
    options = take_options(SearchOptions, settings)
    output = corpus.output_path(output)
    _io.check_output(output, [source], model, draft_model)
    if draft_model is not None:
        if settings.get("num_beams", 1) != 1 or "prompt_lookup_num_tokens" in settings:
            raise ConfigError("--draft-model is given with --num-beams or --prompt-lookup-num-tokens; expected one")
        loading["draft_model"] = os.path.abspath(draft_model)
    elif "num_draft_tokens" in settings:
        raise ConfigError("--num-draft-tokens is given without --draft-model; expected both")
    arguments: dict[str, Any] = {"options": {**options, **settings}, "inputs": inputs.to_dict()}
    if corpus.corpus_out is not None:
        process_file(ChunkFunction(process_chunk, TextGenerator, model, loading, arguments), source, output, corpus)
        return
    pipeline = _io.load_pipeline(TextGenerator, model, **loading)
    config = pipeline.resolve_config(**settings)
    single = source is None and len(prompts) == config.num_return_sequences == 1 and config.method != "beam"
    if single and shows_text and not inputs.verbose:
        options.pop("batch_tokens", None)
        if is_conversation:
            _converse(pipeline, config, options, inputs)
            return
        texts = pipeline.stream(_to_prompt(prompts[0], inputs), config, **options)
        _print_stream("" if inputs.chat else prompts[0], texts)
        return
    if is_conversation:
        raise ConfigError("a conversation has one answer at a time; add --num-beams 1 --num-return-sequences 1")
    number = 0
    with _io.open_bytes(output) as file:
        for chunk in _read_prompts(prompts, source):
            file.write(process_chunk(pipeline, chunk, number, **arguments).data)
            file.flush()
            number += len(chunk)
        if is_open and not number:
            if inputs.chat:
                raise ConfigError(_NO_PROMPT)
            file.write(process_chunk(pipeline, [""], number, **arguments).data)


def process_chunk(
    pipeline: TextGenerator, lines: list[str], first_index: int, *, options: dict[str, Any], inputs: dict[str, Any]
) -> ChunkOutput:
    """Return the texts for consecutive prompts; of a large file, each worker calls it for its chunks."""
    given = InputOptions(**inputs)
    make_outputs = partial(_measured_outputs, pipeline) if given.verbose else pipeline.outputs
    prompts = [_to_prompt(line, given) for line in lines]
    results = make_outputs(prompts, first_index=first_index, **options)
    written: list[str] = []
    for number, (line, outputs) in enumerate(zip(lines, results, strict=True), start=first_index):
        for rank, output in enumerate(outputs, start=1):
            if given.json:
                entry = {"line": number + 1, "prompt": line, "rank": rank}
                entry |= _io.fields_of(output, "log_probability", "text")
                written.append(json.dumps(entry, ensure_ascii=False))
            else:
                written += [_SEPARATOR] if number or rank > 1 else []
                written.append(output.text if given.chat else line + output.text)
    return ChunkOutput("".join(f"{line}\n" for line in written).encode())


def _measured_outputs(
    pipeline: Any, prompts: list[Prompt], *, first_index: int, batch_tokens: int = 0, **options: Any
) -> list[list[Output]]:
    """Return the outputs of one prompt after the other, and report the speed of the steps after their first tokens."""
    model, c, results = pipeline.model, pipeline.model.config, list[list[Output]]()
    seconds, count, nbytes = 1e-9, 0, 0.0
    per_token = 8 * c.num_layers * (c.num_key_value_heads or c.num_heads) * c.features_per_head
    sizes = [array.nbytes for _, array in model.named_arrays()]
    per_step = sum(sizes) if c.tie_output else sum(sizes[1:])  # only a row of an embedding is read

    def steps(number: int, prompt: Prompt) -> Iterator[None]:
        results.extend((yield from run_steps(pipeline.search_task([prompt], first_index=number, **options))))

    for number, prompt in enumerate(prompts, start=first_index):
        times = [time.perf_counter() for _ in steps(number, prompt)]
        lengths, start = [len(output.tokens) for output in results[-1]], len(pipeline.input_ids(prompt))
        seconds, count = seconds + times[-1] - times[0], count + sum(lengths)
        nbytes += max(lengths) * per_step + sum(lengths) * (start + max(lengths) / 2) * per_token
    parts = [np.ones((2, 2**22 // num_threads())) for _ in range(num_threads())]
    copy = timeit.Timer(lambda: parallel_map(lambda part: np.copyto(*part), parts)).repeat(5, 1)
    copied = 2**26 / min(copy)  # bytes read and written
    report = f"{count / seconds:.1f} tokens/s, {nbytes / seconds / 1e9:.1f} GB/s of weights and cache"
    sys.stderr.write(f"{report}, {nbytes / seconds / copied:.0%} of a copy ({copied / 1e9:.1f} GB/s)\n")
    return results


def _to_prompt(text: str, inputs: InputOptions, before: Sequence[dict[str, str]] = ()) -> Any:
    """Return a text, or the messages of a chat that it continues."""
    system = [] if inputs.system is None else [{"role": "system", "content": inputs.system}]
    return [*system, *before, {"role": "user", "content": text}] if inputs.chat else text


def _converse(pipeline: TextGenerator, config: GenerationConfig, options: dict[str, Any], inputs: InputOptions) -> None:
    """Answer the messages that are typed, each as a part of the whole conversation."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # lets input() edit and repeat lines
    console = make_console(stderr=True)
    console.print(f"type a message; {_END_OF_INPUT} ends the conversation")
    chat: list[dict[str, str]] = []
    while (text := _read_message()) is not None:
        messages = _to_prompt(text, inputs, chat)
        try:
            answer = _print_stream("", pipeline.stream(messages, config, **options))
        except XformerError as error:  # such as a conversation that is longer than the context
            console.print(f"error: {error}")
        else:
            chat += [messages[-1], {"role": "assistant", "content": answer}]


def _read_message() -> str | None:
    """Return the next message that is not empty; None at the end of the input."""
    while True:
        try:
            text = input("> ").strip()
            text.encode()  # some locales keep invalid bytes as lone surrogates
        except EOFError:
            sys.stdout.write("\n")
            return None
        except UnicodeError:
            make_console(stderr=True).print("error: the message is not valid UTF-8; type it again")
            continue
        if text:
            return text


def _print_stream(prompt: str, texts: Iterable[str]) -> str:
    """Print a prompt and its continuation as it is generated, and end the line, also after Ctrl-C; return both."""
    printed = []
    try:
        for text in itertools.chain([prompt], texts):
            sys.stdout.write(text)
            sys.stdout.flush()
            printed.append(text)
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return "".join(printed)


def _read_prompts(prompts: list[str], source: str | None) -> Iterable[list[str]]:
    """Return chunks of prompts: a stream as it arrives, a file as a whole."""
    if source is None:
        return [prompts]
    if _io.is_terminal(source):
        make_console(stderr=True).print(f"type a prompt; {_END_OF_INPUT} ends the input")
    return _io.read_chunks(source) if _io.is_stream(source) else [_io.read_all(source)]
