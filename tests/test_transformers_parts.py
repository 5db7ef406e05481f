"""Parts of Transformers beyond its public interface: one that is gone is named, with the versions that work."""

import importlib
import sys
from dataclasses import replace

import pytest
import transformers.core_model_loading

import collab_compress.transformers_parts as parts


def test_a_part_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr(transformers.core_model_loading, "rename_source_key")
    expected = rf"has no rename_source_key in transformers\.core_model_loading.*{parts.VERSIONS}"
    with pytest.raises(ImportError, match=expected):
        importlib.reload(parts)


def test_a_module_that_is_gone_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    with pytest.raises(ImportError, match="no get_model_conversion_mapping in "):
        importlib.reload(parts)


def test_a_family_that_needs_a_newer_version_is_refused(monkeypatch, make_tiny):
    from collab_compress import Compression, UnsupportedModelError, compress
    from collab_compress.architectures import FAMILIES

    monkeypatch.setitem(FAMILIES, "bert", replace(FAMILIES["bert"], since="99.1"))
    with pytest.raises(
        UnsupportedModelError, match=r"type 'bert' can be converted with Transformers 99\.1 and newer"
    ):
        compress(make_tiny("bert"), Compression(dk=8), calibration=None)
