"""The pair's tokenizer: a byte-level BPE of 8192 entries with role tokens and a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, END = SPECIAL = (
    "<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
)  # fmt: skip
BOS_ID, EOS_ID, PAD_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID, END_ID = range(7)
RESERVED = tuple(f"<|reserved_{i}|>" for i in range(9))

# <|bos|><|user|>question<|end|><|assistant|>answer<|end|>
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def texts(corpus: Path, step: int) -> Iterator[str]:
    """Every `step`-th record of the training text."""
    with corpus.open(encoding="utf-8") as lines:
        for line in islice(lines, 0, None, step):
            record: dict[str, Any] = json.loads(line)
            yield record["text"] if "text" in record else f"{record['q']}\n{record['a']}"


def train(corpus: Path, vocab_size: int = 8192, step: int = 6) -> Tokenizer:
    """Train the BPE on a part of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL, *RESERVED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(corpus, step), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json with the chat template."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    template = folder / "chat_template.jinja"
    if template.exists():  # one file less: loaders read the key of the configuration
        template.unlink()
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = CHAT_TEMPLATE
    path.write_text(json.dumps(config, indent=1) + "\n")
