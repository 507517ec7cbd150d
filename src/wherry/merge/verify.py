"""Does the written model hold what it should? Asked of the files before they get their final name, and any time."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from wherry.errors import Exit, WherryError
from wherry.files import read_json
from wherry.merge.adapter import Adapter, unfit
from wherry.merge.plan import EMBEDDINGS, Target
from wherry.merge.stream import Progress, Source, load, raw, row_bytes, sha256
from wherry.safetensors_file import INDEX, Checkpoint, checkpoint

SAMPLES = 3  # of the changed and of the copied tensors, each: the first, the middle and the last
SAMPLE_ROWS = 64  # of each of these, at its beginning, its middle and its end


def finite(adapter: Adapter) -> None:
    """Read every adapter tensor once. Raises WherryError (exit 6) naming the first with a NaN or an infinity."""
    import torch

    for key, source in adapter.sources.items():
        if not torch.isfinite(load(source).float()).all():
            raise unfit(f"adapter tensor {key} holds NaN or infinity", adapter.path, "use an earlier checkpoint")


def written(
    folder: Path,
    layout: dict[str, list[Target]],
    targets: dict[str, Target],
    contract: dict[str, int],
) -> None:
    """Check a model just written. Raises WherryError (exit 6).

    layout: file name → its tensors. contract: the manifest's token contract (embedding_rows, tokenizer_len,
    largest_id), or empty.
    """
    found = sound(folder)
    _same_layout(found, layout, targets)
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


def loads(folder: Path, trust_remote_code: bool) -> None:
    """transformers loads the folder and finds every tensor that its model has, no other, each of its shape.

    In a process of its own, without memory for the weights. Raises WherryError (exit 6).
    """
    _ask_transformers(folder, "names", trust_remote_code)


def speaks(folder: Path, trust_remote_code: bool) -> str:
    """Where it fits into half of the free memory, load the model and compute logits. Returns what to say of it."""
    import psutil

    available = psutil.virtual_memory().available
    size = checkpoint(folder).total_size
    if size > available / 2:
        return f"; its logits were not computed: {size / 1e9:.0f} GB, {available / 1e9:.0f} GB of memory are free"
    _ask_transformers(folder, "logits", trust_remote_code)
    return ", its logits are finite"


def _ask_transformers(folder: Path, what: str, trust_remote_code: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "wherry.merge.reload", what, str(folder), *["--trust"] * trust_remote_code],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise _failed(f"transformers does not load it: {last[:300]}", folder)
    complaint = json.loads(done.stdout.splitlines()[-1])
    if complaint:
        raise _failed(f"transformers loads it, but {complaint}", folder)


def _same_layout(found: Checkpoint, layout: dict[str, list[Target]], targets: dict[str, Target]) -> None:
    for name in targets:
        if name not in found.tensors:
            raise _failed(f"tensor {name} is missing", found.folder)
    home = {target.name: file for file, of_it in layout.items() for target in of_it}
    for name, (path, info) in found.tensors.items():
        target = targets.get(name)
        if target is None or (info.dtype, info.shape, path.name) != (target.dtype, target.shape, home[name]):
            wanted = f"{target.dtype} {list(target.shape)} in {home[name]}" if target else "absent"
            raise _failed(f"tensor {name} is {info.dtype} {list(info.shape)}, it should be {wanted}", path)


def _same_values(found: Checkpoint, targets: dict[str, Target]) -> None:
    """Samples are read back from the disk and made again: bit by bit the same."""
    for path in found.files:
        _forget(path)
    sampled = [_samples([t for t in targets.values() if t.copied == copied]) for copied in (True, False)]
    for target in itertools.chain(*sampled):
        written_to = Source(*found.tensors[target.name])
        for begin, end in _sample_rows(target.shape[0] if target.shape else 1):
            again = row_bytes(target.source, begin, end) if target.copied else raw(target.rows(begin, end))
            if row_bytes(written_to, begin, end) != again:
                complaint = "is not what it was copied from" if target.copied else "reads back with other values"
                raise _failed(f"tensor {target.name} {complaint}", written_to.path)


def _forget(path: Path) -> None:
    """Drop a file from the page cache, so that what is read next is what the disk holds."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _samples(targets: list[Target]) -> list[Target]:
    targets = [target for target in targets if target.size]
    steps = {round(i * (len(targets) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)} if targets else set()
    return [targets[step] for step in sorted(steps)]


def _sample_rows(height: int) -> list[tuple[int, int]]:
    """Beginnings at multiples of SAMPLE_ROWS, as pieces have them."""
    last = max(0, height - 1) // SAMPLE_ROWS
    starts = sorted({0, last // 2 * SAMPLE_ROWS, last * SAMPLE_ROWS})
    return [(start, min(start + SAMPLE_ROWS, height)) for start in starts]


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
