"""Whether ZeRO-3 really split the model: it does not engage, without a word, where the model was loaded before the
configuration existed, and then every rank holds every weight.

Asked twice. At load, 16- and 32-bit weights are split while they are read; 4-bit weights are not (bitsandbytes
quantises whole tensors, and transformers keeps them so), every rank holds all of them for a moment. Once the engine is
built, all weights are split: DeepSpeed keeps whole only small parameters (stage3_param_persistence_threshold), and
bitsandbytes its quantisation constants, which are no parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from wherry.cli import say
from wherry.errors import Exit, WherryError
from wherry.ranks import Rank

TOLERANCE = 1.05
GIB = 2**30


@dataclass(frozen=True)
class Held:
    """Bytes of a model's parameters: of all of them, of those that may stay whole, of what this rank has."""

    total: int
    kept_whole: int
    mine: int
    whole: list[str]
    """Names of parameters that no one has split."""

    def share(self, ranks: int) -> float:
        """Bytes that one of so many ranks should have."""
        return self.kept_whole + (self.total - self.kept_whole) / ranks


def size(parameter: Any) -> int:
    """Elements of the whole parameter; a rank's own tensor is empty where ZeRO-3 has split it."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def held(model: Any) -> Held:
    """What this rank holds now, by the tensors themselves and not by what any configuration says."""
    total = kept = mine = 0
    whole = []
    for name, parameter in model.named_parameters():
        width = parameter.element_size()
        total += size(parameter) * width
        part = getattr(parameter, "ds_tensor", None)
        if part is None:
            whole.append(name)
        if getattr(parameter, "ds_persist", False):
            kept += size(parameter) * width
        mine += (parameter.numel() or (part.numel() if part is not None else 0)) * width
    return Held(total, kept, mine, whole)


def require(model: Any, rank: Rank, moment: str, whole_allowed: bool = False) -> Held:
    """Raises WherryError (exit 3) where this rank holds over 5 % more than its share.

    whole_allowed: the moment after 4-bit weights were read, when the share is all of them.
    """
    found = held(model)
    share = found.total if whole_allowed else found.share(rank.world_size)
    if found.mine <= TOLERANCE * share:
        return found
    named = ", ".join(found.whole[:3]) or "all split, but gathered"
    raise WherryError(
        f"ZeRO-3 did not split the model: {moment} this rank holds {found.mine / GIB:.3g} of {found.total / GIB:.3g} "
        f"GiB of weights, its share is {share / GIB:.3g}",
        f"rank {rank.rank}: {len(found.whole)} parameters are whole: {named}",
        "the model must be loaded after TrainingArguments with its DeepSpeed configuration exists",
        Exit.PREFLIGHT,
    )


class AtWork(TrainerCallback):
    """Asks again when the engine is built, before the first step."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        found = require(model, self.rank, "in the engine")
        if self.rank.is_main:
            say(
                f"train: sharded, a rank holds {found.mine / GIB:.3g} of {found.total / GIB:.3g} GiB of weights "
                f"({found.mine / found.total:.1%})"
            )
