"""Sampling keys of other engines that would change the answer, but that no code here honours.

A line that sets one becomes an error row, because ignoring it would give other text than asked.
At a value that asks for nothing it is let pass: many programs write all of their options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["UNSUPPORTED_KEYS", "asks_for_nothing"]

#: Each key with the values at which it changes nothing, the plainest first; null always is one.
UNSUPPORTED_KEYS: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "beam_search": (False,),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": (),
    "continue_final_message": (),
    "do_sample": (),
    "dry_multiplier": (0,),
    "early_stopping": (),
    "echo": (False,),
    "eos_token_id": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_decoding": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "max_length": (),
    "max_new_tokens": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "mirostat_eta": (),
    "mirostat_tau": (),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_sequences": ([],),
    "stop_strings": ([],),
    "stop_words": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "temperature_last": (),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0,),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
    "xtc_threshold": (),
}


def asks_for_nothing(key: str, value: object) -> bool:
    """Whether `key` is not honoured, and need not be at this value."""
    off = UNSUPPORTED_KEYS.get(key)
    if off is None:
        return False
    # 0 == False, but type matters: 0 is no flag and false no number.
    return value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in off
    )
