"""Merge as a process: its memory, its sudden end, its second start, its later verification."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from merge_models import make_adapter, make_base, make_run, tensors_of
from safetensors.torch import save_file

from wherry import errors, merge
from wherry.errors import Exit
from wherry.merge import stream
from wherry.safetensors_file import read_header

WIDE = 512


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERRY_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def ready(tmp_path: Path) -> tuple[Path, list[str]]:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_base(base, dtype="bfloat16", shard="60KB")
    make_adapter(base, adapter)
    return make_run(tmp_path, base, adapter)


def process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=os.environ)


KILLED = """
import os, signal, sys
from wherry import merge
from wherry.merge import stream
blocks, count = stream.blocks, [0]
def dying(source):
    count[0] += 1
    if count[0] == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return blocks(source)
stream.blocks = dying
merge.main(sys.argv[1:])
"""


def test_killed_half_way_and_started_again(ready: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    run, arguments = ready
    done = process(KILLED, *arguments)
    assert done.returncode == -signal.SIGKILL, done.stderr
    part = next((run / "merge").glob(".model.*.part"))
    assert any(path.stat().st_size for path in part.glob("*.safetensors"))  # it had begun
    assert not (run / "merge" / "model").exists()
    assert not (run / "merge" / "complete.json").exists()

    assert merge.main(arguments) == 0
    assert not list((run / "merge").glob(".*.part"))
    out = capfd.readouterr().out
    assert out.startswith("merged 14 of 21 tensors into")
    assert "peak memory" in out
    assert out.count("\n") == 1

    before = (run / "merge" / "model").stat()
    assert merge.main(arguments) == 0
    assert (run / "merge" / "model").stat() == before
    assert "is complete" in capfd.readouterr().err


MEASURED = """
import sys
from wherry import merge
from wherry.rundir import peak_rss_bytes
for recipe in sys.argv[1:]:
    merge.main([recipe])
    print("peak", peak_rss_bytes())
"""


def big_run(root: Path, name: str, layers: int) -> tuple[Path, list[str]]:
    """A run whose base has layers matrices of 4·WIDE×WIDE in bf16 (2 MB each), all with a LoRA, in four shards."""
    base, adapter = root / f"{name}-base", root / f"{name}-adapter"
    base.mkdir()
    adapter.mkdir()
    weights = {f"model.layers.{i}.up_proj.weight": torch.full((4 * WIDE, WIDE), 0.5).bfloat16() for i in range(layers)}
    where = {tensor: f"model-{i % 4}.safetensors" for i, tensor in enumerate(weights)}
    for file in set(where.values()):
        save_file({t: weights[t] for t in weights if where[t] == file}, base / file, metadata={"format": "pt"})
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (base / "config.json").write_text("{}")
    lora = {"A": torch.full((4, WIDE), 0.5), "B": torch.full((4 * WIDE, 4), 0.5)}
    parts = {f"base_model.model.{t[:-7]}.lora_{x}.weight": lora[x].clone() for t in weights for x in lora}
    save_file(parts, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    return make_run(root, base, adapter, name)


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    _, small = big_run(tmp_path, "small", 4)
    run, large = big_run(tmp_path, "large", 40)
    done = process(MEASURED, *small, *large)
    peaks = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("peak")]
    assert len(peaks) == 2, done.stderr
    total = sum(path.stat().st_size for path in (run / "merge" / "model").glob("*.safetensors"))
    assert total > 80e6
    assert peaks[1] - peaks[0] < 10e6  # one tensor is 2 MB, 4 MB in fp32
    assert all((tensor == 1.5).all() for tensor in tensors_of(run / "merge" / "model").values())  # 0.5 + 4 · 0.5 · 0.5


def test_verify_reads_everything_again(ready: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    run, arguments = ready
    assert errors.run(lambda: merge.main([*arguments, "--verify"])) == Exit.USAGE  # nothing to verify yet
    assert merge.main(arguments) == 0
    model = run / "merge" / "model"
    sums = json.loads((run / "merge" / "sha256.json").read_text())
    assert sums == {path.name: stream.sha256(path) for path in model.iterdir()}
    capfd.readouterr()
    assert merge.main([*arguments, "--verify"]) == 0
    assert "verified" in capfd.readouterr().out

    shard = sorted(model.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert errors.run(lambda: merge.main([*arguments, "--verify"])) == Exit.VERIFICATION
    assert f"{shard.name} is not what merge wrote" in capfd.readouterr().err

    shard.write_bytes(data[:-1])
    assert errors.run(lambda: merge.main([*arguments, "--verify"])) == Exit.VERIFICATION
    assert f"{shard.name} is truncated" in capfd.readouterr().err

    data[-1] ^= 1
    shard.write_bytes(data)
    (model / "chat_template.jinja").unlink()
    assert errors.run(lambda: merge.main([*arguments, "--verify"])) == Exit.VERIFICATION
    assert "chat_template.jinja is missing" in capfd.readouterr().err


def test_mistakes_are_answered_without_torch(ready: tuple[Path, list[str]]) -> None:
    code = "import sys\nfrom wherry import merge, errors\nerrors.run(lambda: merge.main(sys.argv[1:]))\n"
    done = process(code + "sys.exit('torch' in sys.modules)", ready[1][0], "train.tuning=lroa")
    assert done.returncode == 0
    assert "train.tuning" in done.stderr


def test_the_header_is_aligned_and_in_order(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, 2)}
    entries = [
        stream.Entry(name, "F32", tuple(t.shape), t.nbytes, lambda t=t: [stream.raw(t)]) for name, t in tensors.items()
    ]
    done: list[int] = []
    digest = stream.write(tmp_path / "model.safetensors", entries, {"format": "pt"}, done.append)
    header = read_header(tmp_path / "model.safetensors")
    assert list(header.tensors) == ["b", "a"]
    assert header.metadata == {"format": "pt"}
    assert header.tensors["b"].begin % 8 == 0
    assert done == [12, 16]
    assert digest == stream.sha256(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in tensors_of(tmp_path).items())


@pytest.mark.parametrize("size", [0, 1, stream.BLOCK_BYTES, stream.BLOCK_BYTES + 1])
def test_blocks_are_the_whole_tensor(tmp_path: Path, size: int) -> None:
    data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    path = tmp_path / "x"
    path.write_bytes(b"before" + data + b"after")
    source = stream.Source(path, stream.TensorInfo("U8", (size,), 6, 6 + size))
    assert b"".join(bytes(block) for block in stream.blocks(source)) == data
