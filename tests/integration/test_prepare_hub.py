"""prepare from the hub (a stand-in on loopback), and everything after it offline."""

import json
import os
import subprocess
import sys

import pytest
from hub_stand_in import COMMIT, hub

from wherry.errors import Exit


@pytest.fixture
def rows(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (folder / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 3)
    return folder


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "hub.yaml"
    path.write_text("model: {name: org/tiny, revision: v1}\ndata: {train: org/rows}\ntrain: {args: {max_steps: 1}}\n")
    return path


@pytest.fixture
def prepare(recipe, runs, tmp_path):
    """wherry MODE in a process of its own: huggingface_hub reads its environment when it is imported."""

    def call(mode, *overrides, endpoint=None):
        env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and k != "HF_TOKEN"}
        env |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        env |= {"HF_ENDPOINT": endpoint} if endpoint else {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
        done = subprocess.run(
            [sys.executable, "-m", "wherry", mode, recipe, *overrides],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stderr

    return call


def test_a_hub_model_and_data_set_then_offline(prepare, runs, tiny_chat_model, rows):
    with hub({"models/org/tiny": tiny_chat_model, "datasets/org/rows": rows}) as (endpoint, asked):
        code, err = prepare("prepare", endpoint=endpoint)
        assert code == 0, err
    assert any("models/org/tiny/revision/v1" in path for path in asked)
    manifest = json.loads((runs / "hub/manifest.json").read_text())
    assert manifest["model"]["revision"] == COMMIT
    assert manifest["modes"]["prepare"]["data"]["rows"] == 3
    code, err = prepare("train")
    assert code == 0, err


@pytest.mark.parametrize(
    ("override", "code", "what", "fix"),
    [
        ("model.name=org/nothing", Exit.USAGE, "org/nothing is not on the hub", "HF_TOKEN"),
        ("model.revision=v9", Exit.USAGE, "has no revision 'v9'", "model.revision"),
        ("model.name=org/gated", Exit.USAGE, "org/gated is gated", "accept its terms"),
        ("data.train=org/nothing", Exit.USAGE, "org/nothing", "correct the id"),
    ],
)
def test_what_the_hub_refuses(prepare, tiny_chat_model, rows, override, code, what, fix):
    repositories = {
        "models/org/tiny": tiny_chat_model,
        "models/org/gated": tiny_chat_model,
        "datasets/org/rows": rows,
    }
    with hub(repositories, gated=("models/org/gated",)) as (endpoint, _):
        found, err = prepare("prepare", override, endpoint=endpoint)
    assert found == code, err
    assert what in err
    assert fix in err


def test_no_network(prepare):
    code, err = prepare("prepare")
    assert code == Exit.PREFLIGHT, err
    assert "a login node" in err
