"""Writes that a kill cannot leave half-done: temporary name, fsync, rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wherry.errors import Exit, WherryError


def write_atomic(path: Path, data: str | bytes, mode: int = 0o644) -> None:
    """Replace path by data: a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    fsync_directory(path.parent)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n", mode)


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises WherryError where it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WherryError(f"{path.name} is missing", str(path), "run the mode that writes it again") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WherryError(f"{path.name} is not valid JSON: {error}", str(path), "restore or delete it") from None


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes final when the block ends well and vanishes when it does not.

    A previous final is replaced only then. Leftovers of killed attempts are removed first.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for leftover in final.parent.glob(f".{final.name}.*.part"):
        shutil.rmtree(leftover)
    part = final.parent / f".{final.name}.{os.getpid()}.part"
    part.mkdir()
    try:
        yield part
        give_name(part, final)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def give_name(part: Path, final: Path) -> None:
    """Put a directory on the disk and rename it to final; what had that name is whole until then, and then gone."""
    fsync_tree(part)
    old = final.with_name(f".{final.name}.old.part")
    if final.is_symlink():
        final.unlink()
    elif final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)  # removing it takes time, and a kill half-way would leave a part of it under its name
    part.rename(final)
    fsync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def fsync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            descriptor = os.open(Path(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(Path(folder))


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_space(path: Path, needed: int, what: str) -> None:
    """Refuse (exit 3) before the first byte where path's file system has less than needed bytes free."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise WherryError(
            f"{what} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free",
            str(existing),
            "free some space there, or set WHERRY_RUNS to a larger file system",
            Exit.PREFLIGHT,
        )
