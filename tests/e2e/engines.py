"""Small checkpoints and the engines that run them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.tiny import load_state, make_eagle1, make_eagle3, make_target, save_state

from specgen.config import EngineConfig
from specgen.pipeline.engine import Engine

TEXT_VOCAB = 78  # four special tokens, and characters
TEXT = {
    "vocab_size": TEXT_VOCAB,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# What a head takes from no target: those of other families name their sizes otherwise.
PLAIN_HEAD: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": None,
}
FEW = {
    "vocab_size": 5,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def make_checkpoints(root: Path) -> dict[str, Path]:
    """Targets ``text``, ``few`` and ``chain``, each with its ``-eagle1`` and ``-eagle3``.

    ``text`` has a token for every character of its tokenizer; the others five, for exact laws.
    ``few`` depends on its whole context, ``chain`` on the last token alone (its attention output is
    zero), so that its law over any stretch is known. All drafts attend to everything before them;
    EAGLE-3 drafts have a reduced vocabulary. The EAGLE-3 drafts of the small vocabularies know
    nothing of their target, so that rejections leave several tokens to recover.
    """
    paths = {
        "text": make_target(root / "text", with_tokenizer=True, bigram=True, **TEXT),
        "few": make_target(root / "few", with_tokenizer=True, seed=3, **FEW),
        "chain": make_target(root / "chain", with_tokenizer=True, seed=4, **FEW),
    }
    state = load_state(paths["chain"])
    for name in state:
        if "o_proj" in name:
            state[name].zero_()
    save_state(paths["chain"], state)
    for name, num_drafted in (("text", 64), ("few", 4), ("chain", 4)):
        target = paths[name]
        paths[f"{name}-eagle1"] = make_eagle1(root / f"{name}-eagle1", target, agreeable=True)
        paths[f"{name}-eagle3"] = make_eagle3(
            root / f"{name}-eagle3",
            target,
            agreeable=name == "text",
            draft_vocab_size=num_drafted,
        )
    return paths


class EngineShop:
    """``shop(model, draft, **config)``: an idle engine, the same one for the same wishes.

    ``draft`` is ``"eagle1"``, ``"eagle3"`` or ``None``; ``defaults`` are fields of the config.
    ``lag`` is how many steps are under way when another one is launched; None leaves it to the
    engine, which reads every record at once on a CPU.
    """

    def __init__(
        self, checkpoints: Mapping[str, Path], *, lag: int | None = None, **defaults: Any
    ) -> None:
        self._checkpoints = checkpoints
        self._lag = lag
        self._defaults = {"num_speculative_tokens": 3, **defaults}
        self._engines: dict[Any, Engine] = {}

    def __call__(self, model: str, draft: str | None, **config: Any) -> Engine:
        key = (model, draft, *sorted(config.items()))
        if key not in self._engines:
            self._engines[key] = self.build(model, draft, **config)
        return self._engines[key]

    def build(self, model: str, draft: str | None, **config: Any) -> Engine:
        """A new engine, for tests that spoil it."""
        engine = Engine(
            EngineConfig(
                model=str(self._checkpoints[model]),
                draft_model=None if draft is None else str(self._checkpoints[f"{model}-{draft}"]),
                **{**self._defaults, **config},
            )
        )
        if self._lag is not None:
            engine._in_flight.max_lag = self._lag
        return engine
