"""What becomes of the base: one target for each tensor of the result, planned from headers alone.

Everything that can be wrong between base and adapter is found here, before the first byte of the result is written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.errors import WherryError
from wherry.merge import stream
from wherry.merge.adapter import PREFIX, Adapter, unfit
from wherry.merge.names import Fused, Names
from wherry.merge.stream import PIECE_BYTES, Piece, Source
from wherry.nearest import closest
from wherry.safetensors_file import BITS, Checkpoint

if TYPE_CHECKING:
    import torch

    from wherry.merge.lora import Lora
    from wherry.merge.nf4 import Nf4

HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
PLAIN = ("F64", "F32", "F16", "BF16")  # what a sum can be rounded to
ROWS = 64  # pieces begin at a multiple of this: NF4 quantises numbers by 64


@dataclass(frozen=True)
class Tokens:
    """Rows of an embedding that were trained alone: indices[i] is replaced by row i of source."""

    indices: tuple[int, ...]
    source: Source


@dataclass(frozen=True)
class Target:
    """One tensor of the result: the values it starts from, and what is done to them.

    module: what the adapter calls it. nf4: start from its values after NF4 quantisation, as QLoRA trained on them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: Source
    module: str = ""
    replaced: bool = False
    nf4: Nf4 | None = None
    tokens: Tokens | None = None
    lora: Lora | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return BITS[self.dtype] * math.prod(self.shape) // 8

    @property
    def changed(self) -> bool:
        """Whether the adapter has a part in it."""
        return self.replaced or self.lora is not None or self.tokens is not None

    @property
    def copied(self) -> bool:
        """Whether the bytes of source are the result."""
        same = self.source.info.dtype == self.dtype
        return same and self.lora is None and self.tokens is None and self.nf4 is None

    def original(self, begin: int, end: int) -> torch.Tensor:
        """Rows begin to end as they are before the LoRA, in the dtype of the result."""
        import torch

        rows = self.nf4.rows(begin, end) if self.nf4 else stream.load_rows(self.source, begin, end)
        rows = rows.to(stream.dtype(self.dtype))
        if self.tokens:
            at = [(i, row) for i, row in enumerate(self.tokens.indices) if begin <= row < end]
            if at:
                new = stream.load(self.tokens.source)[[i for i, _ in at]].to(rows.dtype)
                rows.index_copy_(0, torch.tensor([row - begin for _, row in at]), new)
        return rows

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows begin to end of the merged tensor. Raises WherryError (exit 6) where one is not finite."""
        import torch

        rows = self.original(begin, end)
        if self.lora and self.name.endswith(".bias"):
            self.lora.merge_bias(rows)
        elif self.lora:
            self.lora.merge(rows, begin, self.original)
        if rows.numel() and not torch.isfinite(torch.stack(torch.aminmax(rows))).all():
            raise unfit(
                f"the merged tensor {self.name} holds NaN or infinity in {self.dtype}",
                f"the adapter and {self.source.path}",
                "the training diverged: use an earlier checkpoint, or lower train.args.learning_rate"
                + ("; or merge.dtype: bfloat16" if self.dtype == "F16" else ""),
            )
        return rows

    def pieces(self) -> list[Piece]:
        height = self.shape[0] if self.shape else 1
        row = self.size // height if height else 0
        step = max(1, PIECE_BYTES // max(1, row) // ROWS) * ROWS
        return [self._piece(begin, min(begin + step, height), row) for begin in range(0, height, step)]

    def _piece(self, begin: int, end: int, row: int) -> Piece:
        return Piece((end - begin) * row, lambda: stream.raw(self.rows(begin, end)))


def header(targets: list[Target], metadata: dict[str, str]) -> bytes:
    return stream.header([(t.name, t.dtype, t.shape, t.size) for t in targets], metadata)


def pieces(targets: list[Target]) -> list[Piece]:
    """What to write for targets, one after the other; neighbours that are only copied are read in one go."""
    made: list[Piece] = []
    run: tuple[Path, int, int] | None = None  # a range of bytes to copy

    def flush() -> None:
        if run:
            path, begin, end = run
            made.extend(
                stream.copy_piece(path, at, min(PIECE_BYTES, end - at)) for at in range(begin, end, PIECE_BYTES)
            )

    for target in targets:
        info = target.source.info
        if target.copied and run and run[0] == target.source.path and run[2] == info.begin:
            run = (run[0], run[1], info.end)
            continue
        flush()
        run = (target.source.path, info.begin, info.end) if target.copied else None
        if not target.copied:
            made.extend(target.pieces())
    flush()
    return made


# -- planning ---------------------------------------------------------------------------------------------------------


def plan(
    base: Checkpoint, config: dict[str, Any], adapter: Adapter, names: Names, dtype: str | None = None
) -> dict[str, Target]:
    """Name → target, for every tensor of the result: those of the base, and a head that is no longer the embedding.

    config: the base's config.json. names: what the adapter calls the base's tensors.
    dtype: that of the result (a key of FLOATS); None keeps each tensor's own.
    Raises WherryError (exit 6) where base and adapter do not fit.
    """
    tied = _tied_embedding(base, config)
    pair = {name: names.called.get(name, name) for name in (tied, HEAD)} if tied else {}
    if not adapter.keys.keys() & pair.values():
        pair = {}
    # While the two are one tensor, so is what they start from; a module of modules_to_save has a start of its own.
    common = next((adapter.whole[m] for m in pair.values() if m in adapter.whole and m in adapter.shared), None)
    plain: dict[str, Target] = {}
    for name, (path, info) in base.tensors.items():
        for copy in pair if name in pair else (name,):
            module = names.called.get(copy, copy)
            plain[module] = _plain(copy, module, Source(path, info), adapter, common if copy in pair else None, dtype)
    if pair:
        _share_tokens(plain, *pair.values())
    experts = _wrapped_experts(adapter, names)
    _refuse_unmatched(adapter, plain, base, experts)
    loras = {
        module: _lora(module, parts, plain, adapter) for module, parts in adapter.lora.items() if module not in experts
    }
    result = {target.name: _with_lora(target, loras) for target in plain.values()}
    for module, parameter in experts.items():
        result |= _with_experts(result, module, parameter, names.fused[parameter], adapter)
    _check_all_used(adapter, result)
    if tied and pair and _alike(result[tied], result[HEAD]):
        del result[HEAD]
    return result


def unties(targets: dict[str, Target], config: dict[str, Any]) -> bool:
    """Whether the result has a head of its own although its config.json would make it the embedding."""
    touched = any(t.changed for t in targets.values() if t.name == HEAD or t.name.endswith(EMBEDDINGS))
    return HEAD in targets and touched and config.get("tie_word_embeddings") is not False


def _tied_embedding(base: Checkpoint, config: dict[str, Any]) -> str | None:
    """The embedding that serves as the head too. (Some families tie by default: then config.json does not say so.)"""
    names = [name for name in base.tensors if name.endswith(EMBEDDINGS)]
    tied = HEAD not in base.tensors and config.get("tie_word_embeddings") is not False and len(names) == 1
    return names[0] if tied else None


def _plain(
    name: str, module: str, stored: Source, adapter: Adapter, common: Source | None, dtype: str | None
) -> Target:
    """The target before LoRA: the adapter's whole tensor where it has one that differs, else the base's."""
    source, info = adapter.whole.get(module, common or stored), stored.info
    if source.info.shape != info.shape:
        raise another_base(adapter, adapter.keys.get(module, module), source.info.shape, info.shape)
    if source.info.dtype != info.dtype:
        _refuse_coded(name, info.dtype, stored.path)
    kind = dtype if dtype and info.dtype in PLAIN else info.dtype
    replaced = not stream.same(source, stored)
    tokens = _tokens(module, info.shape, adapter)
    return Target(name, kind, info.shape, source if replaced else stored, module, replaced=replaced, tokens=tokens)


def _tokens(module: str, shape: tuple[int, ...], adapter: Adapter) -> Tokens | None:
    source = adapter.tokens.get(module)
    if source is None:
        return None
    indices = adapter.config.token_indices(module.removesuffix(".weight")) or []
    wanted = (len(indices), *shape[1:])
    if source.info.shape != wanted:
        raise another_base(adapter, adapter.keys[module], source.info.shape, wanted)
    beyond = [row for row in indices if not 0 <= row < shape[0]]
    if beyond:
        raise unfit(
            f"the adapter trains token {beyond[0]}, {module} has {shape[0]} rows",
            adapter.path,
            "use the model, and the vocabulary size, that the adapter was trained on",
        )
    return Tokens(tuple(indices), source)


def _share_tokens(plain: dict[str, Target], embedding: str, head: str) -> None:
    """PEFT applies rows trained in a tied embedding to the head too, unless the head has its own."""
    if not plain[head].tokens:
        plain[head] = dataclasses.replace(plain[head], tokens=plain[embedding].tokens)


def _with_lora(target: Target, loras: dict[str, Lora]) -> Target:
    module, _, part = target.module.rpartition(".")
    lora = loras.get(module)
    if lora is None or part not in ("weight", "bias") or (part == "bias" and lora.bias is None):
        return target
    return dataclasses.replace(target, lora=lora)


def _lora(module: str, parts: dict[str, Source], plain: dict[str, Target], adapter: Adapter) -> Lora:
    """The LoRA of a module whose parts are those, in name and shape, that PEFT's layer has."""
    from wherry.merge.lora import Factor, Lora

    weight = plain[f"{module}.weight"]
    _refuse_coded(weight.name, weight.source.info.dtype, weight.source.path)
    if len(weight.shape) != 2:
        raise unfit(
            f"{weight.name} has shape {list(weight.shape)}: neither a linear layer nor an embedding",
            adapter.path,
            "train without it (train.lora.target_modules)",
        )
    embedding = "lora_embedding_A" in parts or "lora_embedding_B" in parts
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
    across = embedding or _stored_across(parts, weight.shape, adapter)
    ends = weight.shape if across else weight.shape[::-1]  # in, out
    rank = adapter.config.rank(module)
    wanted: dict[str, tuple[int, ...]] = {names[0]: (rank, ends[0]), names[1]: (ends[1], rank)}
    if adapter.config.use_dora:
        wanted["lora_magnitude_vector.weight"] = (ends[1],)
    if adapter.config.lora_bias:
        wanted["lora_B.bias"] = (ends[1],)
    check_parts(module, parts, wanted, adapter)
    return Lora(
        Factor(parts[names[0]]),
        Factor(parts[names[1]]),
        adapter.config.scaling(module),
        across=across,
        rounded=embedding or adapter.config.targets_parameter(weight.module),
        magnitude=parts.get("lora_magnitude_vector.weight"),
        bias=parts.get("lora_B.bias"),
    )


