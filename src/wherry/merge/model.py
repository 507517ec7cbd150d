"""The folder merge/model: weights, index, config, tokenizer, checked before it gets its name."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from wherry import cli, files
from wherry.errors import Exit, WherryError, no_space
from wherry.merge import adapter as adapters
from wherry.merge import names, plan, stream, verify
from wherry.merge.journal import Attempt
from wherry.merge.plan import Target
from wherry.prepare.source import fingerprint
from wherry.rundir import Run
from wherry.safetensors_file import INDEX, SINGLE, Checkpoint, checkpoint

MANIFEST = "wherry_merge.json"
SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}  # as save_pretrained's


# -- adapter ----------------------------------------------------------------------------------------------------------


def merge(run: Run) -> dict[str, Any]:
    """Write merge/model from base and adapter, going on from where a killed attempt came to.

    Returns what the run's manifest keeps: tensors, merged (how many of them changed), bytes, and what was merged.
    Raises WherryError: exit 3 where base or disk will not do, exit 6 where the adapter or the result is unsound.
    """
    parts = planned(run)
    inputs = inputs_of(run)
    targets = parts.targets.values()
    size = sum(target.size for target in targets)
    record = {"tensors": len(targets), "merged": sum(t.changed for t in targets), "bytes": size, "inputs": inputs}
    if _has_its_name(run.dir("merge") / "model", inputs):
        return record
    with stream.made_for_pieces(), Attempt(run.dir("merge") / "model", _plan_hash(inputs, parts)) as attempt:
        _require_space(attempt, parts, size)
        verify.finite(parts.adapter)
        try:
            write_files(attempt, run, parts)
            verify.written(attempt.folder, parts.layout, parts.targets, run.manifest().get("contract") or {})
            if _laid_out_anew(parts, run):
                verify.loads(attempt.folder, run.recipe.model.trust_remote_code)
            _write_manifest(attempt.folder, inputs, known=attempt.done)
        except OSError as error:
            if not no_space(error):
                raise
            raise WherryError(
                f"the disk filled up while the merged model of {size / 1e9:.2f} GB was written",
                str(run.dir("merge")),
                "free some space there, or set WHERRY_RUNS to a larger file system, and start again: "
                "nothing is left of this attempt",
                Exit.PREFLIGHT,
            ) from error
        attempt.finish()
    return record


def _has_its_name(folder: Path, inputs: dict[str, Any]) -> bool:
    """Whether an attempt came to its end and was killed before the run could say so."""
    manifest = folder / MANIFEST
    return manifest.is_file() and files.read_json(manifest)["inputs"] == inputs


@dataclass(frozen=True)
class Parts:
    """What is merged into what. config: the base's config.json. layout: file name → its tensors, in order."""

    base: Checkpoint
    config: dict[str, Any]
    adapter: adapters.Adapter
    targets: dict[str, Target]
    layout: dict[str, list[Target]]


def planned(run: Run, merge_base: str | None = None) -> Parts:
    """Everything about the result but its values; reads headers only. merge_base: in place of the recipe's."""
    base = checkpoint(run.dir("prepare") / "model")
    config = files.read_json(base.folder / "config.json")
    adapter = adapters.read_adapter(run.dir("train") / "adapter")
    options = run.recipe.merge
    called = names.resolve(base, adapter, run.recipe.model.trust_remote_code)
    targets = plan.plan(base, config, adapter, called, SAFETENSORS.get(options.dtype or ""))
    if (merge_base or options.base) == "nf4":
        from wherry.merge import nf4

        targets = nf4.apply(targets, base.folder, run)
    return Parts(base, config, adapter, targets, _shards(base, targets, options.max_shard_size))


def write_files(attempt: Attempt, run: Run, parts: Parts) -> None:
    """Every file of the model but the manifest; of the weights those that attempt has not yet."""
    _write_weights(attempt, parts)
    _write_index(attempt.folder, parts)
    _write_config(attempt.folder, parts, run.recipe.merge.dtype)
    _copy_tokenizer(attempt.folder, run)


