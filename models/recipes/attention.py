"""One latent attention module of transformers as an ONNX graph: hidden states, positions, mask and caches go in."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from models.recipes.naming import class_of, configuration_class

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
    "num_hidden_layers": 1,
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


def _module(model: str, attention: str, dtype: torch.dtype, config: dict[str, Any]) -> _Module:
    """The module with random weights: matrices of deviation 0.03, vectors about 1, biases about 0."""
    torch.manual_seed(0)
    configuration = configuration_class(model)(**{**SIZES, **(INDEXER if model in SELECTING else {}), **config})
    configuration._attn_implementation = attention
    block = class_of(model, ATTENTIONS[model])(configuration, 0)
    rotary = class_of(model, type(configuration).__name__.replace("Config", "RotaryEmbedding"))
    for key, parameter in block.named_parameters():
        drawn = torch.randn_like(parameter)
        centre = 0.0 if parameter.dim() > 1 or key.endswith("bias") else 1.0
        parameter.data = centre + drawn * (0.03 if parameter.dim() > 1 else 0.1)
    return _Module(block, None if rotary is None else rotary(configuration)).eval().to(dtype)


def _example(
    sizes: dict[str, int], dims: tuple[int, int, int], dtype: torch.dtype, mask: str, selects: bool
) -> dict[str, torch.Tensor | None]:
    """Inputs for `dims` (batch, sequence, past), with a causal mask."""
    batch, sequence, past = dims
    positions = torch.arange(past, past + sequence)
    visible = torch.arange(past + sequence)[None, :] <= positions[:, None]
    added = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    inputs: dict[str, torch.Tensor | None] = {
        "hidden_states": torch.randn(batch, sequence, sizes["hidden_size"]).to(dtype),
        "position_ids": positions[None].repeat(batch, 1),
        "attention_mask": {"added": added, "boolean": visible}[mask].repeat(batch, 1, 1, 1) if mask != "none" else None,
    }
    if past:
        inputs["past_ckv"] = torch.randn(batch, 1, past, sizes["kv_lora_rank"]).to(dtype)
        inputs["past_kpe"] = torch.randn(batch, 1, past, sizes["qk_rope_head_dim"]).to(dtype)
        if selects:
            inputs["past_idx_k"] = torch.randn(batch, past, sizes["index_head_dim"]).to(dtype)
    return inputs


_OUTPUTS = ["attn_out", "present_ckv", "present_kpe", "present_idx_k"]


def _dynamic_axes(stage: str, names: list[str]) -> dict[str, dict[int, Any]]:
    """Symbolic axes of each input: batch and sequence without a cache, batch and past (and sequence) with one."""
    batch, past, sequence = Dim("batch", min=1, max=64), Dim("past", min=2, max=4000), Dim("seq", min=2, max=4000)
    tokens = {0: batch} if stage == "decode" else {0: batch, 1: sequence}
    mask = {
        "prefill": {0: batch, 2: sequence, 3: sequence},
        "decode": {0: batch, 3: past + 1},
        "chunk": {0: batch, 2: sequence, 3: Dim.AUTO},
    }[stage]
    axes = {"hidden_states": tokens, "position_ids": tokens, "attention_mask": mask, "past_idx_k": {0: batch, 1: past}}
    return {name: axes.get(name, {0: batch, 2: past}) for name in names}


def _axis_name(size: Any) -> str:
    """The name of a symbolic size for TorchScript, which knows no sums."""
    name = getattr(size, "__name__", "total")
    return name if name.isidentifier() else "total"


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
    mask: str = "added",
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, int, int] | None = None,
    **config: Any,
) -> None:
    """Write the attention of a `model` type to `path`.

    `stage`: "prefill" (no cache), "decode" (one new token) or "chunk" (several new tokens behind a cache). `mask`:
    "added", "boolean" or "none". `dims` are batch, sequence and past of the example, and of the graph unless `dynamic`.
    `dynamo`: torch.export, else TorchScript. `config` overrides the sizes above.
    """
    selects = model in SELECTING
    module = _module(model, attention, dtype, config)
    dims = dims or {"prefill": (2, 12, 0), "decode": (2, 1, 16), "chunk": (2, 5, 16)}[stage]
    inputs = _example({**SIZES, **INDEXER, **config}, dims, dtype, mask, selects)
    names = [name for name, value in inputs.items() if value is not None]
    axes = _dynamic_axes(stage, names) if dynamic else None
    shared: dict[str, Any] = {
        "opset_version": opset,
        "input_names": names,
        "output_names": _OUTPUTS[: 1 if stage == "prefill" else 4 if selects else 3],
    }
    with torch.no_grad():
        if dynamo:
            shapes = None if axes is None else {name: axes.get(name) for name in inputs}
            options = {"dynamic_shapes": shapes, "optimize": optimize, "external_data": True, "verbose": False}
            torch.onnx.export(module, tuple(inputs.values()), path, dynamo=True, **options, **shared)
        else:
            names_of_axes = {
                name: {i: _axis_name(size) for i, size in sizes.items()} for name, sizes in (axes or {}).items()
            }
            options = {"dynamic_axes": names_of_axes or None, "do_constant_folding": optimize}
            torch.onnx.export(module, tuple(inputs.values()), str(path), dynamo=False, **options, **shared)
