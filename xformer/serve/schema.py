"""Requests and answers of the API."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from xformer.config import Config, check_keys, field_names, options_of
from xformer.errors import ConfigError, describe_type
from xformer.generation import GenerationConfig
from xformer.pipelines.options import SearchOptions
from xformer.serve.jobs import JobError

MAX_BEAMS = 32
MAX_TEXTS = 64
MAX_INPUTS = 2048
MAX_PHRASES, MAX_PHRASE_CHARACTERS = 64, 200
MAX_CHANGES = 512

Json = dict[str, Any]
_NONE: Any = msgspec.field(default_factory=list)
_EMPTY: Any = msgspec.field(default_factory=dict)
Structure = TypeVar("Structure", bound=Struct)
Choice = TypeVar("Choice")


def about(description: str, **bounds: Any) -> Any:
    """Return the metadata of a field; bounds are ge, le, min_length, ..."""
    return Meta(description=description, **bounds)


# What requests say, take and allow beyond what the declaration of a field does.
_NOTES = {
    **dict.fromkeys(("prefix", "target_length"), "Encoder-decoders only."),
    "seed": "Default: a new one for each request.",
}
_KINDS: dict[str, Any] = {
    "sequence_bias": list[Annotated[str, Meta(max_length=MAX_PHRASE_CHARACTERS)]],
    "stop": str | list[str],
}
_LIMITS = {
    "num_beams": {"le": MAX_BEAMS},
    "num_return_sequences": {"le": MAX_BEAMS},
    "seed": {"ge": -(2**63), "le": 2**63 - 1},  # 64 bits, as in the API of OpenAI
    "sequence_bias": {"max_length": MAX_PHRASES},
    "top_k": {"ge": -1},
}


def _fields(config: type[Config], names: Sequence[str], note: str = "") -> list[tuple[str, Any, None]]:
    """Return a field for each one of a configuration; None is its default, or that of the model."""
    hints, fields = get_type_hints(config), []
    for name, _, _, field in options_of(config):
        if name not in names:
            continue
        hint: Any = hints[name]
        kind = get_args(hint)[0] if isinstance(hint, UnionType) else hint  # without None
        choices, bounds, limits = field.metadata["choices"], field.metadata["bounds"], {}
        if choices is not None:
            kind = Literal[tuple(choices)]
        elif get_origin(kind) is tuple:
            kind = _KINDS.get(name, list[int])
        elif kind in (int, float):
            limits = {"ge": bounds["at_least"], "le": bounds["at_most"]}
        help = field.metadata["help"].replace("; repeatable", "").replace("--target-length", "target_length")
        text = f"{help} {_NOTES.get(name, note)}".rstrip()
        fields.append((name, Annotated[kind, Meta(description=text, **limits | _LIMITS.get(name, {}))], None))
    return fields


def _with_fields(base: Any, fields: Sequence[Any] = (), ignored: str = "") -> Any:
    """Return a base class with further fields; those whose names are `ignored` have no effect."""
    names = ignored.split()
    fields = [*fields, *((name, Annotated[Any, about("Accepted without effect.")], None) for name in names)]
    namespace = {"without_effect": (*base.without_effect, *names)}
    return msgspec.defstruct(f"{base.__name__}Fields", fields, bases=(base,), kw_only=True, namespace=namespace)


# Values of fields without effect that say what the server does anyway.
_DONE: dict[str, tuple[Any, ...]] = dict.fromkeys(("cache_prompt", "skip_special_tokens"), (None, True))


class _Request(Struct, kw_only=True, forbid_unknown_fields=True):
    without_effect: ClassVar[tuple[str, ...]] = ()
    model: Annotated[str | None, about("Id of the model. Default: the first suitable one.")] = None

    def ignored(self) -> list[str]:
        """Return the fields of the request that have no effect."""
        given = {name: getattr(self, name) for name in self.without_effect}
        nothing: Any = (None, False, [], {}, "")
        return [name for name, value in given.items() if value not in _DONE.get(name, nothing)]


# What the chat template of a model gets.
_TEMPLATE = [
    ("add_generation_prompt", Annotated[bool, about("End the chat with the start of an answer.")], True),
    ("continue_final_message", Annotated[bool, about("End the chat with the text of its last message.")], False),
    ("chat_template_kwargs", Annotated[Json, about("Further variables of the chat template.")], _EMPTY),
]
_SEARCH = _fields(GenerationConfig, field_names(GenerationConfig), "Default: that of the model, see /v1/models.")
_SEARCH += _fields(SearchOptions, ("seed", "sequence_bias"))
_DIRECTED = _fields(SearchOptions, ("prefix", "target_length", "length_unit"))
_STOP = _fields(SearchOptions, ("stop",))


class _Steered(_with_fields(_Request, _SEARCH), kw_only=True):  # type: ignore[misc, call-arg]
    def settings(self) -> Json:
        """Return the fields of `GenerationConfig` that the request has."""
        values = {name: getattr(self, name) for name in field_names(GenerationConfig)}
        if self.top_k == -1:  # as vLLM turns it off
            values["top_k"] = 0
        return {name: value for name, value in values.items() if value is not None}


class TranslateRequest(_with_fields(_Steered, _DIRECTED + _STOP), kw_only=True):  # type: ignore[misc, call-arg]
    """Texts to translate or summarize, with any field of `GenerationConfig`."""

    text: Annotated[str | list[str], about("A text, or a list of texts.")]
    stream: Annotated[bool, about("Send the output of one text as it is generated.")] = False


class _Part(Struct, kw_only=True, forbid_unknown_fields=True):
    kind: Annotated[Literal["encoder", "decoder", "cross"], about("Layers, by their attention as in /attention.")]
    layer: Annotated[int, about("Layer, counted from 0.", ge=0)]
    head: Annotated[int, about("One head of the attention. Default: all.", ge=0)] | None = None


class Ablation(_Part, kw_only=True):
    """A part of a model that is switched off: it adds nothing."""

    part: Annotated[Literal["attention", "feed_forward"], about("Part of the layer.")] = "attention"


class AttentionRow(_Part, kw_only=True):
    """Attention weights in place of those that the model computes."""

    query: Annotated[int, about("Position of the token that attends.", ge=0)]
    weights: list[Annotated[float, about("Weight of a key; they are normalized to a sum of 1.", ge=0)]]


_Messages = Annotated[list[Json] | None, about("Messages of a chat, instead of a text.")]
_SHOWN = [("text", Annotated[str | None, about("Source text or prompt.")], None), ("messages", _Messages, None)]
_NumAlternatives = Annotated[int, about("Alternatives of each token.", ge=0, le=50)]
_Ablations = Annotated[list[Ablation], about("Parts of the model to switch off.", max_length=MAX_CHANGES)]


class ExploreRequest(_with_fields(_Steered, _SHOWN + _DIRECTED), kw_only=True):  # type: ignore[misc, call-arg]
    """A text or a chat to generate from, with any field of `GenerationConfig`; the answer shows the whole search."""

    prefix_ids: Annotated[list[int], about("Token ids that the output begins with, instead of a prefix.")] = _NONE
    num_alternatives: _NumAlternatives = 10
    ablations: _Ablations = _NONE
    stream: Annotated[bool, about("Send tokens or beam steps as they are generated.")] = False


class AttentionRequest(_with_fields(_Request, _SHOWN), kw_only=True):  # type: ignore[misc, call-arg]
    """A text or a chat, and the output whose attention is shown."""

    output_ids: Annotated[list[int], about("Token ids of the output; omit them for encoders.")] = _NONE
    kinds: Annotated[list[Literal["encoder", "decoder", "cross"]] | None, about("Kinds. Default: all.")] = None
    layer: Annotated[int, about("One layer, counted from 0. Default: all.", ge=0)] | None = None


class LayersRequest(_with_fields(_Request, _SHOWN), kw_only=True):  # type: ignore[misc, call-arg]
    """A text or a chat, its output, and changes of the model."""

    output_ids: Annotated[list[int], about("Token ids of the output.")]
    num_alternatives: _NumAlternatives = 10
    ablations: _Ablations = _NONE
    attention_rows: Annotated[list[AttentionRow], about("Attention to replace.", max_length=MAX_CHANGES)] = _NONE
    lens: Annotated[bool, about("Also describe each layer.")] = False


_Times = Literal["word", "segment"]
_IGNORED_SPEECH = """
chunking_strategy hotwords include keywords known_speaker_names known_speaker_references languages prompt
"""


class ClassifyRequest(_Request, kw_only=True):
    """Texts to classify."""

    input: Annotated[str | list[str], about("A text, or a list of texts.")]


class RerankRequest(_Request, kw_only=True):
    """A query and documents to order by it, as Jina and Cohere write them."""

    query: Annotated[str, about("The query.")]
    documents: Annotated[list[str], about("The documents.")]
    top_n: Annotated[int, about("Return the best ones only. Default: all.", ge=1)] | None = None
    return_documents: Annotated[bool, about("Return the texts of the documents, too.")] = False


class EmbeddingsRequest(_with_fields(_Request, ignored="input_type user"), kw_only=True):  # type: ignore[misc, call-arg]
    """Texts to compute vectors of (OpenAI-compatible)."""

    input: Annotated[str | list[str | int | list[int]], about("A text, token ids, or a list of either.")]
    encoding_format: Annotated[Literal["float", "base64"], about("Format of the vectors.")] = "float"
    dimensions: Annotated[int, about("Features of a vector to keep, at most those of the model.", ge=1)] | None = None


class TranscriptionRequest(_with_fields(_Request, ignored=_IGNORED_SPEECH), kw_only=True):  # type: ignore[misc, call-arg]
    """A recording to transcribe or to translate into English (OpenAI-compatible), as a form."""

    file: Annotated[bytes, about("The recording: WAV, or a format that soundfile reads, such as MP3, FLAC and Ogg.")]
    language: Annotated[str | None, about("Code of the spoken language, e.g. de. Default: detected.")] = None
    response_format: Annotated[Literal["json", "text", "srt", "verbose_json", "vtt"], about("Format.")] = "json"
    temperature: Annotated[float, about("Temperature of sampling; 0 for none.", ge=0, le=2)] | None = None
    timestamp_granularities: Annotated[_Times | list[_Times], about("Times in verbose_json. Default: segment.")] = _NONE
    stream: Annotated[bool, about("Send each segment as soon as it is known.")] = False


class StreamOptions(Struct, frozen=True):
    """Options of a stream; others have no effect."""

    include_usage: bool = False


# Of OpenAI; then of vLLM and llama.cpp.
_IGNORED = """
best_of suffix audio function_call functions metadata modalities moderation prediction prompt_cache_key
prompt_cache_options prompt_cache_retention reasoning_effort safety_identifier service_tier store user verbosity
web_search_options

