"""What methods on heads refuse: weights, edits and hooks of the model stay as they were."""

import pytest
import torch
from torch import nn

from collab_compress import (
    CheckpointError,
    Compression,
    HeadMask,
    UnsupportedModelError,
    compress,
    head_importance,
    merge_alphas_,
    mix_heads_,
    prune_heads_,
)
from collab_compress.analysis import dominant_heads, head_covariances
from collab_compress.attention.run import head_hooks
from collab_compress.checkpoint import edits_of
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.heads import (
    DropHead,
    HeadGates,
    Recorder,
    RotationOptions,
    Rotator,
    average_distance,
    confidence,
    least_important,
    swap_heads_,
)

FIRST, SECOND = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"
PAIR = ((FIRST, 0), (SECOND, 1))
NAN = float("nan")


class Adapter(nn.Linear):
    """As an adapter would."""

    def forward(self, x):
        return 2 * super().forward(x)


def set_(path, make):
    """Return a function that sets an attribute below the layers of a model, as "0.attention.self.key"."""

    def spoil(model):
        holder, name = path.rsplit(".", 1)
        setattr(model.encoder.layer.get_submodule(holder), name, make(model) if callable(make) else make)

    return spoil


def offload(model):
    model.encoder.layer[0].attention.self.value.to("meta")


def to_integers(model):
    weight = model.encoder.layer[0].attention.self.value.weight
    model.encoder.layer[0].attention.self.value.weight = nn.Parameter(weight.to(torch.int8), requires_grad=False)


def quantize(method, **more):
    return lambda model: setattr(model.config, "quantization_config", {"quant_method": method, **more})


def wrap_merged(model):
    mix_heads_(model)
    model.encoder.layer[1].attention.output.dense.proj = Adapter(24, 24)


def narrow(**options):
    return lambda model: compress(model, Compression(**options), calibration=None)


def prune(heads, **more):
    return lambda model, _: prune_heads_(model, {**more, FIRST: heads})


def swap(*pairs):
    """Swap a pair that can be swapped, and others."""
    return lambda model, _: swap_heads_(model, [((FIRST, 2), (SECOND, 2)), *pairs])


def rotate(strategy="hard", **options):
    return lambda model, _: Rotator(model, RotationOptions(strategy, **{"epochs": (0,), **options}))


def silence(mask, name=FIRST):
    def call(model, batch):
        with HeadMask(model, {SECOND: torch.zeros(3)}) as masks:
            before = model(**batch)[0]
            try:
                masks.set({SECOND: torch.ones(3), name: mask})
            finally:
                assert torch.equal(model(**batch)[0], before)

    return call


def read(model, batch, parts="outputs", **options):
    with Recorder(model, parts):
        model(**{**batch, **options})


def unseen(batch):
    return {**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}


SHARED_OUTPUT = set_("1.attention.output.dense", lambda model: model.encoder.layer[0].attention.output.dense)
OUTPUT = r"encoder\.layer\.1\.attention\.output\.dense"
HEADS_STAY = "heads of a collaborative module share its queries and keys"

