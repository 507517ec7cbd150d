"""wherry train --dry-run: a few real steps at the recipe's real shape, with random weights and full rows.

It proves memory, communication and speed on the machines that will train, and leaves nothing in the run directory.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback

from wherry.cli import say
from wherry.device import has_gpu
from wherry.plan import gpus, made, memory
from wherry.ranks import Rank
from wherry.rundir import Run, peak_rss_bytes

GIB = memory.GIB


def dry_run(run: Run, rank: Rank, steps: int) -> list[dict[str, Any]]:
    """Train `steps` steps, print planned against measured, return what each rank measured."""
    import torch
    from transformers import set_seed

    from wherry.train import config, objective, random_model, sharding

    plan = made.make(run, replace(gpus.here(), nodes=1, per_node=rank.world_size))
    with tempfile.TemporaryDirectory() as scratch:
        run = _shortened(run, plan, steps)
        args = config.training_args(run)
        args.output_dir = scratch
        set_seed(args.seed)
        split = run.recipe.train.sharding == "zero3" and not rank.alone
        if run.recipe.train.sharding == "zero3":
            import deepspeed

            deepspeed.init_distributed(dist_backend="nccl" if has_gpu() else "gloo")
        device = torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")
        before = peak_rss_bytes()
        network = random_model.make(run, device)
        if split:
            sharding.require(network, rank, "at load", whole_allowed=run.recipe.train.tuning == "qlora")
        clock = Clock()
        each = args.per_device_train_batch_size * args.gradient_accumulation_steps * rank.world_size
        rows = _rows(run, plan, steps * each)
        with config.library_refusals("train"):
            trainer = objective.trainer_class(run.recipe.train.objective)(
                model=network,
                args=args,
                train_dataset=rows,
                processing_class=_tokenizer(network.config),
                peft_config=config.lora_config(run.recipe.train),
                callbacks=[clock, *([sharding.AtWork(rank)] if split else [])],
            )
        trainer.train()
        mine = {"rank": rank.rank, "step_s": clock.best(), "rss": peak_rss_bytes() - before}
        if has_gpu():
            mine["allocated"] = torch.cuda.max_memory_allocated()
            mine["reserved"] = torch.cuda.max_memory_reserved()
            free, total = torch.cuda.mem_get_info()
            mine["used"], mine["total"] = total - free, total
    found: list[dict[str, Any]] = [mine]
    if not rank.alone:
        found = [{} for _ in range(rank.world_size)]
        torch.distributed.all_gather_object(found, mine)
    if rank.is_main:
        print(as_text(plan, found), flush=True)
    return found


def as_text(plan: made.Plan, found: list[dict[str, Any]]) -> str:
    """Planned against measured, the largest of all ranks."""
    peak = plan.option.peak
    slowest = max(one["step_s"] for one in found)
    lines = [f"dry run: {plan.setting}, {len(found)} rank{'s' * (len(found) > 1)}, random weights"]
    lines.append(f"{'':<26}{'planned':>12}{'measured':>12}")
    if "allocated" in found[0]:
        for name, planned in (("allocated", peak.allocated), ("used", peak.total)):
            measured = max(one[name] for one in found)
            lines.append(f"{name + ', GiB a GPU':<26}{planned / GIB:>12.2f}{measured / GIB:>12.2f}")
        planned_s = plan.step.seconds
        lines.append(f"{'a step, seconds':<26}{planned_s:>12.3g}{slowest:>12.3g}")
    else:  # plans are for GPUs; on a CPU the allocator keeps what it once had, and time is another
        measured = max(one["rss"] for one in found)
        lines.append(f"{'memory, GiB a rank':<26}{peak.allocated / GIB:>12.3g}{measured / GIB:>12.3g}")
        lines.append(f"{'a step, seconds':<26}{'':>12}{slowest:>12.3g}")
    lines.append(f"tokens a second, all ranks: {plan.step.tokens / slowest:,.0f}")
    if plan.steps:
        lines.append(f"the whole training: {plan.steps:,} steps, {plan.steps * slowest / 3600:.2g} h at this speed")
    return "\n".join(lines)


def _shortened(run: Run, plan: made.Plan, steps: int) -> Run:
    """The run with a recipe that takes `steps` steps, saves and evaluates nothing, and knows its rows' length."""
    values = {"max_steps": steps, "max_length": plan.length, "save_strategy": "no", "eval_strategy": "no"}
    values |= {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    args = {name: value for name, value in run.recipe.train.args.items() if name not in ("save_steps", "eval_steps")}
    train = run.recipe.train.model_copy(update={"args": args | values})
    recipe = run.recipe.model_copy(update={"train": train})
    return Run(run.name, replace(run.resolved, recipe=recipe))


def _rows(run: Run, plan: made.Plan, count: int) -> Any:
    """So many random rows, of full length; one of two is a token shorter where batches pad."""
    import numpy as np
    from datasets import Dataset

    draw = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return draw.integers(0, plan.shape.vocab, length).tolist()

    lengths = [plan.length - (i % 2 if plan.setting.padded else 0) for i in range(count)]
    if run.recipe.train.objective == "dpo":
        half = [length // 2 for length in lengths]
        rows = [(ids(n), ids(whole - n), ids(whole - n)) for n, whole in zip(half, lengths, strict=True)]
        return Dataset.from_list(
            [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), row, strict=True)) for row in rows]
        )
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in map(ids, lengths)])


def _tokenizer(config: Any) -> Any:
    """Trainers want a tokenizer, for its pad token; these rows are token ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "</s>": 1, **{f"<{i}>": i for i in range(2, min(16, config.vocab_size))}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


class Clock(TrainerCallback):
    """Seconds of each optimizer step, the device's work included."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._started = 0.0

    def best(self) -> float:
        """The quickest step but the first, which also fills caches."""
        return min(self.times[1:] or self.times)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.times.append(self._now() - self._started)
        if state.is_world_process_zero:
            say(f"dry run: step {state.global_step} of {state.max_steps}, {self.times[-1]:.3g} s")

    @staticmethod
    def _now() -> float:
        if has_gpu():
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()
