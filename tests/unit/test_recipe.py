"""Recipes: origins, overrides, and errors that name the right key."""

import subprocess
import sys

import pytest
import yaml

from wherry.errors import Exit, WherryError
from wherry.library_names import OBJECTIVES, SOURCES, accepted
from wherry.recipe import load
from wherry.recipe.schema import DECIDED_HERE

RECIPE = """\
model: {name: org/model}
data:
  train: rows.jsonl
train:
  tuning: qlora
  args:
    learning_rate: 1e-4
    lr_scheduler_kwargs: {num_cycles: 1}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


def test_values_and_their_origins(recipe):
    resolved = load(recipe, ["train.args.learning_rate=2e-4", "serve.vllm.max_model_len=512"])
    assert resolved.recipe.train.args["learning_rate"] == 2e-4
    text = resolved.to_yaml()
    assert 'tuning: "qlora"  # ' + f"{recipe}:5" in text
    assert "learning_rate: 0.0002  # command line" in text
    assert "max_model_len: 512  # command line" in text
    assert 'objective: "sft"  # default' in text
    assert yaml.safe_load(text) == resolved.recipe.model_dump()


def test_scientific_notation_is_a_number(recipe):
    assert load(recipe, []).recipe.train.args["learning_rate"] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("override", "what", "fix"),
    [
        ("train.args.learning_rat=1", "unknown key train.args.learning_rat", "did you mean learning_rate?"),
        ("trian.tuning=lora", "unknown key trian", "did you mean train?"),
        ("train.tunning=lora", "unknown key train.tunning", "did you mean tuning?"),
        ("train.learning_rate=1", "unknown key train.learning_rate", "did you mean train.args.learning_rate?"),
        ("train.lora.lora_alfa=1", "unknown key train.lora.lora_alfa", "did you mean lora_alpha?"),
        ("train.quantization.load_in_4bits=true", "load_in_4bits", "did you mean load_in_4bit?"),
        ("serve.vllm.max_model_length=1", "unknown key serve.vllm.max_model_length", "did you mean max_model_len?"),
        ("eval.args.max_token=1", "unknown key eval.args.max_token", "did you mean max_tokens?"),
        ("train.args.beta=0.1", "belongs to dpo, train.objective is sft", "set train.objective: dpo"),
        ("train.tuning=lore", "train.tuning = 'lore'", "correct train.tuning"),
        ("serve.ready_timeout=0", "serve.ready_timeout = 0", "correct serve.ready_timeout"),
        ("train.args.output_dir=x", "train.args.output_dir cannot be set", "--run"),
        ("serve.vllm.api_key=x", "serve.vllm.api_key cannot be set", "only you can read"),
        ("train.tuning=full", "train.quantization", "train.tuning: qlora"),
        ("learning_rate", "is not key=value", "train.args.learning_rate=2e-4"),
        ("model.name.x=1", "name is a value", "set name="),
    ],
)
def test_wrong_overrides_are_refused(recipe, override, what, fix):
    overrides = [override] if override != "train.tuning=full" else [override, "train.quantization.load_in_4bit=true"]
    with pytest.raises(WherryError) as caught:
        load(recipe, overrides)
    assert caught.value.code == Exit.USAGE
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert "command line" in caught.value.where


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("model: {name: a}\ndata: {train: b}\ndata: {train: c}\n", 3, "data is given twice"),
        ("model: {name: a}\ndata:\n  train: [b\n", 4, "not valid YAML"),
        ("model: {name: a}\ndata:\n  train: b\n  trian: c\n", 4, "unknown key data.trian"),
    ],
)
def test_errors_name_the_line(tmp_path, text, line, what):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(WherryError) as caught:
        load(path, [])
    assert what in caught.value.what
    assert caught.value.where == f"{path}:{line}"


def test_missing_key_and_missing_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model: {name: a}\n")
    with pytest.raises(WherryError, match="data is missing"):
        load(path, [])
    with pytest.raises(WherryError, match="no recipe"):
        load(tmp_path / "none.yaml", [])


def test_library_names_are_what_the_libraries_accept():
    """The names read from source are those of the imported classes: a moved class must not go unseen."""
    import dataclasses

    from peft import LoraConfig
    from trl import DPOConfig, SFTConfig

    for objective, config in (("sft", SFTConfig), ("dpo", DPOConfig)):
        init = {f.name for f in dataclasses.fields(config) if f.init and not f.name.startswith("_")}
        assert accepted("train.args", objective) == init
    inherited = {"task_type", "inference_mode", "revision", "base_model_name_or_path", "peft_type", "auto_mapping"}
    lora = {f.name for f in dataclasses.fields(LoraConfig) if f.init}
    assert lora - inherited - {"peft_version"} == accepted("train.lora") - inherited
    for key, names in DECIDED_HERE.items():
        assert key in SOURCES
        known = set().union(*(accepted(key, objective) for objective in OBJECTIVES))
        assert names.keys() - known <= {"overwrite_output_dir"}


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--recipe", "RECIPE", "train.args.learning_rat=1"]])
def test_help_and_recipe_errors_import_nothing_heavy(recipe, arguments):
    """What makes them fast: no torch, no transformers, no vLLM."""
    arguments = [str(recipe) if a == "RECIPE" else a for a in arguments]
    code = (
        "import sys\nfrom wherry.__main__ import main\n"
        f"main({arguments!r})\n"
        "sys.exit(str(sorted({'torch', 'transformers', 'trl', 'vllm', 'numpy', 'datasets'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().splitlines()[-1] == "[]"
