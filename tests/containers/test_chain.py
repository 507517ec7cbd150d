"""The demo's whole chain in the image: a real model, no network, nothing writable but the run directory and /tmp."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from machine import PROJECT, Host, Image, say

MODELS = PROJECT / "models"


@pytest.fixture
def runs(host: Host) -> Path:
    folder = host.root / "runs"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    return folder


def test_prepare_train_merge_eval(image: Image, host: Host, runs: Path, request: pytest.FixtureRequest) -> None:
    if not list(MODELS.glob("*/*.gguf")):
        say(request, "SKIPPED ALOUD: no model in models/: `make test-containers` fetches it")
        pytest.skip("LOUD: no model in models/, the chain was not run")
    mounts = [f"{MODELS}:/work/models:ro", f"{host.checkout}/recipes:/work/recipes:ro", f"{runs}:/work/runs"]
    volumes = [word for mount in mounts for word in ("--volume", mount)]
    overrides = ["train.args.max_steps=4", "train.args.save_steps=4"]
    for mode in ("prepare", "train", "merge", "eval"):
        started = time.monotonic()
        done = image.locked(*volumes, image.tag, mode, "recipes/demo.yaml", "--run", "chain", *overrides)
        assert done.returncode == 0, f"{mode} → {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        say(request, f"image: {mode} in {time.monotonic() - started:.0f} s")

    assert list((runs / "chain/merge/model").glob("*.safetensors"))
    (result,) = json.loads((runs / "chain/eval/merged/result.json").read_text())
    assert result["which"] == "merged"
    manifest = json.loads((runs / "chain/manifest.json").read_text())
    assert image.labels["org.opencontainers.image.revision"] in json.dumps(manifest)
