"""Safetensors files read and written piece by piece, reading, arithmetic, hashing and writing at the same time.

Imports torch only where a tensor is made, so that mistakes in a recipe or an adapter are answered at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import io
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.errors import Exit, WherryError
from wherry.merge.direct import DirectFile
from wherry.safetensors_file import TensorInfo

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 8 << 20  # what is read, computed and written at once
WORKERS = max(2, min(4, os.cpu_count() or 1))
FLOATS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""Floating-point dtypes as safetensors spells them → as torch does."""

Progress = Callable[[int], object]
"""Called with the number of bytes done since the last call."""


@dataclass(frozen=True)
class Source:
    """Where the bytes of a tensor lie."""

    path: Path
    info: TensorInfo


@dataclass(frozen=True)
class Piece:
    """Some bytes of the result, made when it is their turn."""

    size: int
    make: Callable[[], memoryview]


@dataclass(frozen=True)
class Shard:
    """A safetensors file to write: its header, then its pieces one after the other."""

    path: Path
    header: bytes
    pieces: list[Piece]


# -- reading ----------------------------------------------------------------------------------------------------------


def dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors one (a key of FLOATS)."""
    import torch

    return getattr(torch, FLOATS[name])


def load(source: Source) -> torch.Tensor:
    """One tensor, in its own dtype (one of FLOATS) and memory of its own."""
    shape = source.info.shape
    return load_rows(source, 0, shape[0] if shape else 1).reshape(shape)


def load_rows(source: Source, begin: int, end: int) -> torch.Tensor:
    """Rows begin to end (of dimension 0) of a tensor, in its own dtype (one of FLOATS) and memory of its own."""
    import torch

    data = torch.frombuffer(row_bytes(source, begin, end), dtype=torch.uint8) if source.info.size else torch.empty(0)
    return data.view(dtype(source.info.dtype)).reshape(end - begin, *source.info.shape[1:])


def row_bytes(source: Source, begin: int, end: int) -> memoryview:
    """The bytes of rows begin to end (of dimension 0), as they are on disk."""
    height = source.info.shape[0] if source.info.shape else 1
    row = source.info.size // height if height else 0
    return _read(source.path, source.info.begin + row * begin, row * (end - begin))


def copy_piece(path: Path, begin: int, size: int) -> Piece:
    """Bytes of a file, as they are."""
    return Piece(size, functools.partial(_read, path, begin, size))


def _read(path: Path, begin: int, size: int) -> memoryview:
    import numpy as np

    block = memoryview(np.empty(size, np.uint8))  # not zeroed first, as a bytearray is
    read_into(block, path, begin)
    return block


def read_into(block: memoryview, path: Path, begin: int) -> None:
    """Fill block from byte begin of a file. Raises WherryError (exit 6) where the file ends before."""
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        _fill(block, file, path)


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


def blocks(source: Source) -> Iterator[memoryview]:
    """The bytes of a tensor as they are on disk; every block is valid until the next one is asked for."""
    buffer = memoryview(bytearray(min(PIECE_BYTES, source.info.size)))
    with source.path.open("rb", buffering=0) as file:
        file.seek(source.info.begin)
        left = source.info.size
        while left:
            block = buffer[: min(left, len(buffer))]
            _fill(block, file, source.path)
            yield block
            left -= len(block)


def same(one: Source, other: Source) -> bool:
    """Whether two stored tensors have the same dtype, shape and bits."""
    if (one.info.dtype, one.info.shape) != (other.info.dtype, other.info.shape):
        return False
    return one == other or all(a == b for a, b in zip(blocks(one), blocks(other), strict=True))


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous."""
    import torch

    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def sha256(path: Path, progress: Progress = lambda count: None) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            progress(count)
    return digest.hexdigest()


# -- writing ----------------------------------------------------------------------------------------------------------


def header(entries: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str]) -> bytes:
    """Length and JSON header, padded with spaces so that the data begins at a multiple of 8.

    entries: name, dtype, shape and size in bytes of each tensor, in the order of their data.
    """
    described: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, kind, shape, size in entries:
        described[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


@contextmanager
def made_for_pieces() -> Iterator[None]:
    """Torch with one thread, since several pieces are worked on at once; memory of a piece is kept for the next one."""
    import torch

    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # else the kernel clears every new piece of memory
        mallopt(M_MMAP_THRESHOLD, 4 * PIECE_BYTES)
        mallopt(M_TRIM_THRESHOLD, 64 * PIECE_BYTES)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def write(shards: list[Shard], finished: Callable[[Shard, str], object], progress: Progress) -> None:
    """Write shards in their order, each one whole and on disk when finished(shard, its sha256) is called.

    Several threads make pieces, one hashes, one ends files, this one writes. Only a few pieces exist at any time.
    Whatever a thread raises is raised here, and then nothing of it goes on.
    """
    makers, hasher, ender = ThreadPoolExecutor(WORKERS), ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    blocks = _in_order(makers, [piece for shard in shards for piece in shard.pieces])
    hashing: deque[Future[Any]] = deque()
    ending: deque[Future[Any]] = deque()
    files = []
    try:
        for shard in shards:
            files.append(file := DirectFile(shard.path))
            digest = hashlib.sha256()
            for block in itertools.chain([memoryview(shard.header)], itertools.islice(blocks, len(shard.pieces))):
                hashing.append(hasher.submit(digest.update, block))
                file.write(block)
                progress(len(block))
                _settle(hashing, at_most=WORKERS)
                _settle(ending)
            hashed = hasher.submit(digest.hexdigest)
            ending.append(ender.submit(_end, file, hashed, functools.partial(finished, shard)))
        _settle(hashing, at_most=0)
        _settle(ending, at_most=0)
    finally:
        for pool in (makers, hasher, ender):
            pool.shutdown(cancel_futures=True)
        for file in files:
            file.abandon()


def _in_order(makers: ThreadPoolExecutor, pieces: list[Piece]) -> Iterator[memoryview]:
    """The bytes of each piece; those that follow are begun meanwhile."""
    begun: deque[Future[memoryview]] = deque()
    waiting = iter(pieces)
    begun.extend(makers.submit(piece.make) for piece in itertools.islice(waiting, WORKERS + 2))
    for piece in pieces:
        block = begun.popleft().result()
        begun.extend(makers.submit(piece.make) for piece in itertools.islice(waiting, 1))
        if len(block) != piece.size:
            raise AssertionError(f"a piece of {len(block)} bytes instead of {piece.size}")
        yield block


def _settle(asked: deque[Future[Any]], at_most: int | None = None) -> None:
    """Drop what is done, raising what it has raised; with at_most, wait until no more than so many are left."""
    while asked and (asked[0].done() or (at_most is not None and len(asked) > at_most)):
        asked.popleft().result()


def _end(file: DirectFile, hashed: Future[str], finished: Callable[[str], object]) -> None:
    file.close()
    finished(hashed.result())
