"""The adapter: what its folder holds, part by part, found from headers alone. Never imports torch or PEFT.

The format is PEFT's: adapter_config.json (a peft.LoraConfig) and adapter_model.safetensors, whose keys are module
names of the transformers model with a prefix.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherry.errors import Exit, WherryError
from wherry.files import read_json
from wherry.merge.stream import FLOATS, Source, sha256
from wherry.safetensors_file import read_header

PREFIX = "base_model.model."
LORA_KEY = re.compile(r"(?P<module>.+)\.(?P<part>lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?:\.\w+)?)")
TOKENS_KEY = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Options of peft.LoraConfig that merging follows, …
FOLLOWED = {
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "ensure_weight_tying",
}
# … and those that leave no trace in what a trained adapter adds. Any other that is set is refused.
TRACELESS = {
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "lora_dropout",
    "bias",
    "init_lora_weights",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
}
# The other initialisations (PiSSA, OLoRA, CorDA, LoftQ, …) change the base weights too when training begins.
INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


def unfit(what: str, where: Path | str, fix: str) -> WherryError:
    return WherryError(what, str(where), fix, Exit.VERIFICATION)


@dataclass(frozen=True)
class Config:
    """What of a peft.LoraConfig the merge follows."""

    r: int
    lora_alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    fan_in_fan_out: bool
    modules_to_save: tuple[str, ...]
    trainable_token_indices: list[int] | dict[str, list[int]] | None
    target_parameters: tuple[str, ...]

    def rank(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def scaling(self, module: str) -> float:
        """The factor of B·A: alpha/r, or alpha/√r for rank-stabilised LoRA (arXiv:2312.03732)."""
        r = self.rank(module)
        return _by_pattern(self.alpha_pattern, module, self.lora_alpha) / (math.sqrt(r) if self.use_rslora else r)

    def targets_parameter(self, name: str) -> bool:
        """Whether PEFT wraps this parameter itself (target_parameters), not the module that holds it."""
        return any(name == wanted or name.endswith(f".{wanted}") for wanted in self.target_parameters)

    def token_indices(self, module: str) -> list[int] | None:
        """Rows of an embedding that were trained alone, in the order of the adapter's tensor."""
        if not isinstance(self.trainable_token_indices, dict):
            return self.trainable_token_indices
        return next((rows for name, rows in self.trainable_token_indices.items() if module.endswith(name)), None)


def _by_pattern(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """PEFT's rule: the first key that, as a regular expression, matches the end of the module's name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


@dataclass(frozen=True)
class Adapter:
    """An adapter folder.

    lora: module name → part ("lora_A.weight") → tensor. whole: base tensor name → tensor that takes its place.
    tokens: embedding's tensor name → rows that take the place of single ones. shared: names in whole that replace a
    weight which embedding and head may share (not a module's own copy of it). keys: base tensor name → the key that
    first speaks of it.
    """

    path: Path
    config: Config
    lora: dict[str, dict[str, Source]]
    whole: dict[str, Source]
    tokens: dict[str, Source]
    shared: frozenset[str]
    keys: dict[str, str]

    @property
    def sources(self) -> dict[str, Source]:
        """Every tensor, by its key in the file."""
        return {key: Source(self.path, info) for key, info in read_header(self.path).tensors.items()}


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter in PEFT's format. Raises WherryError (exit 6) where it is missing, damaged or not supported."""
    config = _read_config(folder / CONFIG)
    path = folder / WEIGHTS
    if not path.is_file() and (folder / "adapter_model.bin").is_file():
        raise unfit("adapter_model.bin: safetensors only", folder, "save the adapter with safe_serialization=True")
    try:
        tensors = read_header(path).tensors
    except WherryError as error:
        raise unfit(f"the adapter cannot be read: {error.what}", path, "restore it, or train again") from None
    names = map(_base_name, tensors)
    shared = frozenset(name for name in names if not name.rpartition(".")[0].endswith(config.modules_to_save))
    adapter = Adapter(path, config, {}, {}, {}, shared, {})
    for key, info in tensors.items():
        if info.dtype not in FLOATS:
            raise unfit(f"adapter tensor {key} is {info.dtype}", path, "an adapter holds floating point tensors")
        _sort_in(adapter, key, Source(path, info))
    return adapter


def sha256_of(folder: Path) -> str:
    """One hash over configuration and weights: whether an adapter is still the one that was merged."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        if (folder / name).is_file():
            digest.update(f"{name}:{sha256(folder / name)};".encode())
    return digest.hexdigest()


def _read_config(path: Path) -> Config:
    try:
        given = read_json(path)
    except WherryError as error:
        raise unfit(error.what, path, "restore the adapter, or train again") from None
    if not isinstance(given, dict) or given.get("peft_type") != "LORA":
        found = given.get("peft_type") if isinstance(given, dict) else given
        raise unfit(f"peft_type is {found!r}", path, "merge knows LORA: other adapters stay beside their base")
    for name, value in given.items():
        if value and name not in FOLLOWED | TRACELESS:
            raise unfit(f"the adapter uses {name}, which merge does not support", path, f"train without {name}")
    if given.get("init_lora_weights") not in INITIALISATIONS:
        raise unfit(
            f"init_lora_weights is {given['init_lora_weights']!r}: its training began from changed base weights",
            path,
            "convert it to a plain LoRA: save_pretrained(…, path_initial_model_for_weight_conversion=…)",
        )
    try:
        return Config(
            r=int(given.get("r", 8)),
            lora_alpha=float(given.get("lora_alpha", 8)),
            rank_pattern=dict(given.get("rank_pattern") or {}),
            alpha_pattern=dict(given.get("alpha_pattern") or {}),
            use_rslora=bool(given.get("use_rslora")),
            use_dora=bool(given.get("use_dora")),
            lora_bias=bool(given.get("lora_bias")),
            fan_in_fan_out=bool(given.get("fan_in_fan_out")),
            modules_to_save=tuple(given.get("modules_to_save") or ()),
            trainable_token_indices=given.get("trainable_token_indices"),
            target_parameters=tuple(given.get("target_parameters") or ()),
        )
    except (TypeError, ValueError) as error:
        raise unfit(f"the configuration cannot be read: {error}", path, "restore the adapter, or train again") from None


def _base_name(key: str) -> str:
    """The base tensor that a key without lora_ in it replaces."""
    return key.removeprefix(PREFIX).replace(".base_layer.", ".")


def _sort_in(adapter: Adapter, key: str, source: Source) -> None:
    plain = key.removeprefix(PREFIX)
    place: dict[str, Source]
    if found := LORA_KEY.fullmatch(plain):
        module, name = found["module"], found["part"]
        name += ".weight" if name == "lora_magnitude_vector" else ""  # PEFT drops it when it saves
        place = adapter.lora.setdefault(module, {})
        target = f"{module}.{'bias' if name.endswith('.bias') else 'weight'}"
    elif found := TOKENS_KEY.fullmatch(plain):
        place, name = adapter.tokens, f"{found['module']}.weight"
        target = name
    else:
        place, name = adapter.whole, _base_name(key)
        target = name
    if name in place:
        raise unfit(f"the adapter gives {name} of {target} twice", adapter.path, f"remove {key}")
    place[name] = source
    adapter.keys.setdefault(target, key)
