"""A kill or an error half-way leaves the old or nothing, never a part."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from wherry.errors import Exit, WherryError, no_space, run, translate
from wherry.files import atomic_directory, require_space, write_atomic, write_json


def names(path):
    return sorted(p.name for p in path.iterdir())


def test_write_atomic_replaces_and_keeps_no_part(tmp_path):
    write_atomic(tmp_path / "a" / "f", "one")
    write_atomic(tmp_path / "a" / "f", b"two", mode=0o600)
    assert (tmp_path / "a" / "f").read_bytes() == b"two"
    assert (tmp_path / "a" / "f").stat().st_mode & 0o777 == 0o600
    assert names(tmp_path / "a") == ["f"]


def test_write_json_that_fails_keeps_the_old_file(tmp_path):
    write_json(tmp_path / "f", {"a": 1})
    circular: dict = {}
    circular["self"] = circular
    with pytest.raises(ValueError, match="Circular"):
        write_json(tmp_path / "f", circular)
    assert json.loads((tmp_path / "f").read_text()) == {"a": 1}
    assert names(tmp_path) == ["f"]


def test_atomic_directory(tmp_path):
    def fail():
        with atomic_directory(tmp_path / "d") as part:
            (part / "f").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert names(tmp_path) == []
    for text in ("one", "two"):
        with atomic_directory(tmp_path / "d") as part:
            (part / "f").write_text(text)
    assert (tmp_path / "d" / "f").read_text() == "two"
    assert names(tmp_path) == ["d"]


def test_atomic_directory_killed_half_way(tmp_path):
    code = f"""
        import os, signal
        from pathlib import Path
        from wherry.files import atomic_directory
        with atomic_directory(Path({str(tmp_path)!r}) / "d") as part:
            (part / "f").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)])
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "d").exists()
    with atomic_directory(tmp_path / "d") as part:
        (part / "f").write_text("whole")
    assert names(tmp_path) == ["d"]  # the leftover of the killed attempt is gone too


def test_require_space(tmp_path):
    require_space(tmp_path / "not" / "there", 1, "nothing")
    with pytest.raises(WherryError, match=r"needs 1000000000\.0 GB") as caught:
        require_space(tmp_path, 10**18, "the model")
    assert caught.value.code == Exit.PREFLIGHT


def test_a_full_disk_is_three_lines_and_can_be_resumed(capsys):
    def full():
        with Path("/dev/full").open("w") as file:
            file.write("x")

    assert run(full) == Exit.STOPPED
    assert capsys.readouterr().err.splitlines() == [
        "error: no space left on device",
        "where: the file system of the run directory",
        "fix:   free some space (df -h) and start the same command again: what was complete is kept",
    ]


def test_errors_of_libraries_are_translated():
    class OutOfMemoryError(RuntimeError):  # as torch names it
        pass

    found = translate(OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"))
    assert found is not None
    assert (found.code, found.what) == (
        Exit.OUT_OF_MEMORY,
        "out of memory: CUDA out of memory. Tried to allocate 2 GiB",
    )
    assert translate(ValueError("a bug")) is None
    wrapped = RuntimeError("save failed")
    wrapped.__cause__ = OSError(28, os.strerror(28))
    assert no_space(wrapped)


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 // 0)
