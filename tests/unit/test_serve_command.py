"""What vLLM is started with, which model, which port; and that a child never outlives its supervisor."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wherry.errors import Exit, WherryError
from wherry.rundir import Run
from wherry.serve import command
from wherry.serve.command import Child, choose_port, environment, flag, how_it_ended, served, vllm_command


def make_run(tmp_path, text="", modes=("prepare",)):
    recipe = tmp_path / "demo.yaml"
    recipe.write_text("model: {name: org/model}\ndata: {train: rows.jsonl}\n" + text)
    run = Run.open(str(recipe), None, [])
    for mode in modes:
        with run.work(mode):
            (run.dir(mode) / "model").mkdir()
            (run.dir(mode) / "tokenizer").mkdir()
    return run


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_model_len", 8192, ["--max-model-len", "8192"]),
        ("gpu_memory_utilization", 0.85, ["--gpu-memory-utilization", "0.85"]),
        ("dtype", "bfloat16", ["--dtype", "bfloat16"]),
        ("enable_prefix_caching", True, ["--enable-prefix-caching"]),
        ("enable_prefix_caching", False, ["--no-enable-prefix-caching"]),
        ("quantization", None, []),
        ("disable_log_stats", True, ["--disable-log-stats"]),
        ("disable_log_stats", False, []),
        ("hf_overrides", {"a": {"b": [1]}}, ["--hf-overrides", '{"a": {"b": [1]}}']),
        ("cudagraph_capture_sizes", [1, 2], ["--cudagraph-capture-sizes", "1", "2"]),
        ("lora_modules", [{"name": "a", "path": "p"}], ["--lora-modules", '{"name": "a", "path": "p"}']),
        ("allowed_origins", ["a", "b"], ["--allowed-origins", '["a", "b"]']),
    ],
)
def test_recipe_entries_become_vllm_s_flags(name, value, words):
    assert flag(name, value) == words


def test_the_command_line(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    run = make_run(tmp_path, "serve: {vllm: {max_model_len: 64}, drain_timeout: 30}\n")
    line = vllm_command(run, served(run, None), 8123)
    model, tokenizer = runs / "demo/prepare/model", runs / "demo/prepare/tokenizer"
    assert line == [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--tokenizer", str(tokenizer), "--served-model-name", "demo-base",
        "--host", "127.0.0.1", "--port", "8123", "--middleware", "wherry.serve.auth.RequireKey",
        "--max-model-len", "64", "--enforce-eager", "--disable-access-log-for-endpoints", "/health",
        "--shutdown-timeout", "25",
    ]  # fmt: skip


def test_what_is_chosen_here_gives_way_to_the_recipe(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    run = make_run(tmp_path, "serve: {vllm: {enforce_eager: false, shutdown_timeout: 3}}\n")
    line = vllm_command(run, served(run, None), 1)
    assert "--no-enforce-eager" in line
    assert line[line.index("--shutdown-timeout") + 1] == "3"
    monkeypatch.setattr(command, "has_gpu", lambda: True)
    assert "--enforce-eager" not in vllm_command(make_run(tmp_path, modes=()), served(run, None), 1)


def test_remote_code_only_where_the_recipe_says_so(runs, tmp_path):
    run = make_run(tmp_path)
    assert "--trust-remote-code" not in vllm_command(run, served(run, None), 1)
    trusting = Run.open(str(tmp_path / "demo.yaml"), "trusting", ["model.trust_remote_code=true"])
    assert "--trust-remote-code" in vllm_command(trusting, served(run, None), 1)


@pytest.mark.parametrize("name", ["uds", "ssl_keyfile", "ssl_certfile", "hf_token"])
def test_no_option_goes_round_the_gate(runs, tmp_path, name):
    def command_line():  # refused by the recipe's own check, or by this one
        run = make_run(tmp_path, f"serve: {{vllm: {{{name}: x}}}}\n")
        return vllm_command(run, served(run, None), 1)

    with pytest.raises(WherryError) as caught:
        command_line()
    assert (caught.value.what, caught.value.code) == (f"serve.vllm.{name} cannot be set", Exit.USAGE)


def test_the_environment_holds_no_key(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    monkeypatch.setenv("VLLM_API_KEY", "sk-user")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    env = environment(tmp_path / "api_key", {})
    assert {name: env.get(name) for name in (
        "PYTHONSAFEPATH", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "WHERRY_API_KEY_FILE",
        "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_HOST_IP",
    )} == {
        "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "WHERRY_API_KEY_FILE": str(tmp_path / "api_key"),
        "VLLM_API_KEY": None, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1",
    }  # fmt: skip
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert environment(tmp_path, {})["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert "VLLM_HOST_IP" not in environment(tmp_path, {"nnodes": 2})


def test_merged_is_served_where_there_is_one(runs, tmp_path):
    run = make_run(tmp_path)
    assert (served(run, None).which, served(run, None).name) == ("base", "demo-base")
    with pytest.raises(WherryError, match="merge of run 'demo' is not there"):
        served(run, "merged")
    run = make_run(tmp_path, modes=("merge",))
    merged = served(run, None)
    assert (merged.which, merged.name, merged.tokenizer) == ("merged", "demo", runs / "demo/merge/model")
    assert served(run, "base").which == "base"


def test_nothing_is_served_before_prepare(runs, tmp_path):
    with pytest.raises(WherryError, match="prepare of run 'demo' is not there"):
        served(make_run(tmp_path, modes=()), None)


def test_a_model_that_was_moved_away_is_named(runs, tmp_path):
    run = make_run(tmp_path)
    folder = run.dir("prepare") / "model"
    folder.rmdir()
    folder.symlink_to(tmp_path / "gone")
    with pytest.raises(WherryError, match=f"the base model's folder is not there \\(a link to {tmp_path}/gone\\)"):
        served(run, None)


def test_a_port_in_use_is_refused_by_name():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(WherryError) as caught:
            choose_port(port)
        assert caught.value.code == Exit.PREFLIGHT
        assert caught.value.what == f"port {port} cannot be used: address already in use"
        assert "leave --port out" in caught.value.fix
        assert choose_port(None) not in (0, port)
    assert choose_port(port) == port


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "ended with exit code 0"), (-9, "was killed by SIGKILL"), (137, "ended with exit code 137"),
     (-64, "was killed by SIGRTMAX"), (-99, "was killed by signal 99")],
)  # fmt: skip
def test_how_it_ended(code, text):
    assert how_it_ended(code) == text


# -- a child and its group ----------------------------------------------------------------------------------------

FAMILY = "import os, time; os.fork(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(100)"


def stat_of(pid):
    """[state, parent, group, …], or nothing where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid):
    return stat_of(pid)[:1] not in ([], ["Z"], ["X"])


