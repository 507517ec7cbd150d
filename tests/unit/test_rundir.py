"""A run directory refuses what does not fit it, and knows what is whole."""

import pytest
import yaml

from wherry.errors import WherryError
from wherry.rundir import Run


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "cargo.yaml"
    path.write_text("model: {name: org/model}\ndata: {train: rows.jsonl}\n")
    return path


def test_named_after_the_recipe_or_by_name(runs, recipe):
    assert Run.open(str(recipe), None, []).path == runs / "cargo"
    assert Run.open(str(recipe), "other", []).path == runs / "other"
    with pytest.raises(WherryError, match="no run 'cargo'"):
        Run.open(None, "cargo", [])
    with pytest.raises(WherryError, match="neither a recipe nor a run"):
        Run.open(None, None, [])
    with pytest.raises(WherryError, match="run name"):
        Run.open(str(recipe), "../elsewhere", [])


def test_work_is_complete_only_when_it_ends_well(runs, recipe):
    run = Run.open(str(recipe), None, [])
    with pytest.raises(RuntimeError), run.work("prepare"):
        raise RuntimeError("boom")
    assert not run.is_complete("prepare")
    assert run.manifest()["modes"]["prepare"]["ended_by"] == "RuntimeError('boom')"
    with pytest.raises(WherryError, match="prepare of run 'cargo' is not finished"):
        run.require("prepare")
    with run.work("prepare") as record:
        record["rows"] = 3
    assert run.is_complete("prepare")
    kept = run.manifest()["modes"]["prepare"]
    assert (kept["complete"], kept["rows"]) == (True, 3)
    assert kept["peak_rss_bytes"] > 1e6
    assert yaml.safe_load((run.path / "recipe.yaml").read_text())["data"]["train"] == "rows.jsonl"
    assert Run.open(None, "cargo", []).recipe == run.recipe


def test_another_recipe_is_refused_where_work_depends_on_it(runs, recipe):
    with Run.open(str(recipe), None, []).work("prepare"):
        pass
    Run.open(str(recipe), None, ["train.args.learning_rate=1e-3"])  # nothing was trained yet
    with pytest.raises(WherryError) as caught:
        Run.open(str(recipe), None, ["data.train=other.jsonl"])
    assert "data.train was 'rows.jsonl', now 'other.jsonl'" in caught.value.what
    assert "--run NEW_NAME" in caught.value.fix
    with Run.open(str(recipe), None, []).work("train"):
        pass
    with pytest.raises(WherryError, match=r"train\.args\.learning_rate was None, now 0\.001"):
        Run.open(str(recipe), None, ["train.args.learning_rate=1e-3"])
    Run.open(str(recipe), None, ["eval.args.limit=3"])  # another evaluation is no other run


def test_an_attempt_that_came_to_nothing_is_started_over(runs, recipe):
    first = Run.open(str(recipe), None, ["model.name=typo"])
    with pytest.raises(RuntimeError), first.work("prepare"):
        (first.dir("prepare") / "leftover").touch()
        raise RuntimeError
    second = Run.open(str(recipe), None, [])
    with second.work("prepare"):
        assert not (second.dir("prepare") / "leftover").exists()
    assert second.is_complete("prepare")


def test_a_checkpoint_protects_an_unfinished_training(runs, recipe):
    run = Run.open(str(recipe), None, [])
    with pytest.raises(RuntimeError), run.work("train"):
        (run.dir("train") / "checkpoints" / "checkpoint-5").mkdir(parents=True)
        (run.dir("train") / "checkpoints" / "checkpoint-5" / "complete.json").write_text("{}")
        raise RuntimeError
    with pytest.raises(WherryError, match="made with another recipe"):
        Run.open(str(recipe), None, ["train.args.learning_rate=1e-3"])


def test_manifest_holds_no_environment(runs, recipe, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_marker")
    run = Run.open(str(recipe), None, [])
    with run.work("prepare"):
        pass
    assert "hf_marker" not in "".join(p.read_text() for p in run.path.rglob("*") if p.is_file())
