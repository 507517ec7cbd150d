"""Checks of the plan against the GPUs, the nodes and the file systems that are there."""

from __future__ import annotations

import shutil
from pathlib import Path

from wherry.doctor.check import Verdict, check, fail, passed, skip, warn
from wherry.doctor.context import Context
from wherry.doctor.node import memory_of
from wherry.plan.cache import divisors
from wherry.plan.made import Plan
from wherry.rundir import runs_root

GIB = 2**30
UNKNOWN = "no recipe is given, or the model's shape is not known yet"


@check("plan.fits", "once")
def fits(context: Context) -> Verdict:
    plan = context.plan
    if plan is None:
        return skip(UNKNOWN)
    total = f"{plan.option.peak.total / GIB:.1f} of {plan.gpus.memory:.1f} GiB ({plan.setting}, {plan.gpus})"
    if context.on_cpu:
        return skip("WHERRY_DEVICE=cpu")
    if plan.option.fits:
        if plan.option.verdict != "fits":
            return warn(f"{total}: tight", f"any one of: {'; '.join(plan.cures)}" if plan.cures else "shorter rows")
        return passed(total)
    if plan.gpus.origin.startswith("assumed"):
        return warn(f"{total}, if the GPUs are those", "say which they are: --gpus 3x8xH100-80")
    cures = "; ".join(plan.cures) or "more GPUs with train.sharding=zero3"
    return fail(f"does not fit: {total}", f"any one of: {cures}")


@check("plan.host", "once")
def host(context: Context) -> Verdict:
    if context.plan is None:
        return skip(UNKNOWN)
    needed = context.plan.host.size / GIB
    if context.on_cpu or not context.in_job:
        return skip(f"the first node of a job needs {needed:.0f} GiB (wherry plan --explain host)")
    total, _ = memory_of(context)
    if total / GIB < needed:
        return fail(
            f"the first node needs {needed:.0f} GiB and has {total / GIB:.0f}: {context.plan.host.how}",
            "ask for nodes with more memory (--mem=0 takes all), or train.sharding=none where the model fits a GPU",
        )
    return passed(f"{needed:.0f} of {total / GIB:.0f} GiB")


@check("plan.disk", "once")
def disk(context: Context) -> Verdict:
    if context.plan is None:
        return skip(UNKNOWN)
    return _room(context.plan.disk.size, "checkpoints", "lower train.args.save_total_limit, free some space")


@check("merge.space", "once")
def merge_space(context: Context) -> Verdict:
    plan = context.plan
    if plan is None:
        return skip(UNKNOWN)
    if plan.setting.tuning == "full":
        return skip("full tuning has nothing to merge")
    if context.run and context.run.is_complete("merge"):
        return passed("merged already")
    return _room(plan.merged.size, "the merged model: the weights", "free some space")


def _room(needed: float, what: str, fix: str) -> Verdict:
    folder = runs_root().absolute()
    while not folder.exists():
        folder = folder.parent
    free = free_bytes(folder)
    if free < needed:
        return fail(
            f"{what} take {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free in {folder}",
            f"{fix}, or set WHERRY_RUNS to a larger file system",
        )
    return passed(f"{needed / 1e9:.1f} GB of {free / 1e9:.0f} GB free in {folder}")


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@check("merge.memory", "once")
def merge_memory(context: Context) -> Verdict:
    if context.plan is None:
        return skip(UNKNOWN)
    needed, (total, free) = context.plan.merge_memory.size, memory_of(context)
    if context.plan.setting.tuning == "full":
        return skip("full tuning has nothing to merge")
    if free < needed:
        return fail(
            f"merging takes {needed / GIB:.1f} GiB of memory, {free / GIB:.1f} of {total / GIB:.1f} are free here",
            "merge on a node with more (sbatch slurm/merge.sh asks for 32 GB); it needs no GPU",
        )
    return passed(f"{needed / GIB:.1f} GiB, on any node: it takes one tensor at a time, no GPU")


@check("serve.parallel", "once")
def parallel(context: Context) -> Verdict:
    plan = context.plan
    if plan is None:
        return skip(UNKNOWN)
    count = plan.served.parallel
    if plan.shape.heads % count:
        allowed = ", ".join(map(str, divisors(plan.shape, max(plan.gpus.per_node, 8))))
        return fail(
            f"serve.vllm.tensor_parallel_size={count} does not divide {plan.shape.heads} attention heads",
            f"one of: {allowed}",
        )
    if count > plan.gpus.per_node and not plan.gpus.origin.startswith("assumed"):
        return fail(
            f"serve.vllm.tensor_parallel_size={count}, a node has {plan.gpus.per_node} GPUs",
            f"serve.vllm.tensor_parallel_size={max(divisors(plan.shape, plan.gpus.per_node))}",
        )
    return passed(f"{count} GPU{'s' * (count != 1)} for {plan.shape.heads} heads")


@check("serve.cache", "once")
def cache(context: Context) -> Verdict:
    plan = context.plan
    if plan is None:
        return skip(UNKNOWN)
    if context.on_cpu:
        return skip("WHERRY_DEVICE=cpu")
    return _cache(plan)


def _cache(plan: Plan) -> Verdict:
    served = plan.served
    if served.asked > plan.shape.context:
        return skip("more than the model has positions for (serve.context)")
    if served.fits:
        return passed(f"the cache holds {served.tokens:,} tokens, {served.asked:,} for the longest request")
    fixes = []
    if served.smallest_parallel:
        fixes.append(f"serve.vllm.tensor_parallel_size={served.smallest_parallel}")
    if served.largest:
        fixes.append(f"serve.vllm.max_model_len={served.largest}")
    found = f"max_model_len={served.asked:,} does not fit: the cache holds {served.tokens:,} tokens"
    fix = ", or ".join(fixes) or "a smaller model, or GPUs with more memory"
    return warn(found, fix) if plan.gpus.origin.startswith("assumed") else fail(found, fix)
