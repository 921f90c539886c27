"""Targets that run through transformers' own classes, over our paged caches.

The path for families without a native form: slower, but the same caches, verification and
auxiliary features. Whether a family can be run so is not taken from its declarations: a probe at
loading compares it with its own eager attention.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specgen.errors import ModelError
from specgen.load_format import is_dummy
from specgen.models.attention import AttentionMetadata, KVCache
from specgen.models.config import ModelConfig
from specgen.models.dummy import fill_dummy
from specgen.models.host_memory import refuse_what_does_not_fit
from specgen.models.rotary import TABLE_MARGIN, build_cos_sin
from specgen.models.transformers_attention import ATTENTION_NAME, PagedPass, register_attention
from specgen.models.transformers_config import causal_class, load_auto_config, quiet
from specgen.models.transformers_outline import Outline, does_not_run, outline_of
from specgen.models.transformers_probe import (
    ProbeFacts,
    entering_stream,
    leaving_stream,
    probe,
)
from specgen.models.transformers_weights import fill_from_checkpoint

if TYPE_CHECKING:
    from specgen.kernels import Kernels

__all__ = ["TransformersTarget", "load_transformers_target"]


def load_transformers_target(
    path: str | Path,
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    kernels: Kernels,
    aux_layers: tuple[int, ...] = (),
    max_model_len: int | None = None,
    load_format: str = "auto",
    trust_remote_code: bool = False,
) -> TransformersTarget:
    """Load a target as transformers does, strictly, and check that it runs on our attention.

    Args:
        path: directory of the checkpoint.
        config: what :func:`specgen.models.registry.read_model_config` made of it.
        device: where the parameters go; on ``"meta"`` headers are checked, no tensor is read, and
            what comes back only has shapes.
        dtype: of parameters and activations.
        kernels: operations to run on.
        aux_layers: boundaries whose streams to return.
        max_model_len: tokens of the longest row.
        load_format: ``"auto"``, or fixed pseudo-random weights, see :func:`fill_dummy`.
        trust_remote_code: whether code beside the checkpoint may run.

    Raises:
        ModelError: the checkpoint is damaged or incomplete, or the model needs what we do not have.
    """
    register_attention()
    auto_config = load_auto_config(path, trust_remote_code)

    def build(place: torch.device | str) -> Any:
        if is_dummy(load_format):
            return _from_config(auto_config, place, dtype, load_format, trust_remote_code)
        return fill_from_checkpoint(
            causal_class(auto_config, path, trust_remote_code),
            auto_config,
            path,
            device=place,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
        )

    with quiet():
        if torch.device(device).type == "cpu":
            refuse_what_does_not_fit(build("meta"), str(path))
        model = build(device)
    # What no checkpoint stores, such as frequencies, transformers makes on the host.
    model = model.to(device).eval().requires_grad_(False)
    return TransformersTarget(
        model, config, kernels, aux_layers, max_model_len=max_model_len, path=str(path)
    )


def _from_config(
    config: Any,
    device: torch.device | str,
    dtype: torch.dtype,
    load_format: str,
    trust_remote_code: bool,
) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation=ATTENTION_NAME,
        )
    slots = {name: parameter.detach() for name, parameter in model.named_parameters()}
    fill_dummy(slots, load_format)
    return model


class _HiddenOutput:
    """The output of a stack of layers of any family: nothing but the last hidden state."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None  # caches, attention weights, router logits: nothing was kept

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _GivenHidden(nn.Module):
    """Stands in for the stack below a lm_head: its output is what it is given."""

    @property
    def decoder(self) -> _GivenHidden:
        """Some families (OPT) call the decoder inside their stack."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _HiddenOutput:
        """``inputs_embeds`` as the last hidden state."""
        return _HiddenOutput(inputs_embeds)


class TransformersTarget(nn.Module):
    """A causal decoder of transformers behind the protocol of our targets."""

    capturable = False

    def __init__(
        self,
        model: Any,
        config: ModelConfig,
        kernels: Kernels,
        aux_layers: tuple[int, ...] = (),
        *,
        max_model_len: int | None = None,
        path: str = "",
    ) -> None:
        """Wrap and probe a loaded model whose attention is :data:`ATTENTION_NAME`.

        A model on the meta device cannot run: its shapes are all that can be asked for.

        Raises:
            ModelError: the probe found that the model does not run on our attention.
        """
        super().__init__()
        self.model = model
        self.config = config
        self.aux_layers = aux_layers
        self.num_layers = config.num_layers
        self.max_model_len = max_model_len or config.max_position_embeddings
        self._pass = PagedPass(path or config.architecture, kernels, config.backend_reason)
        self._streams: dict[int, torch.Tensor] = {}
        self.notes: tuple[str, ...] = (
            f"{config.architecture} runs through transformers, slower and without CUDA graphs"
            + (f": {config.backend_reason}" if config.backend_reason else ""),
        )
        self.notes += _fix_ropes(model, self.max_model_len, self._pass)
        self._pass.attach(model)
        base_name = model.base_model_prefix
        base = getattr(model, base_name, None)
        if base is None:
            raise self._pass.refuse("it has no stack of layers below its lm_head")
        self._base: Any = base
        if self.device.type == "meta":
            self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
            return
        # The same lm_head and whatever else the class does to logits, without the layers. (In a
        # tuple: it is no second set of parameters.)
        head = copy.copy(model)
        head._modules = {**model._modules, base_name: _GivenHidden()}
        self._head: tuple[Any, ...] = (head,)
        facts = _probe(self, self._pass)
        self.num_kv_heads, self.head_dim = facts.num_kv_heads, facts.head_dim
        if aux_layers and not facts.has_one_stream:
            raise ModelError(
                f"{self._pass.name}: its layers do not pass one vector a token on, so that it has "
                "no auxiliary features for an EAGLE-3 head",
                hint="use an EAGLE-1 head, or none",
            )
        self._watch(facts.blocks)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.embed_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters, features and logits."""
        return self.embed_weight.dtype

    @property
    def embed_weight(self) -> torch.Tensor:
        """``[V, H]``, as stored: some families scale what they look up."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def lm_head_weight(self) -> torch.Tensor:
        """``[V, H]``."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight

    @cached_property
    def cos_sin(self) -> torch.Tensor:
        """Table of the rope in ``config``, for drafts; the model has its own."""
        num_positions = self.max_model_len + TABLE_MARGIN
        return build_cos_sin(self.config.rope, self.head_dim, num_positions, self.device)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings as the first layer sees them, ``[T] -> [T, H]``."""
        embedded: torch.Tensor = self.model.get_input_embeddings()(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[KVCache],
        last: AttentionMetadata | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run T tokens; see :meth:`specgen.models.decoder.Decoder.forward`."""
        hidden = self.run_layers(input_ids, metadata, kv_caches)
        hidden = hidden if last is None else last.at_queries(hidden)
        if not self.aux_layers:
            return hidden, None
        aux = torch.cat([self._streams.pop(boundary) for boundary in self.aux_layers], dim=-1)
        return hidden, aux

    def run_layers(
        self,
        input_ids: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[KVCache],
    ) -> torch.Tensor:
        """The hidden states of :meth:`forward` alone."""
        self._pass.metadata, self._pass.kv_caches = metadata, kv_caches
        self._pass.calls.clear()
        out = self._base(
            input_ids=input_ids.long()[None],
            position_ids=metadata.positions.long()[None],
            use_cache=False,
        )
        self._pass.metadata = self._pass.kv_caches = None
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states behind the final norm, ``[R, H] -> [R, V]``."""
        logits: torch.Tensor = self._head[0](inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def outline(self) -> Outline | None:
        """What the layers of a model on the meta device ask for; takes over the sizes of its heads.

        Returns:
            None where the class cannot run without values.

        Raises:
            ModelError: the model does not run on our attention.
        """
        assert self.device.type == "meta", self.device
        found = outline_of(self.model, self._base, self._pass, self.num_layers)
        if found is not None:
            self.num_kv_heads, self.head_dim = found.num_kv_heads, found.head_dim
        return found

    def _watch(self, blocks: Sequence[nn.Module]) -> None:
        """Keep the raw streams of the auxiliary boundaries as they pass."""

        def entering(boundary: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._streams[boundary] = entering_stream(args, kwargs)[0]

            return hook

        def leaving(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
            self._streams[self.num_layers] = leaving_stream(out)[0]

        for boundary in self.aux_layers:
            if boundary == self.num_layers:
                blocks[-1].register_forward_hook(leaving)
            else:
                blocks[boundary].register_forward_pre_hook(entering(boundary), with_kwargs=True)


def _probe(target: TransformersTarget, held: PagedPass) -> ProbeFacts:
    """Probe; whatever a class raises that cannot run so is the same answer in other words."""
    try:
        return probe(target, held)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise does_not_run(held, error) from error


def _fix_ropes(model: Any, max_model_len: int, held: PagedPass) -> tuple[str, ...]:
    """Fix ropes whose frequencies follow from the length of a pass to those of the longest row.

    Otherwise the keys in the cache would be of other frequencies than the queries that meet them,
    and rows would depend on which others they share a batch with.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    notes: dict[str, None] = {}
    for module in model.modules():
        rope_type: Any = getattr(module, "rope_type", None)
        kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        varying = [kind for kind in kinds if kind == "longrope" or "dynamic" in str(kind)]
        if not varying:
            continue
        if isinstance(rope_type, dict):
            raise held.refuse(f"its layers have several ropes, one of them {varying[0]}")
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](
            module.config, module.inv_freq.device, seq_len=max_model_len
        )
        module.inv_freq.copy_(frequencies)
        module.attention_scaling = scaling
        module.rope_type = "default"  # the type under which transformers updates nothing
        notes[f"{rope_type} rope fixed for the whole run by max_model_len {max_model_len}"] = None
    return tuple(notes)
