"""Builds the Megatron `GPTModel` of a spec, for this rank's place in the layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from actors import device
from actors.contract import Dtype
from actors.head import fused_target_logprobs, target_logprobs
from actors.layout import Layout
from actors.models.norm import RMSNorm
from actors.models.spec import ModelSpec, MoeSpec

"""Of the base model's weights and activations. Softmaxes, logprobs and losses are float32 with either."""
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LogprobModel(GPTModel):
    """A `GPTModel` whose output for labels (B, S) or (B, S, K) is the labels' log-probabilities."""

    real_vocab_size: int
    """Without the rows that make the embedding divisible; those take no part."""
    fused_head: bool = False
    """Compute the labels' log-probabilities without ever holding the logits whole."""
    head_adapter: Callable[[], Any] = staticmethod(lambda: None)
    """The active adapter of the head, or None."""
    runs_padding: bool = False
    """What runs is padding: no expert gets to see it."""

    def keep_padding_from_experts(self) -> None:
        """Ranks that wait for each other's experts run padding where they have no microbatch of their own.

        Were it routed, the rows of an expert's product would depend on which rank a microbatch stands on, and the
        last bits with them.
        """

        def hide(_: Any, __: Any, routed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
            probs, routing_map = routed
            if not self.runs_padding:
                return None
            return probs.masked_fill(torch.ones_like(routing_map), 0.0), torch.zeros_like(routing_map)

        for layer in self.decoder.layers:
            layer.mlp.router.register_forward_hook(hide)

    def _postprocess(
        self, hidden_states: Tensor, input_ids: Any, position_ids: Any, labels: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        if not (self.fused_head and self.post_process) or labels is None:
            out: Tensor = super()._postprocess(
                hidden_states, input_ids, position_ids, labels, *args, **kwargs
            )
            return out
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        adapter = self.head_adapter()
        low = None
        if adapter is not None:
            u = adapter.low(hidden_states).flatten(0, -2)
            low = (u, adapter.B[0].to(u.dtype), adapter.scale)
        if self.config.sequence_parallel:
            whole = gather_from_sequence_parallel_region(hidden_states)
        else:
            whole = copy_to_tensor_model_parallel_region(hidden_states)
        return fused_target_logprobs(whole, weight, labels, adapter=low, vocab_size=self.real_vocab_size)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        return target_logprobs(logits, labels, self.real_vocab_size)


def _defer_finalization(*_: Any, **__: Any) -> None:
    """Gradients are finalized by `optim_step`, once per window; a pass only accumulates (see `window`)."""


def _moe_config(moe: MoeSpec | None, layout: Layout) -> dict[str, Any]:
    if moe is None:
        # The default dispatcher refuses variable lengths, also where there is nothing to dispatch.
        return {"moe_token_dispatcher_type": "alltoall"}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_router_topk": moe.top_k,
        "moe_router_pre_softmax": not moe.normalized,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
    }


def transformer_config(spec: ModelSpec, layout: Layout, dtype: Dtype = "float32") -> TransformerConfig:
    """Megatron's configuration of the local layer spec, with every fused kernel off."""
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_query_groups,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_norm_eps,
        qk_layernorm=spec.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.virtual_pp if layout.virtual_pp > 1 else None,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=DTYPES[dtype],
        pipeline_dtype=DTYPES[dtype],
        bf16=dtype == "bfloat16",
        calculate_per_token_loss=True,
        finalize_model_grads_func=_defer_finalization,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        # Two interleaved stages exchange activations and gradients at once (see `pipeline`).
        overlap_p2p_comm=layout.virtual_pp > 1,
        batch_p2p_comm=layout.virtual_pp == 1,
        **_moe_config(spec.moe, layout),
    )
    # Shapes travel with the activations between pipeline stages, unless those interleave. Megatron refuses that
    # beside its all-gather dispatcher, which wants equal shapes on the ranks it gathers from; packing sees to those.
    config.variable_seq_lengths = layout.virtual_pp == 1
    return config


def _block_spec(config: TransformerConfig, spec: ModelSpec, chunk: int | None) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(
        num_experts=spec.moe.num_experts if spec.moe else None,
        normalization="RMSNorm",
        qk_layernorm=spec.qk_norm,
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if spec.qk_norm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def build(
    spec: ModelSpec, layout: Layout, *, fused_head: bool = False, dtype: Dtype = "float32"
) -> list[LogprobModel]:
    """This rank's model chunks in order, their weights not yet set: one, or `layout.virtual_pp` of them.

    Call inside `device.use()` and `layout.join`.
    """
    config = transformer_config(spec, layout, dtype)
    models = []
    for number in range(layout.virtual_pp):
        chunk = number if layout.virtual_pp > 1 else None
        model = LogprobModel(
            config=config,
            transformer_layer_spec=_block_spec(config, spec, chunk),
            vocab_size=layout.padded_vocab(spec.vocab_size),
            max_sequence_length=spec.context_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            parallel_output=True,
            share_embeddings_and_output_weights=spec.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=spec.rope_theta,
            vp_stage=chunk,
        )
        if device.has_gpu():  # it was made in the host's memory
            model.to(device.device())
        model.real_vocab_size = spec.vocab_size
        model.fused_head = fused_head
        _mark_what_is_split(model)
        if spec.moe and layout.lockstep > 1:
            model.keep_padding_from_experts()
        if spec.moe and layout.ep == 1 and layout.tp > 1:
            _sum_experts_over_tensor_parallel_ranks(model)
        models.append(model)
    return models


def _mark_what_is_split(model: GPTModel) -> None:
    """Megatron does so while it initializes weights, which are read from a folder here."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            set_tensor_model_parallel_attributes(weight, True, 0, 1)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(weight, True, 1, 1)


def _sum_experts_over_tensor_parallel_ranks(model: GPTModel) -> None:
    """Each tensor-parallel rank runs whole experts on its part of the sequence: their gradients are parts of one."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.sequence_parallel = True
            parameter.tensor_model_parallel = False
