"""An attempt that can go on: a folder under a temporary name, and a line for each shard that is whole and on disk."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

from wherry.errors import Exit, WherryError
from wherry.files import fsync_directory, give_name


class Attempt:
    """Makes `final`, across kills: enter it, write what is not in `done` into `folder`, then `finish`.

    plan: a hash of everything that determines the result; the work of another plan is thrown away. done: file name →
    sha256 of the shards that an earlier attempt completed. An error (not an interrupt) leaves nothing behind.
    Raises WherryError (exit 3) where another process is at work on the same result.
    """

    def __init__(self, final: Path, plan: str) -> None:
        self.final, self.plan = final, plan
        self.folder = final.with_name(f".{final.name}.part")
        self.path = final.with_name(f".{final.name}.journal")
        self.done: dict[str, str] = {}

    def __enter__(self) -> Attempt:
        self.final.parent.mkdir(parents=True, exist_ok=True)
        self._journal = self.path.open("a+")
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._journal.close()
            raise WherryError(
                "another process is merging this run",
                str(self.folder),
                "wait until it has finished, or stop it",
                Exit.PREFLIGHT,
            ) from None
        except OSError:  # a file system without locks
            pass
        self._read()
        if not self.done:
            self._start_over()
        for path in self.folder.iterdir():
            if path.name not in self.done:
                path.unlink()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self._remove()
        self._journal.close()

    def _read(self) -> None:
        """Shards that count: recorded for the same plan, and of the size that was recorded."""
        self._journal.seek(0)
        text = self._journal.read()
        if not text.endswith("\n"):  # a kill came within a line
            self._append("")
        first, *lines = text.splitlines() or [""]
        if first != self.plan:
            return
        for line in lines:
            try:
                name, size, digest = json.loads(line)
            except ValueError:
                continue
            path = self.folder / name
            if path.is_file() and path.stat().st_size == size:
                self.done[name] = digest

    def _start_over(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self._journal.truncate(0)
        self._append(self.plan)

    def _append(self, line: str) -> None:
        self._journal.write(line + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def record(self, path: Path, digest: str) -> None:
        """path is whole and on disk."""
        fsync_directory(self.folder)
        self._append(json.dumps([path.name, path.stat().st_size, digest]))
        self.done[path.name] = digest

    def finish(self) -> None:
        """Give the folder its name, in place of what had it."""
        give_name(self.folder, self.final)
        self.path.unlink()

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.path.unlink(missing_ok=True)
