"""A template is judged once, at the start; what it says of messages is each row's affair."""

from __future__ import annotations

from pathlib import Path

import pytest

from specgen.errors import ModelError, RequestError
from specgen.pipeline.request import PromptRow
from specgen.pipeline.tokenization import Tokenizer
from specgen.resolve import BUILTIN_TARGET
from specgen.sampling_params import SamplingParams


@pytest.mark.parametrize("template", ["{{ x", "\n{% if %}", "{% endfor %}"])
def test_broken(template: str) -> None:
    with pytest.raises(ModelError, match="--chat-template: not a Jinja template: "):
        Tokenizer(str(BUILTIN_TARGET), chat_template=template)


def test_refusing_some_messages() -> None:
    template = "{% if messages|length < 2 %}{{ raise_exception('too few') }}{% endif %}{{ 'ab' }}"
    tokenizer = Tokenizer(str(BUILTIN_TARGET), chat_template=template)
    message = {"role": "user", "content": "a"}
    row = PromptRow(0, "0" * 16, 1, "in", SamplingParams(), messages=[message])
    with pytest.raises(RequestError, match="too few"):
        tokenizer.encode(row)
    pair = PromptRow(0, "0" * 16, 1, "in", SamplingParams(), messages=[message, message])
    assert tokenizer.encode(pair)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff\xfe\x00weights")
    with pytest.raises(ModelError, match="not a text in UTF-8"):
        Tokenizer(str(BUILTIN_TARGET), chat_template=str(file))


@pytest.mark.parametrize("template", ["B{{ messages[0].content }}", "BB{{ messages[0].content }}"])
@pytest.mark.parametrize("content", ["ab", "Bab", "BBab"])
def test_one_bos_is_left_of_several(template: str, content: str) -> None:
    own = Tokenizer(str(BUILTIN_TARGET))
    bos = own._tokenizer.convert_ids_to_tokens(0)
    own._tokenizer.bos_token = bos
    own._tokenizer.chat_template = template.replace("B", bos)
    message = {"role": "user", "content": content.replace("B", bos)}
    row = PromptRow(0, "0" * 16, 1, "in", SamplingParams(), messages=[message])
    plain = own._encode_text("ab", add_special_tokens=False)
    assert own.encode(row) == (own._tokenizer.bos_token_id, *plain)
    prompt = PromptRow(0, "0" * 16, 1, "in", SamplingParams(), prompt=bos * 3 + "ab")
    assert own.encode(prompt)[-len(plain) - 1 :] == (own._tokenizer.bos_token_id, *plain)
    assert own.encode(prompt).count(own._tokenizer.bos_token_id) == 1
