"""What we rely on beyond the public interface of Transformers and its company: failures name the part that moved.

A part that another version lacks, or has in another form, breaks conversions in ways that are hard to read. Here each
is tried by itself, and named with the file of ours that uses it.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import pytest
import torch
import transformers
from stock_classes import DESCRIBED, FILES
from transformers import BertConfig, BertModel, PreTrainedModel, Trainer
from transformers.cache_utils import StaticLayer
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers.base import HfQuantizer

from collab_compress.attention import forward
from collab_compress.transformers_parts import CACHE_NAME

ROOT = Path(__file__).parents[1]
CLASSES, OWN = (
    [
        pytest.param(family, folder, name, id=f"{folder}-{name}")
        for (folder, name), family in DESCRIBED.items()
        if (family.forward == "scores" if not ours else family.forward == "stock") is False
        and not family.limits.feed_forward_only
    ]
    for ours in (False, True)
)


def path_of(file: str) -> str:
    """Return the path of a file of ours: in collab_compress, or in cli or glue_runs."""
    return file if file.startswith(("cli/", "glue_runs/")) else f"collab_compress/{file}"


def moved(part: str, file: str, got: Any) -> None:
    versions = f"Transformers {transformers.__version__}, torch {torch.__version__}"
    pytest.fail(f"{part} is not what {path_of(file)} relies on ({versions}): {got}", pytrace=False)


def modelling(folder: str, name: str) -> Any:
    return importlib.import_module(FILES[folder, name])


@pytest.mark.parametrize(("family", "folder", "name"), CLASSES)
def test_an_attention_class_looks_functions_up_and_views_heads_as_ours_expect(family, folder, name):
    class_ = getattr(modelling(folder, name), name)
    for used in ("ALL_ATTENTION_FUNCTIONS", "self.config._attn_implementation"):
        if used not in inspect.getsource(class_.forward):
            moved(f"{used} in {folder}'s {name}.forward", "attention/run.py", "it is not read there")
    if family.forward == "plain":  # hooks alone meet the heads that it views
        return
    width = f"3 * self.{family.paths.head_width}" if family.layout.interleaved else f"self.{family.paths.head_width}"
    expected = (f"self.{family.paths.heads}" if family.layout.fixed_head_count else "-1") + f", {width}"
    if expected not in inspect.getsource(class_):
        moved(f"the view (…, {expected} in {folder}'s {name}.forward", "attention/projections.py", "not there")
    part = f"eager_attention_forward of {folder}"
    function = getattr(modelling(folder, name), "eager_attention_forward", None)
    if function is None:
        moved(part, "attention/run.py", "it is gone")
    arguments = list(inspect.signature(function).parameters)
    if arguments[:5] != ["module", "query", "key", "value", "attention_mask"] or not {
        "scaling",
        "dropout",
        "kwargs",
    } <= set(arguments):
        moved(part, "attention/run.py", f"it takes {arguments}")


@pytest.mark.parametrize(("family", "folder", "name"), OWN)
def test_a_forward_pass_of_ours_knows_the_arguments_of_the_stock_one(family, folder, name):
    read = set(re.findall(r'call\.(?:get|pop)\("(\w+)"', inspect.getsource(forward))) | set(forward.STATES)
    ignored = {"encoder_attention_mask", "use_cache", "position_bias", "output_attentions", CACHE_NAME}
    parameters = list(inspect.signature(getattr(modelling(folder, name), name).forward).parameters.values())[1:]
    names = {parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD}
    if parameters[0].name != "hidden_states" or not names <= read | ignored:
        moved(f"{name}.forward", "attention/forward.py", f"it takes {sorted(names)}, ours reads {sorted(read)}")


class Part(NamedTuple):
    """Something relied on: its name, the file of ours, how that file writes it, and what must be true of it."""

    name: str
    file: str
    word: str
    holds: Callable[[], bool]


def takes(function: Callable[..., Any], *names: str) -> Callable[[], bool]:
    """Whether a function has parameters of these names."""
    return lambda: set(names) <= set(inspect.signature(function).parameters)


def mentions(thing: Any, *texts: str) -> Callable[[], bool]:
    """Whether these texts stand in the source of something."""
    return lambda: all(text in inspect.getsource(thing) for text in texts)


def sdpa_takes_no_more() -> bool:
    """Whether a keyword was added that ours would not know."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    names = "module query key value attention_mask dropout scaling is_causal position_bias cache kwargs"
    known = set(names.split())
    arguments = set(inspect.signature(sdpa_attention_forward).parameters)
    return arguments <= known and known - {"cache"} <= arguments


def quantizers_are_plugged_in() -> bool:
    from transformers.quantizers import auto

    mappings = [auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING]
    return all(isinstance(mapping, dict) and "gptq" in mapping for mapping in mappings)


def quantization_configs_are_merged() -> bool:
    from transformers.quantizers import auto

    call = r"merge_quantization_configs\(\s+\S+, quantization_config\s"
    names = ["quantization_config", "quantization_config_from_args"]
    merge = auto.AutoHfQuantizer.merge_quantization_configs
    return bool(re.search(call, inspect.getsource(auto.get_hf_quantizer))) and takes(merge, *names)()


def quantizer_runs(hook: str, caller: str) -> Callable[[], bool]:

    return lambda: f"self.{hook}(model" in inspect.getsource(vars(HfQuantizer)[caller])


def bert() -> PreTrainedModel:
    return BertModel(BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=9))


def hooks_are_listed() -> bool:
    module = torch.nn.Linear(1, 1)
    handle = module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    return list(module._forward_pre_hooks) == list(module._forward_pre_hooks_with_kwargs) == [handle.id]


