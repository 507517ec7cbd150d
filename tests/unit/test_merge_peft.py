"""The merged model is what PEFT makes: bit by bit where PEFT's merge is right, in its logits where it is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from merge_models import edit_adapter, make_adapter, make_base, make_run, reload_here, tensors_of, with_adapter
from transformers import AutoModelForCausalLM

from wherry import merge

CONFIGS = {
    "plain": {},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora-embedding": {"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]},
    "patterns": {
        "rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\.down_proj": 2},
        "alpha_pattern": {"q_proj": 3, "model.layers.0.self_attn.v_proj": 40},
    },
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "norms": {"modules_to_save": ["norm"]},
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "lora_bias": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    "trained biases": {"target_modules": ["q_proj"], "bias": "all"},
}
IDS = torch.arange(24)[None]


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERRY_RUNS", str(tmp_path / "runs"))
    reload_here(monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_is_what_merge_and_unload_gives(tmp_path: Path, name: str, dtype: str) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_base(base, dtype=dtype, bias="bias" in name)
    make_adapter(base, adapter, **CONFIGS[name])
    run, arguments = make_run(tmp_path, base, adapter)

    assert merge.main(arguments) == 0

    expected = with_adapter(base, adapter).merge_and_unload().state_dict()
    found, before = tensors_of(run / "merge" / "model"), tensors_of(base)
    assert found.keys() == expected.keys() == before.keys()
    for tensor in found:
        assert found[tensor].dtype == before[tensor].dtype
        assert torch.equal(found[tensor], expected[tensor]), tensor
    changed = sum(not torch.equal(found[tensor], before[tensor]) for tensor in found)
    record = json.loads((run / "manifest.json").read_text())["modes"]["merge"]
    assert record["merged"] == changed > 0
    assert record["tensors"] == len(found)
    assert record["bytes"] == sum(tensor.nbytes for tensor in found.values())


def test_a_bf16_adapter_is_computed_in_fp32(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_base(base, dtype="bfloat16")
    make_adapter(base, adapter)
    edit_adapter(adapter, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    run, arguments = make_run(tmp_path, base, adapter)
    assert merge.main(arguments) == 0
    expected = with_adapter(base, adapter).merge_and_unload().state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in tensors_of(run / "merge" / "model").items())


def test_shards_keep_their_names_and_the_index_its_sums(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_base(base, dtype="bfloat16", shard="60KB")
    make_adapter(base, adapter, target_modules=["q_proj", "lm_head"])
    run, arguments = make_run(tmp_path, base, adapter)
    assert merge.main(arguments) == 0

    model = run / "merge" / "model"
    names = {path.name for path in base.glob("*.safetensors")}
    assert len(names) > 2
    assert names == {path.name for path in model.glob("*.safetensors")}
    index, before = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (model, base))
    assert index == before
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(model).values())
    expected = with_adapter(base, adapter).merge_and_unload().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(model).items())


TIED = {
    "linear layers": ({}, True),
    "head trained": ({"modules_to_save": ["lm_head"]}, False),
    "embedding trained": ({"modules_to_save": ["embed_tokens"]}, False),
    "both trained apart": ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    "both trained as one": ({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, True),
    "lora on the embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    "lora on the head": ({"target_modules": ["q_proj", "lm_head"]}, False),
    "lora on both apart": ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, False),
    "one lora on both": ({"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, True),
    "one lora on both, by head": ({"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True}, True),
    "tokens trained": ({"trainable_token_indices": [3, 7, 310]}, True),
    "tokens of each trained": ({"trainable_token_indices": {"embed_tokens": [3, 7], "lm_head": [310]}}, False),
    "dora on the head": ({"target_modules": ["q_proj", "lm_head"], "use_dora": True}, False),
}


@pytest.mark.parametrize("shard", ["5GB", "60KB"])
@pytest.mark.parametrize("name", TIED)
def test_tied_embeddings_compute_what_base_and_adapter_compute(tmp_path: Path, name: str, shard: str) -> None:
    """Against the live adapter: merge_and_unload itself adds a LoRA on a tied weight to both sides, or twice."""
    lora, stays_tied = TIED[name]
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_base(base, tied=True, shard=shard)
    make_adapter(base, adapter, **lora)
    run, arguments = make_run(tmp_path, base, adapter)
    assert merge.main(arguments) == 0

    model = run / "merge" / "model"
    assert ("lm_head.weight" not in tensors_of(model)) == stays_tied
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"] == stays_tied
    with torch.no_grad():
        expected = with_adapter(base, adapter)(input_ids=IDS).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(input_ids=IDS).logits
        found = AutoModelForCausalLM.from_pretrained(model)(input_ids=IDS).logits
    assert (expected - plain).abs().max() > 1  # the adapter does something
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_a_family_that_is_tied_by_default(tmp_path: Path) -> None:
    """Gemma's config.json does not say tie_word_embeddings: true."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_base(base, tied=True)
    make_adapter(base, adapter, modules_to_save=["lm_head"])
    config = json.loads((base / "config.json").read_text())
    del config["tie_word_embeddings"]
    (base / "config.json").write_text(json.dumps(config))
    run, arguments = make_run(tmp_path, base, adapter)
    assert merge.main(arguments) == 0
    assert json.loads((run / "merge/model/config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in tensors_of(run / "merge/model")


def test_tokenizer_and_configuration_come_along(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_base(base, dtype="bfloat16")
    make_adapter(base, adapter)
    run, arguments = make_run(tmp_path, base, adapter)
    assert merge.main(arguments) == 0
    model = run / "merge" / "model"
    assert (model / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert (model / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((model / "generation_config.json").read_text()) == {"eos_token_id": 7}
    assert not (base / "chat_template.jinja").exists()  # the base is only read


def test_full_tuning_has_nothing_to_merge(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base"
    make_base(base)
    run, arguments = make_run(tmp_path, base, None, overrides=("train.tuning=full",))
    shutil.copytree(base, run / "train" / "model")
    trained = (run / "train" / "model" / "generation_config.json").read_bytes()

    assert merge.main(arguments) == 0

    assert "no adapter to merge" in capfd.readouterr().err
    model = run / "merge" / "model"
    assert (model / "model.safetensors").samefile(run / "train" / "model" / "model.safetensors")
    assert json.loads((model / "generation_config.json").read_text()) == {"eos_token_id": 7}
    assert (run / "train" / "model" / "generation_config.json").read_bytes() == trained  # not written through a link
