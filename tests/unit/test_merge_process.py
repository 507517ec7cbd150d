"""Merge as a process: its memory, its sudden end, its second start, its later verification."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from merge_models import edit_adapter, make_adapter, make_base, make_run, tensors_of, with_adapter
from safetensors.torch import load_file, save_file

from wherry import errors, files, merge
from wherry.errors import Exit, WherryError
from wherry.merge import model, plan, stream, verify
from wherry.merge.direct import BUFFER_BYTES, DirectFile
from wherry.merge.journal import Attempt
from wherry.merge.model import MANIFEST
from wherry.rundir import Run
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
from wherry.merge import journal
record, count = journal.Attempt.record, [0]
def dying(self, path, digest):
    record(self, path, digest)
    count[0] += 1
    if count[0] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
journal.Attempt.record = dying
merge.main(sys.argv[1:])
"""


def test_killed_half_way_it_goes_on(ready: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    run, arguments = ready
    done = process(KILLED, *arguments)
    assert done.returncode == -signal.SIGKILL, done.stderr
    part = run / "merge" / ".model.part"
    kept = {path.name: path.stat() for path in sorted(part.glob("*.safetensors"))[:2]}
    assert not (run / "merge" / "model").exists()
    assert not (run / "merge" / "complete.json").exists()

    assert merge.main(arguments) == 0
    names = {path.name for path in (run / "merge").iterdir()}
    assert names == {"model", "inputs.json", "complete.json"}
    for name, stat in kept.items():
        assert (run / "merge" / "model" / name).stat().st_ino == stat.st_ino
        assert (run / "merge" / "model" / name).stat().st_mtime_ns == stat.st_mtime_ns
    out, err = capfd.readouterr()
    assert f"merge goes on: 2 of {len(list((run / 'merge/model').glob('*.safetensors')))} files" in err
    assert out.startswith("merged 14 of 21 tensors into")
    assert "peak memory" in out
    assert out.count("\n") == 1

    before = (run / "merge" / "model").stat()
    assert merge.main(arguments) == 0
    assert (run / "merge" / "model").stat() == before
    assert "is complete" in capfd.readouterr().err


def test_a_line_of_the_journal_that_was_cut_short(tmp_path: Path) -> None:
    final = tmp_path / "model"
    for cut, name in ((True, "a"), (False, "b")):
        with pytest.raises(KeyboardInterrupt), Attempt(final, "plan") as attempt:
            (attempt.folder / name).write_text("whole")
            attempt.record(attempt.folder / name, "sha256 of it")
            if cut:
                with attempt.path.open("a") as journal:
                    journal.write('["c", 5, "sha')
            raise KeyboardInterrupt
    with Attempt(final, "plan") as attempt:
        assert attempt.done.keys() == {"a", "b"}
    with Attempt(final, "another plan") as attempt:
        assert not attempt.done
        assert not list(attempt.folder.iterdir())


def test_what_was_written_for_another_adapter_is_thrown_away(ready: tuple[Path, list[str]]) -> None:
    run, arguments = ready
    assert process(KILLED, *arguments).returncode == -signal.SIGKILL
    edit_adapter(run / "train" / "adapter", lambda t: next(iter(t.values())).add_(1))
    assert merge.main(arguments) == 0
    expected = with_adapter(run / "prepare/model", run / "train/adapter").merge_and_unload().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(run / "merge/model").items())


