"""Where a run stands, read from its files alone."""

import json
import os
import time

import pytest

from wherry.files import write_json
from wherry.serve.state import Phase, State


@pytest.fixture
def run(tmp_path, runs):
    """A run whose recipe trains for 80 steps."""
    path = runs / "demo"
    path.mkdir(parents=True)
    recipe = "model: {name: m}\ndata: {train: d.jsonl}\ntrain: {args: {max_steps: 80}}\n"
    (path / "recipe.yaml").write_text(recipe)
    return path


def log_steps(run, *lines):
    (run / "train").mkdir(exist_ok=True)
    with (run / "train/metrics.jsonl").open("a") as file:
        for step, seconds, loss in lines:
            file.write(json.dumps({"step": step, "seconds": seconds, "loss": loss}) + "\n")


def status(wherry):
    code, out, err = wherry("status", "--run", "demo")
    assert code == 0, err
    return dict(line.strip().split(None, 1) for line in out.splitlines()[1:])


def test_a_training_says_its_step_loss_and_time_left(wherry, run):
    log_steps(run, (10, 100.0, 2.5), (20, 120.0, 1.25), (30, 140.0, 1.2))
    found = status(wherry)
    assert found["train"].startswith("step 30 of 80, loss 1.2, 2 s a step, 100 s left; last logged")
    assert found["merge"] == "not started, or not ended yet"


def test_the_time_of_a_step_is_that_of_this_attempt(wherry, run):
    log_steps(run, (10, 100.0, 2.5), (20, 9000.0, 1.25), (30, 10.0, 1.2), (40, 30.0, 1.2))
    assert "2 s a step, 80 s left" in status(wherry)["train"]


def test_without_max_steps_the_share_of_the_epochs_tells(wherry, run):
    (run / "recipe.yaml").write_text("model: {name: m}\ndata: {train: d.jsonl}\n")
    (run / "train").mkdir()
    (run / "train/metrics.jsonl").write_text('{"step": 50, "seconds": 9, "loss": 1.0, "epoch": 0.5}\n{"step": 60, "se')
    assert status(wherry)["train"].startswith("step 50 of 300, loss 1")


def test_a_stop_is_said_with_its_reason_until_training_goes_on(wherry, run):
    log_steps(run, (10, 10.0, 2.5))
    now = time.time()
    record = {"complete": False, "ended_by": "stopped as asked", "started": now, "seconds": 60.0}
    write_json(run / "manifest.json", {"name": "demo", "modes": {"train": record}})
    assert "stopped as asked" in status(wherry)["train"]
    os.utime(run / "train/metrics.jsonl", (now + 90, now + 90))
    assert "stopped as asked" not in status(wherry)["train"]


def test_finished_modes_say_how_long_and_what(wherry, run):
    done = {"complete": True, "started": 0.0, "seconds": 150.0}
    scored = done | {"results": [{"task": "cargo", "score": 0.75}]}
    write_json(run / "manifest.json", {"name": "demo", "modes": {"merge": done, "eval/base": scored}})
    found = status(wherry)
    assert found["merge"] == "complete in 2 min"
    assert found["eval/base"] == "complete in 2 min: cargo 75.0 %"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"progress": "reading weights"}, "loading: reading weights, job 7"),
        ({"state": Phase.FAILED, "reason": "ended with exit code 0"}, "failed: vLLM ended with exit code 0, job 7"),
        ({"host": "n1", "updated": 1.0}, "gone without a word: process"),
    ],
)
def test_a_server_says_its_state(wherry, run, values, said):
    state = State.here(which="merged", model="demo", url="http://127.0.0.1:1", log="l", api_key_file="k")
    state.state, state.job, state.updated = Phase.LOADING, "7", time.time()
    write_json(run / "serve/state.json", vars(state) | values)
    assert status(wherry)["server"].startswith(said)


def test_jobs_are_those_of_the_run_with_what_squeue_said(run, wherry, monkeypatch):
    (run / "logs").mkdir()
    (run / "logs/jobs.txt").write_text("train 11\nmerge 12\ntrain 13\n")
    monkeypatch.setenv("WHERRY_QUEUE", "13|RUNNING None, ran 1:00 of 2:00, on n[1-3]")
    _, out, _ = wherry("status", "--run", "demo")
    assert "job 13       train: RUNNING None, ran 1:00 of 2:00, on n[1-3]" in out
    assert "job 12       merge: not in the queue any more" in out
    assert "job 11" not in out
