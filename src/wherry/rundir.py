"""The run directory: what each mode leaves for the next, and how one knows that it is whole.

$WHERRY_RUNS/<name>/recipe.yaml          the resolved recipe, with the origin of every value
                    manifest.json        versions, machine, job, model revision, token contract, one record a mode
                    <mode>/inputs.json   the part of the recipe that this mode's work depends on
                    <mode>/complete.json written last: the mode's work is all there
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wherry.errors import WherryError
from wherry.files import read_json, write_atomic, write_json
from wherry.recipe import Recipe, Resolved, load
from wherry.recipe.load import leaves

# What a mode's result depends on. A run whose finished work would no longer fit the recipe is refused.
DEPENDS_ON: dict[str, tuple[str, ...]] = {
    "prepare": ("model", "data", "train.objective", "train.args.max_length"),
    "train": ("train",),
    "merge": ("merge",),
    "eval": ("eval", "serve.vllm"),
}
# Of these only memory and speed depend, not what is learned: a run goes on with other values.
MAY_CHANGE = {"train.hang_timeout"} | {
    f"train.args.{name}"
    for name in (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "activation_offloading",
        "use_liger_kernel",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "torch_empty_cache_steps",
    )
}
# Modes whose earlier result is kept beside a new one instead of being refused.
REPEATABLE = ("eval",)


class Run:
    """One run directory. Raises WherryError where it does not fit the recipe or the mode asked for."""

    def __init__(self, name: str, resolved: Resolved) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise WherryError(f"run name {name!r}", "--run", "use letters, digits, '.', '_' and '-'")
        self.name = name
        self.path = runs_root() / name
        self.resolved = resolved

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    def dir(self, mode: str) -> Path:
        return self.path / mode

    # -- opening --------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, recipe: str | None, name: str | None, overrides: list[str]) -> Run:
        """The run of a recipe file, of a name, or of both (a recipe under another name)."""
        if recipe is None and name is None:
            raise WherryError(
                "neither a recipe nor a run is given", "command line", "wherry MODE recipes/demo.yaml, or --run NAME"
            )
        if recipe is None:
            path = runs_root() / str(name) / "recipe.yaml"
            if not path.is_file():
                known = sorted(p.parent.name for p in runs_root().glob("*/recipe.yaml"))
                raise WherryError(
                    f"no run {name!r}",
                    str(path.parent),
                    f"runs here: {', '.join(known)}" if known else "start it with a recipe, or set WHERRY_RUNS",
                )
        else:
            path = Path(recipe)
        run = cls(name or path.stem, load(path, overrides))
        run._refuse_another_recipe()
        return run

    def _refuse_another_recipe(self) -> None:
        for mode in (m for m in DEPENDS_ON if m not in REPEATABLE):
            path = self.dir(mode) / "inputs.json"
            if not self._holds_work(mode):
                continue
            before, now = read_json(path), self.inputs(mode)
            for key in sorted({*before, *now} - MAY_CHANGE):
                if before.get(key) != now.get(key):
                    raise WherryError(
                        f"run {self.name!r} was made with another recipe: {key} was {before.get(key)!r}, "
                        f"now {now.get(key)!r}",
                        str(path),
                        f"use --run NEW_NAME, or remove {self.dir(mode)} (and what follows it) to do it again",
                    )

    def _holds_work(self, mode: str) -> bool:
        """Whether something would be lost: a finished mode, or a training that has a checkpoint to go on from."""
        return self.is_complete(mode) or any(self.dir(mode).glob("checkpoints/checkpoint-*/complete.json"))

    def inputs(self, mode: str) -> dict[str, Any]:
        """The recipe's values, by dotted key, that a mode's result depends on."""
        flat = {k: v for k, v in leaves(self.recipe.model_dump(mode="json")) if v != {}}
        wanted = DEPENDS_ON[mode]
        return {k: v for k, v in flat.items() if any(k == w or k.startswith(f"{w}.") for w in wanted)}

    # -- state ----------------------------------------------------------------------------------------------------

    def is_complete(self, mode: str) -> bool:
        return (self.dir(mode) / "complete.json").is_file()

    def require(self, mode: str) -> None:
        """Raises WherryError where an earlier mode has not finished."""
        if not self.is_complete(mode):
            state = "not finished" if self.dir(mode).is_dir() else "not there"
            raise WherryError(
                f"{mode} of run {self.name!r} is {state}", str(self.dir(mode)), f"wherry {mode} --run {self.name}"
            )

    def manifest(self) -> dict[str, Any]:
        path = self.path / "manifest.json"
        return read_json(path) if path.is_file() else {"name": self.name, "modes": {}}

    def update_manifest(self, **values: Any) -> None:
        """Change top-level entries; modes={mode: record} adds to the records that are there."""
        from filelock import FileLock

        self.path.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path / ".manifest.lock"):
            manifest = self.manifest()
            manifest["modes"].update(values.pop("modes", {}))
            manifest.update(values)
            write_json(self.path / "manifest.json", manifest)

    # -- doing ----------------------------------------------------------------------------------------------------

    @contextmanager
    def work(self, mode: str, writes: bool = True) -> Iterator[dict[str, Any]]:
        """The frame of a mode's work. Yields a record to add to; completeness is marked when the block ends well.

        writes: of several ranks only one keeps the record.
        """
        if not writes:
            yield {}
            return
        from wherry.version import provenance

        folder = self.dir(mode)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / "recipe.yaml", self.resolved.to_yaml())
        kind = mode.partition("/")[0]  # eval/base is a kind of eval
        if kind in DEPENDS_ON:
            started_with = folder / "inputs.json"
            if started_with.is_file() and read_json(started_with) != self.inputs(kind) and not self._holds_work(mode):
                shutil.rmtree(folder)  # an attempt with another recipe that came to nothing
            write_json(folder / "inputs.json", self.inputs(kind))
        record: dict[str, Any] = {"provenance": provenance()}
        earlier = self.manifest()["modes"].get(mode, {}).get("seconds", 0.0) if not self.is_complete(mode) else 0.0
        started = time.time()

        def spent() -> dict[str, Any]:
            return {
                "started": started,
                "seconds": round(earlier + time.time() - started, 2),
                "peak_rss_bytes": peak_rss_bytes(),
            }

        try:
            yield record
        except BaseException as error:
            with suppress(OSError):  # a full disk, which the error itself says better
                ended = {"complete": False, "ended_by": repr(error)[:500]}
                self.update_manifest(modes={mode: {**record, **spent(), **ended}})
            raise
        record |= spent() | {"complete": True}
        self.update_manifest(modes={mode: record})
        if mode != "serve":  # a server has no finished work to mark
            write_json(folder / "complete.json", {"finished": time.time(), "seconds": record["seconds"]})


def runs_root() -> Path:
    return Path(os.environ.get("WHERRY_RUNS", "runs"))


def peak_rss_bytes() -> int:
    """The largest resident set of this process or of any child that has ended (ru_maxrss is in KiB on Linux)."""
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
