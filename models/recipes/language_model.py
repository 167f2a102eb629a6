"""A whole language model of transformers, two layers, as ONNX graphs with and without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.export import Dim
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

__all__ = ["build", "export_for_generation", "export_without_cache"]

_LATENT: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_GROUPED: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_COMMON: dict[str, Any] = {
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_INDEXER: dict[str, Any] = {
    "index_topk": 8,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "mlp_layer_types": ["dense", "sparse"],
}
_OWN: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": {**_LATENT, **_INDEXER},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, **_INDEXER},
    "glm4_moe_lite": {**_LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": {**_LATENT, **_INDEXER},
    "hy_v4": {**_LATENT, **_INDEXER},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 1,
        "ffn_hidden_size": 256,
        "expert_ffn_hidden_size": 128,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "minicpm3": _LATENT,
    "mistral4": _LATENT,
    "youtu": _LATENT,
}
"""What a model type needs beside the common sizes; those not listed share keys and values between heads."""


def build(
    model: str,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    experts: str | None = None,
    **config: Any,
) -> PreTrainedModel:
    """A causal language model of this type with random weights; `config` overrides the sizes above.

    `experts`: how experts are computed, None for the default of transformers.
    """
    torch.manual_seed(0)
    configuration = AutoConfig.for_model(model, **{**_COMMON, **_OWN.get(model, _GROUPED), **config})
    chosen = {} if experts is None else {"experts_implementation": experts}
    built = AutoModelForCausalLM.from_config(configuration, attn_implementation=attention, dtype=dtype, **chosen)
    for name, parameter in built.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3 if name.endswith("gate.weight") else 0.03)
    return built.eval()


def export_for_generation(
    folder: Path,
    name: str,
    model: PreTrainedModel,
    *,
    opset: int | None = None,
    dynamic: bool = True,
    optimize: bool = True,
) -> list[Path]:
    """Write the graphs that generation needs, with past latents or keys as inputs, as transformers exports them.

    One file per component: `name`_prefill.onnx, `name`_decode.onnx.
    """
    ids = torch.randint(3, model.config.vocab_size, (2, 12))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = OnnxConfig(dynamic=dynamic, opset_version=opset, optimize=optimize)
    exported = OnnxExporter().export_for_generation(model, inputs, options)
    paths = []
    for component, made in exported.components.items():
        path = folder / f"{name}_{component}.onnx"
        ir.save(made.program, path, external_data=f"{path.name}.data")
        paths.append(path)
    return paths


class _WithoutCache(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def export_without_cache(
    path: Path, model: PreTrainedModel, *, opset: int = 18, optimize: bool = True, dynamo: bool = True
) -> None:
    """Write the whole model from token ids to logits as torch exports it: no cache goes in or comes out."""
    ids = torch.randint(3, model.config.vocab_size, (2, 12))
    inputs = (ids, torch.ones_like(ids))
    names = ["input_ids", "attention_mask"]
    with torch.no_grad():
        if dynamo:
            axes = {0: Dim("batch", min=1, max=64), 1: Dim("seq", min=2, max=400)}
            torch.onnx.export(
                _WithoutCache(model),
                inputs,
                path,
                dynamo=True,
                opset_version=opset,
                optimize=optimize,
                dynamic_shapes=(axes, axes),
                input_names=names,
                output_names=["logits"],
                verbose=False,
                external_data=True,
            )
        else:
            axes_by_name = {name: {0: "batch", 1: "seq"} for name in names}
            torch.onnx.export(
                _WithoutCache(model),
                inputs,
                str(path),
                dynamo=False,
                opset_version=opset,
                dynamic_axes=axes_by_name,
                input_names=names,
                output_names=["logits"],
                do_constant_folding=optimize,
            )
