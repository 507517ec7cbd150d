"""What cannot be merged is named, with exit 6, and leaves nothing that could be taken for a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from merge_models import edit_adapter, edit_config, make_adapter, make_base, make_run
from safetensors.torch import load_file, save_file

from wherry import errors, files, merge
from wherry.errors import Exit
from wherry.merge import plan, stream
from wherry.prepare.source import fingerprint
from wherry.safetensors_file import read_header

Q = "base_model.model.model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 base and a plain adapter, made once."""
    root = tmp_path_factory.mktemp("made")
    make_base(root / "base", dtype="bfloat16")
    make_adapter(root / "base", root / "adapter", modules_to_save=["lm_head"])
    return root


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Copies of both, to damage, in a run."""
    monkeypatch.setenv("WHERRY_RUNS", str(tmp_path / "runs"))
    base, adapter = (Path(shutil.copytree(made / name, tmp_path / name)) for name in ("base", "adapter"))
    run, arguments = make_run(tmp_path, base, adapter)
    return SimpleNamespace(base=base, adapter=adapter, run=run, arguments=arguments)


def refused(place: SimpleNamespace, capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and message; nothing but a record of the attempt is left."""
    code = errors.run(lambda: merge.main([*place.arguments, *arguments]))
    left = {path.name for path in (place.run / "merge").glob("*")} if (place.run / "merge").exists() else set()
    assert left <= {"inputs.json"}
    return code, capfd.readouterr().err


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[SimpleNamespace], None]:
    return lambda place: edit_adapter(place.adapter, change)


def config(**values: object) -> Callable[[SimpleNamespace], None]:
    return lambda place: edit_config(place.adapter, **values)


def put(name: str, text: str) -> Callable[[SimpleNamespace], None]:
    return lambda place: (place.adapter / name).write_text(text) and None


def remove(name: str) -> Callable[[SimpleNamespace], None]:
    return lambda place: (place.adapter / name).unlink()


def rename(old: str, new: str) -> Callable[[SimpleNamespace], None]:
    return tensors(lambda t: t.update({new: t.pop(old)}))


def truncate(place: SimpleNamespace) -> None:
    data = (place.adapter / WEIGHTS).read_bytes()
    (place.adapter / WEIGHTS).write_bytes(data[:-100])


def poison(key: str, value: float) -> Callable[[SimpleNamespace], None]:
    return tensors(lambda t: t[key].view(-1)[3:4].fill_(value))


def both(*changes: Callable[[SimpleNamespace], None]) -> Callable[[SimpleNamespace], None]:
    return lambda place: [change(place) for change in changes] and None


