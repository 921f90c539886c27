"""Prompts to token ids: tokenizers and chat templates from transformers, applied once each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from specgen.errors import ModelError, RequestError
from specgen.pipeline.request import PromptRow
from specgen.pipeline.text_bound import TextBound, text_bound

# Texts of so few characters are tokenised without a look at the tokenizer's longest token.
_SHORT = 2**16


class Tokenizer:
    """A transformers tokenizer, with the rules that a batch job needs.

    Special tokens are added by the tokenizer to plain prompts only: a chat template writes its own,
    and token ids are taken as they are. However a text comes to begin with several BOS tokens (one
    rendered elsewhere, a template that writes one before a message that has it), one is left.

    Args:
        directory: Local tokenizer directory.
        chat_template: Jinja text, or the path of a file with it, instead of the tokenizer's own.

    Raises:
        ModelError: the directory holds no tokenizer that transformers can load, or the template is
            not Jinja.
    """

    def __init__(
        self, directory: str, *, chat_template: str | None = None, trust_remote_code: bool = False
    ) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                directory, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:  # anything at all comes out of files that are amiss
            raise ModelError(
                f"{directory}: no usable tokenizer: {' '.join(str(error).split())}",
                "give a directory with tokenizer files in --tokenizer",
            ) from error
        if chat_template is not None:
            self._tokenizer.chat_template = read_template(chat_template)
            if self.template_fault is not None:
                raise ModelError(
                    f"--chat-template: not a Jinja template: {self.template_fault}",
                    "give a file with a Jinja template, or the template itself",
                )

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence id."""
        value: int | None = self._tokenizer.eos_token_id
        return value

    @property
    def adds_bos(self) -> bool:
        """Whether plain prompts get a beginning-of-sequence token."""
        bos = self._tokenizer.bos_token_id
        return bos is not None and self._encode_text("a", add_special_tokens=True)[0] == bos

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return bool(self._tokenizer.chat_template)

    def __len__(self) -> int:
        """Tokens, added ones included."""
        return len(self._tokenizer)

    def encode(
        self, row: PromptRow, *, limit: int | None = None, cut: bool = False
    ) -> tuple[int, ...]:
        """Token ids of a row's prompt.

        Args:
            row: what to encode.
            limit: most tokens of use; a text that must have more is not tokenised.
            cut: leave the beginning of such a text away, instead of refusing it.

        Raises:
            RequestError: no template, a template that refuses the messages, an empty prompt, or one
                that is beyond `limit` by far.
        """
        if row.prompt_token_ids is not None:
            token_ids = row.prompt_token_ids
        elif row.messages is not None:
            token_ids = self._encode_text(
                self._bounded(self._render(row), row, limit, cut), add_special_tokens=False
            )
        else:
            text = self._bounded(row.prompt or "", row, limit, cut)
            token_ids = self._encode_text(text, add_special_tokens=True)
        if row.prompt_token_ids is None:
            token_ids = self._with_one_bos(token_ids)
        if not token_ids or row.prompt == "":
            raise RequestError("empty_prompt", f'"{row.prompt_name}" is empty', row.line)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids`` without special tokens, spaces as they are."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def _bound(self) -> TextBound | None:
        return text_bound(self._tokenizer)

    def _bounded(self, text: str, row: PromptRow, limit: int | None, cut: bool) -> str:
        """The text, or its end, if it may be short enough to tokenise at all."""
        if limit is None or len(text) <= _SHORT or self._bound is None:
            return text
        if cut:
            end, bos = self._bound.end_of(text, limit), self._tokenizer.bos_token
            # A template writes BOS as text, which is the first to go.
            return bos + end if bos and len(end) < len(text) and text.startswith(bos) else end
        least = self._bound.least_tokens(text)
        if least > limit:
            raise RequestError(
                "prompt_too_long",
                f'"{row.prompt_name}" has at least {least} tokens, '
                f"the model takes {limit} and one to generate",
                row.line,
            )
        return text

    @property
    def bos_token_id(self) -> int | None:
        """The token that prompts begin with, for models that have one."""
        bos: int | None = self._tokenizer.bos_token_id
        return bos

    def _with_one_bos(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Without what stands before the last of the BOS tokens at the beginning."""
        bos = self.bos_token_id
        num_bos = next((i for i, token in enumerate(token_ids) if token != bos), len(token_ids))
        return token_ids[max(0, num_bos - 1) :]

    def _encode_text(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return tuple(encoded["input_ids"])

    def require_template(self, what: str | None, hint: str) -> None:
        """Refuse what needs a chat template where there is none that could render.

        Args:
            what: needs it, and begins the error; None needs none.
            hint: the way out.

        Raises:
            ModelError: the tokenizer has no template, or it is not Jinja; every row would fail.
        """
        if what is None:
            return
        if not self.has_chat_template:
            raise ModelError(f"{what}: the tokenizer has no chat template", hint)
        if self.template_fault is not None:
            raise ModelError(
                f"{what}: the tokenizer's chat template is not a Jinja template: "
                f"{self.template_fault}",
                hint,
            )

    @cached_property
    def template_fault(self) -> str | None:
        """Why no messages could pass the chat template, with the line of it that is no Jinja.

        None if it is a template, whatever it says of single messages, and if there is none.
        """
        if not self.has_chat_template:
            return None
        try:
            self._tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        except Exception as error:  # a template raises whatever its author chose
            return _why(error) if _is_no_jinja(error) else None
        return None

    def _render(self, row: PromptRow) -> str:
        if not self.has_chat_template:
            raise RequestError(
                "no_chat_template",
                '"messages" need a chat template and the tokenizer has none; '
                'give one with --chat-template, or use "prompt"',
                row.line,
            )
        messages: list[Mapping[str, Any]] = list(row.messages or ())
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template raises whatever its author chose
            raise RequestError(
                "chat_template_error",
                f'"messages" do not fit the chat template: {_why(error)}',
                row.line,
            ) from error
        return text


class NoTokenizer:
    """What stands in for a tokenizer when none is loaded: prompts are token ids, text is empty."""

    eos_token_id = None
    adds_bos = False
    bos_token_id = None
    has_chat_template = False
    template_fault = None

    def encode(
        self, row: PromptRow, *, limit: int | None = None, cut: bool = False
    ) -> tuple[int, ...]:
        """The row's own token ids.

        Raises:
            RequestError: the row has text to encode, or strings to look for in text.
        """
        del limit, cut
        if row.prompt_token_ids is None:
            raise RequestError(
                "no_tokenizer",
                f'"{row.prompt_name}" must be token ids: '
                "the run loads no tokenizer (--skip-tokenizer-init)",
                row.line,
            )
        if row.sampling.stop:
            raise RequestError(
                "no_tokenizer",
                '"stop" needs text: the run loads no tokenizer (--skip-tokenizer-init)',
                row.line,
            )
        if not row.prompt_token_ids:
            raise RequestError("empty_prompt", f'"{row.prompt_name}" is empty', row.line)
        return row.prompt_token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """No text."""
        del token_ids
        return ""


def _is_no_jinja(error: Exception) -> bool:
    # jinja2 is imported by transformers alone, when it renders: its error is known by name.
    return "TemplateSyntaxError" in (kind.__name__ for kind in type(error).__mro__)


def _why(error: Exception) -> str:
    """What a template's error says, with the template's line where it cannot be parsed."""
    line = getattr(error, "lineno", None) if _is_no_jinja(error) else None
    return str(error) if line is None else f"{error} (line {line})"


def read_template(template: str) -> str:
    """The template itself, or the content of the file it names.

    Raises:
        ModelError: the file cannot be read.
    """
    if "{" not in template and "\n" not in template:
        try:
            return Path(os.fspath(template)).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
            raise ModelError(
                f"--chat-template {template}: {reason}",
                "give a file with a Jinja template, or the template itself",
            ) from error
    return template
