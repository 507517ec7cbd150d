"""One kind of error for everything a user can put right: what is wrong, where, and what to do."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit codes of every mode (docs/errors.md)."""

    DONE = 0
    USAGE = 2
    PREFLIGHT = 3
    OUT_OF_MEMORY = 4
    SERVER = 5
    VERIFICATION = 6
    STOPPED = 75
    INTERRUPTED = 130


class WherryError(Exception):
    """A mistake or a state that the user can change.

    what: one sentence with the value found; where: file and line, recipe key or path; fix: the setting to change.
    """

    def __init__(self, what: str, where: str, fix: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(what)
        self.what, self.where, self.fix, self.code = what, where, fix, code

    def __str__(self) -> str:
        return f"error: {self.what}\nwhere: {self.where}\nfix:   {self.fix}"


def translate(error: BaseException) -> WherryError | None:
    """The WherryError that says what another library's exception means to a user, or None for a bug."""
    if isinstance(error, WherryError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return WherryError("interrupted", "the terminal", "the same command goes on from here", Exit.INTERRUPTED)
    # By name, so that torch is not imported to say so: torch.OutOfMemoryError, torch.cuda.OutOfMemoryError.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        what = str(error).splitlines()[0] if str(error) else "host memory is used up"
        return WherryError(
            f"out of memory: {what}",
            "the device named above",
            "lower train.args.per_device_train_batch_size or max_length, set gradient_checkpointing=true, "
            "or use train.tuning=qlora",
            Exit.OUT_OF_MEMORY,
        )
    if no_space(error):
        path = getattr(error, "filename", None) or "the file system of the run directory"
        return WherryError(
            "no space left on device",
            str(path),
            "free some space (df -h) and start the same command again: what was complete is kept",
            Exit.STOPPED,
        )
    if isinstance(error, PermissionError) and error.filename:
        return WherryError(
            f"permission denied: {error.filename}", str(error.filename), "use a path that you may read and write"
        )
    return None


def no_space(error: BaseException) -> bool:
    """Whether an exception, or what caused it, is a full disk or quota (some libraries keep only the text)."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(seen) or "os error 28" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def run(main: Callable[[], int | None]) -> int:
    """Call main and return its exit code; a user's mistake becomes three lines on stderr, a bug keeps its traceback."""
    try:
        return int(main() or 0)
    except BrokenPipeError:  # `wherry … | head`
        return 0
    except (Exception, KeyboardInterrupt) as error:
        known = translate(error)
        if known is None:
            raise
        if not _said_by_another_rank(known):
            print(f"\n{known}" if sys.stderr.isatty() else known, file=sys.stderr)
        return int(known.code)


def _said_by_another_rank(error: WherryError) -> bool:
    """Whether another rank of this attempt has the same mistake: the log needs it once, not from each of 24 ranks.

    WHERRY_EXITS: a folder of the attempt that all ranks see (slurm/multinode.sh).
    """
    folder = os.environ.get("WHERRY_EXITS")
    if not folder or "RANK" not in os.environ:
        return False
    mistake = hashlib.sha256(f"{error.what}\n{error.fix}".encode()).hexdigest()[:16]
    try:
        (Path(folder) / f"said-{mistake}").touch(exist_ok=False)
    except OSError as reason:
        return reason.errno == errno.EEXIST
    return False
