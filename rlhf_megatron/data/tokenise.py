"""Text and chat messages to token ids, with special tokens exactly once.

Left out: images and tool schemas beyond what a tokenizer's own chat template takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_megatron.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[Mapping[str, Any]]


class Tokeniser:
    """Turns prompts and answers into token ids.

    Args:
        tokenizer: A tokenizer of the model.
        template_kwargs: Further arguments of its chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, object] | None = None):
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self._prefix = self._special_prefix()

    def prompt_ids(self, prompt: Prompt, where: str) -> list[int]:
        """Token ids of a prompt.

        A string gets what the tokenizer puts before a text (usually BOS, or nothing), unless the text already starts
        with it, and never what it puts behind (EOS). Messages go through the chat template, which writes all special
        tokens itself, followed by the start of the assistant's turn.

        Args:
            prompt: A string, or chat messages with ``role`` and ``content``.
            where: Where the prompt stands, for messages.

        Raises:
            DataError: The prompt is of another kind or has no tokens, or the chat template is missing or refuses it.
        """
        if isinstance(prompt, str):
            ids = self.text_ids(prompt)
            if ids[: len(self._prefix)] != self._prefix and ids[:1] != [self.tokenizer.bos_token_id]:
                ids = [*self._prefix, *ids]
        else:
            ids = self.text_ids(self._render(prompt, where))
        if not ids:
            raise DataError(f"{where}: the prompt has no tokens")
        return ids

    def response_ids(self, response: object, where: str) -> list[int]:
        """Token ids of an answer, with one end-of-sequence token at its end.

        The answer is tokenised apart from the prompt, as a sampled answer would follow it.

        Args:
            response: A string, or the assistant's message (alone or in a list).
            where: Where the answer stands, for messages.

        Raises:
            DataError: The answer is of another kind, or the tokenizer has no end-of-sequence token.
        """
        message = response[0] if isinstance(response, list) and len(response) == 1 else response
        text = message.get("content") if isinstance(message, Mapping) else message
        if not isinstance(text, str):
            raise DataError(f"{where}: the answer must be a string or one assistant message, not {response!r:.100}")
        eos = self.tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise DataError("the tokenizer has no end-of-sequence token, so an answer could never end; set eos_token")
        ids = self.text_ids(text)
        return ids if ids[-1:] == [eos] else [*ids, eos]

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text without any added special token."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore[reportArgumentType]

    def _special_prefix(self) -> list[int]:
        """What the tokenizer puts before every text."""
        probe = self.text_ids("a")
        marked: list[int] = list(self.tokenizer("a")["input_ids"])  # pyright: ignore[reportArgumentType]
        starts = (at for at in range(len(marked)) if marked[at : at + len(probe)] == probe)
        return marked[: next(starts, 0)]

    def _render(self, messages: object, where: str) -> str:
        from jinja2 import TemplateError

        chat = list(messages) if isinstance(messages, Sequence) else []
        if not chat or not all(isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in chat):
            raise DataError(
                f"{where}: the prompt must be a string or a list of messages with 'role' and 'content', "
                f"not {messages!r:.100}"
            )
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{where}: the prompt is a list of chat messages, but the tokenizer has no chat template; "
                "use string prompts or a tokenizer with a template"
            )
        arguments: dict[str, Any] = {"add_generation_prompt": True, **self.template_kwargs, "tokenize": False}
        try:
            return str(self.tokenizer.apply_chat_template(chat, **arguments))
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"{where}: the chat template refused the messages: {error}") from error


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id to pad with: the tokenizer's, else its end-of-sequence token (masks never depend on it).

    Raises:
        DataError: The tokenizer has neither.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    raise DataError("the tokenizer has neither a padding nor an end-of-sequence token; set pad_token")
