"""Every family of the installed Transformers that has attention: converted, or refused and why.

The verdicts are read off the source of its attention classes and kept in verdicts.yaml, so that a new release shows
what it changed. `python tests/families/test_verdicts.py` writes the file anew.
"""

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
import transformers
import yaml
from transformers.models.auto.configuration_auto import model_type_to_module_name

from collab_compress.architectures import FAMILIES

MODELS = Path(transformers.__file__).parent / "models"
STORED = Path(__file__).with_name("verdicts.yaml")
DOCUMENTED = Path(__file__).parents[2] / "docs" / "families.md"
CONVERTED = "converted"
# What the source of an attention class says, the gravest first: (verdict, pattern that must be there).
REASONS = (
    ("rotary", r"rotary|rope\b|cos, ?sin"),
    ("QK-norm", r"(\bq|\bk|query|key|qk)_?(layer)?_?norm"),
    ("latent keys", r"kv_a_proj|kv_b_proj|kv_lora"),
    (
        "relative keys",
        r"linear_pos|pos_key_proj|r_r_bias|rel_pos|relative_key|distance_embedding|pos_bias_[uv]|disentangled",
    ),
    (
        "sparse or windowed",
        r"sliding_chunk|block_sparse|window_size|num_hashes|landmark|deformable|sampling_offset|prob_?sparse|local_block",
    ),
    ("linear or recurrent", r"cumsum|recurrent|feature_map|fft\b|state_space|autocorrelation"),
)
CLASS = r"^class \w*Attention\w*\(.*?(?=^\S)"
INTERFACE = r"attention_interface"
ATTENDS = r"softmax|attention_interface|scaled_dot_product|multi_head_attention_forward"
STORAGE = (
    ("grouped queries", r"num_key_value_groups|n_rep|repeat_kv|num_key_value_heads"),
    (
        "fused or other storage",
        r"Conv1D|\bqkv\b|query_key_value|c_attn|in_proj|qkv_proj|Wqkv|W_pack|Conv2d|\.chunk\(3",
    ),
    ("fixed head count", r"\.view\([^()\n]*self\.(num_heads|num_attention_heads|n_heads?)\b"),
)
NOT_YET = "not yet described"


def classes(folder):
    """Source of each class of a family that computes attention."""
    for path in sorted(folder.glob("modeling_*.py")):
        for found in re.finditer(CLASS, path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            if re.search(ATTENDS, found[0]):
                yield found[0]


def read(text):
    """Verdict on one attention class."""
    for reason, pattern in REASONS:
        if re.search(pattern, text, re.IGNORECASE):
            return reason
    if not re.search(INTERFACE, text):
        return "not on the attention interface"
    return next((reason for reason, pattern in STORAGE if re.search(pattern, text)), NOT_YET)


@lru_cache
def verdicts():
    """Name of each family's folder → verdict; with several kinds of attention the gravest counts."""
    order = [name for name, _ in REASONS] + ["not on the attention interface"] + [name for name, _ in STORAGE]
    converted = {model_type_to_module_name(name) for name in FAMILIES}
    found = {}
    for folder in sorted(path for path in MODELS.iterdir() if path.is_dir()):
        seen = {read(text) for text in classes(folder)}
        if seen:
            gravest = next((name for name in order if name in seen), NOT_YET)
            found[folder.name] = CONVERTED if folder.name in converted else gravest
    return found


def test_verdicts_are_those_on_record():
    stored = yaml.safe_load(STORED.read_text(encoding="utf-8"))
    found = verdicts()
    changed = {
        name: f"{stored['families'].get(name, 'new')} → {found.get(name, 'gone')}"
        for name in sorted(stored["families"].keys() | found.keys())
        if stored["families"].get(name) != found.get(name)
    }
    if changed and transformers.__version__ != stored["transformers"]:
        pytest.skip(
            f"recorded for Transformers {stored['transformers']}, this is {transformers.__version__}: {changed}"
        )
    assert not changed, f"{changed}; if that is right: python tests/families/test_verdicts.py"


def test_every_described_family_is_there():
    found = verdicts()
    assert {name for name, verdict in found.items() if verdict == CONVERTED} == {
        model_type_to_module_name(name) for name in FAMILIES
    }


def test_reading_agrees_with_what_can_be_converted():
    """What nothing speaks against in the source of the described families is what conversion needs."""
    allowed = {NOT_YET, "fused or other storage", "fixed head count"}
    for name in FAMILIES:
        seen = {read(text) for text in classes(MODELS / model_type_to_module_name(name))}
        assert seen <= allowed | ({"rotary"} if FAMILIES[name].rotary else set()), (name, seen)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("olmoe", "rotary"),
        ("gpt_neox", "rotary"),
        ("deberta_v2", "relative keys"),
        ("swin", "sparse or windowed"),
        ("mpnet", "not on the attention interface"),
        ("gpt_bigcode", "grouped queries"),
        ("decision_transformer", "fused or other storage"),
        ("umt5", "fixed head count"),
        ("clip", NOT_YET),
    ],
)
def test_reading_agrees_with_what_is_known(name, verdict):
    assert verdicts()[name] == verdict


def test_the_table_in_the_documentation_counts_right():
    counts = Counter(yaml.safe_load(STORED.read_text(encoding="utf-8"))["families"].values())
    text = DOCUMENTED.read_text(encoding="utf-8")
    for verdict, count in counts.items():
        assert re.search(rf"^\| {re.escape(verdict)} \| {count} \|", text, re.MULTILINE), (verdict, count)


if __name__ == "__main__":
    content = {"transformers": transformers.__version__, "families": verdicts()}
    STORED.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    print(Counter(content["families"].values()))
