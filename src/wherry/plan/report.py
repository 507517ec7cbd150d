"""A plan as it is printed, as JSON, and one part of it with its formula."""

from __future__ import annotations

from typing import Any

from wherry.errors import WherryError
from wherry.nearest import nearest
from wherry.plan import activations, picture
from wherry.plan.made import Plan
from wherry.plan.memory import GIB, NAMES


def as_text(plan: Plan) -> str:
    mine, setting = plan.option, plan.setting
    layers = f"{setting.recomputed} of {plan.shape.layers} layers recompute" if setting.recomputed else "all is kept"
    lines = [
        f"model    {plan.model}: {plan.shape.parameters / 1e9:.2f} B parameters ({plan.shape_origin})",
        f"recipe   {setting}, {setting.batch} × {setting.sequence:,} tokens a GPU ({plan.length_origin}), {layers}",
        f"GPUs     {plan.gpus} ({plan.gpus.origin})",
        "",
        f"one GPU at its fullest moment, {mine.peak.name}:",
        *(f"  {NAMES[name]:<24}{part.size / GIB:9.2f} GiB" for name, part in mine.peak.parts.items() if part.size),
        f"  {'together':<24}{mine.peak.total / GIB:9.2f} of {plan.gpus.memory:.1f} GiB: {mine.verdict}",
    ]
    if not mine.fits:
        lines += ["", "it fits with any one of:" if plan.cures else "no single change of the recipe makes it fit"]
        lines += [f"  {cure}" for cure in plan.cures]
    lines += ["", picture.as_text(plan.options, plan.choice), _choice(plan), "", *_rest(plan)]
    return "\n".join(lines)


def _choice(plan: Plan) -> str:
    if plan.choice is None:
        return "choice   none of these fits: more GPUs with train.sharding=zero3, shorter rows, or a smaller model"
    chosen = plan.choice.setting
    same = " (the recipe's)" if (chosen.tuning, chosen.sharded) == (plan.setting.tuning, plan.setting.sharded) else ""
    sharding = "zero3" if chosen.sharded else "none"
    return f"choice   train.tuning={chosen.tuning} train.sharding={sharding}{same}"


def _rest(plan: Plan) -> list[str]:
    served, step = plan.served, plan.step
    hours = ""
    if plan.steps and plan.hours:
        hours = f", {plan.steps:,} steps in {plan.hours:.2g} h, {plan.hours * plan.gpus.count:.2g} GPU-hours"
    cache = f"a cache for {served.tokens:,} tokens; the longest context is {served.largest:,}"
    if served.fits:
        verdict = f"fits max_model_len={served.asked:,}"
    elif served.smallest_parallel:
        verdict = f"max_model_len={served.asked:,} does not fit: serve.vllm.tensor_parallel_size="
        verdict += f"{served.smallest_parallel}" + (f", or max_model_len={served.largest}" * bool(served.largest))
    else:
        verdict = f"max_model_len={served.asked:,} does not fit one node: lower serve.vllm.max_model_len"
    host, merging = plan.host.size / GIB, plan.merge_memory.size / GIB
    return [
        f"time     about {step.seconds:.2g} s a step of {step.tokens:,} tokens{hours} (roughly, if nothing waits)",
        f"host     {host:.0f} GiB of memory on the first node, {merging:.0f} to merge",
        f"disk     {plan.disk.size / 1e9:.1f} GB of checkpoints, {plan.merged.size / 1e9:.1f} GB for the merged model",
        f"serve    {served.parallel} GPU{'s' * (served.parallel != 1)}: {cache}: {verdict}",
    ]


def as_json(plan: Plan) -> dict[str, Any]:
    """Bytes, seconds, tokens."""
    return {
        "model": plan.model,
        "parameters": plan.shape.parameters,
        "shape": plan.shape.__dict__,
        "setting": plan.setting.__dict__,
        "gpus": plan.gpus.__dict__,
        "fits": plan.option.fits,
        "peak": _peak(plan.option),
        "cures": plan.cures,
        "options": [
            {"tuning": o.setting.tuning, "sharded": o.setting.sharded, "fits": o.fits, **_peak(o)} for o in plan.options
        ],
        "choice": plan.choice and {"tuning": plan.choice.setting.tuning, "sharded": plan.choice.setting.sharded},
        "host_bytes": plan.host.size,
        "merge_memory_bytes": plan.merge_memory.size,
        "checkpoint_bytes": plan.disk.size,
        "merged_bytes": plan.merged.size,
        "serve": plan.served.__dict__ | {"fits": plan.served.fits, "tokens": plan.served.tokens},
        "step_seconds": plan.step.seconds,
        "step_tokens": plan.step.tokens,
        "steps": plan.steps,
        "hours": plan.hours,
        "gpu_hours": plan.hours * plan.gpus.count if plan.hours is not None else None,
    }


def _peak(option: Any) -> dict[str, Any]:
    parts = {name: round(part.size) for name, part in option.peak.parts.items()}
    return {
        "moment": option.peak.name,
        "parts": parts,
        "allocated_bytes": round(option.peak.allocated),
        "total_bytes": round(option.peak.total),
    }


def explain(plan: Plan, name: str) -> str:
    """A part's formula with its numbers. Raises WherryError (exit 2) for a part that there is not."""
    others = {
        "host": plan.host,
        "merge": plan.merge_memory,
        "disk": plan.disk,
        "merged": plan.merged,
    }
    known = [*NAMES, *others, "serve", "time"]
    if name not in known:
        raise WherryError(f"no part {name!r}", "--explain", f"{nearest(name, known)}one of: {', '.join(known)}")
    if name == "time":
        return f"time: {plan.step.how} = {plan.step.seconds:.3g} s a step"
    if name == "serve":
        return f"serve: {plan.served.how}; {plan.served.tokens:,} tokens"
    part = others.get(name) or plan.option.peak.parts.get(name)
    if part is None:
        return f"{NAMES[name]}: nothing at the fullest moment, {plan.option.peak.name}"
    lines = [f"{NAMES.get(name, name)}: {part.how}", f"= {part.size / GIB:.2f} GiB"]
    if name in ("kept", "layer"):
        saved = activations.saved(plan.shape, plan.setting)
        lines += ["", "a layer that recomputes nothing keeps, in bytes a token:"]
        lines += [f"  {size:>10,.0f}  {tensor}" for tensor, size in saved.items()]
        lines += [f"  {sum(saved.values()):>10,.0f}  together"]
    return "\n".join(lines)