REFUSED: dict[str, tuple[Callable[[SimpleNamespace], None], list[str]]] = {
    "no configuration": (remove("adapter_config.json"), ["adapter_config.json is missing"]),
    "damaged configuration": (put("adapter_config.json", "{"), ["adapter_config.json is not valid JSON"]),
    "configuration of another kind": (put("adapter_config.json", "[]"), ["peft_type is []"]),
    "a configuration of words": (config(r="many"), ["the configuration cannot be read", "many"]),
    "no weights": (remove(WEIGHTS), ["adapter cannot be read", "is missing"]),
    "truncated": (truncate, ["adapter cannot be read", f"{WEIGHTS} is truncated"]),
    "prompt tuning": (config(peft_type="PROMPT_TUNING"), ["peft_type is 'PROMPT_TUNING'"]),
    "tokens beyond the vocabulary": (
        both(
            config(trainable_token_indices=[1, 320]),
            tensors(lambda t: t.update({f"{EMBEDDING}.token_adapter.trainable_tokens_delta": torch.ones(2, 64)})),
        ),
        ["the adapter trains token 320, model.embed_tokens.weight has 320 rows"],
    ),
    "tokens of another count": (
        both(
            config(trainable_token_indices=[1, 2, 3]),
            tensors(lambda t: t.update({f"{EMBEDDING}.token_adapter.trainable_tokens_delta": torch.ones(2, 64)})),
        ),
        ["made for another base", "[2, 64]", "[3, 64]"],
    ),
    "aLoRA": (config(alora_invocation_tokens=[1]), ["uses alora_invocation_tokens"]),
    "a newer PEFT": (config(use_tomorrow=True), ["uses use_tomorrow"]),
    "PiSSA": (config(init_lora_weights="pissa"), ["init_lora_weights is 'pissa'", "changed base weights"]),
    "unknown module": (
        rename(f"{Q}.lora_A.weight", f"{Q.replace('q_proj', 'query_proj')}.lora_A.weight"),
        ["query_proj.lora_A.weight belongs to no tensor", "nearest is model.layers.0.self_attn.q_proj.weight"],
    ),
    "unknown tensor": (
        tensors(lambda t: t.update({"base_model.model.model.norms.weight": torch.ones(64)})),
        ["model.norms.weight belongs to no tensor", "nearest is model.norm.weight"],
    ),
    "half a pair": (
        tensors(lambda t: t.pop(f"{Q}.lora_B.weight")),
        ["lacks lora_B.weight of model.layers.0.self_attn.q_proj"],
    ),
    "a part that plain LoRA does not use": (
        tensors(lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(64)})),
        ["q_proj.lora_magnitude_vector", "is not used"],
    ),
    "DoRA without magnitudes": (config(use_dora=True), ["lacks lora_magnitude_vector.weight"]),
    "given twice": (
        tensors(lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.ones(320, 64)})),
        ["gives lm_head.weight of lm_head.weight twice"],
    ),
    "bias of a layer without": (
        tensors(lambda t: t.update({f"{Q}.lora_B.bias": torch.ones(64)})),
        ["q_proj.lora_B.bias belongs to no tensor"],
    ),
    "another width": (
        tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 128)})),
        ["made for another base", f"{Q}.lora_A.weight", "[4, 128]", "[4, 64]"],
    ),
    "another rank": (config(r=8), ["made for another base", "[4, ", "[8, "]),
    "another vocabulary": (
        tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(322, 64)})),
        ["made for another base", "lm_head.weight", "[322, 64]", "[320, 64]"],
    ),
    "not gathered from ZeRO-3": (
        tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(0)})),
        [f"{Q}.lora_A.weight is empty", "ZeRO-3"],
    ),
    "NaN in the adapter": (poison(f"{Q}.lora_B.weight", float("nan")), [f"{Q}.lora_B.weight holds NaN"]),
    "infinity in the adapter": (
        poison("base_model.model.lm_head.weight", float("inf")),
        ["lm_head.weight holds NaN or infinity"],
    ),
    "overflow in the result": (
        tensors(lambda t: [t[f"{Q}.lora_{x}.weight"].fill_(1e25) for x in "AB"]),
        ["merged tensor model.layers.0.self_attn.q_proj.weight holds NaN or infinity"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(place: SimpleNamespace, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    damage, words = REFUSED[name]
    damage(place)
    code, message = refused(place, capfd)
    assert all(word in message for word in words), message
    assert code == Exit.VERIFICATION
    assert all(line in message for line in ("error: ", "where: ", "fix: "))


def test_an_adapter_of_pickles(place: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    (place.adapter / WEIGHTS).rename(place.adapter / "adapter_model.bin")
    code, message = refused(place, capfd)
    assert code == Exit.VERIFICATION
    assert "safetensors only" in message


def test_a_base_in_eight_bits(place: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    path = place.base / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, path)
    code, message = refused(place, capfd)
    assert code == Exit.VERIFICATION
    assert f"base tensor {name} is F8_E4M3" in message


def test_a_truncated_base_is_a_matter_of_preflight(place: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    path = place.base / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, message = refused(place, capfd)
    assert code == Exit.PREFLIGHT
    assert "model.safetensors is truncated" in message


def test_a_missing_shard_is_a_matter_of_preflight(place: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    (place.base / "model.safetensors").rename(place.base / "model-00001-of-00002.safetensors")
    where = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (place.base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    code, message = refused(place, capfd)
    assert code == Exit.PREFLIGHT
    assert "shard model-00002-of-00002.safetensors is missing: 1 of 2 are there" in message


def test_a_base_that_is_not_the_one_prepared(place: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    """Of the same shapes, so that only its fingerprint tells."""
    manifest = json.loads((place.run / "manifest.json").read_text())
    manifest["model"] = {"fingerprint": fingerprint([place.base / "model.safetensors"])}
    (place.run / "manifest.json").write_text(json.dumps(manifest))
    weights = load_file(place.base / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, place.base / "model.safetensors")
    code, message = refused(place, capfd)
    assert code == Exit.VERIFICATION
    assert "the base is not the one that was prepared and trained on" in message


def test_base_and_adapter_are_only_read(place: SimpleNamespace) -> None:
    before = {path: stream.sha256(path) for path in [*place.base.iterdir(), *place.adapter.iterdir()]}
    for path in before:
        path.chmod(0o444)
    assert merge.main(place.arguments) == 0
    assert before == {path: stream.sha256(path) for path in [*place.base.iterdir(), *place.adapter.iterdir()]}


def test_too_little_space(
    place: SimpleNamespace, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    code, message = refused(place, capfd)
    assert code == Exit.PREFLIGHT
    assert "the merged model needs 0.1 GB" in message


def test_train_has_not_finished(place: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    (place.run / "train" / "complete.json").unlink()
    code, message = refused(place, capfd)
    assert code == Exit.USAGE
    assert "train of run 'demo' is not finished" in message


CONTRACTS = {
    "rows": ({"embedding_rows": 384, "tokenizer_len": 320, "largest_id": 319}, "320 rows, the token contract says 384"),
    "tokenizer": ({"embedding_rows": 320, "tokenizer_len": 321, "largest_id": 319}, "for a tokenizer of 321 tokens"),
    "largest id": ({"embedding_rows": 320, "tokenizer_len": 320, "largest_id": 320}, "largest id 320"),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_the_token_contract(place: SimpleNamespace, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    contract, words = CONTRACTS[name]
    manifest = json.loads((place.run / "manifest.json").read_text())
    (place.run / "manifest.json").write_text(json.dumps(manifest | {"contract": contract}))
    code, message = refused(place, capfd)
    assert code == Exit.VERIFICATION
    assert "verification failed" in message
    assert words in message


@pytest.mark.parametrize("kind", ["copied", "merged"])
def test_a_bit_that_turns_on_its_way_to_the_disk(
    place: SimpleNamespace, kind: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First and last of each kind are among the samples."""
    names = [
        name for name in read_header(place.base / "model.safetensors").tensors if "proj" in name or kind == "copied"
    ]
    tensor = names[0] if kind == "copied" else names[-1]
    assert ("proj" in tensor) == (kind == "merged")
    write = stream.write

    def damaging(shards: list[stream.Shard], *rest: object) -> None:
        write(shards, *rest)
        data = bytearray(shards[0].path.read_bytes())
        data[read_header(shards[0].path).tensors[tensor].begin + 1] ^= 1
        shards[0].path.write_bytes(data)

    monkeypatch.setattr(stream, "write", damaging)
    code, message = refused(place, capfd)
    assert code == Exit.VERIFICATION
    assert "verification failed" in message
    assert tensor in message


def test_a_tensor_that_is_not_written(
    place: SimpleNamespace, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    header, pieces = plan.header, plan.pieces
    monkeypatch.setattr(plan, "header", lambda targets, metadata: header(targets[:-1], metadata))
    monkeypatch.setattr(plan, "pieces", lambda targets: pieces(targets[:-1]))
    code, message = refused(place, capfd)
    assert code == Exit.VERIFICATION
    assert "verification failed: tensor" in message
    assert "is missing" in message


def test_nf4_needs_a_training_on_nf4(place: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    code, message = refused(place, capfd, "merge.base=nf4")
    assert code == Exit.USAGE
    assert "merge.base is nf4 but train.tuning is lora" in message


def test_fp16_that_overflows(place: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    edit_adapter(place.adapter, lambda t: [t[f"{Q}.lora_{x}.weight"].fill_(300) for x in "AB"])
    code, message = refused(place, capfd, "merge.dtype=float16")
    assert code == Exit.VERIFICATION
    assert "holds NaN or infinity in F16" in message
    assert "merge.dtype: bfloat16" in message
