"""The classes of a model type in transformers."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["class_of", "configuration_class"]


def class_of(model: str, name: str) -> Any:
    """The class `name` of a model type; None where it has none of that name."""
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name, None)


def configuration_class(model: str) -> Any:
    """The configuration class of a model type: DeepseekV3Config of deepseek_v3."""
    module = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    wanted = f"{model.replace('_', '')}config"
    return getattr(module, next(name for name in dir(module) if name.lower() == wanted))
