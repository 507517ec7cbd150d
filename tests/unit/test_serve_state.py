"""state.json: which step may follow which, who is still there; and `wherry wait`, which reads it."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from wherry.errors import Exit, WherryError
from wherry.serve.state import FOLLOWED_BY, SILENCE, Phase, State, StateFile, identity, read_state
from wherry.wait import wait

URL = "http://127.0.0.1:1"


def here(**values):
    return State.here(which="base", model="m-base", url=URL, log="vllm.log", api_key_file="api_key", **values)


def written(path, phase, **values):
    """A state file in phase, as the supervisor that values name would have left it."""
    state = here()
    state.state = phase
    state.updated = time.time()
    for name, value in values.items():
        setattr(state, name, value)
    path.write_text(json.dumps(vars(state)))
    return path


@pytest.fixture
def dead_pid():
    """A pid that was ours and is gone."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_way_of_a_good_server(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    path = tmp_path / "serve" / "state.json"
    file, seen = StateFile(path, here()), []
    for phase in (Phase.LOADING, Phase.READY, Phase.DRAINING, Phase.STOPPED):
        seen.append(json.loads(path.read_text())["state"])
        file.change(phase, max_model_len=512)
    assert seen == ["starting", "loading", "ready", "draining"]
    found = json.loads(path.read_text())
    assert (found["state"], found["job"], found["max_model_len"], found["supervisor_pid"]) == (
        "stopped", "77", 512, os.getpid(),
    )  # fmt: skip
    assert {"url", "model", "which", "pid", "host", "started", "updated", "ready_after_s", "reason", "hint", "log",
            "api_key_file"} <= found.keys()  # fmt: skip
    assert read_state(path) == file.state


@pytest.mark.parametrize("phase", list(Phase))
def test_only_the_design_s_steps_are_taken(tmp_path, phase):
    for following in Phase:
        state = here()
        state.state = phase
        file = StateFile(tmp_path / "state.json", state)
        if following in FOLLOWED_BY[phase]:
            file.change(following)
        else:
            with pytest.raises(ValueError, match=f"{phase} is not followed by {following}"):
                file.change(following)


def test_over_is_over():
    assert [phase for phase in Phase if phase.is_over] == [Phase.STOPPED, Phase.FAILED]


def test_a_living_supervisor_is_known_by_more_than_its_pid(dead_pid):
    assert not here().is_abandoned()
    other = here()
    other.supervisor_pid = dead_pid
    assert other.is_abandoned()
    reused = here()
    reused.supervisor_id += "0"  # the same pid, started at another time
    assert reused.is_abandoned()
    assert identity(dead_pid) is None


def test_a_supervisor_elsewhere_is_known_by_its_heartbeat():
    for change in ({"host": "node7"}, {"supervisor_id": "pid:[1]/1"}):
        state = here()
        vars(state).update(change, updated=time.time() - SILENCE + 10)
        assert not state.is_abandoned()
        state.updated = time.time() - SILENCE - 1
        assert state.is_abandoned()


def test_the_heartbeat_is_written_but_not_at_every_look(tmp_path, monkeypatch):
    file = StateFile(tmp_path / "state.json", here())
    first = file.state.updated
    file.beat()
    assert file.state.updated == first
    monkeypatch.setattr("wherry.serve.state.HEARTBEAT", 0)
    file.beat()
    assert read_state(tmp_path / "state.json").updated > first


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "state.json"
    assert read_state(path) is None
    for text in ("{", "[]", "{}", '{"state": "sleeping"}'):
        path.write_text(text)
        with pytest.raises(WherryError, match=r"state\.json is not"):
            read_state(path)
    written(path, Phase.READY)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"of_a_later_version": 1}))
    assert read_state(path).state is Phase.READY


# -- wait ---------------------------------------------------------------------------------------------------------


def test_wait_sees_ready_at_once_and_later(tmp_path):
    path = written(tmp_path / "state.json", Phase.READY)
    begun = time.monotonic()
    assert wait(path, 5).url == URL
    assert time.monotonic() - begun < 3
    path.unlink()
    threading.Timer(0.3, lambda: written(path, Phase.LOADING)).start()
    threading.Timer(0.6, lambda: written(path, Phase.READY)).start()
    assert wait(path, 5).url == URL
    assert 0.5 < time.monotonic() - begun < 4


@pytest.mark.parametrize(
    ("phase", "values", "what"),
    [
        (Phase.FAILED, {"reason": "ended with exit code 0 after 3.0 s", "hint": "do this"},
         "the server failed: vLLM ended with exit code 0 after 3.0 s"),
        (Phase.STOPPED, {}, "the server is stopped"),
        (Phase.DRAINING, {}, "the server is draining"),
    ],
)  # fmt: skip
def test_wait_ends_with_what_ended_the_server(tmp_path, phase, values, what):
    path = written(tmp_path / "state.json", Phase.STARTING)
    threading.Timer(0.3, lambda: written(path, phase, **values)).start()
    begun = time.monotonic()
    with pytest.raises(WherryError) as caught:
        wait(path, 10)
    assert time.monotonic() - begun < 5
    assert (caught.value.what, caught.value.code) == (what, Exit.SERVER)
    assert caught.value.fix == values.get("hint", "start it again")


def test_wait_does_not_believe_a_supervisor_that_is_gone(tmp_path, dead_pid, monkeypatch):
    monkeypatch.setattr("wherry.wait.GRACE", 0.5)
    path = written(tmp_path / "state.json", Phase.READY, supervisor_pid=dead_pid)
    begun = time.monotonic()
    with pytest.raises(WherryError, match=rf"supervisor \(process {dead_pid} on .*\) is gone; it was ready"):
        wait(path, 10)
    assert time.monotonic() - begun < 8


def test_wait_lets_a_server_that_starts_just_now_replace_an_old_end(tmp_path):
    path = written(tmp_path / "state.json", Phase.STOPPED, updated=time.time() - 100)
    threading.Timer(0.5, lambda: written(path, Phase.READY)).start()
    assert wait(path, 10).state is Phase.READY


def test_wait_ends_in_time(tmp_path):
    path = tmp_path / "state.json"
    with pytest.raises(WherryError, match=r"not ready after 0\.3 s: no server was started") as caught:
        wait(path, 0.3)
    assert caught.value.code == Exit.SERVER
    written(path, Phase.LOADING, progress="loading weights, file 3/30")
    with pytest.raises(WherryError, match="the server is loading weights, file 3/30"):
        wait(path, 0)


def test_wait_as_a_mode(runs, wherry, tmp_path):
    recipe = tmp_path / "demo.yaml"
    recipe.write_text("model: {name: org/model}\ndata: {train: rows.jsonl}\n")
    code, out, err = wherry("wait", recipe, "--timeout", "0.1")
    assert (code, out) == (5, "")
    assert err.startswith("error: not ready after 0.1 s: no server was started\nwhere: ")
    (runs / "demo/serve").mkdir(parents=True)
    written(runs / "demo/serve/state.json", Phase.READY)
    assert wherry("wait", recipe)[:2] == (0, URL + "\n")


def test_neither_mode_imports_torch_or_vllm():
    code = "import sys, wherry.serve, wherry.wait; sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