add_special_tokens cache_prompt cache_salt chat_template documents guided_decoding_backend guided_whitespace_pattern
id_slot include_reasoning include_stop_str_in_output mm_processor_kwargs priority request_id return_tokens_as_token_ids
skip_special_tokens spaces_between_special_tokens timings_per_token truncate_prompt_tokens
"""


class StructuredOutputs(Struct):
    """A format that outputs follow: a JSON schema, a regular expression, one of several texts, a Lark grammar."""

    json: Json | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _OpenAIRequest(_with_fields(_Steered, _STOP, _IGNORED), kw_only=True):  # type: ignore[misc, call-arg]
    n: Annotated[int, about("Outputs for each prompt or chat.", ge=1, le=MAX_TEXTS)] = 1
    stream: Annotated[bool, about("Send the output as it is generated.")] = False
    stream_options: Annotated[StreamOptions, about("include_usage adds the usage.")] = StreamOptions()
    ignore_eos: Annotated[bool, about("Generate the maximum number of tokens.")] = False
    min_tokens: Annotated[int, about("The same as min_new_tokens.", ge=0)] | None = None
    prompt_logprobs: Annotated[int, about("The same for each token of the prompt.", ge=0, le=50)] | None = None
    return_token_ids: Annotated[bool, about("Return the token ids of prompts and outputs.")] = False
    structured_outputs: Annotated[StructuredOutputs | None, about("What an output has to follow.")] = None
    guided_json: Annotated[Json | str | None, about("The same as structured_outputs.json.")] = None
    guided_regex: Annotated[str | None, about("The same as structured_outputs.regex.")] = None
    guided_choice: Annotated[list[str] | None, about("The same as structured_outputs.choice.")] = None
    guided_grammar: Annotated[str | None, about("The same as structured_outputs.grammar.")] = None

    def settings(self) -> Json:
        """Return the fields of `GenerationConfig` that the request has."""
        given = super().settings()
        return given if self.min_tokens is None else {"min_new_tokens": self.min_tokens} | given

    def structure(self) -> tuple[str, str, Any] | None:
        """Return what an output has to follow: the field, its kind and its value."""
        nested = self.structured_outputs or StructuredOutputs()
        for kind in ("json", "regex", "choice", "grammar"):
            for owner, name in ((nested, kind), (self, f"guided_{kind}")):
                if (value := getattr(owner, name)) is not None:
                    return (f"structured_outputs.{kind}" if owner is nested else name), kind, value
        return ("structured_outputs.json_object", "json", {"type": "object"}) if nested.json_object else None


class CompletionRequest(_OpenAIRequest, kw_only=True):  # type: ignore[call-arg]
    """A prompt to continue (OpenAI-compatible), with any field of `GenerationConfig`."""

    prompt: Annotated[
        str | list[str | int | list[int]], about("A text, a list of texts, token ids, or a list of lists of them.")
    ]
    max_tokens: Annotated[int, about("Maximum number of new tokens; 0 only reads the prompt.", ge=0)] = 16
    logprobs: Annotated[int, about("Alternatives of each token to return.", ge=0, le=50)] | None = None
    echo: Annotated[bool, about("Return the prompt before the output, with its log-probabilities.")] = False


class Function(Struct, omit_defaults=True):
    """A function that a chat may call."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Struct):
    """A function that a chat may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct):
    """Name of a function."""

    name: str


class NamedTool(Struct, tag="function"):
    """A function that an answer calls."""

    function: FunctionName


class ToolSubset(Struct):
    """Tools that an answer may call, or has to."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(Struct, tag="allowed_tools"):
    """Tools that an answer may call, or has to."""

    allowed_tools: ToolSubset