def _wrapped_experts(adapter: Adapter, names: Names) -> dict[str, str]:
    """Module of the adapter → fused parameter. PEFT wraps those of one module in turn: the first lies innermost."""
    found = {}
    for holder, parameters in names.order.items():
        wrapped = [f"{holder}.{p}" for p in parameters if adapter.config.targets_parameter(f"{holder}.{p}")]
        for depth, parameter in enumerate(reversed(wrapped)):
            module = holder + depth * ".base_layer"
            if parameter in names.fused and module in adapter.lora:
                found[module] = parameter
    return found


def _with_experts(
    targets: dict[str, Target], module: str, parameter: str, fused: Fused, adapter: Adapter
) -> dict[str, Target]:
    """The tensors of a fused parameter, each with its share of the LoRA that PEFT keeps for all experts as one."""
    from wherry.merge.lora import Factor, Lora

    parts, rank, scaling = adapter.lora[module], adapter.config.rank(parameter), adapter.config.scaling(parameter)
    width = targets[fused.slices[0].tensor].shape[1]
    wanted = {"lora_A.weight": (rank * fused.experts, width), "lora_B.weight": (fused.rows, rank * fused.experts)}
    check_parts(module, parts, wanted, adapter)
    a, b = (parts[name] for name in wanted)
    return {
        one.tensor: dataclasses.replace(
            targets[one.tensor],
            lora=Lora(
                Factor(a, (one.expert, fused.experts)),
                Factor(b, (one.expert, fused.experts), "columns", one.rows),
                scaling,
                rounded=True,
            ),
        )
        for one in fused.slices
    }


