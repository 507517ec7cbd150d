"""What a safetensors file says it holds, and whether it can be true. Reads headers only; never imports torch.

The format: 8 bytes (little-endian length of the header), the header (JSON: name → dtype, shape, data_offsets), data.
Offsets in the header count from the end of the header; here they are offsets in the file.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherry.errors import Exit, WherryError
from wherry.files import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
AGAIN = "the download or copy broke off: download it again"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: dtype as the format spells it ("BF16"); begin and end are byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A sound header: its tensors, in the order of their data, fill the file without gap or overlap."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a model folder, and the files that hold them."""

    folder: Path
    headers: list[Header]

    @property
    def files(self) -> list[Path]:
        return [header.path for header in self.headers]

    @property
    def tensors(self) -> dict[str, tuple[Path, TensorInfo]]:
        return {name: (header.path, info) for header in self.headers for name, info in header.tensors.items()}

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, headers not counted: what an index calls metadata.total_size."""
        return sum(info.size for header in self.headers for info in header.tensors.values())

    @property
    def sharded(self) -> bool:
        """Whether an index names the files."""
        return self.files[0].name != SINGLE


def read_header(path: Path) -> Header:
    """The header of a safetensors file. Raises WherryError (exit 3) where it is missing, truncated or impossible."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= MAX_HEADER_BYTES:
                raise _impossible(path, f"{size} bytes that do not begin with the length of a header")
            raw = file.read(length)
    except (FileNotFoundError, IsADirectoryError):
        raise WherryError(f"{path.name} is missing", str(path), AGAIN, Exit.PREFLIGHT) from None
    if len(raw) < length:
        raise _truncated(path, size, 8 + length)
    try:
        entries = json.loads(raw, object_pairs_hook=_without_duplicates)
        metadata = entries.pop("__metadata__", {})
        tensors = {name: _tensor(entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _impossible(path, f"a header that cannot be read: {error!r}") from None
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_layout(path, ordered, 8 + length, size)
    return Header(path, ordered, metadata)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name is given twice")
    return dict(pairs)


def _tensor(entry: dict[str, Any], data: int) -> TensorInfo:
    """An entry of the header whose data section begins at byte data. Raises ValueError and its like where it lies."""
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    bits = BITS[entry["dtype"]] * math.prod(shape)
    if begin < 0 or min(shape, default=0) < 0 or (end - begin) * 8 != bits:
        raise ValueError(f"{entry['dtype']} of shape {list(shape)} in bytes {begin} to {end}")
    return TensorInfo(entry["dtype"], shape, data + begin, data + end)


def _check_layout(path: Path, ordered: dict[str, TensorInfo], data: int, size: int) -> None:
    """Tensors follow one another without gap or overlap, and the last one ends where the file ends."""
    position = data
    for name, info in ordered.items():
        if info.begin != position:
            relation = "overlaps the tensor before it" if info.begin < position else "leaves a gap before it"
            raise _impossible(path, f"{name}, which {relation} (byte {info.begin}, expected {position})")
        position = info.end
    if size < position:
        raise _truncated(path, size, position)
    if size > position:
        raise _impossible(path, f"{size - position} bytes after its last tensor")


def _truncated(path: Path, size: int, needed: int) -> WherryError:
    return WherryError(f"{path.name} is truncated: {size} of {needed} bytes", str(path), AGAIN, Exit.PREFLIGHT)


def _impossible(path: Path, found: str) -> WherryError:
    with path.open("rb") as file:
        pointer = file.read(24) == b"version https://git-lfs."
    if pointer:
        return WherryError(
            f"{path.name} is a Git LFS pointer, not the weights", str(path), "git lfs pull", Exit.PREFLIGHT
        )
    return WherryError(
        f"{path.name} is not a sound safetensors file: it has {found}",
        str(path),
        "it is damaged: download it again",
        Exit.PREFLIGHT,
    )


def checkpoint(folder: Path) -> Checkpoint:
    """The model in a folder: model.safetensors, or the shards that its index names.

    Raises WherryError (exit 3) where a file is missing or unsound, where index and shards disagree, and where there
    are no safetensors at all.
    """
    if (folder / SINGLE).is_file():
        return Checkpoint(folder, [read_header(folder / SINGLE)])
    if (folder / INDEX).is_file():
        return _sharded(folder)
    raise _no_weights(folder)


def _sharded(folder: Path) -> Checkpoint:
    index = folder / INDEX
    where = _weight_map(index)
    names = sorted(set(where.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise WherryError(
            f"shard {missing[0]} is missing: {len(names) - len(missing)} of {len(names)} are there",
            str(folder),
            "the download broke off: run it again, it fetches what is missing",
            Exit.PREFLIGHT,
        )
    headers = [read_header(folder / name) for name in names]
    held = {name: header.path.name for header in headers for name in header.tensors}
    for name in sorted({*where, *held}):
        if where.get(name) != held.get(name):
            raise WherryError(
                f"tensor {name}: the index says {where.get(name, 'nowhere')}, it is in {held.get(name, 'no shard')}",
                str(index),
                "index and shards belong to different downloads: download the whole folder again",
                Exit.PREFLIGHT,
            )
    return Checkpoint(folder, headers)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name → file name. A name that leaves the folder is refused."""
    try:
        found = read_json(index)["weight_map"]
    except (KeyError, TypeError):
        found = None
    except WherryError as error:
        raise WherryError(error.what, error.where, AGAIN, Exit.PREFLIGHT) from None
    plain = isinstance(found, dict) and all(
        isinstance(file, str) and re.fullmatch(r"[^/\\]+\.safetensors", file) for file in found.values()
    )
    if not found or not plain:
        raise WherryError(
            "the index has no weight_map of tensor names to file names", str(index), AGAIN, Exit.PREFLIGHT
        )
    return found


def _no_weights(folder: Path) -> WherryError:
    if any(folder.glob("pytorch_model*.bin")):
        return WherryError(
            "the model has only pytorch_model*.bin, which can run code when it is read: safetensors only",
            str(folder),
            "take a revision that has model.safetensors, or convert it where you trust it: "
            'python -c "from transformers import AutoModelForCausalLM as M; '
            "M.from_pretrained('IN', dtype='auto').save_pretrained('OUT')\"",
            Exit.PREFLIGHT,
        )
    return WherryError(
        f"no weights: neither {SINGLE} nor {INDEX}", str(folder), "download the model's safetensors", Exit.PREFLIGHT
    )
