"""Special tokens exactly once, whatever the tokenizer adds by itself."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rlhf_megatron.data.tokenise import Tokeniser, padding_id
from rlhf_megatron.errors import DataError

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

BOS, EOS = 1, 2
ONE, TWO, A, PLUS, EQUALS, COLON, SPACE, UNKNOWN = 11, 12, 20, 23, 24, 25, 26, 3
CHAT = [{"role": "c", "content": "1+"}, {"role": "b", "content": "2"}]
CHAT_IDS = [BOS, 22, COLON, ONE, PLUS, SPACE, 21, COLON, TWO, SPACE, A, COLON]


@pytest.mark.parametrize(
    ("around", "text", "expected"),
    [
        ("$A", "1+2=", [ONE, PLUS, TWO, EQUALS]),
        ("<s> $A", "1+2=", [BOS, ONE, PLUS, TWO, EQUALS]),
        ("<s> $A </s>", "1+2=", [BOS, ONE, PLUS, TWO, EQUALS]),
        ("$A </s>", "1+2=", [ONE, PLUS, TWO, EQUALS]),
        ("<s> $A", "<s>1+", [BOS, ONE, PLUS]),
        ("$A", "<s>1+", [BOS, ONE, PLUS]),
        ("<s> $A", "", [BOS]),
    ],
)
def test_string_prompts(make_tokenizer: MakeTokenizer, around: str, text: str, expected: list[int]) -> None:
    assert Tokeniser(make_tokenizer(around=around)).prompt_ids(text, "here") == expected


@pytest.mark.parametrize("around", ["$A", "<s> $A", "<s> $A </s>"])
def test_the_template_writes_the_only_bos(make_tokenizer: MakeTokenizer, chat_template: str, around: str) -> None:
    tokeniser = Tokeniser(make_tokenizer(around=around, chat_template=chat_template))
    assert tokeniser.prompt_ids(CHAT, "here") == CHAT_IDS
    # The same conversation as a string that was rendered elsewhere.
    assert tokeniser.prompt_ids("<s>c:1+ b:2 a:", "here") == CHAT_IDS


def test_template_arguments(make_tokenizer: MakeTokenizer, chat_template: str) -> None:
    tokenizer = make_tokenizer(chat_template=chat_template)
    assert Tokeniser(tokenizer, {"loud": True, "tokenize": True}).prompt_ids(CHAT, "here") == [*CHAT_IDS, PLUS]
    assert Tokeniser(tokenizer, {"add_generation_prompt": False}).prompt_ids(CHAT, "here") == CHAT_IDS[:-2]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "has no tokens"),
        (7, "must be a string or a list of messages with 'role' and 'content', not 7"),
        ([], "must be a string or a list of messages"),
        (["1+1"], "must be a string or a list of messages"),
        ([{"role": "user"}], "must be a string or a list of messages"),
        ([{"role": "c", "content": {"no": "text"}.get}], "the chat template refused the messages"),
    ],
)
def test_other_prompts(make_tokenizer: MakeTokenizer, prompt: Any, message: str) -> None:
    template = "{% for m in messages %}{{ m['content'] + '' }}{% endfor %}"
    with pytest.raises(DataError, match=f"^a.jsonl:4: .*{message}"):
        Tokeniser(make_tokenizer(chat_template=template)).prompt_ids(prompt, "a.jsonl:4")


def test_template_that_raises(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="a:1: the chat template refused the messages: roles must alternate"):
        Tokeniser(tokenizer).prompt_ids(CHAT, "a:1")


def test_messages_without_a_template(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        Tokeniser(make_tokenizer()).prompt_ids(CHAT, "a:1")


@pytest.mark.parametrize("around", ["$A", "<s> $A </s>"])
@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("12", [ONE, TWO, EOS]),
        ("12</s>", [ONE, TWO, EOS]),
        ("", [EOS]),
        ({"role": "assistant", "content": "1"}, [ONE, EOS]),
        ([{"role": "assistant", "content": "1"}], [ONE, EOS]),
    ],
)
def test_answers_end_once(make_tokenizer: MakeTokenizer, around: str, response: Any, expected: list[int]) -> None:
    assert Tokeniser(make_tokenizer(around=around)).response_ids(response, "here") == expected


def test_other_answers(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(DataError, match="a:1: the answer must be a string or one assistant message, not 5"):
        Tokeniser(make_tokenizer()).response_ids(5, "a:1")
    with pytest.raises(DataError, match="no end-of-sequence token"):
        Tokeniser(make_tokenizer(eos_token=None)).response_ids("1", "a:1")


def test_padding_id(make_tokenizer: MakeTokenizer) -> None:
    assert padding_id(make_tokenizer()) == 0
    assert padding_id(make_tokenizer(pad_token=None)) == EOS
    with pytest.raises(DataError, match="neither a padding nor an end-of-sequence token"):
        padding_id(make_tokenizer(pad_token=None, eos_token=None))
