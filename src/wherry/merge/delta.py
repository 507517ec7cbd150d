"""The adapter: what it holds, which tensor of the base each part belongs to, and PEFT's own arithmetic for it.

Everything that can be wrong with an adapter is found from headers, before the first byte of the result is written.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer, dispatch_default
from peft.utils.other import get_pattern_key
from torch import nn
from transformers.pytorch_utils import Conv1D

from wherry.errors import Exit, WherryError
from wherry.files import read_json
from wherry.merge.stream import DTYPES, Source, load, same
from wherry.nearest import closest
from wherry.safetensors_file import BITS, Checkpoint, read_header

PREFIX = "base_model.model."
LORA_KEY = re.compile(r"(?P<module>.+)\.(?P<part>lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?:\.\w+)?)")
NAME = "default"  # PEFT's name for the only adapter of a layer

HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")

# A LoRA layer is rebuilt from base weight and adapter alone. What these options need besides is not at hand.
UNSUPPORTED = (
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "use_qalora",
    "megatron_config",
    *(f.name for f in dataclasses.fields(LoraConfig) if f.metadata.get("is_lora_variant") and f.name != "use_dora"),
)
# The other initialisations (PiSSA, OLoRA, CorDA, LoftQ, …) change the base weights too when training begins.
INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


def unfit(what: str, where: Path | str, fix: str) -> WherryError:
    return WherryError(what, str(where), fix, Exit.VERIFICATION)


# -- what the adapter holds -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapter:
    """An adapter folder.

    lora: module name → part ("lora_A.weight") → tensor. whole: base tensor name → tensor that takes its place.
    shared: names in whole that replace a weight which embedding and head may share (not a module's own copy of it).
    keys: base tensor name → the key that first speaks of it.
    """

    path: Path
    config: LoraConfig
    lora: dict[str, dict[str, Source]]
    whole: dict[str, Source]
    shared: frozenset[str]
    keys: dict[str, str]


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter in PEFT's format. Raises WherryError (exit 6) where it is missing, damaged or not supported."""
    config = _read_config(folder / "adapter_config.json")
    path = folder / "adapter_model.safetensors"
    if not path.is_file() and (folder / "adapter_model.bin").is_file():
        raise unfit("adapter_model.bin: safetensors only", folder, "save the adapter with safe_serialization=True")
    try:
        tensors = read_header(path).tensors
    except WherryError as error:
        raise unfit(f"the adapter cannot be read: {error.what}", path, "restore it, or train again") from None
    adapter = Adapter(path, config, {}, {}, _shared(tensors, config), {})
    for key, info in tensors.items():
        if info.dtype not in DTYPES:
            raise unfit(f"adapter tensor {key} is {info.dtype}", path, "an adapter holds floating point tensors")
        _sort_in(adapter, key, Source(path, info))
    return adapter


def _read_config(path: Path) -> LoraConfig:
    try:
        given = read_json(path)
    except WherryError as error:
        raise unfit(error.what, path, "restore the adapter, or train again") from None
    if not isinstance(given, dict) or given.get("peft_type") != "LORA":
        found = given.get("peft_type") if isinstance(given, dict) else given
        raise unfit(f"peft_type is {found!r}", path, "merge knows LORA: other adapters stay beside their base")
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    for name, value in given.items():
        if value and (name in UNSUPPORTED or name not in known):
            raise unfit(f"the adapter uses {name}, which merge does not support", path, f"train without {name}")
    if given.get("init_lora_weights") not in INITIALISATIONS:
        raise unfit(
            f"init_lora_weights is {given['init_lora_weights']!r}: its training began from changed base weights",
            path,
            "convert it to a plain LoRA: save_pretrained(…, path_initial_model_for_weight_conversion=…)",
        )
    given |= {"init_lora_weights": False, "inference_mode": True}
    try:
        return LoraConfig(**{name: value for name, value in given.items() if name != "runtime_config"})
    except (TypeError, ValueError) as error:
        raise unfit(f"PEFT refuses this configuration: {error}", path, "restore the adapter, or train again") from None


def _shared(keys: Iterable[str], config: LoraConfig) -> frozenset[str]:
    own = tuple(config.modules_to_save or ())
    return frozenset(name for name in map(_base_name, keys) if not name.rpartition(".")[0].endswith(own))


def _base_name(key: str) -> str:
    """The base tensor that a key without lora_ in it replaces."""
    return key.removeprefix(PREFIX).replace(".base_layer.", ".")


def _sort_in(adapter: Adapter, key: str, source: Source) -> None:
    found = LORA_KEY.fullmatch(key.removeprefix(PREFIX))
    if found:
        module, part = found["module"], found["part"]
        part += ".weight" if part == "lora_magnitude_vector" else ""  # PEFT drops it when it saves
        place, name = adapter.lora.setdefault(module, {}), part
        target = f"{module}.{'bias' if part.endswith('.bias') else 'weight'}"
    else:
        place, name = adapter.whole, _base_name(key)
        target = name
    if name in place:
        raise unfit(f"the adapter gives {name} of {target} twice", adapter.path, f"remove {key}")
    place[name] = source
    adapter.keys.setdefault(target, key)


def refuse_not_finite(adapter: Adapter) -> None:
    """Read every adapter tensor once. Raises WherryError (exit 6) naming the first with a NaN or an infinity."""
    for key, info in read_header(adapter.path).tensors.items():
        if not torch.isfinite(load(Source(adapter.path, info)).float()).all():
            raise unfit(f"adapter tensor {key} holds NaN or infinity", adapter.path, "use an earlier checkpoint")


# -- what becomes of the base -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """One tensor of the result: the file it goes to, the values it starts from, the LoRA that is added to them."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    source: Source
    lora: Lora | None = None
    replaced: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return BITS[self.dtype] * math.prod(self.shape) // 8

    @property
    def changed(self) -> bool:
        return self.replaced or self.lora is not None

    @property
    def copied(self) -> bool:
        """Whether the bytes of source are the result."""
        return self.lora is None and self.source.info.dtype == self.dtype

    def start(self) -> torch.Tensor:
        return load(self.source).to(DTYPES[self.dtype])

    def value(self) -> torch.Tensor:
        """The merged tensor, of this dtype and shape. Raises WherryError (exit 6) where it is not finite."""
        value = self.lora.merge()[self.name.rpartition(".")[2]] if self.lora else self.start()
        if not torch.isfinite(value).all():
            raise unfit(
                f"the merged tensor {self.name} holds NaN or infinity",
                f"the adapter and {self.source.path}",
                "the training diverged: use an earlier checkpoint, or lower train.args.learning_rate",
            )
        return value


@dataclass(frozen=True)
class Lora:
    """The LoRA of one module; base holds its weight, and its bias where the adapter changes that too."""

    module: str
    config: LoraConfig
    parts: dict[str, Source]
    base: dict[str, Target]

    def layer(self) -> LoraLayer:
        """PEFT's own layer for this module, without memory (on the meta device)."""
        rows, columns = self.base["weight"].shape
        with torch.device("meta"):
            if "lora_embedding_A" in self.parts:
                wrapped: nn.Module = nn.Embedding(rows, columns)
            elif self.config.fan_in_fan_out:
                wrapped = Conv1D(columns, rows)
            else:
                wrapped = nn.Linear(columns, rows, bias="bias" in self.base)
            return dispatch_default(wrapped, NAME, self.config, r=self._of("rank", "r"), lora_alpha=self._of("alpha"))

    def _of(self, what: str, default: str = "lora_alpha") -> Any:
        pattern = getattr(self.config, f"{what}_pattern")
        return pattern.get(get_pattern_key(pattern.keys(), self.module), getattr(self.config, default))

    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Part → shape, as PEFT's layer has them."""
        state = self.layer().state_dict()
        return {_part(name): tuple(state[name].shape) for name in state if not name.startswith("base_layer.")}

    def scaling(self) -> float:
        return self.layer().scaling[NAME]

    @torch.no_grad()
    def merge(self) -> dict[str, torch.Tensor]:
        """weight (and bias), merged as merge_and_unload does it: adapter in fp32, one rounding to the base's dtype.

        safe_merge would add a copy of the weight and, for bf16, a second rounding; Target.value checks for NaN itself.
        """
        layer = self.layer()
        state = {f"base_layer.{name}": target.start() for name, target in self.base.items()}
        for name in layer.state_dict():
            if not name.startswith("base_layer."):
                tensor = load(self.parts[_part(name)])
                state[name] = tensor.float() if tensor.itemsize < 4 else tensor  # PEFT's autocast_adapter_dtype
        layer.load_state_dict(state, strict=False, assign=True)
        layer.merge()
        return {name: getattr(layer.get_base_layer(), name).data for name in self.base}


def _part(name: str) -> str:
    """A name in the state of PEFT's layer, as the adapter's file spells it."""
    return name.replace(f".{NAME}", "", 1)


def plan(base: Checkpoint, config: dict[str, Any], adapter: Adapter) -> dict[str, Target]:
    """Name → target, for every tensor of the result: those of the base, and a head that is no longer the embedding.

    config: the base's config.json. Raises WherryError (exit 6) where base and adapter do not fit.
    """
    tied = _tied_embedding(base, config)
    pair = (tied, HEAD) if tied and {tied, HEAD} & adapter.keys.keys() else ()
    # While the two are one tensor, so is what they start from; a module of modules_to_save has a start of its own.
    common = next((adapter.whole[name] for name in pair if name in adapter.whole and name in adapter.shared), None)
    plain: dict[str, Target] = {}
    for name, (path, info) in base.tensors.items():
        for copy in pair if name == tied and pair else (name,):
            plain[copy] = _plain(copy, Source(path, info), adapter, common if copy in pair else None)
    _refuse_unmatched(adapter, plain, base)
    loras = {module: _lora(module, parts, plain, adapter) for module, parts in adapter.lora.items()}
    result = {name: _with_lora(target, loras) for name, target in plain.items()}
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


def _plain(name: str, stored: Source, adapter: Adapter, common: Source | None) -> Target:
    """The target before LoRA: the adapter's whole tensor where it has one that differs, else the base's."""
    source, info = adapter.whole.get(name, common or stored), stored.info
    if source.info.shape != info.shape:
        raise _another_base(adapter, adapter.keys.get(name, name), source.info.shape, info.shape)
    if source.info.dtype != info.dtype:
        _refuse_coded(name, info.dtype, stored.path)
    replaced = not same(source, stored)
    return Target(name, stored.path.name, info.dtype, info.shape, source if replaced else stored, replaced=replaced)


def _with_lora(target: Target, loras: dict[str, Lora]) -> Target:
    module, _, part = target.name.rpartition(".")
    lora = loras.get(module)
    return dataclasses.replace(target, lora=lora) if lora and part in lora.base else target


def _lora(module: str, parts: dict[str, Source], plain: dict[str, Target], adapter: Adapter) -> Lora:
    """The LoRA of a module whose parts are those, in name and shape, that PEFT's layer has."""
    names = ["weight", "bias"] if "lora_B.bias" in parts else ["weight"]
    lora = Lora(module, adapter.config, parts, {name: plain[f"{module}.{name}"] for name in names})
    weight = lora.base["weight"]
    _refuse_coded(weight.name, weight.dtype, weight.source.path)
    if len(weight.shape) != 2:
        raise unfit(
            f"{weight.name} has shape {list(weight.shape)}: neither a linear layer nor an embedding",
            adapter.path,
            "train without it (train.lora.target_modules)",
        )
    try:
        wanted = lora.wanted()
    except ValueError as error:
        raise unfit(f"PEFT refuses a LoRA on {module}: {error}", adapter.path, "see adapter_config.json") from None
    for part in sorted({*wanted, *parts}):
        if part not in parts:
            raise unfit(f"the adapter lacks {part} of {module}", adapter.path, "restore the adapter, or train again")
        if part not in wanted:
            raise unfit(
                f"adapter tensor {PREFIX}{module}.{part} is not used", adapter.path, "see adapter_config.json beside it"
            )
        if parts[part].info.shape != wanted[part]:
            raise _another_base(adapter, f"{PREFIX}{module}.{part}", parts[part].info.shape, wanted[part])
    return lora


def _refuse_coded(name: str, dtype: str, path: Path) -> None:
    if dtype not in ("F64", "F32", "F16", "BF16"):
        raise unfit(f"base tensor {name} is {dtype}", path, "merge into a 16-bit base: a quantised one cannot take it")


def _refuse_unmatched(adapter: Adapter, plain: dict[str, Target], base: Checkpoint) -> None:
    for name, key in adapter.keys.items():
        if name not in plain:
            like = closest(name, plain)
            raise unfit(
                f"adapter tensor {key} belongs to no tensor of the base" + (f"; the nearest is {like}" if like else ""),
                f"{adapter.path}, {base.folder}",
                "the adapter was trained on another model, or on another version of it",
            )


def _another_base(adapter: Adapter, key: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> WherryError:
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
    if not same(embedding.source, head.source):
        return False
    one, other = embedding.lora, head.lora
    if one is None or other is None:
        return one is other
    if one.config.use_dora or one.scaling() != other.scaling():  # DoRA's norms run along different sides
        return False
    crossed = (("lora_embedding_A", "lora_B.weight"), ("lora_embedding_B", "lora_A.weight"))
    return all(torch.equal(load(one.parts[a]), load(other.parts[b]).T) for a, b in crossed)