class ResponseFormat(Struct):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Json | None = None


class ChatRequest(_with_fields(_OpenAIRequest, _TEMPLATE), kw_only=True):  # type: ignore[misc, call-arg]
    """A chat to answer (OpenAI-compatible), with any field of `GenerationConfig`."""

    messages: Annotated[list[Json], about("Messages with role and content.")]
    max_tokens: Annotated[int, about("Maximum number of new tokens.", ge=1)] | None = None
    max_completion_tokens: Annotated[int, about("The same as max_tokens.", ge=1)] | None = None
    logprobs: Annotated[bool, about("Return the log-probability of each token.")] = False
    top_logprobs: Annotated[int, about("Alternatives of each token to return.", ge=0, le=50)] = 0
    tools: Annotated[list[Tool], about("Functions that the model may call.", max_length=128)] = _NONE
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedTool | AllowedTools,
        about("Whether an answer may call functions, or has to."),
    ] = "auto"
    parallel_tool_calls: Annotated[bool, about("Whether an answer may have several calls.")] = True
    response_format: Annotated[ResponseFormat | None, about("Format of the answer.")] = None


class TokenizeRequest(_with_fields(_Request, _TEMPLATE), kw_only=True):  # type: ignore[misc, call-arg]
    """A text or a chat to split into tokens, as vLLM writes it."""

    prompt: Annotated[str | None, about("A text.")] = None
    messages: _Messages = None
    tools: Annotated[list[Json], about("Functions that the chat may call.")] = _NONE
    add_special_tokens: Annotated[bool, about("Add the special tokens of the tokenizer to a text.")] = True
    return_token_strs: Annotated[bool, about("Return the names of the tokens, too.")] = False


