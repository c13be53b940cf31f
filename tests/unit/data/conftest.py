"""A character tokenizer whose ids can be written down by hand."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

VOCABULARY = {
    "<pad>": 0,
    "<s>": 1,
    "</s>": 2,
    "<unk>": 3,
    **{char: 10 + i for i, char in enumerate("0123456789abc+=: ")},
}
"""``0`` is 10, ..., ``9`` is 19, ``a b c`` are 20 21 22, ``+ = : space`` are 23 24 25 26."""

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}{% if loud is defined %}+{% endif %}"
)
"""Writes BOS itself; a turn is the first letter of its role, a colon, the content, a space."""

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    def make(*, around: str = "$A", chat_template: str | None = None, **special: str | None) -> PreTrainedTokenizerFast:
        core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        core.decoder = decoders.Fuse()
        core.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", 1), ("</s>", 2)])
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"} | special
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **tokens)
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def chat_template() -> str:
    return TEMPLATE


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    """Adds nothing around a text; has a chat template."""
    return make_tokenizer(chat_template=TEMPLATE)
