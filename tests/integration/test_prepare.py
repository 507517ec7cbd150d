"""wherry prepare on real files: what it leaves, and what it refuses."""

import json
import os
import shutil
import subprocess

import pytest

from wherry.errors import Exit


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.fixture
def model(tmp_path, tiny_chat_model):
    """A copy that a test may damage."""
    return shutil.copytree(tiny_chat_model, tmp_path / "model")


@pytest.fixture
def recipe(tmp_path, model, rows):
    path = tmp_path / "tiny.yaml"
    path.write_text(f"model: {{name: {model}}}\ndata: {{train: {rows}}}\n")
    return path


def refused(result, code, *parts):
    found, _, err = result
    lines = err.splitlines()[-3:]
    assert [line[:6] for line in lines] == ["error:", "where:", "fix:  "], err
    assert "Traceback" not in err
    assert found == code
    for part in parts:
        assert part in err


def test_what_it_leaves(recipe, runs, wherry, model):
    code, _, err = wherry("prepare", recipe)
    assert code == 0, err
    run = runs / "tiny"
    manifest = json.loads((run / "manifest.json").read_text())
    contract = manifest["contract"]
    assert contract["embedding_rows"] == 320
    assert contract["tokenizer_len"] == 263
    assert contract["vocab_size"] == 256  # leaves added tokens out: not the number to compare
    assert contract["eos_token_ids"] == [258]
    assert contract["pad_token_id"] == 261  # was eos; now a reserved token
    assert contract["max_length"] == 64
    assert manifest["model"]["kind"] == "folder"
    assert (run / "prepare/model").resolve() == model.resolve()
    generation = json.loads((run / "prepare/tokenizer/generation_config.json").read_text())
    assert generation["eos_token_id"] == 258
    assert (run / "prepare/token_lengths.png").stat().st_size > 5000
    assert "pad was '<|im_end|>', now '<|reserved_0|>' (261)" in err
    code, _, err = wherry("prepare", recipe)
    assert (code, "is complete" in err) == (0, True)


def test_another_recipe_under_the_same_name(recipe, runs, wherry, tmp_path, rows):
    assert wherry("prepare", recipe)[0] == 0
    other = shutil.copy(rows, tmp_path / "other.jsonl")
    refused(wherry("prepare", recipe, f"data.train={other}"), Exit.USAGE, "another recipe", "--run NEW_NAME")
    assert wherry("prepare", recipe, f"data.train={other}", "--run", "other")[0] == 0


def test_a_half_downloaded_model(recipe, runs, wherry, model):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(wherry("prepare", recipe), Exit.PREFLIGHT, "truncated", "model.safetensors", "download it again")
    weights.rename(model / "model-00001-of-00002.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(wherry("prepare", recipe), Exit.PREFLIGHT, "model-00002-of-00002.safetensors")


def test_pickles_are_refused(recipe, runs, wherry, model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    refused(wherry("prepare", recipe), Exit.PREFLIGHT, "safetensors")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_damaged_model_folder(recipe, runs, wherry, model, name):
    (model / name).write_text("{")
    code, *_ = result = wherry("prepare", recipe)
    refused(result, code, str(model) if name == "tokenizer.json" else "config.json")
    assert code in (Exit.USAGE, Exit.PREFLIGHT)


def test_a_tokenizer_larger_than_the_embedding(recipe, runs, wherry, model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(100)])
    tokenizer.save_pretrained(model)
    refused(wherry("prepare", recipe), Exit.PREFLIGHT, "tokenizer_len is 363, the embedding has 320 rows", "never")


@pytest.mark.parametrize("value", ["513", "0", "many"])
def test_max_length_beyond_the_context(recipe, runs, wherry, value):
    refused(wherry("prepare", recipe, f"train.args.max_length={value}"), Exit.USAGE, "the model's context is 512")


def test_a_row_beyond_the_context_and_a_broken_line(recipe, runs, wherry, rows):
    long = {"messages": [{"role": "user", "content": "x" * 600}, {"role": "assistant", "content": "y"}]}
    good = rows.read_text()
    rows.write_text(good + json.dumps(long) + "\n")
    refused(wherry("prepare", recipe), Exit.USAGE, "the limit is 512", f"{rows}:2", "data.too_long")
    code, _, err = wherry("prepare", recipe, "data.too_long=drop", "--run", "dropped")
    assert (code, "data: 1 dropped rows" in err) == (0, True)
    rows.write_text(good + '{"messages": [\n')
    refused(wherry("prepare", recipe), Exit.USAGE, "broken JSON", f"{rows}:2")
    rows.write_text("")
    refused(wherry("prepare", recipe), Exit.USAGE, "holds no rows")


def test_a_gguf_file_that_is_cut_short(recipe, runs, wherry, tmp_path, demo_gguf):
    cut = tmp_path / "cut.gguf"
    with demo_gguf.open("rb") as file:
        cut.write_bytes(file.read(50_000_000))
    refused(
        wherry("prepare", recipe, f"model.name={cut}"), Exit.PREFLIGHT, "not a whole GGUF file", "download it again"
    )
    assert not list((runs / "tiny/prepare").glob("*model*"))


def test_names_that_lead_nowhere(recipe, runs, wherry, monkeypatch):
    refused(wherry("prepare", recipe, "model.name=nowhere"), Exit.USAGE, "no model at nowhere")
    refused(wherry("prepare", recipe, "model.name=gone/model.gguf"), Exit.USAGE, "no file gone/model.gguf")
    refused(wherry("prepare", recipe, "data.train=nowhere.jsonl"), Exit.USAGE, "no file nowhere.jsonl")
    refused(wherry("prepare", recipe, "data.chat_template=nowhere.jinja"), Exit.USAGE, "no file nowhere.jinja")
    refused(wherry("prepare", "nowhere.yaml"), Exit.USAGE, "no recipe nowhere.yaml")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 28 KiB: enough to begin, too small to end."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=28k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_fills_up_half_way(recipe, wherry, small_disk, runs, monkeypatch):
    monkeypatch.setenv("WHERRY_RUNS", str(small_disk))
    refused(wherry("prepare", recipe), Exit.STOPPED, "no space left on device", "start the same command again")
    assert not (small_disk / "tiny/prepare/complete.json").exists()
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    code, _, err = wherry("prepare", recipe)
    assert code == 0, err


def test_no_space(recipe, runs, wherry, demo_gguf, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    refused(wherry("prepare", recipe, f"model.name={demo_gguf}"), Exit.PREFLIGHT, "GB are free", "WHERRY_RUNS")
