"""The folder merge/model: weights, index, config, tokenizer, checked before it gets its name."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from wherry import cli, files
from wherry.merge import delta, stream, verify
from wherry.merge.delta import Target
from wherry.rundir import Run
from wherry.safetensors_file import INDEX, Checkpoint, checkpoint

# -- adapter ----------------------------------------------------------------------------------------------------------


def merge(run: Run) -> dict[str, int]:
    """Write merge/model from base and adapter. Returns tensors, merged (how many of them changed) and bytes.

    Raises WherryError: exit 3 where base or disk will not do, exit 6 where the adapter or the result is unsound.
    """
    base = checkpoint(run.dir("prepare") / "model")
    config = files.read_json(base.folder / "config.json")
    adapter = delta.read_adapter(run.dir("train") / "adapter")
    targets = delta.plan(base, config, adapter)
    size = sum(target.size for target in targets.values())
    files.require_space(run.dir("merge"), size + (64 << 20), "the merged model")  # and tokenizer, headers, index
    delta.refuse_not_finite(adapter)

    final = run.dir("merge") / "model"
    with files.atomic_directory(final) as folder:
        sums = _write_weights(folder, base, targets, size)
        _write_index(folder, base, targets, size)
        _write_config(folder, base, config, untied=delta.unties(targets, config))
        _copy_tokenizer(folder, run)
        verify.written(folder, base, targets, run.manifest().get("contract") or {})
        sums = _sums(folder, known=sums)
    files.write_json(run.dir("merge") / "sha256.json", sums)
    return {"tensors": len(targets), "merged": sum(t.changed for t in targets.values()), "bytes": size}


def _write_weights(folder: Path, base: Checkpoint, targets: dict[str, Target], size: int) -> dict[str, str]:
    """The shards of the base, under their names. Returns file name → sha256."""
    sums = {}
    with _bar(size, "merge") as bar:
        for header in base.headers:
            entries = [_entry(target) for target in targets.values() if target.file == header.path.name]
            sums[header.path.name] = stream.write(
                folder / header.path.name, entries, header.metadata or {"format": "pt"}, bar.update
            )
    return sums


def _entry(target: Target) -> stream.Entry:
    return stream.Entry(target.name, target.dtype, target.shape, target.size, lambda: _blocks(target))


def _blocks(target: Target) -> Iterable[memoryview]:
    return stream.blocks(target.source) if target.copied else [stream.raw(target.value())]


def _write_index(folder: Path, base: Checkpoint, targets: dict[str, Target], size: int) -> None:
    """The base's index, with the sizes of what was written. Nothing where the base is a single file."""
    if not base.sharded:
        return
    metadata = files.read_json(base.folder / INDEX).get("metadata") or {}
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(math.prod(target.shape) for target in targets.values())
    weight_map = {name: targets[name].file for name in sorted(targets)}
    files.write_json(folder / INDEX, {"metadata": metadata | {"total_size": size}, "weight_map": weight_map})


def _write_config(folder: Path, base: Checkpoint, config: dict[str, Any], untied: bool) -> None:
    """config.json as it is, but for a head that is no longer the embedding; code that config.json names; generation."""
    if untied:
        cli.say("the adapter makes head and embedding differ: lm_head.weight is written, tie_word_embeddings is false")
        files.write_json(folder / "config.json", config | {"tie_word_embeddings": False})
    else:
        shutil.copyfile(base.folder / "config.json", folder / "config.json")
    for path in [base.folder / "generation_config.json", *base.folder.glob("*.py")]:
        if path.is_file():
            shutil.copyfile(path, folder / path.name)


def _copy_tokenizer(folder: Path, run: Run) -> None:
    """The tokenizer that the model was trained with, not the base's; its generation_config.json goes first."""
    for path in (run.dir("prepare") / "tokenizer").iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)


# -- full tuning ------------------------------------------------------------------------------------------------------


def link_trained(run: Run) -> dict[str, int]:
    """train/model is a whole model already: merge/model is the same files under second names. Returns as merge does."""
    trained = checkpoint(run.dir("train") / "model")
    cli.say("train.tuning is full: there is no adapter to merge, merge/model is train/model")
    final = run.dir("merge") / "model"
    with files.atomic_directory(final) as folder:
        _copy_tokenizer(folder, run)  # first: copied over a link, it would be written into train/model
        for path in trained.folder.iterdir():
            if path.is_file() and not (folder / path.name).exists():
                _link(path.resolve(), folder / path.name)
        verify.sound(folder)
        sums = _sums(folder, known={})
    files.write_json(run.dir("merge") / "sha256.json", sums)
    return {"tensors": len(trained.tensors), "merged": 0, "bytes": trained.total_size}


def _link(path: Path, link: Path) -> None:
    try:
        os.link(path, link)
    except OSError:  # another file system, or one without hard links
        files.require_space(link.parent, path.stat().st_size, path.name)
        shutil.copyfile(path, link)


# -- both -------------------------------------------------------------------------------------------------------------


def _sums(folder: Path, known: dict[str, str]) -> dict[str, str]:
    """File name → sha256, for every file of folder; those known from writing are not read again."""
    missing = [path for path in sorted(folder.iterdir()) if path.name not in known]
    with _bar(sum(path.stat().st_size for path in missing), "sha256") as bar:
        return known | {path.name: stream.sha256(path, bar.update) for path in missing}


def verify_again(run: Run) -> str:
    """Read merge/model again and say so. Raises WherryError (exit 6) where it is not what was written."""
    folder = run.dir("merge") / "model"
    sums = files.read_json(run.dir("merge") / "sha256.json")
    found = verify.sound(folder)
    with _bar(sum(path.stat().st_size for path in folder.iterdir()), "verify") as bar:
        verify.hashes(folder, sums, bar.update)
    return f"verified {folder}: {len(found.tensors)} tensors, {len(sums)} files, sha256 as written"


def _bar(size: int, what: str) -> tqdm:
    return tqdm(total=size, desc=what, unit="B", unit_scale=True, file=sys.stderr, mininterval=1, leave=False)
