"""Conversations as token ids with masks of the answers, for training."""

from __future__ import annotations

import pytest

from tests.pipelines.chat_model import CHATS, PLAIN, TAGGED, write_tokenizer
from tests.reference import raises_line
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.pipelines import encode_conversation
from xformer.pipelines.chat import encode_chat
from xformer.tokenizers import Tokenizer

pytest.importorskip("jinja2")


def answers(tokenizer, ids, mask):
    """Return the text of each run of tokens in the mask."""
    texts, run = [], []
    for index, is_answer in zip([*ids, 0], [*mask, 0], strict=True):
        if is_answer:
            run.append(index)
        elif run:
            texts.append(tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return texts


@pytest.mark.parametrize(("template", "end"), [(TAGGED, "<|im_end|>"), (PLAIN, "<|im_end|>\n")], ids=["tags", "plain"])
def test_answers_are_found_and_prompts_are_those_of_generation(template, end, tmp_path):
    tokenizer = write_tokenizer(tmp_path, template)
    for messages in CHATS:
        ids, mask = encode_conversation(tokenizer, messages)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        expected = [message["content"] + end for message in messages if message["role"] == "assistant"]
        assert answers(tokenizer, ids, mask) == expected
        prompt = encode_chat(tokenizer, messages[:-1], None)
        assert ids[: len(prompt)] == prompt
        assert mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]


def test_the_mask_is_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = write_tokenizer(tmp_path, TAGGED)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in [*CHATS, [*CHATS[0], {"role": "user", "content": ""}, {"role": "assistant", "content": ""}]]:
        expected = reference.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        assert encode_conversation(tokenizer, messages) == (expected["input_ids"], expected["assistant_masks"])


@pytest.mark.parametrize("template", [TAGGED, PLAIN])
def test_answers_without_weight_are_read_only(template, tmp_path):
    tokenizer = write_tokenizer(tmp_path, template)
    first, *rest = CHATS[1][2:]
    messages = [*CHATS[1][:2], {**first, "weight": 0}, rest[0], {**rest[1], "weight": 1}]
    (answer,) = answers(tokenizer, *encode_conversation(tokenizer, messages))
    assert answer.startswith("three  <|im_end|>")
    with raises_line(DataError, r"the answers have the weights \[0, 'x'\]; expected 0 or 1"):
        encode_conversation(tokenizer, [*messages[:4], {**rest[1], "weight": "x"}])
    with raises_line(DataError, "the conversation has no answer to learn; expected a message of the role assistant"):
        encode_conversation(tokenizer, messages[:4])


def test_a_template_that_rewrites_earlier_answers_needs_tags(tmp_path):
    """Templates of models that think leave the thoughts of earlier answers out."""
    thought, answer = "{% if loop.last %}two{% endif %}", "{{ m['content']"
    tokenizer = write_tokenizer(tmp_path, PLAIN.replace(answer, thought + answer))
    with raises_line(DataError, r"the chat template writes message 3, an answer, in one way after its prompt"):
        encode_conversation(tokenizer, CHATS[1])
    tag = "{% generation %}"
    tokenizer = write_tokenizer(tmp_path, TAGGED.replace(tag, tag + thought))
    assert answers(tokenizer, *encode_conversation(tokenizer, CHATS[1]))[1] == "twothree  <|im_end|>"


def test_templates_without_a_prompt_of_answers_and_with_one_in_any_case(tmp_path):
    question, answer = "[INST] {{ m['content'] }} [/INST]", "{{ m['content'] }}<|im_end|>"
    turn = f"{{% if m['role'] == 'user' %}}{question}{{% else %}}{answer}{{% endif %}}"
    tokenizer = write_tokenizer(tmp_path, f"{{% for m in messages %}}{turn}{{% endfor %}}")
    found = answers(tokenizer, *encode_conversation(tokenizer, CHATS[1][1:]))
    assert found == ["  five is\nfive é 🙂<|im_end|>", "three  <|im_end|>"]
    tokenizer = write_tokenizer(tmp_path, PLAIN.replace("{% if add_generation_prompt %}", "{% if true %}"))
    with raises_line(DataError, "the chat template starts an answer also without add_generation_prompt, so the end"):
        encode_conversation(tokenizer, CHATS[0])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "has no answer to learn"),
        (CHATS[0][:1], "has no answer to learn"),
        ([{"role": "user"}, {"content": "x"}], "a message is"),
        ([{"role": "user", "text": "x"}], "a message is"),
        ("text", "messages is not a list of messages"),
        ([{"role": "assistant", "content": "\ud800"}], "got something that is not text"),
        ([{"role": "assistant", "content": 3}], "a message is"),
    ],
)
def test_invalid_messages(messages, message, tmp_path):
    with raises_line(DataError, message):
        encode_conversation(write_tokenizer(tmp_path, TAGGED), messages)


def test_tokenizers_without_a_template(tmp_path):
    with raises_line(ConfigError, "got a chat, but this model has no chat template"):
        encode_conversation(Tokenizer.train(["two"], 20), CHATS[0])
    with raises_line(CheckpointError, "the chat template failed"):
        encode_conversation(write_tokenizer(tmp_path, "{{ 1 + 'a' }}"), CHATS[0])
