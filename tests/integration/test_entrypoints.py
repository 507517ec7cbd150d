"""What the entrypoints do before Python starts."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRYPOINT = ROOT / "entrypoints/entrypoint.sh"


def call(*arguments, cwd=ROOT, **variables):
    env = {k: v for k, v in os.environ.items() if k not in ("WHERRY_REVISION", "WHERRY_CACHE")} | variables
    return subprocess.run([ENTRYPOINT, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def test_a_mode_a_command_and_neither():
    assert call("version").stdout.startswith("wherry ")
    assert call("wherry", "--version").stdout.startswith("wherry ")
    assert call("echo", "hello").stdout == "hello\n"
    wrong = call("trian")
    assert wrong.returncode == 2
    assert "did you mean train?" in wrong.stderr


def test_caches_go_where_one_can_write(tmp_path):
    show = "echo $HOME; echo $TRITON_CACHE_DIR; echo $VLLM_CACHE_ROOT"
    found = call("bash", "-c", show, TMPDIR=str(tmp_path), HOME="/nonexistent")
    home, triton, vllm = found.stdout.split()
    assert all(Path(path).is_relative_to(tmp_path) for path in (home, triton, vllm))
    assert Path(home).stat().st_mode & 0o077 == 0
    refused = call("version", WHERRY_CACHE="/proc/nowhere")
    assert refused.returncode == 3
    assert "no place to write caches to" in refused.stderr


@pytest.mark.parametrize("packed", [False, True])
def test_an_image_of_another_commit_is_named(tmp_path, packed):
    git = ["git", "-C", tmp_path, "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "x"], check=True)
    (tmp_path / "src/wherry").mkdir(parents=True)
    if packed:
        subprocess.run([*git, "pack-refs", "--all"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert "warning" not in call("version", cwd=tmp_path, WHERRY_REVISION=commit).stderr
    other = "0123456789abcdef0123456789abcdef01234567"
    warned = call("version", cwd=tmp_path, WHERRY_REVISION=f"{other}-dirty")
    assert warned.returncode == 0
    assert f"built from {other[:12]}, this checkout is at {commit[:12]}" in warned.stderr
