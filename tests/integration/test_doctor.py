"""wherry doctor on real ranks (gloo), and in a second on a machine that has nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wherry.errors import Exit

ROOT = Path(__file__).parents[2]
WHERRY = [sys.executable, "-m", "wherry"]


@pytest.fixture
def recipe(tmp_path, tiny_chat_model, runs, monkeypatch):
    monkeypatch.setenv("WHERRY_DEVICE", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}\n')
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"model: {{name: {tiny_chat_model}}}\ndata: {{train: {rows}}}\ntrain: {{args: {{max_length: 64}}}}\n"
    )
    return path


def test_two_ranks_meet_and_agree(recipe):
    torchrun = [str(Path(sys.prefix) / "bin/torchrun"), "--nproc-per-node", "2", "--no-python", "--"]
    done = subprocess.run([*torchrun, *WHERRY, "doctor", recipe, "--json"], capture_output=True, text=True, timeout=200)
    results = {result["id"]: result for result in json.loads(done.stdout)}
    assert results["network.allreduce"]["status"] == "pass", done.stderr
    assert "over 2 ranks (gloo, on the CPU)" in results["network.allreduce"]["found"]
    assert results["network.clocks"]["status"] == "pass"
    assert results["model.shards"]["status"] == "pass"
    assert [r["rank"] for r in json.loads(done.stdout) if r["id"] == "device.visible"] == [0, 1]
    assert "Traceback" not in done.stderr
    faults = [result for result in results.values() if result["status"] == "fail"]
    assert (done.returncode == 0) == (not faults), done.stderr


def test_every_rank_ends_with_exit_3_where_one_finds_a_fault(recipe):
    torchrun = [str(Path(sys.prefix) / "bin/torchrun"), "--nproc-per-node", "2", "--no-python", "--"]
    command = [*torchrun, *WHERRY, "doctor", recipe, "train.args.max_length=4096"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert "FAIL train.context" in done.stdout
    assert done.stderr.count(f"exitcode  : {int(Exit.PREFLIGHT)}") == 2


def test_the_entrypoint_on_a_machine_without_slurm(recipe):
    """Outside a step: one process, no torch, as `make doctor` starts it."""
    entrypoint = ROOT / "entrypoints/entrypoint.sh"
    done = subprocess.run(
        [entrypoint, "doctor", recipe], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert done.returncode in (0, Exit.PREFLIGHT), done.stderr
    assert "not looked at:" in done.stdout
    assert "Traceback" not in done.stderr
    script = "import sys; from wherry.__main__ import main; main(['doctor']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
