"""Headers that lie, files that end early, folders that are half a download."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wherry.errors import Exit, WherryError
from wherry.safetensors_file import checkpoint, read_header


def file_of(path: Path, entries: dict[str, Any] | bytes, data: int) -> Path:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def refusal(call: Any) -> WherryError:
    with pytest.raises(WherryError) as caught:
        call()
    assert caught.value.code == Exit.PREFLIGHT
    return caught.value


def test_offsets_are_those_of_the_file(tmp_path: Path) -> None:
    entries = {
        "__metadata__": {"format": "pt"},
        "b": entry(8, 12),
        "a": entry(0, 8, "BF16", [2, 2]),
        "e": entry(12, 12),
    }
    path = file_of(tmp_path / "x.safetensors", entries, 12)
    header = read_header(path)
    start = path.stat().st_size - 12
    assert list(header.tensors) == ["a", "b", "e"]  # as their data lie
    assert (header.tensors["a"].begin, header.tensors["a"].end, header.tensors["a"].size) == (start, start + 8, 8)
    assert header.tensors["a"].shape == (2, 2)
    assert header.tensors["a"].dtype == "BF16"
    assert header.metadata == {"format": "pt"}


def test_the_library_agrees(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {"x": torch.arange(6).reshape(2, 3), "scalar": torch.tensor(1.5), "h": torch.ones(3, dtype=torch.float16)}
    save_file(tensors, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    for name, info in read_header(tmp_path / "x.safetensors").tensors.items():
        assert data[info.begin : info.end] == tensors[name].numpy().tobytes()
        assert info.shape == tuple(tensors[name].shape)


UNSOUND: dict[str, tuple[dict[str, Any] | bytes, int, str]] = {
    "one byte short": ({"a": entry(0, 8)}, 7, "is truncated"),
    "one byte more": ({"a": entry(0, 8)}, 9, "1 bytes after its last tensor"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "b, which overlaps"),
    "gap": ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "b, which leaves a gap"),
    "gap at the beginning": ({"a": entry(4, 8)}, 8, "a, which leaves a gap"),
    "size against shape": ({"a": entry(0, 8, shape=[3])}, 8, "F32 of shape [3]"),
    "negative": ({"a": entry(-8, 0)}, 0, "cannot be read"),
    "negative shape": ({"a": entry(0, 8, shape=[-1, -2])}, 8, "cannot be read"),
    "unknown dtype": ({"a": entry(0, 8, "F31")}, 8, "F31"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "data_offsets"),
    "not JSON": (b"{nonsense", 0, "cannot be read"),
    "not an object": (b"[1, 2]", 0, "cannot be read"),
    "nothing but numbers": (b'{"a": 1}', 0, "cannot be read"),
    "a name twice": (b'{"a": {}, "a": {}}', 0, "given twice"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_unsound(tmp_path: Path, name: str) -> None:
    entries, data, words = UNSOUND[name]
    path = file_of(tmp_path / "model.safetensors", entries, data)
    error = refusal(lambda: read_header(path))
    assert words in error.what
    assert error.where == str(path)
    assert "download it again" in error.fix


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "do not begin with the length"),
        (b"\x10\0\0", "do not begin with the length"),
        (b"\xff" * 64, "do not begin with the length"),
        ((1000).to_bytes(8, "little") + b"{}", "truncated: 10 of 1008 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<html>404 Not Found</html>", "do not begin with the length"),
    ],
)
def test_what_is_no_safetensors_at_all(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert words in refusal(lambda: read_header(path)).what


def test_missing(tmp_path: Path) -> None:
    assert "is missing" in refusal(lambda: read_header(tmp_path / "a.safetensors")).what


def sharded(folder: Path, count: int = 3) -> dict[str, str]:
    """A folder of count shards with one tensor each, and its weight_map."""
    where = {f"t{i}": f"model-{i}-of-{count}.safetensors" for i in range(count)}
    for name, file in where.items():
        file_of(folder / file, {name: entry(0, 8)}, 8)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def test_a_single_file(tmp_path: Path) -> None:
    path = file_of(tmp_path / "model.safetensors", {"a": entry(0, 8)}, 8)
    found = checkpoint(tmp_path)
    assert found.files == [path]
    assert found.total_size == 8
    assert not found.sharded
    assert found.tensors["a"][0] == path


def test_shards(tmp_path: Path) -> None:
    where = sharded(tmp_path / "m")
    found = checkpoint(tmp_path / "m")
    assert {name: path.name for name, (path, _) in found.tensors.items()} == where
    assert found.total_size == 24
    assert len(found.files) == 3
    assert found.sharded


def test_half_a_download(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    (tmp_path / "m" / "model-1-of-3.safetensors").unlink()
    error = refusal(lambda: checkpoint(tmp_path / "m"))
    assert error.what == "shard model-1-of-3.safetensors is missing: 2 of 3 are there"


def test_a_dangling_link_of_the_hub_cache_is_missing(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    shard = tmp_path / "m" / "model-2-of-3.safetensors"
    shard.unlink()
    shard.symlink_to("../blobs/gone")
    assert "model-2-of-3.safetensors is missing" in refusal(lambda: checkpoint(tmp_path / "m")).what


def test_a_truncated_shard(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    shard = tmp_path / "m" / "model-0-of-3.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "model-0-of-3.safetensors is truncated" in refusal(lambda: checkpoint(tmp_path / "m")).what


def test_index_and_shards_of_different_downloads(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    file_of(tmp_path / "m" / "model-1-of-3.safetensors", {"other": entry(0, 8)}, 8)
    error = refusal(lambda: checkpoint(tmp_path / "m"))
    assert error.what == "tensor other: the index says nowhere, it is in model-1-of-3.safetensors"
    file_of(tmp_path / "m" / "model-1-of-3.safetensors", {}, 0)
    error = refusal(lambda: checkpoint(tmp_path / "m"))
    assert error.what == "tensor t1: the index says model-1-of-3.safetensors, it is in no shard"


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../../x.safetensors"}}']
)
def test_an_index_that_is_none(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "index" in refusal(lambda: checkpoint(tmp_path)).what


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    error = refusal(lambda: checkpoint(tmp_path))
    assert "safetensors only" in error.what
    assert "save_pretrained" in error.fix


def test_no_weights_at_all(tmp_path: Path) -> None:
    assert "no weights" in refusal(lambda: checkpoint(tmp_path)).what


def test_torch_is_not_imported() -> None:
    code = "import sys, wherry.safetensors_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