def inputs_of(run: Run) -> dict[str, Any]:
    """What the result is made of: whether a finished merge is still that of this adapter and base."""
    base = checkpoint(run.dir("prepare") / "model")
    now = fingerprint(base.files)
    before = (run.manifest().get("model") or {}).get("fingerprint", now)
    if now != before:
        raise WherryError(
            "the base is not the one that was prepared and trained on: its fingerprint differs",
            str(base.folder.resolve()),
            "restore the model of this run (model.name, model.revision), or prepare and train under another --run",
            Exit.VERIFICATION,
        )
    made_of: dict[str, Any] = {"base_fingerprint": now, **run.recipe.merge.model_dump(mode="json")}
    if run.recipe.train.tuning == "full":
        made_of["trained_fingerprint"] = fingerprint(checkpoint(run.dir("train") / "model").files)
    else:
        made_of["adapter_sha256"] = adapters.sha256_of(run.dir("train") / "adapter")
    if run.recipe.merge.base == "nf4":
        made_of["quantization"] = run.recipe.train.quantization
    return made_of


def _laid_out_anew(parts: Parts, run: Run) -> bool:
    """Whether more than values differ from the base, which train has loaded: then transformers is asked again."""
    options = run.recipe.merge
    return bool(options.dtype or options.max_shard_size or plan.unties(parts.targets, parts.config))


def _plan_hash(inputs: dict[str, Any], parts: Parts) -> str:
    """A hash of everything that determines the weights: the journal of another is of no use."""
    whole = {
        "inputs": inputs,
        "layout": {name: [(t.name, t.dtype, t.shape) for t in targets] for name, targets in parts.layout.items()},
        "base": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in parts.base.files],
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _shards(base: Checkpoint, targets: dict[str, Target], max_shard_size: str | None) -> dict[str, list[Target]]:
    """File name → its tensors in order: the base's own files, or as many as max_shard_size ("5GB") asks for."""
    if max_shard_size is None:
        return _shards_of_the_base(base, targets)
    limit, room = _bytes(max_shard_size), 0
    groups: list[list[Target]] = []
    for target in targets.values():
        if not groups or target.size > room:
            groups.append([])
            room = limit
        groups[-1].append(target)
        room -= target.size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _shards_of_the_base(base: Checkpoint, targets: dict[str, Target]) -> dict[str, list[Target]]:
    home = {name: path.name for name, (path, _) in base.tensors.items()}
    embedding = next((name for name in home if name.endswith(plan.EMBEDDINGS)), "")
    layout: dict[str, list[Target]] = {path.name: [] for path in base.files}
    for target in targets.values():
        layout[home.get(target.name) or home[embedding]].append(target)  # a new head goes beside its embedding
    return layout


def _bytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+) *(\w+)", text).groups()  # type: ignore[union-attr] # the recipe's pattern
    return int(number) * UNITS[unit.upper()]


def _require_space(attempt: Attempt, parts: Parts, size: int) -> None:
    left = size - sum(target.size for name in attempt.done for target in parts.layout[name])
    files.require_space(attempt.folder, left + (64 << 20), "the merged model")  # and tokenizer, headers, index


def _write_weights(attempt: Attempt, parts: Parts) -> None:
    metadata = next((header.metadata for header in parts.base.headers if header.metadata), {"format": "pt"})
    todo = {name: targets for name, targets in parts.layout.items() if name not in attempt.done}
    if attempt.done:
        cli.say(f"merge goes on: {len(attempt.done)} of {len(parts.layout)} files were written before")
    size, left = (sum(t.size for targets in d.values() for t in targets) for d in (parts.layout, todo))
    shards = [
        stream.Shard(attempt.folder / name, plan.header(targets, metadata), plan.pieces(targets))
        for name, targets in todo.items()
    ]
    with bar(size, "merge", done=size - left) as progress:
        stream.write(shards, lambda shard, digest: attempt.record(shard.path, digest), progress.update)


def _write_index(folder: Path, parts: Parts) -> None:
    """The base's index, with the sizes of what was written. Nothing where the result is a single file."""
    if list(parts.layout) == [SINGLE]:
        return
    index = parts.base.folder / INDEX
    metadata = (files.read_json(index).get("metadata") or {}) if index.is_file() else {}
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(math.prod(target.shape) for target in parts.targets.values())
    metadata["total_size"] = sum(target.size for target in parts.targets.values())
    weight_map = {target.name: name for name, targets in parts.layout.items() for target in targets}
    files.write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def _write_config(folder: Path, parts: Parts, dtype: str | None) -> None:
    """config.json as it is, but for a head that is no longer the embedding, and for another dtype; code; generation."""
    changes: dict[str, Any] = {}
    if plan.unties(parts.targets, parts.config):
        cli.say("the adapter makes head and embedding differ: lm_head.weight is written, tie_word_embeddings is false")
        changes["tie_word_embeddings"] = False
    if dtype:
        changes |= dict.fromkeys([key for key in ("dtype", "torch_dtype") if key in parts.config] or ["dtype"], dtype)
    if changes:
        files.write_json(folder / "config.json", parts.config | changes)
    else:
        shutil.copyfile(parts.base.folder / "config.json", folder / "config.json")
    for path in [parts.base.folder / "generation_config.json", *parts.base.folder.glob("*.py")]:
        if path.is_file():
            shutil.copyfile(path, folder / path.name)


