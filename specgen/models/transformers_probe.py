"""Whether a model of transformers really runs on our attention.

Some families keep an attention of their own and only log a warning, some hand over less than they
use (a window that is only in their mask). So a loaded model is tried on two short prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specgen.errors import ModelError
from specgen.models.attention import AttentionMetadata, KVCache
from specgen.models.transformers_attention import ATTENTION_NAME, PROBE_NAME, PagedPass

if TYPE_CHECKING:
    from specgen.models.transformers_target import TransformersTarget

__all__ = ["ProbeFacts", "check_calls", "entering_stream", "leaving_stream", "probe"]

_BLOCK_SIZE = 16
_LONGEST = 96  # tokens of the longer prompt; windows beyond are not reached
_HEAD_DIMS = range(2, 257, 2)
# Error of a token's vector relative to its length: of every token in float32, of the median one in
# less, where a router may send single tokens to other experts. One key too many or too few changes
# far more.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.03}


@dataclass(frozen=True)
class ProbeFacts:
    """What the probe found out."""

    num_kv_heads: int
    head_dim: int
    blocks: Sequence[nn.Module]
    """The model's layers, in order."""
    has_one_stream: bool
    """Whether each layer takes and leaves one vector a token, so that there are features."""


def entering_stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer that was called so takes for hidden states, ``[1, T, H]`` as a rule."""
    return args[0] if args else kwargs.get("hidden_states")


def leaving_stream(out: Any) -> Any:
    """The hidden states in what a layer returned."""
    return out[0] if isinstance(out, tuple) else out


class _LazyCaches(Sequence[KVCache]):
    """Caches made when a layer first asks, in the shape that it asks for."""

    def __init__(self, held: PagedPass, num_layers: int, num_blocks: int, like: Any) -> None:
        self._held, self._num_layers = held, num_layers
        self._num_blocks, self._like = num_blocks, like
        self._made: dict[int, KVCache] = {}

    def __len__(self) -> int:
        return self._num_layers

    def __getitem__(self, layer: Any) -> Any:
        call = self._held.calls[-1]
        if layer not in self._made:
            shape = (self._num_blocks, _BLOCK_SIZE, call.num_kv_heads, call.head_dim)
            self._made[layer] = (self._like.new_zeros(shape), self._like.new_zeros(shape))
        return self._made[layer]


@torch.inference_mode()
def probe(target: TransformersTarget, held: PagedPass) -> ProbeFacts:
    """Run two prompts packed, apart, in decode form, and with the model's own eager attention.

    Raises:
        ModelError: they disagree, are not finite, or not every layer called our attention exactly
            once.
    """
    windows = {
        size
        for size in (getattr(target.model.config, "sliding_window", None),)
        if isinstance(size, int)
    }
    # Most tokens past the window, where it is short enough.
    reach = [min(3 * window + 8, _LONGEST) for window in windows if window + 8 <= _LONGEST]
    lengths = (max([12, *reach]), 5)
    prompts = [_prompt(target, n) for n in lengths]
    per_row = -(-max(lengths) // _BLOCK_SIZE)
    like = target.embed_weight
    caches = _LazyCaches(held, target.num_layers, 2 * per_row + 1, like)

    def run(rows: list[tuple[int, int, int]], decode: bool = False) -> torch.Tensor:
        ids = torch.cat([prompts[slot][first : first + n] for slot, first, n in rows])
        return target.run_layers(ids, _metadata(rows, per_row, decode, like.device), caches)

    held.mask_windows.clear()
    target.model.set_attn_implementation(PROBE_NAME)
    try:
        run([(0, 0, lengths[0])])
    finally:
        target.model.set_attn_implementation(ATTENTION_NAME)
    packed = run([(0, 0, lengths[0]), (1, 0, lengths[1])])
    calls = list(held.calls)
    num_kv_heads, head_dim = check_calls(held, target.num_layers, target.model.config)
    unused = held.mask_windows - {call.window for call in calls} if _uses_windows(target) else set()
    if unused:
        raise held.refuse(f"its attention does not pass on its window of {min(unused)}")
    if not packed.isfinite().all():
        raise ModelError(
            f"{held.name}: its hidden states are NaN or infinite in {str(packed.dtype)[6:]}",
            hint="its activations may need another --dtype, or its weights are damaged",
        )
    apart = torch.cat([run([(slot, 0, n)]) for slot, n in enumerate(lengths)])
    again = run([(0, lengths[0] - 2, 2), (1, lengths[1] - 2, 2)], decode=True)
    ends = torch.cat([packed[lengths[0] - 2 : lengths[0]], packed[-2:]])
    _compare(held, packed, apart, "two prompts in one pass differ from the same two apart")
    _compare(held, again, ends, "single steps differ from a pass over the whole prompt")
    _compare_eager(target, held, prompts, packed)
    blocks = _find_blocks(target.model, {call.layer: call.module for call in calls}, held)
    streams: list[Any] = []

    def watch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        streams.extend((entering_stream(args, kwargs), leaving_stream(out)))

    hooks = [block.register_forward_hook(watch, with_kwargs=True) for block in blocks]
    try:
        run([(1, 0, lengths[1])])
    finally:
        for hook in hooks:
            hook.remove()
    shape = (1, lengths[1], target.embed_weight.shape[1])
    has_one_stream = all(isinstance(s, torch.Tensor) and s.shape == shape for s in streams)
    return ProbeFacts(num_kv_heads, head_dim, blocks, has_one_stream)


def check_calls(held: PagedPass, num_layers: int, config: Any) -> tuple[int, int]:
    """Number and size of the key and value heads that a pass asked for.

    Args:
        held: the pass.
        num_layers: of the model.
        config: transformers' configuration object, for what is to be named.

    Raises:
        ModelError: not one causal attention call a layer, or heads that we do not have.
    """
    calls = held.calls
    if not calls:
        raise held.refuse("it does not call the attention function that it was given")
    if sorted(call.layer for call in calls) != list(range(num_layers)):
        raise held.refuse(
            f"{len(calls)} attention calls in a pass of {num_layers} layers, not one a layer"
        )
    if not all(getattr(call.module, "is_causal", True) for call in calls):
        raise held.refuse(f"its attention is not causal{_why_not_causal(config)}")
    shapes = {(call.num_kv_heads, call.head_dim) for call in calls}
    if len(shapes) > 1:
        raise held.refuse("key and value heads differ between layers")
    ((num_kv_heads, head_dim),) = shapes
    if head_dim not in _HEAD_DIMS:
        raise held.refuse(f"heads of size {head_dim}")
    return num_kv_heads, head_dim


def _why_not_causal(config: Any) -> str:
    values = {key: getattr(config, key, None) for key in ("use_bidirectional_attention",)}
    values |= {key: getattr(config, key, None) for key in ("is_decoder", "is_causal")}
    said = [
        f'"{key}" is {json.dumps(value)}'
        for key, value in values.items()
        if value is not None and bool(value) == (key == "use_bidirectional_attention")
    ]
    return f" ({', '.join(said)} in config.json)" if said else ""


def _uses_windows(target: TransformersTarget) -> bool:
    layer_types = getattr(target.model.config, "layer_types", None)
    return layer_types is None or "sliding_attention" in layer_types


def _prompt(target: TransformersTarget, length: int) -> torch.Tensor:
    ids = (torch.arange(length) * 7919 + 31 * length) % target.config.vocab_size
    return ids.to(target.embed_weight.device, torch.int32)


def _metadata(
    rows: list[tuple[int, int, int]], per_row: int, decode: bool, device: torch.device
) -> AttentionMetadata:
    """Rows (slot, first position, tokens) whose blocks lie in order."""
    positions = torch.cat([torch.arange(first, first + n) for _, first, n in rows])
    slots = torch.cat(
        [slot * per_row * _BLOCK_SIZE + torch.arange(first, first + n) for slot, first, n in rows]
    )
    counts = torch.tensor([0, *(n for _, _, n in rows)])

    def i32(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    return AttentionMetadata(
        positions=i32(positions),
        slot_mapping=slots.to(device),
        block_tables=i32(torch.arange(2 * per_row).view(2, per_row)),
        slot_ids=i32([slot for slot, _, _ in rows]),
        first_positions=i32([first for _, first, _ in rows]),
        context_lens=i32([first + n for _, first, n in rows]),
        query_len=rows[0][2] if decode else 0,
        max_query_len=max(n for _, _, n in rows),
        max_context_len=max(first + n for _, first, n in rows),
        query_start_loc=None if decode else i32(counts.cumsum(0)),
    )


def _compare(held: PagedPass, got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    lengths = want.float().norm(dim=-1).clamp(min=1e-9)
    errors = (got.float() - want.float()).norm(dim=-1) / lengths  # [tokens]
    error = (errors.max() if want.dtype == torch.float32 else errors.median()).item()
    if not error <= _TOLERANCE[want.dtype]:  # NaN fails too
        raise held.refuse(f"{what} (relative error {error:.2g})")


def _compare_eager(
    target: TransformersTarget, held: PagedPass, prompts: list[torch.Tensor], packed: torch.Tensor
) -> None:
    """Hidden states and logits against the model's own attention."""
    model = target.model
    model.set_attn_implementation("eager")
    try:
        hidden, logits = [], []
        for prompt in prompts:
            ids = prompt.long()[None]
            out = model(ids, use_cache=False)
            below = target._base(input_ids=ids, use_cache=False)
            hidden.append(below.last_hidden_state[0])
            logits.append(out.logits[0])
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    _compare(held, packed, torch.cat(hidden), "it differs from its own eager attention")
    ours = target.compute_logits(packed)
    _compare(held, ours, torch.cat(logits), "its logits follow from more than its hidden states")


def _find_blocks(model: Any, by_layer: dict[int, nn.Module], held: PagedPass) -> list[nn.Module]:
    """The layers around the attention modules: children of one list, in order."""
    for candidate in model.modules():
        if not isinstance(candidate, nn.ModuleList) or len(candidate) < len(by_layer):
            continue
        blocks = list(candidate)[: len(by_layer)]
        inside = [any(m is by_layer[i] for m in block.modules()) for i, block in enumerate(blocks)]
        if all(inside):
            return blocks
    raise held.refuse("its layers are not in one list")
