"""Checkpoints of which a kill leaves either a whole one or none: the marker is written last, and only then are old
ones removed."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

from wherry.cli import say
from wherry.files import fsync_tree, write_json

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
                root = Path(self.args.output_dir)
                mark(root / f"checkpoint-{self.state.global_step}")
                remove_old(root, keep)

    Marking.__name__ = trainer_class.__name__  # TRL writes it into model cards
    return Marking


def mark(checkpoint: Path) -> None:
    fsync_tree(checkpoint)
    write_json(checkpoint / MARKER, {"saved": time.time()})


def remove_old(root: Path, keep: int | None) -> None:
    """Keep the newest `keep` complete checkpoints (None: all)."""
    complete = [path for path in numbered(root) if (path / MARKER).is_file()]
    for path in complete[: -keep if keep else 0]:
        (path / MARKER).unlink()  # first, so that one half removed is not taken for whole
        shutil.rmtree(path)


def newest_complete(root: Path) -> Path | None:
    """The newest checkpoint that is whole."""
    whole = [path for path in numbered(root) if (path / MARKER).is_file()]
    return whole[-1] if whole else None


def set_aside_unfinished(root: Path) -> None:
    """Rename checkpoints that were not saved to their end, and name them: never used, never deleted."""
    for path in numbered(root):
        if not (path / MARKER).is_file():
            aside = path.with_name(f"{path.name}.incomplete-{int(time.time())}")
            path.rename(aside)
            say(f"train: {path.name} was not saved to its end; set aside as {aside.name}")


def numbered(root: Path) -> list[Path]:
    """checkpoint-N folders by N."""
    found = [
        (int(m[1]), path) for path in root.glob("checkpoint-*") if (m := re.fullmatch(r"checkpoint-(\d+)", path.name))
    ]
    return [path for _, path in sorted(found)]
