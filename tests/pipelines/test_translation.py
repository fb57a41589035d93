import numpy as np
import pytest

from tests.test_threads import blas_pools, three_blas_threads  # noqa: F401 - a fixture
from xformer.data.demo_tasks import numbers_task
from xformer.errors import CheckpointError, DataError
from xformer.families.run_directory import RunDirectory
from xformer.generation.engine import run_task
from xformer.models import Transformer, TransformerConfig
from xformer.pipelines import Tokenizers, Translator, check_source_lengths
from xformer.tokenizers import Tokenizer

TASK = numbers_task(num_train=400, num_valid=10, num_test=12, largest=9999)
LINES = TASK.test.source


def tokenizer_of(size, lines=(*TASK.train.source, *TASK.train.target)):
    return Tokenizer.train(lines, size)


def make_model(size, **changes):
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = TransformerConfig(source_vocab_size=size, target_vocab_size=size, **sizes, **changes)
    return Transformer(config, xp=np, seed=0, dtype="float64")


@pytest.fixture(scope="module")
def translator():
    tokenizer = tokenizer_of(100)
    return Translator(make_model(tokenizer.vocab_size), Tokenizers(tokenizer, tokenizer))


@pytest.fixture
def run(tmp_path, translator):
    run = RunDirectory(tmp_path / "run")
    run.start({}, {"joint": translator.tokenizers.source})
    translator.model.save(run.model)
    return run


def test_order_is_kept(translator):
    expected = [translator([line], max_new_tokens=30)[0] for line in LINES]
    assert len(set(expected)) > 1
    assert translator(LINES, max_new_tokens=30) == expected
    assert translator(LINES[::-1], batch_tokens=20, max_new_tokens=30) == expected[::-1]


def test_blank_lines_become_empty(translator):
    lines = ["", LINES[0], "   ", "\t", LINES[1]]
    translated = translator(lines, max_new_tokens=5)
    assert [translated[row] for row in (0, 2, 3)] == ["", "", ""]
    assert [translated[row] for row in (1, 4)] == translator(LINES[:2], max_new_tokens=5)
    assert translator([]) == []


def test_batches_are_sorted_by_length_and_complete(translator):
    batches = list(translator.batches_of_ids(translator.token_ids(LINES), batch_tokens=30, max_new_tokens=4))
    rows = [translation.text_index for batch in batches for translation in batch]
    assert sorted(rows) == list(range(len(LINES)))
    lengths = [len(translator.tokenizers.source.encode(LINES[row])) for row in rows]
    assert lengths == sorted(lengths)
    for batch in batches:
        longest = max(len(translator.tokenizers.source.encode(LINES[item.text_index])) + 1 for item in batch)
        assert len(batch) == 1 or longest * len(batch) <= 30


def test_cores_share_the_batches(translator, monkeypatch):
    expected = translator(LINES, batch_tokens=20, max_new_tokens=10)
    for threads in ("1", "3"):
        monkeypatch.setenv("XFORMER_NUM_THREADS", threads)
        assert translator(LINES, batch_tokens=20, max_new_tokens=10) == expected


@pytest.mark.parametrize(("backend", "count"), [("numpy", 1), ("torch", 3)])
def test_products_have_the_threads_that_batches_leave(translator, monkeypatch, three_blas_threads, backend, count):  # noqa: F811
    if backend == "torch":
        pytest.importorskip("torch")
    monkeypatch.setenv("XFORMER_NUM_THREADS", "3")
    run_batches = Translator(translator.model.to(backend), translator.tokenizers)._run_batches
    held = list(run_batches(lambda batch: set(blas_pools()), range(4)))
    assert all(count in pools and max(pools) <= 3 for pools in held[:3])
    if backend == "numpy":
        assert held[:3] == [{1}] * 3
    assert 3 in held[3]  # a batch that is alone has all of them
    monkeypatch.setenv("XFORMER_NUM_THREADS", "1")
    assert list(run_batches(lambda batch: set(blas_pools()), range(2))) == [{1}] * 2
    assert 3 in blas_pools()


def test_long_sentences_are_refused_before_anything_is_translated(translator, monkeypatch):
    monkeypatch.setattr("xformer.pipelines.seq2seq.GenerationBatch", lambda *a, **k: pytest.fail("translated"))
    with pytest.raises(DataError, match=r"text 2 has \d+ tokens; expected at most 8"):
        translator([LINES[0][:3], "one " * 9], max_source_length=8)
    with pytest.raises(DataError, match=r"file line 12 has"):
        check_source_lengths(translator.token_ids(["one", "one " * 9]), 8, name="file line", first_number=11)


def test_a_tokenizer_of_another_size_is_refused(translator):
    other = tokenizer_of(90)
    with pytest.raises(CheckpointError, match=r"the target tokenizer has 90 tokens, the model 100"):
        Translator(translator.model, Tokenizers(translator.tokenizers.source, other))
    with pytest.raises(CheckpointError, match=r"the source tokenizer has 90 tokens"):
        Translator(translator.model, Tokenizers(other, translator.tokenizers.target))


def test_a_run_can_be_loaded(run, translator):
    loaded = Translator.from_pretrained(run.path, xp=np)
    assert loaded(LINES, max_new_tokens=10) == translator(LINES, max_new_tokens=10)
    assert loaded.tokenizers.source is loaded.tokenizers.target


def test_a_run_with_two_vocabularies(tmp_path):
    run = RunDirectory(tmp_path / "run")
    source, target = tokenizer_of(60, TASK.train.source), tokenizer_of(60, TASK.train.target)
    run.start({}, {"source": source, "target": target})
    make_model(60).save(run.model)
    loaded = Translator.from_pretrained(run.path, xp=np)
    assert loaded.tokenizers.source.encode(LINES[0]) == source.encode(LINES[0])
    assert loaded.tokenizers.target.encode("zweihundert") == target.encode("zweihundert")


def test_parts_of_a_text_come_with_their_tokens(translator):
    parts = []
    options = {"max_new_tokens": 5, "logprobs": 1, "on_text": lambda index, text, tokens: parts.append((text, tokens))}
    ((output,),) = run_task(translator.search_task(translator.token_ids(["forty two"]), **options))
    assert len(parts) > 1
    assert [token.id for token in parts[0][1]] == output.tokens[: len(parts[0][1])] != output.tokens
    assert all("".join(token.text for token in tokens) == text for text, tokens in parts)
    assert [token for _, tokens in parts for token in tokens] == output.logprobs
