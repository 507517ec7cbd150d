"""Make a plan of a run: find the model's shape and the rows' length, then do the arithmetic."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from wherry.errors import WherryError
from wherry.plan import cache, choose, known, node, shapes, speed
from wherry.plan.gpus import Gpus
from wherry.plan.memory import Part
from wherry.plan.setting import Setting, of_recipe
from wherry.plan.shapes import Shape
from wherry.rundir import Run

UNKNOWN_LENGTH = 2048  # tokens a row, where neither recipe nor data have said


@dataclass(frozen=True)
class Plan:
    model: str
    shape: Shape
    shape_origin: str
    length_origin: str
    setting: Setting
    gpus: Gpus
    option: choose.Option
    options: list[choose.Option]
    choice: choose.Option | None
    cures: list[str]
    host: Part
    merge_memory: Part
    disk: Part
    merged: Part
    served: cache.Served
    step: speed.Step
    steps: int | None
    length: int
    """Tokens of the longest row."""

    @property
    def hours(self) -> float | None:
        return self.steps * self.step.seconds / 3600 if self.steps else None


def make(run: Run, gpus: Gpus, recomputed: int | None = None) -> Plan:
    """recomputed: layers that recompute their activations, instead of what the recipe says.

    Raises WherryError (exit 2) where the shape is not known, or a value that counts is no number.
    """
    try:
        return _make(run, gpus, recomputed)
    except (TypeError, ValueError) as error:
        raise WherryError(
            f"a value of the recipe is no number: {error}",
            "train.args, train.lora or serve.vllm",
            "give numbers where TRL, PEFT and vLLM take numbers",
        ) from None


def _make(run: Run, gpus: Gpus, recomputed: int | None) -> Plan:
    recipe = run.recipe
    shape, shape_origin = find_shape(run)
    contract = run.manifest().get("contract", {})
    asked = recipe.train.args.get("max_length")
    length = int(asked or contract.get("max_length") or min(UNKNOWN_LENGTH, shape.context))
    setting = of_recipe(recipe, shape, gpus.count, length)
    if recomputed is not None:
        setting = Setting(**{**setting.__dict__, "recomputed": min(recomputed, shape.layers)})
    origin = "train.args.max_length" if asked else "the longest row"
    if origin == "the longest row" and not contract:
        origin = "assumed: prepare will know"
    mine = choose.option(shape, setting, gpus)
    options = choose.options(shape, setting, gpus)
    step = speed.step(shape, setting, gpus)
    return Plan(
        model=recipe.model.name,
        shape=shape,
        shape_origin=shape_origin,
        length_origin=origin,
        setting=setting,
        gpus=gpus,
        option=mine,
        options=options,
        choice=choose.choice(options),
        cures=[] if mine.fits else list(choose.cures(shape, setting, gpus)),
        host=node.host(shape, setting, gpus),
        merge_memory=node.merge_memory(shape, setting),
        disk=node.checkpoints(shape, setting, int(recipe.train.args.get("save_total_limit") or 2)),
        merged=node.merged(shape, setting),
        served=cache.served(shape, gpus, recipe.serve.vllm),
        step=step,
        steps=_steps(run, setting, length),
        length=length,
    )


def find_shape(run: Run) -> tuple[Shape, str]:
    """The model's shape and where it came from. Raises WherryError where neither file nor table knows it."""
    name = run.recipe.model.name
    for path in (run.dir("prepare") / "model/config.json", Path(name) / "config.json", *_cached(name)):
        if path.is_file():
            return shapes.of_config(path), str(path)
    if shape := known.find(name):
        return shape, "table of known models"
    raise WherryError(
        f"the shape of {name} is not known here",
        "model.name",
        "run prepare first (it fetches config.json), or name a folder that holds config.json",
    )


def _cached(name: str) -> list[Path]:
    """config.json of a hub id that was fetched before."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return sorted(hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")) if "/" in name else []


def _steps(run: Run, setting: Setting, length: int) -> int | None:
    """Optimizer steps of the whole training; None where the data has not been counted."""
    args = run.recipe.train.args
    if int(args.get("max_steps") or -1) > 0:
        return int(args["max_steps"])
    data = run.manifest()["modes"].get("prepare", {}).get("data", {})
    if not data.get("rows"):
        return None
    rows = data["rows"]
    if args.get("packing"):
        rows = -(-int(data["tokens"]) // length)
    each = int(args.get("per_device_train_batch_size") or 8) * setting.ranks * setting.accumulation
    return max(1, round(-(-rows // each) * float(args.get("num_train_epochs") or 3)))
