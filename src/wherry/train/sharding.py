"""Whether ZeRO-3 really split the model: it does not engage, without a word, where the model was loaded before the
configuration existed, and then every rank holds every weight."""

from __future__ import annotations

from typing import Any

from wherry.errors import Exit, WherryError
from wherry.ranks import Rank


def size(parameter: Any) -> int:
    """Elements of the whole parameter; a rank's own tensor is empty where ZeRO-3 has split it."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def held(parameter: Any) -> int:
    """Elements that this rank holds."""
    own = getattr(parameter, "ds_tensor", None)
    return int(parameter.numel() + (own.numel() if own is not None and parameter.numel() == 0 else 0))


def require(model: Any, sharding: str, rank: Rank) -> None:
    """Raises WherryError (exit 3) where this rank holds more than its share: more than 5 % over it.

    Parameters below DeepSpeed's persistence threshold may stay whole; they are held through ds_tensor in any case.
    """
    if sharding == "none" or rank.alone:
        return
    parameters = dict(model.named_parameters())
    total = sum(size(p) for p in parameters.values())
    mine = sum(held(p) for p in parameters.values())
    share = total / rank.world_size
    if mine <= 1.05 * share:
        return
    whole = [name for name, p in parameters.items() if not hasattr(p, "ds_tensor")]
    raise WherryError(
        f"ZeRO-3 did not split the model: this rank holds {mine:,} of {total:,} parameters, its share is {share:,.0f}",
        f"rank {rank.rank}: {len(whole)} parameters are whole, the first {whole[0] if whole else 'none'}",
        "the model must be loaded after TrainingArguments with its DeepSpeed configuration exists",
        Exit.PREFLIGHT,
    )