REFUSED = [  # what is done to the model, what is called then, and the error's message
    (None, lambda m, _: DropHead(m, 1.0), r"DropHead's p is 1\.0; expected 0 to below 1"),
    (None, lambda m, _: HeadGates(m, start=NAN), "start of head gates is nan; expected a finite"),
    (SHARED_OUTPUT, lambda m, _: HeadGates(m), "output projections share weights"),
    (SHARED_OUTPUT, lambda m, _: mix_heads_(m), "output projections share weights"),
    (
        set_("1.attention.output.dense", lambda _: Adapter(24, 24)),
        lambda m, _: mix_heads_(m),
        OUTPUT + r": got .*test_refusals\.Adapter, expected a plain torch\.nn\.Linear",
    ),
    (
        set_("1.attention.output.dense", lambda _: nn.Linear(24, 24, device="meta")),
        lambda m, _: mix_heads_(m),
        "is offloaded",
    ),
    (mix_heads_, lambda m, _: mix_heads_(m), r"mixes its heads already; merge_alphas_\(model\) first"),
    (mix_heads_, lambda m, _: narrow(dv=12)(m), "mixes the heads; call merge_alphas_ first, then convert values"),
    (None, lambda m, _: merge_alphas_(m), r"has no alphas to merge; mix_heads_\(model\) adds them"),
    (wrap_merged, lambda m, _: merge_alphas_(m), r"output\.dense\.proj: got .*\.Adapter, expected a plain"),
    (quantize("gptq"), lambda m, _: mix_heads_(m), "is quantized; mix the heads of the unquantized checkpoint"),
    (quantize("other"), prune([0]), "BertModel is quantized; remove heads from the unquantized checkpoint"),
    (None, lambda m, _: prune_heads_(nn.Linear(2, 2), {}), "Linear is no Transformers model"),
    (None, prune([0], nowhere=[0]), r"no attention module 'nowhere'; there are encoder\.layer\.0\.attention\.self"),
    (None, prune([0, 3]), r"layer\.0\.attention\.self has no head 3; its heads are 0 to 2"),
    (None, prune([0.5]), r"has no head 0\.5"),
    (None, prune([0, 1, 2]), r"removing heads \[0, 1, 2\] leaves none; keep at least one head"),
    (
        set_("0.attention.output.dense", lambda _: Adapter(24, 24)),
        prune([0], **{SECOND: [0]}),
        r"attention\.output\.dense: got .*Adapter, expected a plain torch\.nn\.Linear of floats; merge",
    ),
    (to_integers, prune([0], **{SECOND: [0]}), r"self\.value: .*undo quantization"),
    (
        set_("0.attention.self.value.weight", lambda model: model.get_submodule(SECOND).value.weight),
        prune([0], **{SECOND: [0]}),
        r"self\.value is shared with another module, .* untie them first",
    ),
    (
        set_("0.attention.self.query", lambda model: model.get_submodule(SECOND).query),
        prune([0]),
        r"self\.query is shared with another module",
    ),
    (
        set_("0.attention.self.key", lambda _: nn.Linear(24, 16)),
        prune([0], **{SECOND: [0]}),
        r"self\.key: got 16 output channels; expected 3 heads × 8; the model is not",
    ),
    (offload, prune([0], **{SECOND: [0]}), r"self\.value is offloaded; load the model into memory"),
    (mix_heads_, prune([0]), r"attention\.output\.dense mixes the heads.*call merge_alphas_ first"),
    (HeadMask, prune([0]), "something acts on its heads .* remove that first"),
    (
        None,
        swap((("encoder.layer.7", 0), (FIRST, 0))),
        "no attention module 'encoder.layer.7'; there are",
    ),
    (None, swap(((FIRST, 0), (SECOND, 3))), r"layer\.1\.attention\.self has no head 3; its heads are 0 to 2"),
    (None, swap(((FIRST, 0),)), r"expected \(\(module, head\), \(module, head\)\) for each"),
    (None, swap(((FIRST, 0), (FIRST, 0.5))), "pairs are "),
    (
        None,
        swap(((FIRST, 0), (FIRST, 1)), ((SECOND, 0), (FIRST, 1))),
        "head 1 of .* is named twice; name each head in one pair only",
    ),
    (None, rotate("gentle"), "unknown strategy 'gentle'; expected one of hard, manual, random, soft"),
    (None, rotate(importance="size"), "unknown importance 'size'"),
    (None, rotate(epochs=()), "expected at least one, each once"),
    (None, rotate(epochs=(0.5, NAN)), "counted from 0"),
    (None, rotate(epochs=(1, 1.0)), "each once"),
    (None, rotate(epochs=1), r"a wrong type \(.*; expected tuples of numbers as epochs"),
    (None, rotate(epochs="12"), "'1' is no number"),
    (None, rotate(k=0), "k is 0; expected at least 1"),
    (None, rotate(rest=-1), "rest is -1; expected 0 or more"),
    (None, rotate(swap_back_after=0), "swap_back_after is 0; expected more than 0 epochs"),
    (None, rotate(kinds=("self",)), "unknown kind of attention for rotation 'self'; expected one of"),
    (None, rotate(kinds=None), "expected .* of names as kinds"),
    (None, rotate("manual"), "'manual' got 0 pairs"),
    (None, rotate(pairs=(PAIR,)), "'hard' got 1 pairs; the manual strategy needs pairs, and others take none"),
    (None, rotate(k=4), "k is 4 for 'hard' among 2 modules of encoder attention .* at most 3"),
    (None, rotate("soft", k=4), "k is 4 for 'soft' .* expected at most 3"),
    (None, rotate("soft", t_max=2), "t_max is 2 for 2 layers of encoder attention; expected at most 1"),
    (None, rotate("manual", pairs=((("nowhere", 0), (FIRST, 2)),)), "no attention module 'nowhere'"),
    (None, rotate("random", kinds=("cross",)), "with kind cross"),
    (narrow(dk=8), rotate("random"), HEADS_STAY),
    (narrow(dk=8, modules="*layer.1*"), rotate(), HEADS_STAY),
    (narrow(dv=9, modules="*layer.0*"), rotate("random"), "cannot swap head .* their parameters differ"),
    (
        None,
        silence(torch.ones(4)),
        r"mask of encoder\.layer\.0\.attention\.self: got shape \(4,\); expected a tensor",
    ),
    (None, silence([1, 1, 1]), "got list; expected a tensor"),
    (None, silence(torch.ones(3), "nowhere"), r"no attention module 'nowhere'; there are encoder\.layer\.0"),
    (None, silence(torch.ones(2, 3)), "got 2 rows for 3 samples; pass one"),
    (None, lambda m, _: HeadMask(m, kinds="encoder"), r"kinds is 'encoder'; .* as \('encoder',\)"),
    (
        None,
        lambda m, _: Recorder(m, kinds=None),
        r"kinds is None; expected a tuple of some of encoder, decoder, cross",
    ),
    (None, lambda m, _: Recorder(m, kinds=("cross",)), r"with kind cross; the attention modules are .* \(encoder\)"),
    (None, lambda m, _: Recorder(m, "scores"), "cannot read scores; it reads outputs, values, probs"),
    (narrow(dk=5), lambda m, _: Recorder(m, ("keys",)), "is converted: its heads have no keys of equal width"),
    (None, lambda m, _: confidence(m, []), "no batches to measure the importance of heads on"),
    (None, lambda m, b: average_distance(m, [unseen(b)]), r"layer\.0\.attention\.self saw no token that counts"),
    (None, lambda m, b: confidence(m, [b], exclude=range(61)), "saw no token that counts"),
    (None, lambda m, b: average_distance(m, [b], of="values"), "expected 'outputs' or 'probs'"),
    *(
        (None, lambda m, b, f=f: f(m, b), r"a batch is 'input_ids'; expected keyword .* or \[batch\] for a single")
        for f in (confidence, average_distance, head_importance, head_covariances)
    ),
    (None, lambda m, b: dominant_heads(m, batches=b), r"a batch is 'input_ids'; expected keyword .* or \[batch\]"),
    (None, lambda m, _: head_importance(m, []), "at least one batch, got none"),
    (None, lambda m, b: head_importance(m, [b]), "BertModel returned no loss; put labels into the batches, or pass"),
    (
        None,
        lambda m, b: head_importance(m, [b], lambda outputs, _: outputs[1]),
        r"shape \(3, 24\); expected a mean over samples \(\), or one loss .* \(3,\)",
    ),
    (None, lambda m, b: head_importance(m, [b], lambda *_: 1.0), "is of float; expected"),
    (
        None,
        lambda m, b: head_importance(m, [b], lambda outputs, _: outputs[0].mean().detach()),
        "no gradient in the heads; compute it from the outputs",
    ),
    (
        None,
        lambda m, b: head_importance(m, [{**b, "labels": torch.ones(2)}]),
        r"cannot tell how many samples .* sizes \[2, 3\]",
    ),
    (
        None,
        lambda m, b: head_importance(m, [b], lambda outputs, _: outputs[0].mean() * float("inf")),
        r"attention\.self: the gradient of the loss in its heads is not finite",
    ),
    (None, lambda *_: least_important({"a": torch.ones(2)}, 1.1), r"share of heads is 1\.1; expected 0 to 1"),
    (
        None,
        lambda *_: least_important({"a": torch.tensor([0.1, NAN])}, 0.5),
        "importance of a: got .*expected one finite number a head",
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals_change_nothing(case, make_tiny, batch):
    spoil, call, message = REFUSED[case]
    model = make_tiny("bert")
    present = None if spoil is None else spoil(model)
    before = {name: (id(parameter), parameter.clone()) for name, parameter in model.named_parameters()}
    edits, hooks = edits_of(model), [len(head_hooks(module)) for module in model.modules()]
    with pytest.raises((HeadError, CheckpointError, CalibrationError, UnsupportedModelError), match=message):
        call(model, batch)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert parameter.is_meta or torch.equal(parameter, before[name][1])
    assert edits_of(model) == edits
    assert [len(head_hooks(module)) for module in model.modules()] == hooks
    assert not model._forward_pre_hooks or isinstance(present, HeadMask)
