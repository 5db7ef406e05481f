"""Fine-tune a classifier with methods that act on heads in a bare Accelerate loop: an example to copy from.

    python glue_runs/accelerate_loop.py task=mrpc model=minilm data_dir=DIR output=outputs/loop tuning.epochs=3 \\
        heads.drophead='[{p: 0.2}]' heads.alphas.frozen_ratio=0.3 tuning.arguments='{gradient_accumulation_steps: 2}'

With `torchrun --nproc_per_node 2` or `accelerate launch` there are several processes with different batches.
Of a recipe it takes task, model, revision, data_dir, output, seed, max_length, heads, trackers, and of tuning whole
epochs, learning_rate, batch_size, warmup and arguments, which are the Accelerator's here (mixed_precision: bf16, …).
Losses are averaged over passes and processes, as by `heads.loss_normalization=mean` in a Trainer. Converting and
resuming is for run_glue.py.
"""

import math
import sys

import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from collab_compress_glue_runs.experiments import Recipe, read_recipe
from collab_compress_glue_runs.experiments.tuning import check_trackers
from collab_compress_glue_runs.metrics import Metric, load_metric
from collab_compress_glue_runs.tasks import TASKS, encode_classification, load_task
from torch.utils.data import DataLoader
from tqdm import tqdm

from collab_compress import mix_heads_
from collab_compress.checkpoint.pretrained import find_directory, load_model, load_tokenizer
from collab_compress.errors import CollabCompressError, RecipeError
from collab_compress.training import HeadSession


def train(recipe: Recipe) -> None:
    task, tuning = TASKS[recipe.task], recipe.tuning
    if task.kind != "classification" or tuning is None or recipe.fresh is not None or recipe.compression is not None:
        raise RecipeError("this loop fine-tunes a given model on a classification task; run_glue.py does the rest")
    check_trackers(recipe.trackers)
    try:
        accelerator = Accelerator(
            **tuning.arguments,
            log_with=list(recipe.trackers) or None,
            project_dir=recipe.output,
            cpu=not torch.accelerator.is_available(),  # else processes could not communicate on the CPU
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=recipe.seed),
        )
    except TypeError as error:
        raise RecipeError(f"tuning.arguments: {error}; give arguments of the Accelerator") from error
    set_seed(recipe.seed)
    directory = find_directory(recipe.model, recipe.revision)
    tokenizer = load_tokenizer(directory)
    model, _ = load_model(transformers.AutoModelForSequenceClassification, directory, num_labels=task.num_labels)
    if recipe.heads.alphas is not None:
        mix_heads_(model)  # before the optimizer is made, so that it steps the alphas
    rows = encode_classification(load_task(task.name, recipe.data_dir), tokenizer, max_length=recipe.max_length)
    loading = {"batch_size": tuning.batch_size, "collate_fn": transformers.DataCollatorWithPadding(tokenizer)}
    held_out = {
        name: DataLoader(part, **loading)
        for name, part in rows.items()
        if name != "train" and "labels" in part.column_names
    }
    shares = {name: accelerator.prepare(part) for name, part in held_out.items()}  # of this process
    data = accelerator.prepare(DataLoader(rows["train"], shuffle=True, **loading))
    accumulated = accelerator.gradient_accumulation_steps
    steps = math.ceil(tuning.epochs) * math.ceil(len(data) / accumulated)
    warmup = math.ceil(tuning.warmup * steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=tuning.learning_rate, weight_decay=0.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, warmup, steps)
    wrapped, optimizer = accelerator.prepare(model, optimizer)  # a prepared schedule would step once for each process
    set_seed(recipe.seed, device_specific=True)  # each process drops other heads
    accelerator.init_trackers("collab_compress", {"task": task.name, "seed": recipe.seed, "heads": str(recipe.heads)})
    bar, done = tqdm(total=steps, unit=" steps", disable=not accelerator.is_main_process), 0
    with bar, HeadSession(model, recipe.heads, optimizer, warmup / steps, tokenizer) as session:  # not of `wrapped`
        for epoch in range(math.ceil(tuning.epochs)):
            wrapped.train()
            for number, batch in enumerate(data):
                if number % accumulated == 0:
                    share = next(iter(shares.values()), None)  # rotation measures on all processes' shares
                    by_steps = recipe.heads.rotation is not None and recipe.heads.rotation.of_training
                    session.epoch(done / steps if by_steps else epoch + number / len(data), share)
                    session.step(done / max(steps - 1, 1))
                passes = min(accumulated, len(data) - number // accumulated * accumulated)  # fewer in the last step
                with accelerator.accumulate(wrapped):
                    loss = wrapped(**batch).loss
                    loss = loss + session.penalty(loss, batch.get("labels"))
                    accelerator.backward(loss * accumulated / passes)  # it divides by `accumulated`
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    schedule.step()
                    bar.update()
                    done += 1
                    if done % 10 == 0:
                        accelerator.log({"loss": loss.item(), **session.logs()}, step=done)
            for name, share in shares.items():
                scores = evaluate(accelerator, model, share, load_metric(task.metric))
                accelerator.log({f"{name}/{score}": value for score, value in scores.items()}, step=done)
                accelerator.print(f"epoch {epoch + 1}, {name}: {scores}")
    weights = accelerator.get_state_dict(wrapped)  # all processes take part, for FSDP2 shards the model
    if accelerator.is_main_process:
        model.save_pretrained(recipe.output, state_dict=weights)
        tokenizer.save_pretrained(recipe.output)
    accelerator.end_training()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, data: DataLoader, metric: Metric) -> dict[str, float]:
    model.eval()
    predictions, references = [], []
    for batch in data:
        predicted = model(**batch).logits.argmax(-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))  # no row counts twice
        predictions += predicted.tolist()
        references += labels.tolist()
    return metric.compute(predictions=predictions, references=references)


if __name__ == "__main__":
    try:
        train(read_recipe(overrides=sys.argv[1:]))
    except CollabCompressError as error:
        sys.exit(f"accelerate_loop: {error}")
