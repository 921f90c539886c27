"""What a model of transformers asks of our attention, found out without its weights.

A pass over tensors that have shapes and no values shows most of what the probe of a loaded model
would refuse, and the sizes that the caches will have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from specgen.errors import ModelError
from specgen.models.transformers_attention import PagedPass
from specgen.models.transformers_probe import check_calls

__all__ = ["Outline", "does_not_run", "outline_of"]

_NUM_TOKENS = 5
# What torch says of shapes that do not go together, which is the same with values.
_SHAPES = re.compile("broadcast|cannot be multiplied|must match|is invalid for input of size")


@dataclass(frozen=True)
class Outline:
    """What the layers ask for."""

    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Keys that a token of each layer sees at most, as handed to the attention; 0: all."""
    softcaps: tuple[float, ...]
    """Bound of each layer's scores; 0: none."""


def does_not_run(held: PagedPass, error: Exception) -> ModelError:
    """The refusal of a class that raised `error` when it was tried."""
    reason = " ".join(str(error).split())[:300]
    return held.refuse(f"it does not run on our attention ({type(error).__name__}: {reason})")


def outline_of(model: Any, base: Any, held: PagedPass, num_layers: int) -> Outline | None:
    """Run the layers of a model on the meta device.

    Args:
        model: the whole of it, its attention ours.
        base: its stack of layers.
        held: the pass that is attached to it.
        num_layers: as its configuration says.

    Returns:
        None where the class looks at values, so that it cannot run without them.

    Raises:
        ModelError: it would not run with them either, or needs what we do not have.
    """
    ids = torch.zeros((1, _NUM_TOKENS), dtype=torch.long, device="meta")
    if model._can_set_experts_implementation():
        # The one whose shapes do not follow from where the router sends a token.
        model.set_experts_implementation("batched_mm")
    held.calls.clear()
    try:
        with torch.inference_mode():
            base(input_ids=ids, position_ids=ids, use_cache=False)
    except ModelError:
        raise
    except NotImplementedError:  # an operation of which the shape follows from values
        return None
    except Exception as error:
        # torch refuses some operations here alone: a value is asked for, or a dtype is not known.
        if isinstance(error, RuntimeError) and not _SHAPES.search(str(error)):
            return None
        raise does_not_run(held, error) from error
    num_kv_heads, head_dim = check_calls(held, num_layers, model.config)
    calls = sorted(held.calls, key=lambda call: call.layer)
    held.calls.clear()
    return Outline(
        num_kv_heads,
        head_dim,
        tuple(call.window for call in calls),
        tuple(call.softcap for call in calls),
    )
