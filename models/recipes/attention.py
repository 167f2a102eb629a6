"""One latent attention module of transformers as an ONNX graph: hidden states, positions, mask and caches go in."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

__all__ = ["ATTENTIONS", "export_attention"]

HIDDEN, HEADS = 1024, 4

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}

INDEXER: dict[str, Any] = {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 128}

ATTENTIONS = {
    "axk1": "AXK1Attention",
    "axk2": "AXK2Attention",
    "deepseek_v3": "DeepseekV3Attention",
    "deepseek_v32": "DeepseekV32Attention",
    "glm4_moe_lite": "Glm4MoeLiteAttention",
    "glm_moe_dsa": "GlmMoeDsaAttention",
    "hy_v4": "HYV4Attention",
    "kimi_linear": "KimiLinearAttention",
    "longcat_flash": "LongcatFlashMLA",
    "minicpm3": "MiniCPM3Attention",
    "mistral4": "Mistral4Attention",
    "youtu": "YoutuAttention",
}
"""The attention class of each model type."""

SELECTING = frozenset({"axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"})
"""Model types whose attention chooses keys by an indexer, which has a cache of its own."""


class _Cache:
    """What a cache layer of transformers does (concatenate), over plain tensors."""

    def __init__(self, latent: torch.Tensor, rotated: torch.Tensor, indexer: torch.Tensor | None) -> None:
        self.latent, self.rotated, self.indexer = latent, rotated, indexer

    def update(self, latent: torch.Tensor, rotated: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        self.latent = torch.cat([self.latent, latent], dim=-2)
        self.rotated = torch.cat([self.rotated, rotated], dim=-2)
        return self.latent, self.rotated

    def update_indexer(self, keys: torch.Tensor, *_: object) -> torch.Tensor:
        self.indexer = keys if self.indexer is None else torch.cat([self.indexer, keys], dim=1)
        return self.indexer

    def get_seq_length(self, *_: object) -> int:
        return self.latent.shape[-2]


class _Module(nn.Module):
    """Attention and rotary embedding, with the caches as tensors."""

    def __init__(self, attention: nn.Module, rotary: nn.Module | None) -> None:
        super().__init__()
        self.attention, self.rotary = attention, rotary
        self.asks_positions = "position_ids" in inspect.signature(attention.forward).parameters

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_ckv: torch.Tensor | None = None,
        past_kpe: torch.Tensor | None = None,
        past_idx_k: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        angles = (None, None) if self.rotary is None else self.rotary(hidden_states, position_ids)
        cache = None if past_ckv is None else _Cache(past_ckv, past_kpe, past_idx_k)
        positions = {"position_ids": position_ids} if self.asks_positions else {}
        attended = self.attention(
            hidden_states=hidden_states,
            position_embeddings=angles,
            attention_mask=attention_mask,
            past_key_values=cache,
            **positions,
        )[0]
        if cache is None:
            return (attended,)
        indexed = () if cache.indexer is None else (cache.indexer,)
        return (attended, cache.latent, cache.rotated, *indexed)


def _module(model: str, attention: str, dtype: torch.dtype, layer: int, config: dict[str, Any]) -> _Module:
    """The module with random weights: matrices of deviation 0.03, vectors about 1, biases about 0."""
    torch.manual_seed(0)
    classes = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    configs = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    name = next(key for key in dir(configs) if key.endswith("Config") and key.lower() == f"{model.replace('_', '')}config")
    chosen = {**SIZES, **(INDEXER if model in SELECTING else {}), **config}
    configuration = getattr(configs, name)(**chosen)
    configuration._attn_implementation = attention
    block = getattr(classes, ATTENTIONS[model])(configuration, layer)
    rotary = getattr(classes, f"{name.removesuffix('Config')}RotaryEmbedding", None)
    for key, parameter in block.named_parameters():
        drawn = torch.randn_like(parameter)
        centre = 0.0 if parameter.dim() > 1 or key.endswith("bias") else 1.0
        parameter.data = centre + drawn * (0.03 if parameter.dim() > 1 else 0.1)
    return _Module(block, None if rotary is None else rotary(configuration)).eval().to(dtype)


def _example(sizes: dict[str, int], dims: tuple[int, int, int], dtype: torch.dtype, selects: bool) -> list[torch.Tensor]:
    """Inputs for `dims` (batch, sequence, past), with a causal mask."""
    batch, sequence, past = dims
    positions = torch.arange(past, past + sequence)[None].repeat(batch, 1)
    later = torch.arange(past + sequence)[None, :] > torch.arange(past, past + sequence)[:, None]
    mask = torch.zeros(batch, 1, sequence, past + sequence).masked_fill(later, torch.finfo(dtype).min)
    inputs = [torch.randn(batch, sequence, sizes["hidden_size"]).to(dtype), positions, mask.to(dtype)]
    if past:
        inputs.append(torch.randn(batch, 1, past, sizes["kv_lora_rank"]).to(dtype))
        inputs.append(torch.randn(batch, 1, past, sizes["qk_rope_head_dim"]).to(dtype))
        if selects:
            inputs.append(torch.randn(batch, past, 128).to(dtype))
    return inputs


_INPUTS = ["hidden_states", "position_ids", "attention_mask", "past_ckv", "past_kpe", "past_idx_k"]
_OUTPUTS = ["attn_out", "present_ckv", "present_kpe", "present_idx_k"]


def _dynamic(kind: str, count: int) -> list[dict[int, Any]]:
    """Symbolic axes of each input: batch and sequence without a cache, batch and past (and sequence) with one."""
    batch, past = Dim("batch", min=1, max=64), Dim("past", min=2, max=4000)
    sequence = Dim("seq", min=2, max=4000)
    if kind == "prefill":
        axes = [{0: batch, 1: sequence}, {0: batch, 1: sequence}, {0: batch, 2: sequence, 3: sequence}]
    elif kind == "decode":
        axes = [{0: batch}, {0: batch}, {0: batch, 3: past + 1}]
    else:
        total = Dim.AUTO
        axes = [{0: batch, 1: sequence}, {0: batch, 1: sequence}, {0: batch, 2: sequence, 3: total}]
    return [*axes, {0: batch, 2: past}, {0: batch, 2: past}, {0: batch, 1: past}][:count]


def export_attention(
    path: Path,
    model: str,
    stage: str = "decode",
    *,
    opset: int = 18,
    optimize: bool = True,
    dynamo: bool = True,
    dynamic: bool = True,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    layer: int = 0,
    dims: tuple[int, int, int] | None = None,
    **config: Any,
) -> None:
    """Write the attention of layer `layer` of a `model` type to `path`.

    `stage`: "prefill" (no cache), "decode" (one new token) or "chunk" (several new tokens behind a cache). `dims` are
    batch, sequence and past of the example, and of the graph unless `dynamic`. `dynamo`: torch.export, else TorchScript.
    `config` overrides the sizes above.
    """
    selects = model in SELECTING
    module = _module(model, attention, dtype, layer, config)
    dims = dims or {"prefill": (2, 12, 0), "decode": (2, 1, 16), "chunk": (2, 5, 16)}[stage]
    inputs = _example({**SIZES, **config}, dims, dtype, selects)
    names = _INPUTS[: len(inputs)]
    outputs = _OUTPUTS[: 1 if len(inputs) == 3 else 4 if selects else 3]
    axes = _dynamic(stage, len(inputs)) if dynamic else None
    with torch.no_grad():
        if dynamo:
            torch.onnx.export(
                module,
                tuple(inputs),
                path,
                dynamo=True,
                opset_version=opset,
                optimize=optimize,
                dynamic_shapes=None if axes is None else tuple(axes),
                input_names=names,
                output_names=outputs,
                verbose=False,
                external_data=True,
            )
            return
        named = None if axes is None else {
            name: {axis: _axis_name(size) for axis, size in dict_.items()} for name, dict_ in zip(names, axes, strict=True)
        }
        torch.onnx.export(
            module,
            tuple(inputs),
            str(path),
            dynamo=False,
            opset_version=opset,
            dynamic_axes=named,
            input_names=names,
            output_names=outputs,
            do_constant_folding=optimize,
        )


def _axis_name(size: Any) -> str:
    return getattr(size, "__name__", "total").replace(" ", "").replace("past+1", "total")
