"""Converted attention inside a live model: its maps, their projections, and how it runs."""

from collab_compress.attention.edits import MAP_KINDS, MapEdit
from collab_compress.attention.maps import ConvertedMap, MapConfig
from collab_compress.attention.rotary import RotaryConfig, RotaryQK
from collab_compress.attention.run import install_, is_converted, maps_of, register_attention, uninstall_
from collab_compress.attention.shared import QKConfig, SharedConfig, SharedQK
from collab_compress.attention.values import NarrowConfig, NarrowOV

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
