"""Padding counts nowhere: a padded sequence gives the moments and output error of the sequence without it."""

import copy

import pytest
import torch
from tiny_families import TINIES, attend_by_, build, inputs
from transformers import MusicgenMelodyModel

from collab_compress import Compression, Solver, compress
from collab_compress.architectures import find_dense_attention, find_dense_values
from collab_compress.calibration import gather_moments
from collab_compress.conversion.agreement import measure_output_error
from collab_compress.heads import Recorder

MASK_OF = {
    "input_ids": "attention_mask",
    "flattened_patches": "attention_mask",
    "decoder_input_ids": "decoder_attention_mask",
    "encoder_hidden_states": "encoder_attention_mask",
    "pixel_values": "pixel_attention_mask",
}
EXTRA = 20  # positions of padding
OF_PATCHES = ("pix2struct_vision_model", "siglip2")
PADDED = [
    name
    for name, tiny in sorted(TINIES.items())
    if (not tiny.copy_of or name in OF_PATCHES)
    and {*MASK_OF.values()} & {*inputs(name)}
    and not {"input_values", "input_features"} & {*inputs(name)}  # convolutions smear padding over the sound
]


def padded_and_not(batch):
    """Return the first sequence of a batch, with much padding and masks, and without both."""
    generator = torch.Generator().manual_seed(1)
    padded, bare = {}, {name: tensor[:1] for name, tensor in batch.items() if name not in MASK_OF.values()}
    for name, tensor in bare.items():
        padded[name] = tensor
        if MASK_OF.get(name) in batch:
            shape = (1, EXTRA, *tensor.shape[2:])
            noise = torch.rand(shape, generator=generator)
            noise = (5 + 50 * noise).long() if tensor.dtype == torch.long else noise
            padded[name] = torch.cat([tensor, noise], 1)
            padded[MASK_OF[name]] = (torch.arange(padded[name].shape[1]) < tensor.shape[1]).long()[None]
    if "spatial_shapes" in batch:  # SigLIP 2 cannot do without
        bare["pixel_attention_mask"] = torch.ones(bare["pixel_values"].shape[:2])
    return padded, bare


@pytest.mark.parametrize("name", PADDED)
def test_padding_does_not_count_anywhere(name):
    dense, batch = build(name), inputs(name)
    attend_by_(dense, "eager")
    padded, bare = padded_and_not(batch)
    if name == "mobilebert":  # adds the embeddings of neighbours to each token's
        padded["input_ids"][:, -EXTRA:] = dense.config.pad_token_id
    sites = [*find_dense_attention(dense), *find_dense_values(dense)]
    for far, near in zip(*(gather_moments(dense, sites, [batch]) for batch in (padded, bare)), strict=True):
        for actual, expected in zip(far, near, strict=True):
            assert actual.count == expected.count
            torch.testing.assert_close(actual.second, expected.second, atol=1e-4, rtol=1e-4)

    model = copy.deepcopy(dense)
    compress(model, Compression(dk=TINIES[name].full // 2, dv=9, solver=Solver(sweeps=1)), calibration=None)
    if name != "siglip2":  # it pools the last token, even if it is padding
        far, near = (measure_output_error(model, dense, [batch]).relative_error for batch in (padded, bare))
        assert far == pytest.approx(near, rel=1e-3)


@pytest.mark.parametrize("name", ["wav2vec2", "speech_to_text"])
def test_padded_sound_is_not_counted(name):
    model, batch = build(name), inputs(name)
    sites = [site for site in find_dense_attention(model) if site.kind == "encoder"]
    positions = batch["attention_mask"].sum(1)
    lengths = getattr(model, "encoder" if name == "speech_to_text" else "base_model")._get_feat_extract_output_lengths
    for query, key in gather_moments(model, sites, [batch]):
        assert query.count == key.count == lengths(positions).sum()


def test_masked_pixels_are_not_counted():
    model, batch = build("detr"), inputs("detr")
    batch["pixel_mask"] = torch.ones(3, 64, 96)
    batch["pixel_mask"][1, :, 32:], batch["pixel_mask"][2, 32:] = 0, 0
    memory, queries = 6 + 2 + 3, 3 * model.config.num_queries
    sites = find_dense_attention(model)
    counts = [tuple(part.count for part in moments) for moments in gather_moments(model, sites, [batch])]
    assert counts == [(memory, memory), (queries, queries), (queries, memory)]
    with Recorder(model) as recorder, torch.no_grad():
        model(**batch)
        masks = [reading.masks for reading in recorder.take()]
    assert [None if mask.key is None else int(mask.key.sum()) for mask in masks] == [memory, None, memory]


def test_masks_of_what_stands_beside_tokens_count():
    def count(kin, batch, model=None):
        model = build(kin) if model is None else model
        return gather_moments(model, find_dense_attention(model), [batch])[0][0].count

    batch, states = inputs("bert"), torch.randn(3, 4, 24)
    real = int(batch["attention_mask"].sum())
    mask = torch.tensor([[1, 1, 1, 0]] * 3)
    images = {**batch, "visual_embeds": states[..., :12]}
    assert count("visual_bert", images) == real + 12
    assert count("visual_bert", {**images, "visual_attention_mask": mask}) == real + 9
    beside = {**batch, "encoder_hidden_states": states, "encoder_attention_mask": mask}
    melody = build("musicgen_melody_decoder")
    assert isinstance(melody, MusicgenMelodyModel)
    assert count("", beside, melody) == real + 9
