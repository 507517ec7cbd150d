"""The real vLLM behind the gate: ready, guarded, watched, stopped, and nothing of it left."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from wherry.errors import Exit, WherryError
from wherry.rundir import Run
from wherry.serve import Server
from wherry.serve.state import Phase, read_state

RECIPE = """
model: {name: org/model}
data: {train: rows.jsonl}
serve: {ready_timeout: 300, drain_timeout: 10, vllm: {max_model_len: 512, max_num_seqs: 8, dtype: bfloat16}}
"""


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """A run whose merge has finished."""
    root = tmp_path_factory.mktemp("serve")
    (root / "tiny.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHERRY_RUNS", str(root / "runs"))
        run = Run.open(str(root / "tiny.yaml"), None, [])
        with run.work("merge"):
            make_tiny_model(run.dir("merge") / "model", hidden_size=128)
        yield run


def ask(server, method, path, key=None, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=60)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request(method, path, json.dumps(body) if body is not None else None, headers)
    response = connection.getresponse()
    return response.status, response.read()


def group(pgid):
    """pid → name of what lives in a process group."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = stat.read_text(errors="replace").partition(" (")
        except OSError:
            continue
        name, _, after = rest.rpartition(") ")
        state, _, its_group = after.split()[:3]
        if int(its_group) == pgid and state not in "ZX":
            found[int(pid)] = name
    return found


def state(run):
    return read_state(run.dir("serve") / "state.json")


def test_guarded_on_every_path_and_gone_when_stopped(merged, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('a stray module of the user was imported')")
    monkeypatch.chdir(tmp_path)
    with Server(merged) as server:
        pid, key = state(merged).pid, server.api_key_file.read_text().strip()
        assert (server.model, server.max_model_len, state(merged).state) == ("tiny", 512, Phase.READY)
        complete = {"model": "tiny", "prompt": "a boat", "max_tokens": 4}
        for method, path, body in (
            ("GET", "/v1/models", None),
            ("POST", "/v1/completions", complete),
            ("POST", "/invocations", complete),
            ("POST", "/tokenize", {"model": "tiny", "prompt": "a boat"}),
            ("GET", "/metrics", None),
            ("GET", "/version", None),
            ("GET", "/openapi.json", None),
        ):
            assert ask(server, method, path, None, body)[0] == 401, path
            assert ask(server, method, path, key + "x", body)[0] == 401, path
            assert ask(server, method, path, key, body)[0] == 200, path
        assert ask(server, "GET", "/health")[0] == 200
        assert listening_at(int(server.url.rpartition(":")[2])) == {"0100007F"}  # 127.0.0.1 alone
        for command_line in (Path(f"/proc/{member}/cmdline") for member in group(pid)):
            assert key.encode() not in command_line.read_bytes()
        running = subprocess.Popen([sys.executable, "-P", "-c", SLOW_CLIENT, server.url, str(server.api_key_file)],
                                   stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert running.stdout.readline() == "the first token\n"
    assert running.communicate(timeout=30)[0] == "length\n"  # draining let it finish
    assert (state(merged).state, group(pid)) == (Phase.STOPPED, {})
    assert key not in (merged.dir("serve") / "vllm.log").read_text()


SLOW_CLIENT = """
import http.client, json, sys
connection = http.client.HTTPConnection(sys.argv[1].removeprefix("http://"), timeout=60)
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + open(sys.argv[2]).read().strip()}
body = {"model": "tiny", "prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
connection.request("POST", "/v1/completions", json.dumps(body), headers)
lines = (line.removeprefix(b"data: ") for line in connection.getresponse() if line.startswith(b"data: {"))
next(lines)
print("the first token", flush=True)
for line in lines:
    finished = json.loads(line)["choices"][0]["finish_reason"]
print(finished)
"""


def listening_at(port):
    """The addresses, in the kernel's notation, at which anything listens on a TCP port."""
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}


def test_an_engine_that_is_killed_is_a_failure(merged):
    mode = subprocess.Popen(
        [sys.executable, "-P", "-m", "wherry", "serve", "--run", "tiny"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    waited = subprocess.run(
        [sys.executable, "-P", "-m", "wherry", "wait", "--run", "tiny", "--timeout", "200"],
        capture_output=True, text=True,
    )  # fmt: skip
    found = state(merged)
    assert (waited.returncode, waited.stdout) == (0, found.url + "\n"), waited.stderr
    (engine,) = (pid for pid, name in group(found.pid).items() if "Engine" in name)
    os.kill(engine, signal.SIGKILL)
    begun = time.monotonic()
    _, err = mode.communicate(timeout=60)
    assert time.monotonic() - begun < 30
    assert mode.returncode == 5
    error, where, fix = err.splitlines()[-3:]
    assert error.startswith("error: vLLM ended with exit code")
    assert where.startswith(f"where: {merged.dir('serve') / 'vllm.log'}: ")
    assert "the engine was killed" in fix
    assert (state(merged).state, group(found.pid)) == (Phase.FAILED, {})


def test_a_setting_that_cannot_be_is_named(merged):
    run = Run.open(str(merged.path.parent.parent / "tiny.yaml"), None, ["serve.vllm.max_model_len=100000"])
    with pytest.raises(WherryError) as caught, Server(run):
        pytest.fail("it cannot come up")
    assert caught.value.code == Exit.SERVER
    assert caught.value.what.startswith("vLLM ended with exit code 1 after ")
    assert "User-specified max_model_len (100000)" in caught.value.where
    assert "set serve.vllm.max_model_len to 512 or less" in caught.value.fix
