"""merge.base: nf4 against bitsandbytes itself; merge.dtype and merge.max_shard_size; --compare."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from datasets import Dataset
from merge_models import make_adapter, make_base, make_run, reload_here, tensors_of, with_adapter
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from wherry import errors, merge
from wherry.errors import Exit
from wherry.merge import lora, nf4, plan

QLORA = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.fixture(autouse=True)
def small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERRY_RUNS", str(tmp_path / "runs"))
    reload_here(monkeypatch)
    for module in (plan, nf4):
        monkeypatch.setattr(module, "PIECE_BYTES", 8 << 10)
    monkeypatch.setattr(lora, "STRIDE", 1 << 10)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # base, adapter, train.quantization
    "as qlora does by default": ({}, {}, {}),
    "tied": ({"tied": True}, {}, {}),
    "with biases": ({"bias": True}, {"target_modules": ["q_proj"]}, {}),
    "without double quantisation": ({}, {}, {"bnb_4bit_use_double_quant": False}),
    "fp4": ({}, {}, {"bnb_4bit_quant_type": "fp4"}),
    "dora": ({}, {"use_dora": True}, {}),
    "a module left out": ({}, {}, {"llm_int8_skip_modules": ["up_proj", "lm_head"]}),
    "an embedding and a head trained": ({}, {"modules_to_save": ["embed_tokens", "lm_head"]}, {}),
    "a base in fp16": ({"dtype": "float16"}, {}, {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_nf4_is_what_bitsandbytes_quantised(tmp_path: Path, name: str) -> None:
    of_base, of_adapter, quantization = CASES[name]
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_base(base, **{"dtype": "bfloat16"} | of_base)
    make_adapter(base, adapter, **of_adapter)
    overrides = [f"train.quantization.{key}={json.dumps(value)}" for key, value in quantization.items()]
    run, arguments = make_run(tmp_path, base, adapter, overrides=("train.tuning=qlora", "merge.base=nf4", *overrides))
    assert merge.main(arguments) == 0

    config = BitsAndBytesConfig(**QLORA | {"bnb_4bit_compute_dtype": torch.bfloat16} | quantization)
    trained = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
    )
    quantised = {n for n, module in trained.named_modules() if type(module).__name__ == "Linear4bit"}
    assert quantised == nf4.quantised_layers(base, config).keys()
    assert len(quantised) == (12 if "left out" in name else 14)
    merged = PeftModel.from_pretrained(trained.dequantize(), adapter).merge_and_unload()
    expected, before = merged.state_dict(), tensors_of(base)
    found = AutoModelForCausalLM.from_pretrained(run / "merge/model", dtype="auto").state_dict()
    assert found.keys() == expected.keys()
    for tensor in found:
        if of_base.get("dtype"):  # the sum is rounded to the base's dtype, not to that of training
            torch.testing.assert_close(found[tensor].float(), expected[tensor].float(), rtol=2**-7, atol=2**-9)
        else:
            assert torch.equal(found[tensor], expected[tensor]), tensor
    untouched = [t for t in before if t.removesuffix(".weight") not in quantised and "norm" in t]
    assert untouched
    assert all(torch.equal(found[tensor], before[tensor]) for tensor in untouched)
    assert json.loads((run / "merge/model/wherry_merge.json").read_text())["inputs"]["base"] == "nf4"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_and_shard_size(tmp_path: Path, dtype: str) -> None:
    """As if the base had been loaded in that dtype, which is how PEFT would be asked for it."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_base(base, dtype="bfloat16", shard="60KB")
    make_adapter(base, adapter, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"])
    run, arguments = make_run(tmp_path, base, adapter, overrides=(f"merge.dtype={dtype}", "merge.max_shard_size=90KB"))
    assert merge.main(arguments) == 0

    model = run / "merge" / "model"
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
    expected = PeftModel.from_pretrained(loaded, adapter).merge_and_unload().state_dict()
    found = tensors_of(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    files = sorted(model.glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    largest = max(tensor.nbytes for tensor in found.values())
    assert all(path.stat().st_size < max(90_000, largest) + 4096 for path in files)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert json.loads((model / "config.json").read_text())["dtype"] == dtype


def test_a_sharded_base_into_one_file(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_base(base, dtype="bfloat16", shard="60KB")
    make_adapter(base, adapter)
    run, arguments = make_run(tmp_path, base, adapter, overrides=("merge.max_shard_size=5GB",))
    assert merge.main(arguments) == 0
    assert [path.name for path in (run / "merge/model").glob("model*")] == ["model.safetensors"]
    expected = with_adapter(base, adapter).merge_and_unload().state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in tensors_of(run / "merge/model").items())


@pytest.mark.parametrize(("key", "value"), [("max_shard_size", "5 shards"), ("dtype", "int8"), ("base", "int4")])
def test_a_value_that_is_none(tmp_path: Path, key: str, value: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo.yaml").write_text("model: {name: base}\ndata: {train: rows.jsonl}\n")
    assert errors.run(lambda: merge.main([str(tmp_path / "demo.yaml"), f"merge.{key}={value}"])) == Exit.USAGE
    assert f"merge.{key} = '{value}'" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_compare_finds_the_base_that_was_trained_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_base(base, dtype="bfloat16")
    make_adapter(base, adapter)
    run, arguments = make_run(tmp_path, base, adapter, overrides=("train.tuning=qlora",))
    ids = chat_tokenizer()("a wherry carries cargo on the river")["input_ids"]
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids}] * 3)
    rows.save_to_disk(tmp_path / "rows")
    (tmp_path / "rows" / "data-00000-of-00001.arrow").rename(run / "prepare" / "train.arrow")

    assert merge.main([*arguments, "--compare"]) == 0
    measured = json.loads((run / "merge" / "compare.json").read_text())
    found = measured["merged_into"]
    assert (measured["rows"], measured["positions"]) == (3, 3 * len(ids))
    assert found["nf4"]["kl_mean"] < found["bf16"]["kl_mean"] < found["no adapter"]["kl_mean"]
    assert found["nf4"]["same_top"] > 0.9
    out = capfd.readouterr().out
    assert "| merged into | mean KL" in out
    assert {path.name for path in (run / "merge").iterdir()} == {"compare.json"}  # nothing counts as merged

    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    assert errors.run(lambda: merge.main([*arguments, "--compare"])) == Exit.PREFLIGHT
    assert "--compare holds the model twice" in capfd.readouterr().err