KILLED_ANY_TIME = """
import os, random, shutil, signal, sys, time
from pathlib import Path
from wherry import merge
from wherry.merge import lora, model, stream
run, *arguments = sys.argv[1:]

def attempt():
    pid = os.fork()
    if not pid:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        os._exit(merge.main(arguments))
    return pid

def sums():
    return {p.name: stream.sha256(p) for p in sorted(Path(run, "merge/model").iterdir())}

started = time.monotonic()
assert os.waitpid(attempt(), 0)[1] == 0
whole, expected = time.monotonic() - started, sums()
kills = results = resumed = 0
rng = random.Random(1)
shutil.rmtree(f"{run}/merge")
while kills < 50 or not Path(run, "merge/complete.json").exists():
    journal = Path(run, "merge/.model.journal")
    resumed += journal.is_file() and len(journal.read_text().splitlines()) > 1
    pid = attempt()
    if kills < 50:
        time.sleep(rng.uniform(0, whole))
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    kills += os.WIFSIGNALED(status)
    assert os.WIFSIGNALED(status) or status == 0, status
    if Path(run, "merge/model").is_dir():  # under its name it is whole, whether or not the process lived to say so
        assert sums() == expected, {n for n in {*sums(), *expected} if sums().get(n) != expected.get(n)}
        results += 1
    if Path(run, "merge/complete.json").exists() and kills < 50:
        shutil.rmtree(f"{run}/merge")
print(kills, results, resumed)
"""


