"""Attention patterns of heads, against loops over queries; attention maps, against the stock model's own."""

from math import log

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from collab_compress.analysis import attention_maps, head_patterns, induction
from collab_compress.analysis.patterns import PATTERNS
from collab_compress.analysis.stream import read_heads
from collab_compress.architectures import find_attention
from collab_compress.errors import HeadError


def slow_value(name, row, query, visible):
    """Return one head's pattern at one query, from its probabilities `row` at unpadded positions; or None."""
    if name == "entropy":
        return -sum(float(p) * log(float(p)) for p in row if float(p) > 0)
    if name == "distance":
        return sum(float(p) * abs(query - key) for key, p in enumerate(row))
    if name == "previous token":
        return float(row[query - 1]) if query - 1 in visible else None
    return float(row[visible[0]]) if query != visible[0] else None


def slow_means(model, batches, name):
    values = {}
    for batch in batches:
        ((readings,),) = read_heads([model], [batch], "probs")
        for module, reading in readings:
            if reading.site.kind == "cross" and name != "entropy":
                continue
            for sample, probs in enumerate(reading.probs):
                queries, keys = (
                    mask[sample].nonzero().flatten().tolist() for mask in (reading.masks.query, reading.masks.key)
                )
                for head, rows in enumerate(probs):
                    for query in queries:
                        value = slow_value(name, rows[query], query, keys)
                        if value is not None:
                            values.setdefault(module, {}).setdefault(head, []).append(value)
    return {
        module: torch.tensor([sum(per_query) / len(per_query) for per_query in heads.values()], dtype=torch.float64)
        for module, heads in values.items()
    }


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_means_over_queries(either, name):
    model, batches = either
    patterns = head_patterns(model, batches)[name]
    wanted = slow_means(model, batches, name)
    assert len(patterns) == len(wanted)
    for ours, right in zip(patterns.values(), wanted.values(), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)


def test_left_padding_does_not_count():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=40)).eval()
    ids = torch.randint(50, (1, 8))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), ids], 1)
    mask = (torch.arange(12) >= 4).long()[None]
    positions = (torch.arange(12) - 4).clamp_min(0)[None]
    plain = head_patterns(model, [{"input_ids": ids}])
    patterns = head_patterns(model, [{"input_ids": padded, "attention_mask": mask, "position_ids": positions}])
    for name in PATTERNS:
        for path, values in plain[name].items():
            torch.testing.assert_close(patterns[name][path], values, rtol=1e-4, atol=1e-5)


def test_an_induction_head_scores_one():
    """Build a head that attends to the key after an earlier copy of the query's token."""
    length = 6
    config = GPT2Config(vocab_size=11, n_embd=48, n_layer=1, n_head=1, n_positions=2 * length)
    model = GPT2LMHeadModel(config).eval()
    attention = model.transformer.h[0].attn
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
        model.transformer.wpe.weight.zero_()
        for position in range(2 * length):
            model.transformer.wpe.weight[position, position] = 1.0
        attention.c_attn.weight.zero_()
        attention.c_attn.bias.zero_()
        for position in range(length, 2 * length):  # query of position i reads key of position i − length + 1
            attention.c_attn.weight[position, position] = 100.0
            attention.c_attn.weight[position - length + 1, 48 + position] = 100.0
    (scores,) = induction(model, length=length, sequences=3).values()
    assert float(scores) == pytest.approx(1, abs=1e-3)


def test_induction_is_the_mean_over_repeated_tokens(bert):
    length, read = 8, []
    handle = bert.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs), with_kwargs=True)
    scores = torch.stack([*induction(bert, length=length, sequences=3).values()])
    handle.remove()
    bert.set_attn_implementation("eager")
    total = torch.zeros_like(scores)  # (L, H)
    for batch in read:
        (tokens,) = batch["input_ids"].tolist()
        assert tokens[length:] == tokens[:length]
        with torch.no_grad():
            attentions = bert(**batch, output_attentions=True).attentions  # L of (1, H, 2T, 2T)
        for layer, attention in enumerate(attentions):
            for first in range(length):
                total[layer] += attention[0, :, length + first, first + 1].double()
    torch.testing.assert_close(scores, total / (3 * length), rtol=1e-5, atol=1e-6)
    assert scores.std() > 0.01


WORDS = ["[PAD]", "</s>", "[CLS]", "[UNK]", "the", "cat", "sat", "on", "a", "mat"]


@pytest.fixture(scope="module")
def tokenizer():
    core = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    core.post_processor = TemplateProcessing(
        single="[CLS] $A </s>", pair="[CLS] $A </s> $B </s>", special_tokens=[("[CLS]", 2), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", eos_token="</s>", unk_token="[UNK]")


SOURCE = ("[CLS]", "the", "cat", "sat", "</s>")
TARGET = ("[PAD]", "[CLS]", "a", "mat")  # from the start token on, without the last


def test_maps_are_those_of_stock_attention(either, tokenizer):
    model, _ = either
    pair = model.config.is_encoder_decoder
    maps = attention_maps(model, tokenizer, "the cat sat", target="a mat" if pair else None)
    model.set_attn_implementation("eager")
    ids = tokenizer("the cat sat", return_tensors="pt")["input_ids"]
    extra = {"decoder_input_ids": torch.tensor([[0, 2, 8, 9]])} if pair else {}
    with torch.no_grad():
        output = model(input_ids=ids, output_attentions=True, **extra)
    kinds = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    rows = (
        {kind: list(output[name]) for kind, name in kinds.items()} if pair else {"encoder": list(output.attentions)}
    )
    for map_ in maps.values():
        right = rows[map_.kind].pop(0)[0]
        torch.testing.assert_close(map_.weights, right, atol=1e-5, rtol=1e-5)
        assert map_.queries == (SOURCE if map_.kind == "encoder" else TARGET)
        assert map_.keys == (TARGET if map_.kind == "decoder" else SOURCE)
        word = map_.queries[2]
        torch.testing.assert_close(map_.of(word), right[:, 2], atol=1e-5, rtol=1e-5)
    assert not any(rows.values())


def test_pairs_of_texts(bert, tokenizer):
    name = find_attention(bert)[1].name
    maps = attention_maps(bert, tokenizer, ("the cat", "a mat"))
    assert maps[name].queries == ("[CLS]", "the", "cat", "</s>", "a", "mat", "</s>")
    torch.testing.assert_close(maps[name].of("</s>"), maps[name].weights[:, 3])


def test_a_token_that_is_not_there(bert, tokenizer):
    with pytest.raises(HeadError, match=r"no token 'dog' among the queries; there are \[CLS\] the cat </s>"):
        next(iter(attention_maps(bert, tokenizer, "the cat").values())).of("dog")
