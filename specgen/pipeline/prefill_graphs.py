"""The target's pass over prompt tokens as CUDA graphs: one a padded number of tokens, on first use.

Launched one by one, the kernels of a pass take the host about a millisecond a layer; of few tokens
a GPU is done sooner. Up to that many, a batch of chunks is padded to the next captured size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from specgen.models.attention import AttentionMetadata
from specgen.pipeline.cuda_capture import Capture
from specgen.pipeline.decode_graphs import batch_buckets

__all__ = ["PrefillGraphs", "PrefillPass", "most_prefill_tokens"]

PrefillPass = Callable[
    [torch.Tensor, AttentionMetadata, AttentionMetadata], tuple[torch.Tensor, torch.Tensor | None]
]
"""A pass over token ids ``[T]``, of which the last of each row may be all that the last layer is
run for: hidden states and auxiliary features, see `Decoder.forward`."""

logger = logging.getLogger(__name__)

_FEWEST_TOKENS = 16
_MOST_TOKENS = 8192
# Tokens times weights of a layer that a GPU of 600 TFLOP/s multiplies in the millisecond that
# launching the layer takes the host.
_PRODUCTS_OF_A_LAUNCH = 3e11


def most_prefill_tokens(num_weights: int, num_layers: int) -> int:
    """Tokens up to which launching a pass takes longer than computing it."""
    weights_of_a_layer = max(1, num_weights // num_layers)
    return min(_MOST_TOKENS, max(_FEWEST_TOKENS, int(_PRODUCTS_OF_A_LAUNCH / weights_of_a_layer)))


@dataclass(frozen=True)
class _Captured:
    """A captured pass: the tensors it reads, in the order of :func:`_inputs`, and its results."""

    replay: Callable[[], None]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, torch.Tensor | None]


class PrefillGraphs:
    """Captures passes over prompt tokens on first use and replays them.

    Args:
        max_num_tokens: The most tokens of a pass to capture.
        max_num_seqs: Rows of every captured pass, where there are as many tokens.
        max_context_len: Host bound on any row's context.
        capture: How passes are captured.
    """

    def __init__(
        self, max_num_tokens: int, max_num_seqs: int, max_context_len: int, capture: Capture
    ) -> None:
        self._sizes = tuple(n for n in batch_buckets(max_num_tokens, 2) if n >= _FEWEST_TOKENS)
        self._max_num_seqs = max_num_seqs
        self._max_context_len = max_context_len
        self._capture = capture
        self._graphs: dict[int, _Captured] = {}

    def padded_size(self, num_tokens: int) -> tuple[int, int] | None:
        """Tokens and rows to pad a batch of chunks to; None: it is too large to be captured."""
        size = next((size for size in self._sizes if size >= num_tokens), None)
        return None if size is None else (size, min(size, self._max_num_seqs))

    def clear(self) -> None:
        """Forget all graphs; waits for those that run."""
        if any(captured.inputs[0].is_cuda for captured in self._graphs.values()):
            torch.cuda.synchronize()
        self._graphs.clear()

    def run(
        self,
        input_ids: torch.Tensor,
        metadata: AttentionMetadata,
        last: AttentionMetadata,
        run_pass: PrefillPass,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Replay the pass over a padded batch; capture it if its size is new.

        Args:
            input_ids: int32 ``[T]``, padded as `padded_size` says.
            metadata: of as many tokens and rows; padding tokens have slot mapping -1, padding rows
                slot -1.
            last: of the same rows, see `AttentionMetadata.of_last_tokens`.
            run_pass: the pass.

        Returns:
            What the pass returns, overwritten by the next replay of its graph; None if the batch
            has no captured size, or memory for its graph ran out.
        """
        num_tokens = input_ids.numel()
        if num_tokens not in self._sizes:
            return None
        inputs = _inputs(input_ids, metadata, last)
        captured = self._graphs.get(num_tokens)
        if captured is None:
            try:
                captured = self._capture_pass(inputs, metadata, run_pass)
            except torch.OutOfMemoryError:
                self._give_up(num_tokens)
                return None
            self._graphs[num_tokens] = captured
        for mine, new in zip(captured.inputs, inputs, strict=True):
            mine.copy_(new)
        captured.replay()
        return captured.outputs

    def _capture_pass(
        self,
        inputs: tuple[torch.Tensor, ...],
        metadata: AttentionMetadata,
        run_pass: PrefillPass,
    ) -> _Captured:
        """Capture a pass over nothing but padding."""
        mine = tuple(torch.zeros_like(tensor) for tensor in inputs)
        input_ids, positions, slot_mapping, slot_ids, first_positions, *rest = mine
        context_lens, starts, last_idx, last_positions = rest
        slot_mapping.fill_(-1)
        slot_ids.fill_(-1)
        static = replace(
            metadata,
            positions=positions,
            slot_mapping=slot_mapping,
            slot_ids=slot_ids,
            first_positions=first_positions,
            context_lens=context_lens,
            query_start_loc=starts,
            max_query_len=input_ids.numel(),
            max_context_len=self._max_context_len,
        )
        last = static.of_last_tokens(last_idx, last_positions)
        replay, outputs = self._capture(lambda: run_pass(input_ids, static, last))
        return _Captured(replay, mine, outputs)

    def _give_up(self, num_tokens: int) -> None:
        """Capture no passes of so many tokens or more."""
        self._sizes = tuple(size for size in self._sizes if size < num_tokens)
        logger.warning(
            "memory ran out as a pass over %d prompt tokens was captured: so many are launched "
            "kernel by kernel (a lower --gpu-memory-utilization leaves more to graphs)",
            num_tokens,
        )


def _inputs(
    input_ids: torch.Tensor, metadata: AttentionMetadata, last: AttentionMetadata
) -> tuple[torch.Tensor, ...]:
    """What of a batch changes from one replay to the next."""
    assert metadata.query_start_loc is not None, "a prefill"
    assert last.query_idx is not None, "last tokens"
    return (
        input_ids,
        metadata.positions,
        metadata.slot_mapping,
        metadata.slot_ids,
        metadata.first_positions,
        metadata.context_lens,
        metadata.query_start_loc,
        last.query_idx,
        last.first_positions,
    )
