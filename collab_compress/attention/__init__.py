"""Converted attention inside a live model: its maps, their projections, and how it runs."""

from collab_compress.attention.maps import ConvertedMap, MapConfig, MapEdit
from collab_compress.attention.rotary import RotaryConfig, RotaryQK
from collab_compress.attention.run import install_, is_converted, maps_of, register_attention, uninstall_
from collab_compress.attention.shared import QKConfig, SharedConfig, SharedQK
from collab_compress.attention.values import NarrowConfig, NarrowOV

SharedConfig.module, RotaryConfig.module, NarrowConfig.module = SharedQK, RotaryQK, NarrowOV
MAP_KINDS: dict[str, type[MapConfig]] = {config.kind: config for config in (SharedConfig, RotaryConfig, NarrowConfig)}
"""Name in checkpoints → config of the converted map."""

__all__ = [
    "MAP_KINDS",
    "ConvertedMap",
    "MapConfig",
    "MapEdit",
    "NarrowConfig",
    "NarrowOV",
    "QKConfig",
    "RotaryConfig",
    "RotaryQK",
    "SharedConfig",
    "SharedQK",
    "install_",
    "is_converted",
    "maps_of",
    "register_attention",
    "uninstall_",
]
