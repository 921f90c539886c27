"""A template is judged once, at the start; what it says of messages is each row's affair."""

from __future__ import annotations

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