def _stored_across(parts: dict[str, Source], shape: tuple[int, ...], adapter: Adapter) -> bool:
    """Whether a layer keeps its weight as [in, out] (transformers' Conv1D, in GPT-2). Squares: as the adapter says."""
    a, b = parts.get("lora_A.weight"), parts.get("lora_B.weight")
    if a is None or b is None or len(a.info.shape) != 2 or len(b.info.shape) != 2:
        return False
    ends = (a.info.shape[1], b.info.shape[0])
    return ends == shape and (ends != shape[::-1] or adapter.config.fan_in_fan_out)


def check_parts(
    module: str, parts: Mapping[str, Source], wanted: Mapping[str, tuple[int, ...]], adapter: Adapter
) -> None:
    for part in sorted({*wanted, *parts}):
        if part not in parts:
            raise unfit(f"the adapter lacks {part} of {module}", adapter.path, "restore the adapter, or train again")
        if part not in wanted:
            raise unfit(
                f"adapter tensor {PREFIX}{module}.{part} is not used", adapter.path, "see adapter_config.json beside it"
            )
        if parts[part].info.shape != wanted[part]:
            raise another_base(adapter, f"{PREFIX}{module}.{part}", parts[part].info.shape, wanted[part])


def _refuse_coded(name: str, dtype: str, path: Path) -> None:
    if dtype not in PLAIN:
        raise unfit(f"base tensor {name} is {dtype}", path, "merge into a 16-bit base: a quantised one cannot take it")


