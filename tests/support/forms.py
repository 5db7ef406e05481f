"""Forms that the attention of a tiny model can be in, for tests that go through all of them."""

import pytest
import torch

from collab_compress import Compression, compress

FORMS = {
    "dense": None,
    "collaborative": Compression(dk=13),
    "narrow": Compression(dv=12),
    "unequal": Compression(dk=13, dv=10),  # 4, 3 and 3 channels of values
}


def mostly_slow(cases, *quick):
    """Parameters of a test, of which the normal run takes `quick` alone."""
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


BERTS = [("bert", form) for form in FORMS]
COMPILED = mostly_slow([*BERTS, ("marian", "collaborative")], ("bert", "dense"), ("bert", "unequal"))


def convert_(model, form):
    """Bring a dense model into a form, in place; returns it."""
    if FORMS[form] is not None:
        compress(model, FORMS[form], calibration=None)
    return model


def value_sizes(site):
    """Channels of each head's values."""
    form = getattr(site.module, "value_form", None)
    return list(form.sizes) if form else [site.head_width] * site.heads


def heads_of(site, x):
    """Split what an output projection reads into heads, (…, dv) to (…, H, s), filled up with zeros."""
    sizes = value_sizes(site)
    return torch.stack(
        [torch.nn.functional.pad(head, (0, max(sizes) - head.shape[-1])) for head in x.split(sizes, -1)], -2
    )
