"""Safetensors files read and written piece by piece: never more than one block, or one tensor, in memory."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from wherry.errors import Exit, WherryError
from wherry.safetensors_file import TensorInfo

BLOCK_BYTES = 8 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

Progress = Callable[[int], object]
"""Called with the number of bytes done since the last call."""


@dataclass(frozen=True)
class Source:
    """Where the bytes of a tensor lie."""

    path: Path
    info: TensorInfo


@dataclass(frozen=True)
class Entry:
    """A tensor to write. blocks yields its size bytes, in order, when it is its turn."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    blocks: Callable[[], Iterable[memoryview]]


def blocks(source: Source) -> Iterator[memoryview]:
    """The bytes of a tensor as they are on disk; every block is valid until the next one is asked for."""
    buffer = memoryview(bytearray(min(BLOCK_BYTES, source.info.size)))
    with source.path.open("rb", buffering=0) as file:
        file.seek(source.info.begin)
        left = source.info.size
        while left:
            block = buffer[: min(left, len(buffer))]
            _fill(block, file, source.path)
            yield block
            left -= len(block)


def load(source: Source) -> torch.Tensor:
    """One tensor, in its own dtype (one of DTYPES) and memory of its own."""
    data = bytearray(source.info.size)
    with source.path.open("rb", buffering=0) as file:
        file.seek(source.info.begin)
        _fill(memoryview(data), file, source.path)
    if not data:
        return torch.empty(source.info.shape, dtype=DTYPES[source.info.dtype])
    return torch.frombuffer(data, dtype=DTYPES[source.info.dtype]).reshape(source.info.shape)


def _fill(block: memoryview, file: io.FileIO, path: Path) -> None:
    done = 0
    while done < len(block):
        count = file.readinto(block[done:])
        if not count:
            raise WherryError(
                f"{path.name} ended while it was read",
                str(path),
                "something else changes it: start again when it is whole",
                Exit.VERIFICATION,
            )
        done += count


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def same(one: Source, other: Source) -> bool:
    """Whether two stored tensors have the same dtype, shape and bits."""
    if (one.info.dtype, one.info.shape) != (other.info.dtype, other.info.shape):
        return False
    return one == other or all(a == b for a, b in zip(blocks(one), blocks(other), strict=True))


def write(path: Path, entries: list[Entry], metadata: dict[str, str], progress: Progress) -> str:
    """Write a safetensors file: header first, then every entry in turn. Returns the file's sha256."""
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:

        def put(block: memoryview) -> None:
            digest.update(block)
            _write_all(file.fileno(), block)

        put(memoryview(header(entries, metadata)))
        for entry in entries:
            done = 0
            for block in entry.blocks():
                put(block)
                progress(len(block))
                done += len(block)
            if done != entry.size:
                raise AssertionError(f"{entry.name}: {done} bytes instead of {entry.size}")
    return digest.hexdigest()


def header(entries: list[Entry], metadata: dict[str, str]) -> bytes:
    """Length and JSON header, padded with spaces so that the data begins at a multiple of 8."""
    described: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for entry in entries:
        offsets = [position, position + entry.size]
        described[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        position += entry.size
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block) :]


def sha256(path: Path, progress: Progress = lambda count: None) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            progress(count)
    return digest.hexdigest()