def _refuse_unmatched(adapter: Adapter, plain: dict[str, Target], base: Checkpoint, experts: dict[str, str]) -> None:
    for name, key in adapter.keys.items():
        if name in plain or name.removesuffix(".weight") in experts:
            continue
        if adapter.config.target_parameters and ".lora_" in key:
            raise unfit(
                f"adapter tensor {key} belongs to a parameter that the base keeps in a form that merge does not know",
                f"{adapter.path}, {base.folder}",
                "merge knows experts that the checkpoint keeps one by one: train without target_parameters",
            )
        like = closest(name, plain)
        raise unfit(
            f"adapter tensor {key} belongs to no tensor of the base" + (f"; the nearest is {like}" if like else ""),
            f"{adapter.path}, {base.folder}",
            "the adapter was trained on another model, or on another version of it",
        )


def _check_all_used(adapter: Adapter, targets: dict[str, Target]) -> None:
    """Each tensor of the adapter has its part in the result. (That none is used twice, its names see to.)"""
    used = {part for target in targets.values() if target.lora for part in target.lora.parts}
    used |= {target.tokens.source for target in targets.values() if target.tokens}
    used |= {adapter.whole[target.module] for target in targets.values() if target.module in adapter.whole}
    for key, source in adapter.sources.items():
        if source not in used:
            raise unfit(f"adapter tensor {key} is not used", adapter.path, "see adapter_config.json beside it")


def another_base(adapter: Adapter, key: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> WherryError:
    if 0 in found:
        return unfit(
            f"adapter tensor {key} is empty: it was saved while its values were spread over ranks (ZeRO-3, FSDP)",
            adapter.path,
            "gather the parameters before save_pretrained",
        )
    return unfit(
        f"adapter was made for another base: {key} has shape {list(found)}, this base and adapter_config.json "
        f"need {list(wanted)}",
        adapter.path,
        "use the model, and the vocabulary size, that the adapter was trained on",
    )


def _alike(embedding: Target, head: Target) -> bool:
    """Whether head and embedding are still one: the same beginning, and PEFT's tied LoRA or none (ensure_weight_tying).

    PEFT ties the factors crosswise. Comparing them is exact, where the two products may differ by a rounding.
    """
    import torch

    if not stream.same(embedding.source, head.source) or embedding.tokens != head.tokens:
        return False
    one, other = embedding.lora, head.lora
    if one is None or other is None:
        return one is other
    if one.magnitude or other.magnitude or one.scaling != other.scaling:  # DoRA's norms run along different sides
        return False
    crossed = ((one.a, other.b), (one.b, other.a))
    return all(torch.equal(x.value(), y.value().T) for x, y in crossed)