def test_fifty_kills_at_random_moments(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_base(base, dtype="bfloat16", shard="30KB")
    make_adapter(base, adapter)
    run, arguments = make_run(tmp_path, base, adapter)
    done = process(KILLED_ANY_TIME, str(run), *arguments)
    assert done.returncode == 0, done.stderr
    kills, results, resumed = map(int, done.stdout.split())
    print(f"{kills} kills, {results} results byte-identical, {resumed} attempts went on from a journal")
    assert kills == 50
    assert results >= 1
    assert resumed >= 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs root to mount a small tmpfs: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_fills_up_half_way(
    ready: tuple[Path, list[str]],
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Free when it was asked, taken by another before it was used; then freed."""
    run, arguments = ready
    (run / "merge").symlink_to(small_disk)
    monkeypatch.setattr(files, "require_space", lambda *_: None)
    (small_disk / "another's").write_bytes(bytes(900_000))

    assert errors.run(lambda: merge.main(arguments)) == Exit.PREFLIGHT
    assert "error: the disk filled up while the merged model" in capfd.readouterr().err
    assert {path.name for path in small_disk.iterdir()} == {"another's", "inputs.json"}

    (small_disk / "another's").unlink()
    assert merge.main(arguments) == 0
    assert (small_disk / "model").is_dir()


def test_two_at_once(ready: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    run, arguments = ready
    with Attempt(run / "merge" / "model", "another process"):
        assert errors.run(lambda: merge.main(arguments)) == Exit.PREFLIGHT
        assert "another process is merging this run" in capfd.readouterr().err
    assert merge.main(arguments) == 0


def test_an_adapter_that_was_trained_again(ready: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    run, arguments = ready
    assert merge.main(arguments) == 0
    edit_adapter(run / "train" / "adapter", lambda t: next(iter(t.values())).add_(1))
    assert errors.run(lambda: merge.main(arguments)) == Exit.USAGE
    assert "the model was trained again since it was merged" in capfd.readouterr().err
    shutil.rmtree(run / "merge")
    assert merge.main(arguments) == 0


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
    manifest = json.loads((model / MANIFEST).read_text())
    assert manifest["sha256"] == {path.name: stream.sha256(path) for path in model.iterdir() if path.name != MANIFEST}
    assert manifest["inputs"]["base"] == "bf16"
    capfd.readouterr()
    assert merge.main([*arguments, "--verify"]) == 0
    said = capfd.readouterr().out
    assert "loads in transformers, samples computed again, its logits are finite" in said
    assert merge.main(["--verify", str(model)]) == 0  # the folder alone, wherever it was moved
    assert "loads in transformers, its logits are finite" in capfd.readouterr().out
    assert errors.run(lambda: merge.main(["--verify", str(run / "prepare/model")])) == Exit.USAGE

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


def test_transformers_is_asked_in_a_process_of_its_own(ready: tuple[Path, list[str]]) -> None:
    run, arguments = ready
    assert merge.main([*arguments, "merge.max_shard_size=50KB"]) == 0  # another layout than the base's: it is asked
    model = run / "merge" / "model"
    assert len(list(model.glob("*.safetensors"))) > 2
    index = json.loads((model / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    weights = next(path for path in model.glob("*.safetensors") if "model.norm.weight" in load_file(path))
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WherryError, match=r"transformers loads it, but it has missing keys: model.norm.weight"):
        verify.loads(model, False)


def test_mistakes_are_answered_without_torch(ready: tuple[Path, list[str]]) -> None:
    code = "import sys\nfrom wherry import merge, errors\nerrors.run(lambda: merge.main(sys.argv[1:]))\n"
    done = process(code + "sys.exit('torch' in sys.modules)", ready[1][0], "train.tuning=lroa")
    assert done.returncode == 0
    assert "train.tuning" in done.stderr


def test_files_are_aligned_in_order_and_whole_when_they_are_told_of(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, 2)}
    header = stream.header([(n, "F32", tuple(t.shape), t.nbytes) for n, t in tensors.items()], {"format": "pt"})
    pieces = [stream.Piece(t.nbytes, lambda t=t: stream.raw(t)) for t in tensors.values()]
    shards = [stream.Shard(tmp_path / f"model-{i}.safetensors", header, pieces) for i in range(3)]
    done: list[int] = []
    told: list[str] = []

    def finished(shard: stream.Shard, digest: str) -> None:
        assert digest == stream.sha256(shard.path)
        told.append(shard.path.name)

    stream.write(shards, finished, done.append)
    assert told == ["model-0.safetensors", "model-1.safetensors", "model-2.safetensors"]
    assert done == 3 * [len(header), 12, 16]
    for shard in shards:
        read = read_header(shard.path)
        assert list(read.tensors) == ["b", "a"]
        assert read.metadata == {"format": "pt"}
        assert read.tensors["b"].begin % 8 == 0
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(shard.path).items())


@pytest.mark.parametrize("size", [0, 1, 4096, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 4097])
@pytest.mark.parametrize("where", ["past the cache", "without O_DIRECT", "with O_DIRECT in name only"])
def test_a_file_past_the_cache(tmp_path: Path, size: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(size)
    opened, written = os.open, os.write

    def refuse(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return opened(path, flags, *rest)

    def stumble(file: int, block: memoryview) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not aligned")
        return written(file, block)

    if where == "without O_DIRECT":
        monkeypatch.setattr(os, "open", refuse)
    elif where == "with O_DIRECT in name only":
        monkeypatch.setattr(os, "write", stumble)
    file = DirectFile(tmp_path / "x")
    for begin in range(0, size, 5_000_011):
        file.write(memoryview(data)[begin : begin + 5_000_011])
    file.close()
    file.abandon()
    assert (tmp_path / "x").read_bytes() == data


def test_what_a_thread_raises_ends_the_writing(tmp_path: Path) -> None:
    def broken() -> memoryview:
        raise RuntimeError("a piece that cannot be made")

    pieces = [stream.Piece(4, lambda: memoryview(bytes(4))), *[stream.Piece(4, broken)] * 50]
    with pytest.raises(RuntimeError, match="cannot be made"):
        stream.write([stream.Shard(tmp_path / "x", b"", pieces)], lambda *_: None, lambda _: None)


@pytest.mark.parametrize("size", [0, 1, stream.PIECE_BYTES, stream.PIECE_BYTES + 1])
def test_blocks_are_the_whole_tensor(tmp_path: Path, size: int) -> None:
    data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    path = tmp_path / "x"
    path.write_bytes(b"before" + data + b"after")
    source = stream.Source(path, stream.TensorInfo("U8", (size,), 6, 6 + size))
    assert b"".join(bytes(block) for block in stream.blocks(source)) == data


def test_neighbours_that_are_only_copied_are_read_in_one_go(ready: tuple[Path, list[str]]) -> None:
    parts = model.planned(Run.open(ready[1][0], None, []))
    target = next(iter(parts.targets.values()))
    places = [stream.TensorInfo("BF16", (n // 2,), at, at + n) for at, n in ((8, 64), (72, 32), (104, 96))]
    copies = [
        dataclasses.replace(target, lora=None, source=stream.Source(target.source.path, place)) for place in places
    ]
    assert [piece.size for piece in plan.pieces(copies)] == [192]
    assert [piece.size for piece in plan.pieces([copies[0], copies[2]])] == [64, 96]