def _copy_tokenizer(folder: Path, run: Run) -> None:
    """The tokenizer that the model was trained with, not the base's; its generation_config.json goes first."""
    for path in (run.dir("prepare") / "tokenizer").iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)


def _write_manifest(folder: Path, inputs: dict[str, Any], known: dict[str, str]) -> None:
    """What was merged, and the sha256 of every file; those known from writing are not read again."""
    missing = [path for path in sorted(folder.iterdir()) if path.name not in known and path.name != MANIFEST]
    with bar(sum(path.stat().st_size for path in missing), "sha256") as progress:
        sums = known | {path.name: stream.sha256(path, progress.update) for path in missing}
    files.write_json(folder / MANIFEST, {"inputs": inputs, "sha256": dict(sorted(sums.items()))})


# -- full tuning ------------------------------------------------------------------------------------------------------


def link_trained(run: Run) -> dict[str, Any]:
    """train/model is a whole model already: merge/model is the same files under second names. Returns as merge does."""
    trained = checkpoint(run.dir("train") / "model")
    cli.say("train.tuning is full: there is no adapter to merge, merge/model is train/model")
    inputs = inputs_of(run)
    with files.atomic_directory(run.dir("merge") / "model") as folder:
        _copy_tokenizer(folder, run)  # first: copied over a link, it would be written into train/model
        for path in trained.folder.iterdir():
            if path.is_file() and not (folder / path.name).exists():
                _link(path.resolve(), folder / path.name)
        verify.sound(folder)
        _write_manifest(folder, inputs, known={})
    return {"tensors": len(trained.tensors), "merged": 0, "bytes": trained.total_size, "inputs": inputs}


def _link(path: Path, link: Path) -> None:
    try:
        os.link(path, link)
    except OSError:  # another file system, or one without hard links
        files.require_space(link.parent, path.stat().st_size, path.name)
        shutil.copyfile(path, link)


# -- later ------------------------------------------------------------------------------------------------------------


def refuse_outdated(run: Run) -> None:
    """Raises WherryError (exit 2) where a finished merge is no longer that of what train left."""
    merged = (run.manifest()["modes"].get("merge") or {}).get("inputs") or {}
    now = inputs_of(run)
    if any(key in merged and merged[key] != now.get(key) for key in ("adapter_sha256", "trained_fingerprint")):
        raise WherryError(
            "the model was trained again since it was merged: merge/model is that of the earlier training",
            str(run.dir("merge") / "model"),
            f"remove {run.dir('merge')} (and what follows it) to merge again, or use --run NEW_NAME",
        )


def verify_again(folder: Path, run: Run | None = None) -> str:
    """Read a merged model again and say so. Raises WherryError (exit 6) where it is not what was written.

    run: the one that it is of, where base and adapter are at hand: samples are then computed again.
    """
    manifest = files.read_json(folder / MANIFEST)
    found = verify.sound(folder)
    with bar(sum(path.stat().st_size for path in folder.iterdir()), "verify") as progress:
        verify.hashes(folder, manifest["sha256"], progress.update)
    said = f"verified {folder}: {len(found.tensors)} tensors, {len(manifest['sha256'])} files, sha256 as written"
    trusted = bool(run and run.recipe.model.trust_remote_code)
    verify.loads(folder, trusted)
    said += ", loads in transformers"
    if run and run.recipe.train.tuning != "full":
        parts = planned(run)
        verify.written(folder, parts.layout, parts.targets, run.manifest().get("contract") or {})
        said += ", samples computed again"
    return said + verify.speaks(folder, trusted)


def bar(size: int, what: str, done: int = 0) -> tqdm:
    """Bytes done and to do, bytes a second, time left."""
    return tqdm(
        total=size, initial=done, desc=what, unit="B", unit_scale=True, file=sys.stderr, mininterval=1, leave=False
    )
