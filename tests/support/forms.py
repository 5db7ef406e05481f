"""Forms that the attention of a tiny model can be in, for tests that go through all of them."""

import copy
from functools import cache

import pytest
import torch

from collab_compress import Compression, alphas_of, compress
from collab_compress.architectures import find_attention

FORMS = {
    "dense": None,
    "collaborative": Compression(dk=13),
    "narrow": Compression(dv=12),
    "both": Compression(dk=13, dv=9),
}


def mostly_slow(cases, *quick):
    """Return parameters of a test; the normal run takes only `quick`."""
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


BERTS = [("bert", form) for form in FORMS]
PAIRS = [  # every form of one family, the dense and another form of the others
    *BERTS,
    ("albert", "collaborative"),
    ("albert", "dense"),
    ("marian", "both"),
    ("marian", "dense"),
    ("distilbert", "dense"),
    ("distilbert", "narrow"),
]
TURNS = [(*pair, ("eager", "sdpa")[place % 2]) for place, pair in enumerate(PAIRS)]  # each family and form by both
in_pairs = pytest.mark.parametrize(("family", "form"), PAIRS)
in_turns = pytest.mark.parametrize(("family", "form", "implementation"), TURNS)
COMPILED = [*BERTS, ("marian", "collaborative")]


def convert_(model, form):
    """Convert a dense model to a form in place; return it."""
    if FORMS[form] is not None:
        compress(model, FORMS[form], calibration=None)
    return model


@cache
def _converted(make_tiny, family, form):
    return convert_(make_tiny(family), form)


def converted(make_tiny, family, form):
    """Return a tiny model in a form, and leave the seed as building it does."""
    model = copy.deepcopy(_converted(make_tiny, family, form))
    torch.manual_seed(0)
    return model


def hidden(model, batch):
    """Return the last hidden states at unpadded tokens."""
    with torch.no_grad():
        return model(**batch).last_hidden_state[batch.get("decoder_attention_mask", batch["attention_mask"]).bool()]


def outputs(model, batch):
    with torch.no_grad():
        return model(**batch)[0]


def randomise_(model, seed=0):
    """Set different alphas, far from the identity, in each module."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for alphas in alphas_of(model).values():
            alphas.add_(0.3 * torch.randn_like(alphas))


def value_size(site):
    """Return the number of value channels of each head."""
    ov = getattr(site.module, "ov", None)
    return site.head_width if ov is None else ov.config.size


def heads_of(site, x):
    """Split the inputs of an output projection into heads, (…, dv) to (…, H, s)."""
    return x.unflatten(-1, (-1, value_size(site)))


def projected_heads(model, batch):
    """Return the model's output, and the inputs (B, T, H, s) of each call of an output projection."""
    heads, handles = [], []
    for site in find_attention(model):

        def keep(_, args, site=site):
            heads.append(heads_of(site, args[0]))

        handles.append(site.part(site.paths.output).register_forward_pre_hook(keep))
    output = model(**batch)[0]
    for handle in handles:
        handle.remove()
    return output, heads


def checkpoint_(model, **options):
    """Turn gradient checkpointing on, by its name of before and after Transformers 5.2x."""
    newer = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if newer else model.gradient_checkpointing_enable)(options or None)
