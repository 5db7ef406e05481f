"""The parts of Transformers that this package uses beyond the public interface, in all versions that it works with.

A part that moves from one version to another is looked for here alone. What an older version lacks has a replacement
here; what no version may lack is an error that names it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import transformers

VERSIONS = ">=5.0,<5.24"  # that were tried: `make test-versions`


def _part(module: str, name: str) -> Any:
    """Return `transformers.module.name`.

    Raises:
        ImportError: the installed version does not have it.
    """
    try:
        return getattr(import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"Transformers {transformers.__version__} has no {name} in transformers.{module}, which collab_compress "
            f"relies on; install transformers{VERSIONS}"
        ) from error


class _Missing:
    """In place of a class that this version of Transformers does not have: nothing is an instance of it."""


ALL_ATTENTION_FUNCTIONS: Any = _part("modeling_utils", "ALL_ATTENTION_FUNCTIONS")
WeightConverter: Any = _part("core_model_loading", "WeightConverter")
WeightRenaming: Any = _part("core_model_loading", "WeightRenaming")
PrefixChange: Any = getattr(import_module("transformers.core_model_loading"), "PrefixChange", _Missing)
HfQuantizer: Any = _part("quantizers.base", "HfQuantizer")
QUANTIZATION_CONFIGS: dict[str, Any] = _part("quantizers.auto", "AUTO_QUANTIZATION_CONFIG_MAPPING")
QUANTIZERS: dict[str, Any] = _part("quantizers.auto", "AUTO_QUANTIZER_MAPPING")
rename_source_key: Callable[..., tuple[str, str | None]] = _part("core_model_loading", "rename_source_key")
weight_conversions_of: Callable[..., list[Any]] = _part("conversion_mapping", "get_model_conversion_mapping")
sdpa_attention_forward: Any = _part("integrations.sdpa_attention", "sdpa_attention_forward")

UPDATES_CONVERSIONS = hasattr(HfQuantizer, "update_weight_conversions")
"""Whether a quantizer can change how the tensors of a checkpoint become a model's."""
