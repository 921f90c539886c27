"""The target: a stack of pre-norm blocks, one class for every family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from specgen.models.attention import Attention, AttentionMetadata, KVCache
from specgen.models.config import ModelConfig
from specgen.models.experts import RoutedMLP
from specgen.models.layers import GatedMLP, RMSNorm, empty_parameter
from specgen.models.rotary import TABLE_MARGIN, build_cos_sin, rope_note

if TYPE_CHECKING:
    from specgen.kernels import Kernels

__all__ = ["Decoder", "DecoderLayer"]


class DecoderLayer(nn.Module):
    """One block; its input norm is applied by the caller, which thereby sees the raw stream."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        kernels: Kernels,
        *,
        window: int = 0,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        """Allocate uninitialised parameters of layer ``index``; ``window`` as in Attention."""
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, kernels, device=device, dtype=dtype)
        self.attention = Attention(config, kernels, window=window, device=device, dtype=dtype)
        self.post_attention_norm = RMSNorm(size, eps, kernels, device=device, dtype=dtype)
        experts = config.experts
        self.mlp: GatedMLP | RoutedMLP
        if experts is not None and index in experts.layers:
            self.mlp = RoutedMLP(size, experts, kernels, device=device, dtype=dtype)
            self._mlp_name = experts.rules.block
        else:
            self.mlp = GatedMLP(config, kernels, device=device, dtype=dtype)
            self._mlp_name = "mlp"

    def forward(
        self,
        normed: torch.Tensor,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(mlp output, residual)`` of the tokens that attend; their sum is the stream behind the
        block. The output may come in parts.
        """
        attended = self.attention(normed, cos_sin, metadata, kv_cache)
        residual = metadata.at_queries(residual)
        normed, residual = self.post_attention_norm.add(attended, residual)
        return self.mlp.parts(normed), residual

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint destinations under ``{prefix}.``."""
        return (
            self.input_norm.slots(f"{prefix}.input_layernorm")
            | self.attention.slots(f"{prefix}.self_attn")
            | self.post_attention_norm.slots(f"{prefix}.post_attention_layernorm")
            | self.mlp.slots(f"{prefix}.{self._mlp_name}")
        )


class Decoder(nn.Module):
    """A Llama-shaped causal decoder over paged caches.

    Nothing in :meth:`forward` depends on the data of a tensor, so a pass can be captured in a CUDA
    graph. No parameter requires a gradient. ``notes`` say what a user should know of the target.
    """

    capturable = True

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        aux_layers: tuple[int, ...] = (),
        *,
        max_model_len: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate uninitialised parameters.

        Args:
            config: the target's configuration.
            kernels: the operations to run on.
            aux_layers: ascending boundaries ``0..num_layers`` whose streams to return.
            max_model_len: tokens of the longest row; None: as many as the model has positions.
            device: where parameters live.
            dtype: of parameters and activations.
        """
        super().__init__()
        assert list(aux_layers) == sorted(set(aux_layers)), aux_layers
        assert all(0 <= boundary <= config.num_layers for boundary in aux_layers), aux_layers
        self.config = config
        self.aux_layers = aux_layers
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self._linear = kernels.linear
        longest = max_model_len or config.max_position_embeddings
        num_positions = longest + TABLE_MARGIN
        note = rope_note(config.rope, longest)
        self.notes: tuple[str, ...] = config.notes + (() if note is None else (note,))
        self.embed_weight = empty_parameter(
            config.vocab_size, config.hidden_size, device=device, dtype=dtype
        )
        self.layers = nn.ModuleList(
            DecoderLayer(
                config,
                i,
                kernels,
                window=config.window_of(i) if config.window_of(i) < num_positions else 0,
                device=device,
                dtype=dtype,
            )
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, kernels, device=device, dtype=dtype
        )
        self.lm_head_weight = (
            self.embed_weight
            if config.tie_word_embeddings
            else empty_parameter(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        )
        self.register_buffer(
            "cos_sin",
            build_cos_sin(config.rope, config.head_dim, num_positions, device),
            persistent=False,
        )
        self.cos_sin: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.embed_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters, features and logits."""
        return self.embed_weight.dtype

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings, ``[T] -> [T, H]``."""
        return functional.embedding(input_ids, self.embed_weight)

    def forward(
        self,
        input_ids: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[KVCache],
        last: AttentionMetadata | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run T tokens, writing their keys and values to the caches.

        Args:
            input_ids: int32 ``[T]``.
            metadata: rows and positions of the pass.
            kv_caches: one cache a layer.
            last: of the last layer, if hidden states are wanted of fewer tokens, its ``query_idx``:
                then only these go through what follows the last keys and values.

        Returns:
            Hidden states behind the final norm, ``[T, H]`` or of the tokens wanted, and the raw
            residual streams entering the blocks of ``aux_layers`` (boundary ``num_layers``: leaving
            the last block), concatenated in ascending order ``[T, A * H]``, or None without
            ``aux_layers``.
        """
        stream = self.embed(input_ids)
        block_out: torch.Tensor | None = None
        aux: list[torch.Tensor] = []
        wants_last_stream = self.num_layers in self.aux_layers
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            if block_out is None:
                normed = layer.input_norm(stream)
            else:
                normed, stream = layer.input_norm.add(block_out, stream)
            if i in self.aux_layers:
                aux.append(stream)
            if last is not None and i == self.num_layers - 1 and not wants_last_stream:
                metadata = last
            block_out, stream = layer(normed, stream, self.cos_sin, metadata, kv_caches[i])
        assert block_out is not None
        hidden, stream = self.norm.add(block_out, stream)
        if wants_last_stream:
            aux.append(stream)
            hidden = hidden if last is None else last.at_queries(hidden)
        return hidden, torch.cat(aux, dim=-1) if aux else None

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states behind the final norm, ``[R, H] -> [R, V]``."""
        logits: torch.Tensor = self._linear.linear(hidden, self.lm_head_weight)
        return logits

    def slots(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the tensor to copy into, for every parameter."""
        slots = {"model.embed_tokens.weight": self.embed_weight.detach()}
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            slots |= layer.slots(f"model.layers.{i}")
        slots |= self.norm.slots("model.norm")
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = self.lm_head_weight.detach()
        return slots
