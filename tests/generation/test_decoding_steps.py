"""Steps that run as programs give the logits of steps that call the model."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.generation.definitions import SOURCES, padded, varied_model
from tests.reference import for_each, small_language_model
from xformer import Rng, intervene, record, stream
from xformer.backends.numpy import NumpyLibrary
from xformer.generation import GenerationConfig, generate, steps
from xformer.generation.steps import ProgramPool
from xformer.layers.cache import DecodingCache
from xformer.tracing.graph import GraphTrace
from xformer.tracing.program import Program
from xformer.tree import map_arrays

POSITIONS = ["sinusoidal", "learned", "rotary", "alibi", "relative", "none"]
CONFIGS = {
    "greedy": GenerationConfig(min_new_tokens=12, max_new_tokens=36),
    "sampling": GenerationConfig(do_sample=True, num_return_sequences=2, min_new_tokens=12, max_new_tokens=36),
    "beam": GenerationConfig(num_beams=3, num_return_sequences=2, max_new_tokens=36, length_penalty=0.6),
}


def both(monkeypatch, call):
    """Return the results of a call without and with programs, and the number of their runs."""
    runs, run = [], Program.run
    monkeypatch.setattr(Program, "run", lambda self, *args: runs.append(1) or run(self, *args))
    repeated = call()
    with monkeypatch.context() as patch:
        patch.setattr(steps, "_MIN_LENGTH", 1000)
        return call(), repeated, len(runs)


def assert_equal_outputs(expected, actual, rel=1e-9):
    assert [[each.tokens for each in row] for row in actual] == [[each.tokens for each in row] for row in expected]
    for first, second in zip(expected, actual, strict=True):
        assert [each.score for each in first] == pytest.approx([each.score for each in second], rel=rel)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_translations(monkeypatch, positions, config):
    model = varied_model(1, positions=positions)
    expected, actual, runs = both(monkeypatch, lambda: generate(model, padded(SOURCES), config, rng=Rng(0)))
    assert runs > 3
    assert_equal_outputs(expected, actual)


@pytest.mark.parametrize("length", [30, 31, 80])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_continuations_longer_than_the_first_capacity(monkeypatch, config, length):
    model = small_language_model(positions="rotary", seed=3)
    expected, actual, runs = both(
        monkeypatch,
        lambda: generate(
            model, [[3, 4, 5], [6, 7, 8]], config, rng=Rng(0), max_new_tokens=length, min_new_tokens=length
        ),
    )
    assert runs > length / 2
    assert_equal_outputs(expected, actual)


def test_a_quantized_model_runs_as_a_program(monkeypatch):
    model = varied_model(1).quantize()
    expected, actual, runs = both(monkeypatch, lambda: generate(model, padded(SOURCES), CONFIGS["beam"]))
    assert runs > 3
    assert_equal_outputs(expected, actual, rel=1e-6)  # float32, unlike the other models


def test_a_model_that_reads_values_is_called(monkeypatch):
    model = varied_model(1)
    step = type(model).decode_step
    monkeypatch.setattr(
        type(model), "decode_step", lambda self, tokens, cache: step(self, tokens, cache) * float(np.ones(1)[0])
        + 0.0 * float(tokens[0, 0])
    )  # fmt: skip
    expected, actual, runs = both(monkeypatch, lambda: generate(model, padded(SOURCES), CONFIGS["greedy"]))
    assert runs == 0
    assert_equal_outputs(expected, actual)


# --- Programs that are kept ---------------------------------------------------------------------------------------


@pytest.fixture
def programs(monkeypatch):
    """Programs made so far, and an empty store."""
    made, init = [], Program.__init__
    monkeypatch.setattr(Program, "__init__", lambda self, *args: made.append(self) or init(self, *args))
    monkeypatch.setattr(steps, "_pool", ProgramPool(max_entries=64, max_bytes=2**28))
    return made


@for_each("config", CONFIGS.values())
@for_each("positions", ["learned", "rotary", "relative"])
def test_later_searches_trace_nothing_and_have_the_same_bits(programs, positions, config):
    model = varied_model(1, positions=positions)
    other = [[row[0], *row[:-1]] for row in SOURCES]  # of the same shape
    first, between = (generate(model, padded(rows), config, rng=Rng(0)) for rows in (SOURCES, other))
    count = len(programs)
    assert count
    again = [generate(model, padded(rows), config, rng=Rng(0)) for rows in (SOURCES, other)]
    assert again == [first, between]
    assert len(programs) <= count + 1  # an input that leaves the batch at another step


def test_programs_of_a_draft_model_are_kept(programs):
    model, draft_model = (small_language_model(positions="rotary", seed=seed) for seed in (3, 4))
    outputs, counts = [], []
    for _ in range(2):
        outputs.append(generate(model, [[3, 4, 5]], max_new_tokens=24, min_new_tokens=24, draft_model=draft_model))
        counts.append(len(programs))
    assert outputs[0] == outputs[1]
    assert counts[0] == counts[1] > 1


def test_weights_that_change_in_place_are_seen_and_replaced_ones_too(programs):
    model = varied_model(1)
    config = CONFIGS["greedy"]
    generate(model, padded(SOURCES), config)
    for replace in (False, True):
        _, parameter = next(iter(model.named_parameters()))
        if replace:
            model = map_arrays(lambda array: array * 1.5, model)
        else:
            parameter *= -2.0
        actual = generate(model, padded(SOURCES), config)
        assert actual == generate(copy.deepcopy(model), padded(SOURCES), config)


def test_threads_that_share_a_model_do_not_share_a_program(programs):
    model = varied_model(1)
    sources = [padded([row]) for row in SOURCES] * 2
    expected = [generate(model, source, CONFIGS["beam"]) for source in sources]
    with ThreadPoolExecutor(6) as pool:
        actual = list(pool.map(lambda source: generate(model, source, CONFIGS["beam"]), sources))
    assert actual == expected


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("positions", ["learned", "relative"])
def test_programs_share_no_arrays_that_steps_change(monkeypatch, positions, config):
    kept = []
    monkeypatch.setattr(steps._pool, "release", lambda model, key, cache, program: kept.append(cache))
    generate(varied_model(1, positions=positions), padded(SOURCES), config, rng=Rng(0))
    assert len(kept) > 1  # inputs have left the batch, or the capacity has grown
    changed = [[cache.lengths, *(array for layer in cache.layers
                               for each in (layer.self_attention, layer.cross_attention)
                               for array in (each.key, each.value))] for cache in kept]  # fmt: skip
    for number, arrays in enumerate(changed):
        for others in changed[:number]:
            assert not any(np.shares_memory(x, y) for x in arrays for y in others)


def test_programs_that_are_not_kept_leave_no_arrays_for_the_garbage_collector(monkeypatch):
    caches = []
    monkeypatch.setattr(steps._pool, "release", lambda model, key, cache, program: caches.append(weakref.ref(cache)))
    arrays, take_calls = [], GraphTrace.take_calls

    def taken(trace):
        calls = take_calls(trace)
        arrays.extend(weakref.ref(array) for call in calls for array in call.outputs)
        return calls

    monkeypatch.setattr(GraphTrace, "take_calls", taken)
    gc.disable()
    try:
        generate(varied_model(1), padded(SOURCES), GenerationConfig(min_new_tokens=36, max_new_tokens=36))
        assert caches
        assert arrays
        assert not any(each() is not None for each in (*caches, *arrays))
    finally:
        gc.enable()


def test_a_program_takes_over_the_keys_of_a_new_cache(monkeypatch):
    shared, without = [], DecodingCache.without

    def copied(cache, arrays):
        new = without(cache, arrays)
        keys = ((x.self_attention.key, y.self_attention.key) for x, y in zip(cache.layers, new.layers, strict=True))
        shared.append({np.shares_memory(old, key) for old, key in keys})
        return new

    monkeypatch.setattr(DecodingCache, "without", copied)
    generate(varied_model(1), padded(SOURCES), GenerationConfig(min_new_tokens=36, max_new_tokens=36))
    assert shared == [{True}]  # with a larger capacity


def test_a_stream_that_is_stopped_returns_its_program(programs):
    model = small_language_model(positions="rotary", seed=3)
    settings = GenerationConfig(max_new_tokens=12, min_new_tokens=12)
    expected = generate(model, [[3, 4, 5]], settings)
    for _ in range(3):
        tokens = stream(model, [[3, 4, 5]], settings)
        for _ in range(6):
            next(tokens)
        tokens.close()
    assert len(programs) == 1
    assert generate(model, [[3, 4, 5]], settings) == expected


def test_the_number_and_size_of_programs_are_limited_and_they_end_with_the_model(programs, monkeypatch):
    model, kept = varied_model(1), steps._pool
    monkeypatch.setattr(kept, "_max_entries", 3)
    for rows in range(1, 6):
        generate(model, padded([SOURCES[0]] * rows), CONFIGS["greedy"])
    assert len(kept._models[model]) == 3
    monkeypatch.setattr(kept, "_max_bytes", 10)
    generate(model, padded(SOURCES), CONFIGS["greedy"])
    assert not kept._models[model]
    monkeypatch.setattr(NumpyLibrary, "program_bytes", lambda self, default: 2**40)  # as on a GPU
    generate(model, padded(SOURCES), CONFIGS["greedy"])
    assert kept._models[model]
    released = weakref.ref(model)
    del model
    gc.collect()
    assert released() is None


BLOCK_MODELS = {
    "gpt2": {"positions": "learned", "max_positions": 64},
    "gqa": {"positions": "rotary", "norm": "rms", "activation": "swiglu", "num_heads": 4, "num_key_value_heads": 2},
    "sinks": {"positions": "rotary", "attention_sinks": True, "window": 4},
    "softcap": {"positions": "alibi", "attention_softcap": 9.0, "dtype": "float32"},
}


def without_programs(patch):
    patch.setattr(steps, "compiler", lambda xp: None)
    patch.setattr(steps, "_pool", ProgramPool(0, 0))


def add_half(x):
    return x + x.dtype.type(0.5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", BLOCK_MODELS)
def test_programs_pass_blocks_the_values_of_the_python_code(monkeypatch, kind, config):
    model, runs = small_language_model(**BLOCK_MODELS[kind]), []
    for name in ("run", "repeat"):
        function = getattr(Program, name)
        monkeypatch.setattr(Program, name, lambda *args, f=function: runs.append(1) or f(*args))

    def call(names, prompts):
        changes = {"layers.0.residual_mid": add_half, "layers.1.*.heads": lambda x: x * 0.5}
        with record(model, names, every_call=True) as seen, intervene(model, changes), record(model, "logits") as last:
            found = generate(model, prompts, config, rng=Rng(0))
        return found, [(name, *each) for name, each in seen.items()], last["logits"]

    for names in ("*", ["*residual*", "layers.1.*.weights"], ["logits", "layers.0.*.keys"]):
        for prompts in ([[5, 4, 7]], [[5, 4, 7], [3, 2]]):
            runs.clear()
            found, seen, last = call(names, prompts)
            assert len(runs) > 3
            with monkeypatch.context() as patch:
                without_programs(patch)
                expected, python, expected_last = call(names, prompts)
            assert_equal_outputs(expected, found, rel=0.0)
            for (name, *arrays), (expected_name, *others) in zip(seen, python, strict=True):
                assert name == expected_name
                for x, y in zip(arrays, others, strict=True):
                    np.testing.assert_array_equal(x, y)
            np.testing.assert_array_equal(last, expected_last)


def test_functions_of_interventions_are_called_in_each_step(monkeypatch):
    """They may have state, and read values and recorded activations; an error ends the search."""
    model, name, seen, state = small_language_model(positions="rotary"), "layers.0.residual_out", [], {}

    def change(x):
        state["calls"] += 1
        if state["calls"] == state["last"]:
            raise ZeroDivisionError
        seen.append(float(x.max()))
        return x + state["shift"] * (state["calls"] % 3) * np.sign(state["recorded"][name][0, -1, 0])

    def call(last=None):
        state.update(calls=0, last=last, shift=np.zeros(8))
        seen.clear()
        with record(model, name) as state["recorded"], intervene(model, {"layers.1.residual_in": change}):
            for tokens in stream(model, [[5, 4, 7]], max_new_tokens=30):
                state["shift"] = state["shift"] + 0.1  # another array
                seen.extend(tokens[0])
        return list(seen)

    with monkeypatch.context() as patch:
        without_programs(patch)
        expected = call()
    assert call() == expected  # the order of calls and tokens, too
    assert call() == expected  # by kept programs
    with pytest.raises(ZeroDivisionError):
        call(last=20)
    assert call() == expected


def test_blocks_open_and_end_at_any_step():
    model = small_language_model(positions="rotary")
    plain = [token for new in stream(model, [[5, 4, 7]], max_new_tokens=30) for token in new[0]]
    updates, found = stream(model, [[5, 4, 7]], max_new_tokens=30), []
    for _ in range(3):
        found += [next(updates)[0][0] for _ in range(4)]
        with record(model, "logits", every_call=True) as recorded:
            found += [next(updates)[0][0] for _ in range(6)]
        tokens = [int(each[0, 0].argmax()) for each in recorded["logits"]]  # some were chosen before
        assert tokens
        assert tokens == found[len(found) - len(tokens) :]
    assert [*found, *(token for new in updates for token in new[0])] == plain


def test_a_block_of_a_model_does_not_see_a_draft_model_of_equal_configuration():
    model, draft = small_language_model(positions="rotary"), small_language_model(positions="rotary", seed=1)
    with record(model, "logits", every_call=True) as recorded, record(draft, "logits", every_call=True) as drafted:
        generate(model, [[5, 4, 7]], max_new_tokens=30, draft_model=draft)
    with record(model, "logits") as again:
        model([[5, 4, 7]])
    np.testing.assert_allclose(recorded["logits"][0][0, -1], again["logits"][0, -1], rtol=1e-9)
    assert {each.shape[1] for each in recorded["logits"][1:]} != {each.shape[1] for each in drafted["logits"][1:]}


def test_threads_with_different_blocks_share_a_model():
    model = small_language_model(positions="rotary")

    def call(scale):
        with intervene(model, {"layers.0.residual_out": lambda x: x * scale}), record(model, "states") as recorded:
            tokens = [each.tokens for each in generate(model, [[5, 4, 7]], max_new_tokens=30)[0]]
        return tokens, recorded["states"].tolist()

    expected = [call(scale) for scale in (1.0, -1.0, 3.0, 0.5)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, (1.0, -1.0, 3.0, 0.5))) == expected
