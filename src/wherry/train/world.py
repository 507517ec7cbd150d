"""A checkpoint of another number of ranks.

Without sharding every rank holds everything, and only the order of the rows changes. Under ZeRO-3 each rank wrote its
part of the optimizer: DeepSpeed's universal checkpoint puts the parts together by parameter, for any number of ranks
(arXiv:2406.18820).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from wherry.cli import say
from wherry.errors import Exit, WherryError
from wherry.train import checkpoints


def changed(checkpoint: Path | None, ranks: int) -> bool:
    return checkpoint is not None and checkpoints.saved_by(checkpoint)[0] != ranks


def announce(checkpoint: Path, ranks: int, batch: int) -> None:
    """Say what goes on otherwise than before. batch: rows of a step, over all ranks."""
    before, rows = checkpoints.saved_by(checkpoint)
    if before != ranks:
        say(f"train: {checkpoint.name} was saved by {before} ranks, now there are {ranks}")
    if rows != batch:
        say(
            f"train: a step had {rows} rows until {checkpoint.name}, now it has {batch}: set "
            "train.args.gradient_accumulation_steps or per_device_train_batch_size to keep them"
        )


def make_universal(checkpoint: Path) -> None:
    """Put DeepSpeed's parts together, once; training loads them where its configuration says load_universal.

    Raises WherryError (exit 6) where DeepSpeed cannot.
    """
    if (checkpoint / "latest_universal").is_file():  # written last
        return
    step = checkpoint / (checkpoint / "latest").read_text().strip()
    say(f"train: putting {step.name} together for another number of ranks")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(step), "--output_folder", f"{step}_universal", "--num_merge_workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (checkpoint / "latest_universal").is_file():
        raise WherryError(
            f"DeepSpeed cannot put the checkpoint together: {done.stderr.strip().splitlines()[-1:]}",
            str(step),
            f"start with {checkpoints.saved_by(checkpoint)[0]} ranks, as it was saved",
            Exit.VERIFICATION,
        )
