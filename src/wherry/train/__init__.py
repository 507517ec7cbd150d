"""wherry train: tune the prepared model; started again after a stop or a kill it goes on from the newest checkpoint.

train/checkpoints/checkpoint-N   complete ones hold complete.json
train/adapter                    the LoRA adapter and its tokenizer (train.tuning: full leaves train/model)
train/metrics.jsonl, train/loss.png
train/stop-requested             create this file to stop at the next step: exit 75

--dry-run needs nothing prepared and leaves nothing behind.
"""

from __future__ import annotations

from typing import Any

from wherry import ranks
from wherry.cli import open_run, parser, say
from wherry.device import has_gpu, quiet_cpu
from wherry.errors import Exit, WherryError
from wherry.rundir import Run


def main(arguments: list[str]) -> int:
    made = parser("train", __doc__, "wherry train recipes/demo.yaml train.args.learning_rate=1e-4")
    made.add_argument(
        "--dry-run", action="store_true", help="a few steps with random weights: memory and speed, measured"
    )
    made.add_argument("--steps", type=int, default=4, metavar="N", help="of a dry run (default: 4)")
    options = made.parse_args(arguments)
    rank = ranks.current()
    run = open_run(options)
    if options.dry_run:
        return _dry_run(run, rank, options.steps)
    run.require("prepare")
    if run.is_complete("train"):
        say(f"train of run {run.name!r} is complete: {run.dir('train')}")
        return 0
    ranks.check(rank)
    quiet_cpu()
    with run.work("train", writes=rank.is_main) as record:
        train(run, rank, record)
    return 0


def _dry_run(run: Run, rank: ranks.Rank, steps: int) -> int:
    if steps < 1:
        raise WherryError(f"--steps {steps}", "command line", "give a number of steps above 0")
    ranks.check(rank)
    quiet_cpu()
    from wherry.train.dry_run import dry_run

    dry_run(run, rank, steps)
    return 0


def train(run: Run, rank: ranks.Rank, record: dict[str, Any]) -> None:
    from transformers import set_seed

    from wherry.train import checkpoints, config, model, objective, output, progress, sharding, world
    from wherry.train.watchdog import Watchdog

    stop = progress.Stop(run.dir("train") / "stop-requested")
    if rank.is_main:
        stop.path.unlink(missing_ok=True)  # of an attempt that did not live to see it
    # The configuration exists before any weight is read: libraries shard by what they find when the model is loaded.
    saved = run.dir("train") / "checkpoints"
    resume = checkpoints.newest_complete(saved)
    reshaped = world.changed(resume, rank.world_size)
    added = model.added_tokens(run) if run.recipe.train.tuning != "full" else {}
    args = config.training_args(run, universal=reshaped, head_rows=len(added) > 1)
    adapter = config.lora_config(run.recipe.train, added)
    model.check_contract(run)
    set_seed(args.seed)  # before PEFT draws the adapter's first weights; the trainer does so only afterwards
    network = model.load(run, rank)
    split = run.recipe.train.sharding == "zero3" and not rank.alone
    if split:
        sharding.require(network, rank, "at load", whole_allowed=run.recipe.train.tuning == "qlora")
    watchdog = Watchdog(run.dir("train") / "hang", run.recipe.train.hang_timeout, rank)
    if rank.is_main:
        checkpoints.set_aside_damaged(saved)
        if resume and reshaped and args.deepspeed:
            world.make_universal(resume)
    args.distributed_state.wait_for_everyone()
    with config.library_refusals("train"):
        metrics = progress.Metrics(run.dir("train") / "metrics.jsonl", resumed=resume is not None)
        callbacks = [stop, metrics, watchdog] + ([sharding.AtWork(rank)] if split else [])
        trainer = objective.trainer(run, network, args, adapter, callbacks)
    if rank.is_main:
        if resume:
            world.announce(resume, rank.world_size, trainer.get_total_train_batch_size(args))
        say(_what(run, rank, trainer.model, resume))

    with stop.on_sigterm(), watchdog.watching():
        result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    record |= {"step": trainer.state.global_step, "max_steps": trainer.state.max_steps, "loss": result.training_loss}
    record |= {"world_size": rank.world_size}
    if stop.requested and trainer.state.global_step < trainer.state.max_steps:
        stop.path.unlink(missing_ok=True)
        raise WherryError(
            f"stopped as asked after step {trainer.state.global_step} of {trainer.state.max_steps}; it is saved",
            str(run.dir("train")),
            "the same command goes on from there",
            Exit.STOPPED,
        )
    output.save(trainer, run, rank)
    if rank.is_main:
        progress.save_picture(run.dir("train") / "metrics.jsonl", run.dir("train") / "loss.png")
        say(f"trained: {run.dir('train')}")


def _what(run: Run, rank: ranks.Rank, network: Any, resume: Any) -> str:
    from wherry.train.sharding import size

    trainable = sum(size(p) for p in network.parameters() if p.requires_grad)
    where = "GPU" if has_gpu() else "CPU"
    ways = "" if rank.alone else f", {rank.world_size} ranks, sharding {run.recipe.train.sharding}"
    start = f"from {resume.name}" if resume else "from step 0"
    what = f"{run.recipe.train.objective}, {run.recipe.train.tuning}"
    return f"train: {what} on the {where}{ways}, {trainable:,} trainable parameters, {start}"
