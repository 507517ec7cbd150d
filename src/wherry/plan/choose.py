"""Which way of tuning fits the GPUs, which one Wherry would take, and what single change would make a recipe fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wherry.plan import memory
from wherry.plan.gpus import Gpus
from wherry.plan.setting import Setting
from wherry.plan.shapes import Shape

TIGHT = 0.95  # of the memory: more than this and the next longer row may not fit


@dataclass(frozen=True)
class Option:
    setting: Setting
    peak: memory.Moment
    gpus: Gpus

    @property
    def share(self) -> float:
        return self.peak.total / (self.gpus.memory * memory.GIB)

    @property
    def fits(self) -> bool:
        return self.share <= 1

    @property
    def verdict(self) -> str:
        return "does not fit" if not self.fits else "fits tightly" if self.share > TIGHT else "fits"


def option(shape: Shape, setting: Setting, gpus: Gpus) -> Option:
    return Option(setting, memory.peak(shape, setting, gpus.nodes), gpus)


def another(setting: Setting, tuning: str, sharded: bool) -> Setting:
    """The same step by another way of tuning, with what TRL would make of it (setting.of_recipe)."""
    return replace(
        setting,
        tuning=tuning,
        sharded=sharded,
        adapter_size=2 if sharded or tuning == "qlora" else 4,
        autocast=not sharded,
    )


def options(shape: Shape, setting: Setting, gpus: Gpus) -> list[Option]:
    """Every way of tuning on these GPUs, in the order of preference: the first that fits is the choice.

    LoRA whole on each GPU moves nothing but the adapter's gradients. LoRA with ZeRO-3 keeps the base in 16 bits, which
    QLoRA does not. Full tuning is a choice of what is learned, so it is never made here; it stands last.
    """
    ways = [(tuning, sharded) for tuning in ("lora", "qlora") for sharded in (False, True)]
    ways += [("full", True), ("full", False)]
    return [
        option(shape, another(setting, tuning, sharded), gpus)
        for tuning, sharded in ways
        if not sharded or setting.ranks > 1
    ]


def choice(found: list[Option]) -> Option | None:
    return next((one for one in found if one.fits and one.setting.tuning != "full"), None)


def cures(shape: Shape, setting: Setting, gpus: Gpus) -> Iterator[str]:
    """Single changes of the recipe, each of which makes it fit, as a recipe has them; the cheapest first."""
    for words, changed in _changes(shape, setting):
        if option(shape, changed, gpus).fits:
            yield words
    if shorter := _longest(shape, setting, gpus):
        yield f"train.args.max_length={shorter}"
    if setting.sharded:
        for nodes in range(gpus.nodes + 1, 65):
            more = replace(gpus, nodes=nodes)
            if option(shape, replace(setting, ranks=more.count), more).fits:
                yield f"{nodes} nodes instead of {gpus.nodes}"
                break


def _changes(shape: Shape, setting: Setting) -> Iterator[tuple[str, Setting]]:
    if not setting.fused:
        yield "train.args.use_liger_kernel=true", replace(setting, fused=True, loss="fused")
    if setting.loss == "whole":
        yield "train.args.loss_type=chunked_nll", replace(setting, loss="chunked")
    if setting.recomputed < shape.layers:
        yield "train.args.gradient_checkpointing=true", replace(setting, recomputed=shape.layers)
    for batch in (setting.batch // 2, setting.batch // 4, 1):
        if 0 < batch < setting.batch:
            changed = replace(setting, batch=batch, padded=setting.padded and batch > 1)
            yield f"train.args.per_device_train_batch_size={batch}", changed
    if not setting.sharded and setting.ranks > 1:
        yield "train.sharding=zero3", another(setting, setting.tuning, True)
    if setting.tuning == "full":
        yield "train.tuning=lora", another(setting, "lora", setting.sharded)
    if setting.tuning != "qlora":
        yield "train.tuning=qlora", another(setting, "qlora", setting.sharded)


def _longest(shape: Shape, setting: Setting, gpus: Gpus) -> int | None:
    """The longest rows, in steps of 256 tokens, with which it would fit."""
    for length in range(setting.sequence - setting.sequence % 256, 0, -256):
        if length < setting.sequence and option(shape, replace(setting, sequence=length), gpus).fits:
            return length
    return None
