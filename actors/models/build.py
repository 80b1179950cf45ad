"""Builds the Megatron `GPTModel` of a spec, for this rank's place in the layout."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from actors.head import target_logprobs
from actors.models.spec import ModelSpec


class LogprobModel(GPTModel):
    """A `GPTModel` whose output for labels (B, S) or (B, S, K) is the labels' log-probabilities."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        return target_logprobs(logits, labels)


def _defer_finalization(*_: Any, **__: Any) -> None:
    """Gradients are finalized by `optim_step`, once per window; a pass only accumulates (see `window`)."""


def transformer_config(spec: ModelSpec) -> TransformerConfig:
    """Megatron's configuration of the local layer spec in float32, with every fused kernel off."""
    return TransformerConfig(
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
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
        finalize_model_grads_func=_defer_finalization,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # dense model; the default one refuses variable lengths
    )


def build(spec: ModelSpec) -> LogprobModel:
    """The model of this rank, its weights not yet set. Call inside `device.use()` and `layout.join`."""
    layer_spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=spec.qk_norm)
    return LogprobModel(
        config=transformer_config(spec),
        transformer_layer_spec=layer_spec,
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.context_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
    )
