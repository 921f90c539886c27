"""Tokenizers that come as a SentencePiece model and nothing else, as those of Vicuna do."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from e2e.harness import make_row
from models.tiny import make_target

from specgen.config import EngineConfig
from specgen.errors import ModelError
from specgen.pipeline.engine import Engine
from specgen.pipeline.tokenization import Tokenizer

WORDS = ("hello", "world", "drafts", "verify", "tokens", "spread", "over", "several", "pieces")
CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "legacy": True,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(rng.choices(WORDS, k=9)) for _ in range(300)]),
        model_writer=written,
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=-1,
        minloglevel=2,
    )
    sizes: dict[str, Any] = {"vocab_size": 310, "num_hidden_layers": 3}
    path = make_target(tmp_path_factory.mktemp("sp") / "target", **sizes)
    (path / "tokenizer.model").write_bytes(written.getvalue())
    (path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize("text", ["hello world over pieces", "na\u00efve \u2603 x", "a\nb  c"])
def test_ids_are_those_of_sentencepiece(target: Path, text: str) -> None:
    own = sentencepiece.SentencePieceProcessor(str(target / "tokenizer.model"))
    tokenizer = Tokenizer(str(target))
    assert tokenizer.adds_bos
    ids = tokenizer.encode(make_row(0, text))
    assert ids == (1, *own.encode(text))
    assert tokenizer.encode(make_row(0, "<s>" + text))[:2] == ids[:2]
    assert tokenizer.decode(ids) == text


def test_rows_run(target: Path) -> None:
    engine = Engine(EngineConfig(model=str(target), device="cpu", max_model_len=64))
    row = make_row(0, "hello world", temperature=0.0, max_tokens=6, ignore_eos=True)
    (output,) = engine.generate([row])
    (choice,) = output.choices
    whole = Tokenizer(str(target)).decode([*Tokenizer(str(target)).encode(row), *choice.token_ids])
    assert whole == "hello world" + choice.text


def test_a_damaged_model_is_one_error_of_one_line(target: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((target / name).read_bytes())
    with pytest.raises(ModelError) as caught:
        Tokenizer(str(tmp_path))
    assert "no usable tokenizer" in caught.value.message
    assert "\n" not in caught.value.message