def children():
    stats = ((path.parent.name, stat_of(path.parent.name)) for path in Path("/proc").glob("[0-9]*/stat"))
    return {pid for pid, stat in stats if stat[1:2] == [str(os.getpid())]}


def gone_within(pids, seconds):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_the_whole_group_is_killed_and_the_guard_goes_too():
    child = Child([sys.executable, "-c", FAMILY], os.environ, stdout=subprocess.PIPE)
    pids = [int(child._process.stdout.readline()) for _ in range(2)]
    guard = child._guard.pid
    assert all(map(alive, [*pids, guard]))
    child.kill()
    assert not any(map(alive, [*pids, guard]))
    child._process.stdout.close()


def test_a_command_that_does_not_exist_leaves_no_guard():
    before = children()
    with pytest.raises(FileNotFoundError):
        Child(["/no/such/command"], os.environ)
    assert children() == before


def test_a_supervisor_killed_by_sigkill_takes_its_children_along():
    supervisor = subprocess.Popen(
        [sys.executable, "-c", "import os, sys, time; from wherry.serve.command import Child\n"
         f"Child([sys.executable, '-c', {FAMILY!r}], os.environ); time.sleep(100)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    pids = [int(supervisor.stdout.readline()) for _ in range(2)]
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    supervisor.stdout.close()
    assert gone_within(pids, 2)
