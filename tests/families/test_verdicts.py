"""Every family of the installed Transformers that has attention: converted, or refused and why.

The verdicts are read off the source of its attention classes and kept in verdicts.yaml, so that a new release shows
what it changed. `python tests/families/test_verdicts.py` writes the file anew.
"""

import re
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
import transformers
import yaml

from collab_compress.attention.forwards import FORWARDS

sys.path.append(str(Path(__file__).parents[1] / "support"))  # where this is run as a script
from stock_classes import DESCRIBED

MODELS = Path(transformers.__file__).parent / "models"
STORED = Path(__file__).with_name("verdicts.yaml")
CONVERTED = "converted"
IN_PART = "converted in part"
KEEPS_SCORES = "values and feed-forward blocks alone"
BLOCKS_ALONE = "feed-forward blocks alone"
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
CLASS = r"^class (\w*Attention\w*)\(.*?(?=^\S)"
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
OWN = "not on the attention interface"
NOT_YET = "not yet described"


def classes(folder):
    """Yield the name and source of each class of a family that computes attention."""
    for path in sorted(folder.glob("modeling_*.py")):
        for match in re.finditer(CLASS, path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            if re.search(ATTENDS, match[0]):
                yield match[1], match[0]


def read(text):
    """Return the verdict on one attention class."""
    for reason, pattern in REASONS:
        if re.search(pattern, text, re.IGNORECASE):
            return reason
    if not re.search(INTERFACE, text):
        return OWN
    return next((reason for reason, pattern in STORAGE if re.search(pattern, text)), NOT_YET)


@lru_cache
def verdicts():
    """Name of each family's folder → verdict; with several kinds of attention the gravest counts.

    Where some of the classes can be converted and others not, as those of two towers, it is converted in part.
    """
    order = [name for name, _ in REASONS] + [OWN] + [name for name, _ in STORAGE]
    result = {}
    for folder in sorted(path for path in MODELS.iterdir() if path.is_dir()):
        sources = dict(classes(folder))
        described = {name for place, name in DESCRIBED if place == folder.name}
        if described.isdisjoint(sources):
            reasons = {read(text) for text in sources.values()}
            if reasons:
                result[folder.name] = next((name for name in order if name in reasons), NOT_YET)
        else:
            families = [DESCRIBED[folder.name, name] for name in described]
            if any(family.keeps_attention for family in families):
                result[folder.name] = BLOCKS_ALONE
            elif any(family.keeps_scores for family in families):
                result[folder.name] = KEEPS_SCORES
            else:
                result[folder.name] = CONVERTED if described.issuperset(sources) else IN_PART
    return result


def test_verdicts_are_those_on_record():
    stored = yaml.safe_load(STORED.read_text(encoding="utf-8"))
    actual = verdicts()
    changed = {
        name: f"{stored['families'].get(name, 'new')} → {actual.get(name, 'gone')}"
        for name in sorted(stored["families"].keys() | actual.keys())
        if stored["families"].get(name) != actual.get(name)
    }
    if changed and transformers.__version__ != stored["transformers"]:
        pytest.skip(
            f"recorded for Transformers {stored['transformers']}, this is {transformers.__version__}: {changed}"
        )
    count = sum(verdict == CONVERTED for verdict in actual.values())
    assert not changed, (
        f"{count} of {len(actual)} families are converted, and these are not as recorded: {changed}; if that is "
        "right: python tests/families/test_verdicts.py"
    )


def test_reading_agrees_with_what_can_be_converted():
    """The source of each described family yields no reason against its conversion."""
    for path in MODELS.iterdir():
        for name, text in classes(path) if path.is_dir() else ():
            family = DESCRIBED.get((path.name, name))
            if family is None:
                continue
            own = [OWN] if name in FORWARDS or family.keeps_attention else []
            turned = ["rotary"] if family.rotary else []
            allowed = {NOT_YET, "fused or other storage", "fixed head count", *own, *turned}
            assert read(text) in allowed, (name, read(text))


if __name__ == "__main__":
    content = {"transformers": transformers.__version__, "families": verdicts()}
    STORED.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    print(Counter(content["families"].values()))
