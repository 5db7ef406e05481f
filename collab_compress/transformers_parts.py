"""What this package uses of Transformers beyond its public interface, for all supported versions.

A part that moved between versions is looked up here alone. A part that older versions lack has a replacement; any
other missing part is an error that names it.
"""

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import transformers
from transformers import Cache

VERSIONS = ">=5.0,<5.25"  # tested by `make test-versions`
UNLABELLED = -100  # label of what a loss leaves out


def _part(module: str, name: str) -> Any:
    """Return `transformers.module.name`, or raise an ImportError that names it."""
    try:
        return getattr(import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"Transformers {transformers.__version__} has no {name} in transformers.{module}, which collab_compress "
            f"relies on; install transformers{VERSIONS}"
        ) from error


class _Missing:
    """Replaces a class that this version of Transformers lacks; nothing is an instance of it."""


ALL_ATTENTION_FUNCTIONS: Any = _part("modeling_utils", "ALL_ATTENTION_FUNCTIONS")
WeightConverter: Any = _part("core_model_loading", "WeightConverter")
WeightRenaming: Any = _part("core_model_loading", "WeightRenaming")
PrefixChange: Any = getattr(import_module("transformers.core_model_loading"), "PrefixChange", _Missing)
HfQuantizer: Any = _part("quantizers.base", "HfQuantizer")
AutoHfQuantizer: Any = _part("quantizers.auto", "AutoHfQuantizer")
QUANTIZATION_CONFIGS: dict[str, Any] = _part("quantizers.auto", "AUTO_QUANTIZATION_CONFIG_MAPPING")
QUANTIZERS: dict[str, Callable[..., Any]] = _part("quantizers.auto", "AUTO_QUANTIZER_MAPPING")
rename_source_key: Callable[..., tuple[str, str | None]] = _part("core_model_loading", "rename_source_key")
weight_conversions_of: Callable[..., list[Any]] = _part("conversion_mapping", "get_model_conversion_mapping")
sdpa_attention_forward: Any = _part("integrations.sdpa_attention", "sdpa_attention_forward")

_create_causal_mask: Callable[..., Any] = _part("masking_utils", "create_causal_mask")
CACHE_NAME = "cache" if "cache" in inspect.signature(_create_causal_mask).parameters else "past_key_values"
"""Argument and output of models that holds the key-value cache, renamed in 5.24."""

UPDATES_CONVERSIONS = hasattr(HfQuantizer, "update_weight_conversions")
"""Whether a quantizer can change how the weights of a checkpoint are converted."""


def find_cache(arguments: Iterable[Any]) -> Cache | None:
    """Return the key-value cache among an attention module's arguments; families and versions name it differently."""
    return next((argument for argument in arguments if isinstance(argument, Cache)), None)