def gpt2_splits_by_an_attribute() -> bool:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    return ".split(self.split_size, dim=2)" in inspect.getsource(GPT2Attention.forward)


def accelerate_keeps_forward() -> bool:
    from accelerate.hooks import ModelHook, add_hook_to_module

    return "_old_forward" in vars(add_hook_to_module(torch.nn.Linear(1, 1), ModelHook()))


def lengths_are_grouped() -> bool:
    from transformers.trainer_pt_utils import get_length_grouped_indices

    return takes(get_length_grouped_indices, "lengths", "batch_size", "generator")()


PARTS = [
    Part("the parameters of sdpa_attention_forward", "attention/run.py", "position_bias", sdpa_takes_no_more),
    Part("PreTrainedConfig._attn_implementation", "attention/run.py", "_attn_implementation",
         lambda: bert().config._attn_implementation == "sdpa"),
    Part("split_size of GPT2Attention", "attention/projections.py", "split_size", gpt2_splits_by_an_attribute),
    Part("_old_forward of a module that Accelerate hooks into", "attention/forward.py", "_old_forward",
         accelerate_keeps_forward),
    Part("the mappings of transformers.quantizers.auto", "transformers_parts.py", "AUTO_QUANTIZER_MAPPING",
         quantizers_are_plugged_in),
    Part("AutoHfQuantizer.merge_quantization_configs", "checkpoint/quantizer.py", "merge_quantization_configs",
         quantization_configs_are_merged),
    Part("HfQuantizer._process_model_before_weight_loading", "checkpoint/quantizer.py",
         "_process_model_before_weight_loading",
         quantizer_runs("_process_model_before_weight_loading", "preprocess_model")),
    Part("HfQuantizer._process_model_after_weight_loading", "checkpoint/quantizer.py",
         "_process_model_after_weight_loading",
         quantizer_runs("_process_model_after_weight_loading", "postprocess_model")),
    Part("HfQuantizer.update_weight_conversions", "checkpoint/quantizer.py", "update_weight_conversions",
         takes(HfQuantizer.update_weight_conversions, "weight_conversions", "model")),
    Part("_weight_conversions of a model that is saved", "checkpoint/edits.py", "_weight_conversions",
         mentions(revert_weight_conversion, '"_weight_conversions"', "get_model_conversion_mapping", "PrefixChange")),
    Part("hf_quantizer of a model that is saved", "checkpoint/quantizer.py", "hf_quantizer",
         mentions(PreTrainedModel.save_pretrained, "hf_quantizer", "is_serializable")),
    Part("PreTrainedModel.is_quantized", "checkpoint/quantizer.py", "is_quantized",
         mentions(PreTrainedModel.half, "is_quantized")),
    Part("PreTrainedModel._no_split_modules", "checkpoint/edits.py", "_no_split_modules",
         lambda: hasattr(bert(), "_no_split_modules")),
    Part("Cache.is_compileable", "attention/run.py", "is_compileable",
         lambda: "is_compileable" in dir(transformers.Cache)),
    Part("StaticLayer.lazy_initialization", "attention/run.py", "lazy_initialization",
         takes(StaticLayer.lazy_initialization, "self", "key_states", "value_states")),
    Part("torch.nn.Module._forward_pre_hooks", "attention/projections.py", "_forward_pre_hooks", hooks_are_listed),
    Part("Trainer.compute_loss", "training/trainer.py", "compute_loss",
         takes(Trainer.compute_loss, "model", "inputs", "return_outputs", "num_items_in_batch")),
    Part("how Trainer scales its loss", "training/trainer.py", "current_gradient_accumulation_steps",
         mentions(Trainer, "self.model_accepts_loss_kwargs", "self.compute_loss_func",
                  "self.current_gradient_accumulation_steps", "self.label_smoother")),
    Part("Trainer._load_from_checkpoint", "training/trainer.py", "_load_from_checkpoint",
         takes(Trainer._load_from_checkpoint, "resume_from_checkpoint", "model")),
    Part("TrainerState.stateful_callbacks", "training/trainer.py", "stateful_callbacks",
         lambda: "stateful_callbacks" in vars(transformers.TrainerState())),
    Part("Trainer._get_train_sampler", "glue_runs/experiments/by_length.py", "_get_train_sampler",
         takes(Trainer._get_train_sampler, "train_dataset")),
    Part("Trainer._get_eval_sampler", "glue_runs/experiments/by_length.py", "_get_eval_sampler",
         takes(Trainer._get_eval_sampler, "eval_dataset")),
    Part("TrainingArguments.train_sampling_strategy", "glue_runs/experiments/by_length.py", "train_sampling_strategy",
         takes(transformers.TrainingArguments, "train_sampling_strategy")),
    Part("get_length_grouped_indices", "glue_runs/experiments/by_length.py", "get_length_grouped_indices",
         lengths_are_grouped),
    Part("accelerate.utils.gather_object and broadcast_object_list", "glue_runs/experiments/processes.py",
         "gather_object",
         lambda: takes(accelerate.utils.gather_object, "object")()
         and takes(accelerate.utils.broadcast_object_list, "object_list")()),
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_is_as_it_was_and_still_used(part):
    try:
        holds = part.holds()
    except Exception as error:
        moved(part.name, part.file, f"{type(error).__name__}: {error}")
    if not holds:
        moved(part.name, part.file, "it is there in another form")
    assert part.word in (ROOT / path_of(part.file)).read_text(encoding="utf-8"), "remove the line of this part"