class DetokenizeRequest(_Request, kw_only=True):
    """Token ids to join to a text, as vLLM writes it."""

    tokens: Annotated[list[int], about("Token ids.")]


class ScoreRequest(_Request, kw_only=True):
    """Pairs of texts to score, as vLLM writes them; one text is paired with each of several."""

    text_1: Annotated[str | list[str], about("A text, or a list of texts.")]
    text_2: Annotated[str | list[str], about("A text, or a list of texts.")]


_IGNORED_RESPONSE = """
access_programs background_options context_management image max_tool_calls metadata moderation prompt prompt_cache_key
prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store stream_options truncation
user
"""


class ResponseRequest(_with_fields(_Steered, _STOP, _IGNORED_RESPONSE), kw_only=True):  # type: ignore[misc, call-arg]
    """A chat to answer (OpenAI-compatible), with any field of `GenerationConfig`."""

    input: Annotated[str | list[Json], about("A text, or messages, calls of functions and their outputs.")]
    instructions: Annotated[str | None, about("Text of a system message before the input.")] = None
    max_output_tokens: Annotated[int, about("Maximum number of new tokens.", ge=1)] | None = None
    tools: Annotated[list[Json], about("Functions that the model may call.", max_length=128)] = _NONE
    tool_choice: Annotated[Any, about("Whether an answer may call functions, or has to, as of a chat.")] = "auto"
    parallel_tool_calls: Annotated[bool, about("Whether an answer may have several calls.")] = True
    text: Annotated[Json | None, about("Format of the answer, in the field `format`.")] = None
    include: Annotated[list[str], about('"message.output_text.logprobs" adds log-probabilities.')] = _NONE
    top_logprobs: Annotated[int, about("Alternatives of each token to return.", ge=0, le=50)] = 0
    stream: Annotated[bool, about("Send the output as it is generated.")] = False
    previous_response_id: Annotated[Any, about("An error: nothing is stored.")] = None
    conversation: Annotated[Any, about("An error: nothing is stored.")] = None
    background: Annotated[bool, about("An error if true: nothing is stored.")] = False


