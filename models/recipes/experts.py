"""One mixture-of-experts block of transformers as an ONNX graph: hidden states in, hidden states out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from models.recipes.naming import class_of, configuration_class

__all__ = ["BLOCKS", "export_experts"]

HIDDEN, INTERMEDIATE, EXPERTS = 256, 128, 8

BLOCKS = {
    "deepseek_v2": "DeepseekV2Moe",
    "deepseek_v3": "DeepseekV3MoE",
    "glm4_moe_lite": "Glm4MoeLiteMoE",
    "glm_moe_dsa": "GlmMoeDsaMoE",
    "gpt_oss": "GptOssMLP",
    "longcat_flash": "LongcatFlashMoE",
    "mixtral": "MixtralSparseMoeBlock",
    "olmoe": "OlmoeSparseMoeBlock",
    "qwen2_moe": "Qwen2MoeSparseMoeBlock",
    "qwen3_moe": "Qwen3MoeSparseMoeBlock",
}
"""The block of each model type."""


class _HiddenStates(nn.Module):
    """The block without the router's own results."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        result = self.block(hidden_states)
        return result[0] if isinstance(result, tuple) else result


def _block(model: str, implementation: str, dtype: torch.dtype, top_k: int, config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "expert_ffn_hidden_size": INTERMEDIATE,
        "ffn_hidden_size": INTERMEDIATE,
        "shared_expert_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": top_k,
        "moe_topk": top_k,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    }
    if model == "deepseek_v2":
        sizes["topk_method"] = "group_limited_greedy"
    configuration = configuration_class(model)(**{**sizes, **config})
    configuration._experts_implementation = implementation
    block = class_of(model, BLOCKS[model])(configuration)
    for parameter in block.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1
    return _HiddenStates(block).eval().to(dtype)


def export_experts(
    path: Path,
    model: str,
    implementation: str = "batched_mm",
    *,
    opset: int = 18,
    optimize: bool = True,
    dynamo: bool = True,
    dynamic: bool = True,
    dtype: torch.dtype = torch.float32,
    top_k: int = 2,
    **config: Any,
) -> None:
    """Write the experts of a `model` type to `path`; `implementation` as transformers names it (batched_mm, eager)."""
    module = _block(model, implementation, dtype, top_k, config)
    inputs = (torch.randn(2, 6, HIDDEN).to(dtype),)
    names, outputs = ["hidden_states"], ["output"]
    with torch.no_grad():
        if dynamo:
            axes = ({0: Dim("batch", min=1, max=64), 1: Dim("seq", min=2, max=4000)},)
            torch.onnx.export(
                module,
                inputs,
                path,
                dynamo=True,
                opset_version=opset,
                optimize=optimize,
                dynamic_shapes=axes if dynamic else None,
                input_names=names,
                output_names=outputs,
                verbose=False,
                external_data=True,
            )
        else:
            by_name = {"hidden_states": {0: "batch", 1: "seq"}} if dynamic else None
            torch.onnx.export(
                module,
                inputs,
                str(path),
                dynamo=False,
                opset_version=opset,
                dynamic_axes=by_name,
                input_names=names,
                output_names=outputs,
                do_constant_folding=optimize,
            )
