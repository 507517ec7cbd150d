"""Does the written model hold what it should? Asked of the files before they get their final name, and any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from wherry.errors import Exit, WherryError
from wherry.files import read_json
from wherry.merge.delta import EMBEDDINGS, Target
from wherry.merge.stream import Progress, Source, load, same, sha256
from wherry.safetensors_file import INDEX, Checkpoint, checkpoint

SAMPLES = 3  # of the changed and of the copied tensors, each: the first, the middle and the last


def written(folder: Path, base: Checkpoint, targets: dict[str, Target], contract: dict[str, int]) -> None:
    """Check a model just written. Raises WherryError (exit 6).

    contract: the manifest's token contract (embedding_rows, tokenizer_len, largest_id), or empty.
    """
    found = sound(folder)
    _same_layout(found, base, targets)
    _same_values(found, targets)
    if contract:
        _embedding_rows(found, contract)


def sound(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, its headers and its index checked."""
    try:
        found = checkpoint(folder)
    except WherryError as error:
        raise _failed(error.what, error.where) from None
    if found.sharded:
        total = read_json(folder / INDEX)["metadata"]["total_size"]
        if total != found.total_size:
            raise _failed(f"the index says {total} bytes, the shards hold {found.total_size}", folder / INDEX)
    return found


def hashes(folder: Path, expected: dict[str, str], progress: Progress) -> None:
    """Read every file again. Raises WherryError (exit 6) naming the first that is missing or no longer the same."""
    for name, digest in expected.items():
        path = folder / name
        if not path.is_file():
            raise _failed(f"{name} is missing", path)
        if sha256(path, progress) != digest:
            raise _failed(f"{name} is not what merge wrote: its sha256 differs", path)


def _same_layout(found: Checkpoint, base: Checkpoint, targets: dict[str, Target]) -> None:
    if [path.name for path in found.files] != [path.name for path in base.files]:
        raise _failed("the shards are not those of the base", found.folder)
    for name in [*base.tensors, *targets]:
        if name not in found.tensors:
            raise _failed(f"tensor {name} is missing", found.folder)
    for name, (path, info) in found.tensors.items():
        target = targets.get(name)
        if target is None or (info.dtype, info.shape) != (target.dtype, target.shape):
            wanted = f"{target.dtype} {list(target.shape)}" if target else "absent"
            raise _failed(f"tensor {name} is {info.dtype} {list(info.shape)}, it should be {wanted}", path)


def _same_values(found: Checkpoint, targets: dict[str, Target]) -> None:
    """Samples are read back and made again: bit by bit the same."""
    for name in _samples([t.name for t in targets.values() if t.copied]):
        if not same(Source(*found.tensors[name]), targets[name].source):
            raise _failed(f"tensor {name} is not a copy of what it was copied from", found.tensors[name][0])
    for name in _samples([t.name for t in targets.values() if not t.copied]):
        if not torch.equal(load(Source(*found.tensors[name])), targets[name].value()):
            raise _failed(f"merged tensor {name} reads back with other values", found.tensors[name][0])


def _samples(names: list[str]) -> list[str]:
    steps = {round(i * (len(names) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)} if names else set()
    return [names[step] for step in sorted(steps)]


def _embedding_rows(found: Checkpoint, contract: dict[str, Any]) -> None:
    """Every token id has a row: the contract's count of rows is kept, and neither tokenizer nor data go beyond it."""
    for name, (path, info) in found.tensors.items():
        if not name.endswith(EMBEDDINGS):
            continue
        rows = info.shape[0]
        if rows != contract.get("embedding_rows", rows):
            raise _failed(f"{name} has {rows} rows, the token contract says {contract['embedding_rows']}", path)
        if contract.get("tokenizer_len", 0) > rows or contract.get("largest_id", -1) >= rows:
            raise _failed(
                f"{name} has {rows} rows for a tokenizer of {contract.get('tokenizer_len')} tokens, "
                f"largest id {contract.get('largest_id')}",
                path,
            )


def _failed(what: str, where: Path | str) -> WherryError:
    return WherryError(
        f"verification failed: {what}", str(where), "check the disk, and start the merge again", Exit.VERIFICATION
    )
