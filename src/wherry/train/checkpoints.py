"""Checkpoints of which a kill leaves either a whole one or none: the marker is written last, and only then are old
ones removed."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

from wherry.cli import say
from wherry.files import fsync_tree, read_json, write_json
from wherry.train.output import check_adapter

MARKER = "complete.json"


def with_markers(trainer_class: Any) -> Any:
    """A transformers.Trainer subclass that marks a checkpoint when all of it is on disk.

    transformers removes old checkpoints before the new one is known to be whole; here removal comes last.
    """

    class Marking(trainer_class):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            keep, self.args.save_total_limit = self.args.save_total_limit, None
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.save_total_limit = keep
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                root, step = Path(self.args.output_dir), self.state.global_step
                checkpoint = root / f"checkpoint-{step}"
                if (adapter := checkpoint / "adapter_model.safetensors").is_file():
                    # A warm-up's first step may have a learning rate of zero.
                    check_adapter(adapter, self.model, learned=step > 1)
                mark(checkpoint, self.args.world_size, self.get_total_train_batch_size(self.args))
                remove_old(root, keep)

    Marking.__name__ = trainer_class.__name__  # TRL writes it into model cards
    return Marking


def mark(checkpoint: Path, ranks: int, batch: int) -> None:
    """batch: rows of a step, over all ranks."""
    fsync_tree(checkpoint)
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in _files(checkpoint)}
    write_json(checkpoint / MARKER, {"saved": time.time(), "world_size": ranks, "batch": batch, "bytes": sizes})


def saved_by(checkpoint: Path) -> tuple[int, int]:
    """The number of ranks that saved it, and of rows in each of their steps."""
    marker = read_json(checkpoint / MARKER)
    return int(marker["world_size"]), int(marker["batch"])


def damage(checkpoint: Path) -> str | None:
    """What has become of a checkpoint since it was marked, by its files' sizes; None: it is whole."""
    if not (checkpoint / MARKER).is_file():
        return "was not saved to its end"
    sizes = read_json(checkpoint / MARKER)["bytes"]
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"has lost {name}"
        if path.stat().st_size != size:
            return f"has {path.stat().st_size} of {size} bytes of {name}"
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def remove_old(root: Path, keep: int | None) -> None:
    """Keep the newest `keep` complete checkpoints (None: all)."""
    complete = [path for path in numbered(root) if (path / MARKER).is_file()]
    for path in complete[: -keep if keep else 0]:
        (path / MARKER).unlink()  # first, so that one half removed is not taken for whole
        shutil.rmtree(path)


def newest_complete(root: Path) -> Path | None:
    """The newest checkpoint that is whole."""
    return next((path for path in reversed(numbered(root)) if damage(path) is None), None)


def set_aside_damaged(root: Path) -> None:
    """Rename checkpoints that are not whole, and name them: never used, never deleted."""
    for path in numbered(root):
        if what := damage(path):
            aside = path.with_name(f"{path.name}.incomplete-{int(time.time())}")
            path.rename(aside)
            say(f"train: {path.name} {what}; set aside as {aside.name}")


def numbered(root: Path) -> list[Path]:
    """checkpoint-N folders by N."""
    found = [
        (int(m[1]), path) for path in root.glob("checkpoint-*") if (m := re.fullmatch(r"checkpoint-(\d+)", path.name))
    ]
    return [path for _, path in sorted(found)]