# --- Answers ----------------------------------------------------------------------------------------------------------


class ErrorDetails(Struct):
    """The reason of an error, in one line."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(Struct):
    """An error."""

    error: ErrorDetails


class Usage(Struct):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    """Return numbers of tokens with their sum."""
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


_Hash = Annotated[
    str | msgspec.UnsetType,
    about("SHA-256 of the logits of all steps, row by row in float32; only of a reproducible server."),
]


_Ids = Annotated[list[int] | msgspec.UnsetType, about("Token ids; only if the request asks for them.")]
_Probable = Annotated[list[Json | None] | msgspec.UnsetType, about("Log-probabilities by token id, of each token.")]


class TextOutput(Struct):
    """An output with its score."""

    text: str
    score: float
    log_probability: float
    finished: bool
    logits_sha256: _Hash = msgspec.UNSET


class Outputs(Struct):
    """Outputs of each text, best first."""

    model: str
    outputs: list[list[TextOutput]]
    usage: Usage


class CompletionLogprobs(Struct):
    """Tokens of a completion; the first token of a prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    logits_sha256: _Hash = msgspec.UNSET
    token_ids: _Ids = msgspec.UNSET
    prompt_token_ids: _Ids = msgspec.UNSET
    prompt_logprobs: _Probable = msgspec.UNSET


class _Answer(Struct, Generic[Choice]):  # in the order of OpenAI
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    prompt_token_ids: _Ids = msgspec.UNSET
    prompt_logprobs: _Probable = msgspec.UNSET


class Completion(_Answer[CompletionChoice]):
    """Completions."""


class Logprob(Struct):
    """A token of an answer."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Logprob):
    """A token of an answer with the most probable tokens in its place."""

    top_logprobs: list[Logprob]


class ChatLogprobs(Struct):
    """Tokens of an answer."""

    content: list[TokenLogprob]


class FunctionCall(Struct, omit_defaults=True):
    """Name and arguments, as JSON, of a call; in a stream more of its arguments."""

    arguments: str
    name: str | None = None


class ToolCall(Struct, omit_defaults=True):
    """A call of a function; in a stream with its index, and with what the parts before do not have."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None
    index: int | None = None


class Message(Struct, omit_defaults=True):
    """An answer, or in a stream a part of it."""

    role: Literal["assistant"] | None = None
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[ToolCall] = []


class ChatChoice(Struct):
    """One answer; in a stream a part of it, delta."""

    index: int
    message: Message | msgspec.UnsetType = msgspec.UNSET
    delta: Message | msgspec.UnsetType = msgspec.UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    logits_sha256: _Hash = msgspec.UNSET
    token_ids: _Ids = msgspec.UNSET


class Chat(_Answer[ChatChoice]):
    """Answers of a chat, or in a stream parts of them."""


