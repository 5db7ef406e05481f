"""What benchmarks time and score as ONNX is the model that they export."""

import pytest
import torch
from transformers import BertConfig, BertModel

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
from serving import Encoder, Session
from speed import token_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:# The axis name:UserWarning"),
]


@pytest.mark.parametrize(("quantized", "tolerance"), [(False, 1e-4), (True, 0.2)])
def test_a_session_is_called_as_its_model(tmp_path, quantized, tolerance):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=20000, attn_implementation="eager", **sizes)).eval()
    batch = token_batch(3, 7)
    with torch.no_grad():
        wanted = model(**batch).last_hidden_state
    encoder = Encoder(Session(model, tmp_path, 1, quantized), model.config)
    states = encoder(**batch, token_type_ids=torch.zeros(3, 7)).last_hidden_state
    assert (states - wanted).abs().max() < tolerance
    assert (encoder.call.size < 1e6) == quantized
