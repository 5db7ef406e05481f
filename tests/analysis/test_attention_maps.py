"""Attention maps, against the stock model's own attentions."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from collab_compress.analysis import attention_maps
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.errors import HeadError

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
    found = attention_maps(model, tokenizer, "the cat sat", target="a mat" if pair else None)
    model.set_attn_implementation("eager")
    ids = tokenizer("the cat sat", return_tensors="pt")["input_ids"]
    extra = {"decoder_input_ids": torch.tensor([[0, 2, 8, 9]])} if pair else {}
    with torch.no_grad():
        output = model(input_ids=ids, output_attentions=True, **extra)
    kinds = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    rows = (
        {kind: list(output[name]) for kind, name in kinds.items()} if pair else {"encoder": list(output.attentions)}
    )
    for each in found.values():
        right = rows[each.kind].pop(0)[0]
        torch.testing.assert_close(each.weights, right, atol=1e-5, rtol=1e-5)
        assert each.queries == (SOURCE if each.kind == "encoder" else TARGET)
        assert each.keys == (TARGET if each.kind == "decoder" else SOURCE)
        word = each.queries[2]
        torch.testing.assert_close(each.of(word), right[:, 2], atol=1e-5, rtol=1e-5)
    assert not any(rows.values())


def test_pairs_of_texts(bert, tokenizer):
    name = find_attention(bert, FAMILIES)[1].name
    found = attention_maps(bert, tokenizer, ("the cat", "a mat"))
    assert found[name].queries == ("[CLS]", "the", "cat", "</s>", "a", "mat", "</s>")
    torch.testing.assert_close(found[name].of("</s>"), found[name].weights[:, 3])


def test_what_cannot_be_shown_is_refused(bert, make_tiny, tokenizer):
    with pytest.raises(HeadError, match="BertModel: leave target out"):
        attention_maps(bert, tokenizer, "the cat", target="a mat")
    with pytest.raises(HeadError, match="MarianModel: pass target="):
        attention_maps(make_tiny("marian"), tokenizer, "the cat")
    with pytest.raises(HeadError, match=r"no token 'dog' among the queries; there are \[CLS\] the cat </s>"):
        next(iter(attention_maps(bert, tokenizer, "the cat").values())).of("dog")