class Embedding(Struct):
    """A vector, as numbers or as base64 of float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Embeddings(Struct):
    """Vectors of texts."""

    model: str
    data: list[Embedding]
    usage: Usage
    object: str = "list"


class Class(Struct):
    """The most probable class of a text; for a model of problem type "regression", its output."""

    index: int
    label: str
    probability: float
    probabilities: dict[str, float]


class Classes(Struct):
    """Classes of texts."""

    model: str
    data: list[Class]


class Document(Struct):
    """A document."""

    text: str


class Relevance(Struct):
    """Index of a document, and how well it answers the query: the logistic function of its logit, 0 to 1."""

    index: int
    relevance_score: float
    document: Document | msgspec.UnsetType = msgspec.UNSET


class Rerank(Struct):
    """The documents, best first."""

    id: str
    model: str
    results: list[Relevance]
    usage: Usage


class ShownToken(Struct):
    """A token; text joins to that of the whole output, token is its name in the vocabulary."""

    id: int
    token: str
    text: str


class ProbableToken(ShownToken):
    """A token with its probability."""

    log_probability: float
    probability: float


class OutputToken(ProbableToken):
    """A token with its alternatives, and in a stream with its index."""

    alternatives: list[ProbableToken]


class ExploredOutput(TextOutput, kw_only=True):
    """An output with its tokens."""

    tokens: list[OutputToken]


class BeamToken(ShownToken):
    """A candidate of a beam search."""

    group: int
    parent: int | None
    log_probability: float
    score: float
    status: str


class BeamTree(Struct):
    """The candidates of each step of a beam search."""

    groups: int
    steps: list[list[BeamToken]]


class ShownText(Struct):
    """A text with its tokens."""

    text: str
    tokens: list[ShownToken]


class Exploration(Struct):
    """Outputs of a text, and everything about the search."""

    model: str
    task: str
    method: str
    source: ShownText
    outputs: list[ExploredOutput]
    alignment: list[list[float]] | None
    beam: BeamTree | None
    usage: Usage
    seconds: float


class AttentionMap(Struct):
    """Weights (layers, heads, queries, keys) as base64 of float32."""

    shape: list[int]
    dtype: str
    data: str
    queries: list[str]
    keys: list[str]


class AttentionMaps(Struct):
    """Attention weights by kind."""

    model: str
    source: ShownText
    output: ShownText
    attention: dict[str, AttentionMap]


class Layer(Struct):
    """Results of a layer at each position.

    `norms` are the lengths of the vectors after the layer, `parts` those of the vectors that attention and feed-forward
    compute, and `tokens` the most probable ones if the model ended here (the logit lens).
    """

    name: str
    norms: list[float]
    parts: dict[str, list[float]]
    tokens: list[ProbableToken]


class Layers(Struct):
    """The output with its probabilities, and a description of each layer from the position `first` on."""

    model: str
    output: list[OutputToken]
    first: int
    layers: list[Layer]


class Model(Struct):
    """A model, what it can do, and its settings."""

    id: str
    created: int
    task: str
    architecture: str
    backend: str
    num_parameters: int
    vocab_size: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    context_length: int | None
    attention: list[str]
    supports: dict[str, bool]
    defaults: Json | None
    has_log: bool
    example: str
    object: str = "model"
    owned_by: str = "user"


class Models(Struct):
    """The models of a server."""

    data: list[Model]
    object: str = "list"


class Runs(Struct):
    """Ids of the models that have a training log."""

    runs: list[str]


class Curves(Struct):
    """Training curves of a model."""

    model: str
    metric: str | None
    label_smoothing: float
    steps: dict[str, list[float | None]]
    validations: list[Json]


class Health(Struct):
    """State of a server."""

    status: str
    version: str
    running: int
    waiting: int


# --- Reading ----------------------------------------------------------------------------------------------------------


def read(body: Any, request: type[Structure], *, strict: bool = True) -> Structure:
    """Return a request; null is the default of a field, and texts are converted unless `strict`.

    Raises:
        JobError: For unknown, missing or invalid fields.
    """
    if not isinstance(body, dict):
        raise JobError(f"the body is {describe_type(body)}; expected a JSON object")
    try:
        check_keys(body, request.__struct_fields__, "the request")
    except ConfigError as error:
        unknown = next(key for key in body if key not in request.__struct_fields__)
        raise JobError(str(error), param=unknown) from error
    values = {key: value for key, value in body.items() if value is not None}
    try:
        return msgspec.convert(values, request, strict=strict)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        parts, value = re.findall(r"[^.\[\]`]+", path), body
        for part in parts:
            value = value[part] if isinstance(value, dict) else value[int(part)] if part.isdecimal() else "..."
        name = path.strip("`.") or (re.findall(r"field `(\w+)`", text) or [None])[0]
        received = json.dumps(value, ensure_ascii=False, default=repr) if parts else "invalid"
        received = received if len(received) < 80 else f"{received[:80]}..."
        message = f"{name or 'the request'} is {received}; {text[:1].lower()}{text[1:]}"
        raise JobError(message, param=name) from error
