"""The gate and the watchdog, against a server that fails in every way that was seen."""

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import wherry.serve
from wherry.errors import Exit, WherryError
from wherry.rundir import Run
from wherry.serve import Server
from wherry.serve.gate import Watch
from wherry.serve.state import Phase, read_state

STAND_IN = Path(__file__).parent / "stand_in_server.py"


@pytest.fixture
def run(runs, tmp_path):
    recipe = tmp_path / "demo.yaml"
    recipe.write_text(
        "model: {name: org/model}\ndata: {train: rows.jsonl}\nserve: {ready_timeout: 20, drain_timeout: 0.5}\n"
    )
    made = Run.open(str(recipe), None, [])
    with made.work("merge"):
        (made.dir("merge") / "model").mkdir()
    return made


def stand_in(*options):
    return lambda port: [sys.executable, str(STAND_IN), "--port", str(port), *map(str, options)]


def server(run, *options, **arguments):
    return Server(run, command=stand_in(*options), **arguments)


def with_timeout(run, seconds):
    return Run.open(str(run.path.parent.parent / "demo.yaml"), None, [f"serve.ready_timeout={seconds}"])


def state(run):
    return read_state(run.dir("serve") / "state.json")


def group_is_gone(pid):
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    # What is left may be a zombie that nobody has waited for yet.
    members = [p for p in Path("/proc").glob("[0-9]*/stat") if _group(p) == (pid, True)]
    return not members


def _group(path):
    try:
        fields = path.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[2]), fields[0] not in "ZX"


def failure(run, *options, seconds=20.0):
    with pytest.raises(WherryError) as caught, server(with_timeout(run, seconds), *options):
        pytest.fail("this server was never ready")
    assert caught.value.code == Exit.SERVER
    assert state(run).state is Phase.FAILED
    assert caught.value.what == f"vLLM {state(run).reason}"
    assert caught.value.fix == state(run).hint
    assert group_is_gone(state(run).pid)
    return caught.value


# -- ready --------------------------------------------------------------------------------------------------------


def test_ready_and_stopped(run, capfd):
    with server(run) as one:
        found = state(run)
        assert (found.state, found.which, found.model, found.url) == (Phase.READY, "merged", "demo", one.url)
        assert (found.max_model_len, one.max_model_len) == (512, 512)
        assert found.supervisor_pid == os.getpid()
        assert (one.model, one.which, one.api_key_file.name) == ("demo", "merged", "api_key")
        assert found.ready_after_s > 0
        pid = found.pid
    assert (state(run).state, state(run).pid, state(run).reason) == (Phase.STOPPED, None, None)
    assert group_is_gone(pid)
    key = (run.dir("serve") / "api_key").read_text().strip()
    err = capfd.readouterr().err
    assert f"ready after {found.ready_after_s:.1f} s: {found.url}, model demo, key in" in err
    for text in (err, (run.dir("serve") / "vllm.log").read_text(), (run.dir("serve") / "state.json").read_text()):
        assert key not in text


@pytest.mark.parametrize("options", [("--bind-after", 0.5), ("--good-after", 0.5)])
def test_ready_is_seen_when_it_is_true_and_soon(run, options):
    with server(run, *options):
        # 0.5 s, the stand-in's own start, and at most one interval of asking.
        assert 0.5 <= state(run).ready_after_s < 1.5


def test_loading_is_told_from_the_log(run, monkeypatch):
    seen = []
    monkeypatch.setattr(
        wherry.serve.state, "write_json", lambda path, value: seen.append((str(value["state"]), value["progress"]))
    )
    lines = ("INFO Starting to load model /m...", "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01")
    with server(run, "--say", "\n".join(lines), "--good-after", 0.5):
        pass
    assert [entry for entry, after in zip(seen, [None, *seen], strict=False) if entry != after] == [
        ("starting", None), ("loading", "loading weights, file 1/2"), ("ready", None), ("draining", None),
        ("stopped", None),
    ]  # fmt: skip


def test_progress_is_said_but_seldom(run, monkeypatch, capfd):
    monkeypatch.setattr(wherry.serve, "SAY_EVERY", 0.3)
    with server(run, "--say", "Starting to load model /m...", "--good-after", 0.8):
        pass
    said = [line for line in capfd.readouterr().err.splitlines() if line.endswith("loading weights")]
    assert 1 <= len(said) <= 4


def test_a_log_that_floods_blocks_nothing(run):
    with server(run, "--flood"):
        assert (run.dir("serve") / "vllm.log").stat().st_size > 20_000_000


def test_every_attempt_has_its_part_of_the_log(run):
    for _ in range(2):
        failure(run, "--say", "ValueError: once more", "--exit", "1")
    log = (run.dir("serve") / "vllm.log").read_text()
    assert log.count("==== ") == 2
    failed = failure(run, "--exit", "1")  # an earlier attempt's error explains nothing
    assert failed.where == str(run.dir("serve") / "vllm.log")


# -- never ready --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (("--bind-after", 60), "/health: Connection refused"),
        (("--good-after", 60), "/health answered 503"),
        (("--health", "hang"), "/health has not answered yet"),
        (("--name", "other"), "/v1/models lists other, not demo"),
        (("--completion", "500"), "/v1/completions answered 500"),
        (("--completion", "hang"), "/v1/completions has not answered yet"),
        (("--completion", "empty"), "/v1/completions came back without a choice"),
        (("--completion", "html"), "/v1/completions did not answer in JSON"),
    ],
)
def test_what_is_missing_is_said_at_the_deadline(run, options, missing):
    begun = time.monotonic()
    failed = failure(run, *options, seconds=1.0)
    assert time.monotonic() - begun < 8
    assert failed.what == f"vLLM not ready after 1 s: {missing}"


@pytest.mark.parametrize(
    ("code", "how"),
    [(0, "ended with exit code 0"), (1, "ended with exit code 1"), (-9, "was killed by SIGKILL")],
)
def test_any_end_before_ready_is_a_failure_seen_at_once(run, code, how):
    begun = time.monotonic()
    failed = failure(run, "--exit", code)
    assert time.monotonic() - begun < 8
    assert failed.what.startswith(f"vLLM {how} after ")
    assert failed.what.endswith(", before it was ready")
    if code == -9:
        assert "out-of-memory killer" in failed.fix


def test_the_decisive_line_and_the_setting_are_told(run):
    failed = failure(run, "--say", "ValueError: No available memory for the cache blocks.", "--exit", "1")
    assert failed.where == f"{run.dir('serve') / 'vllm.log'}: ValueError: No available memory for the cache blocks."
    assert "serve.vllm.max_model_len" in failed.fix


@pytest.mark.parametrize("hanging", [("--health", "hang"), ("--completion", "hang")])
def test_death_is_seen_while_an_answer_is_outstanding(run, hanging):
    killed = []

    def kill():
        os.kill(state(run).pid, signal.SIGKILL)
        killed.append(time.monotonic())

    threading.Timer(0.7, kill).start()
    failed = failure(run, *hanging)
    assert time.monotonic() - killed[0] < 1
    assert failed.what.startswith("vLLM was killed by SIGKILL")


# -- after ready --------------------------------------------------------------------------------------------------


def test_death_after_ready_is_seen_at_once(run):
    with pytest.raises(WherryError) as caught, server(run, "--engine") as one:
        pid = state(run).pid
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        try:
            one.watch()
        finally:
            took = time.monotonic() - begun
    assert took < 5
    assert caught.value.code == Exit.SERVER
    assert caught.value.what.startswith("vLLM was killed by SIGKILL after ")
    assert not caught.value.what.endswith("ready")
    assert state(run).state is Phase.FAILED
    assert group_is_gone(pid)  # the engine too


@pytest.fixture
def quick_watch(monkeypatch):
    monkeypatch.setattr(wherry.serve, "Watch", functools.partial(Watch, every=0.1))


def test_a_server_that_only_seems_sick_goes_on(run, quick_watch, tmp_path):
    sick = tmp_path / "sick"
    with server(run, "--sick-when", sick) as one:
        sick.touch()
        assert one.run([sys.executable, "-c", "import time; time.sleep(0.8)"]) == 0
        assert state(run).state is Phase.READY


def test_a_server_that_answers_no_more_is_given_up(run, quick_watch, tmp_path):
    sick = tmp_path / "sick"
    with pytest.raises(WherryError) as caught, server(run, "--sick-when", sick, "--dead-when", sick) as one:
        sick.touch()
        one.watch()
    assert caught.value.what == "vLLM alive but not answering: /v1/completions answered 500"
    assert (state(run).state, caught.value.code) == (Phase.FAILED, Exit.SERVER)


# -- clients ------------------------------------------------------------------------------------------------------


def test_a_client_s_exit_code_and_environment(run):
    with server(run) as one:
        assert one.run([sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['CODE']))"], {"CODE": "7"}) == 7
        assert one.run([sys.executable, "-c", ""]) == 0


def test_a_client_dies_with_the_server(run, tmp_path):
    note = tmp_path / "pid"
    client = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    with pytest.raises(WherryError) as caught, server(run) as one:
        threading.Timer(0.5, lambda: os.kill(state(run).pid, signal.SIGKILL)).start()
        begun = time.monotonic()
        one.run([sys.executable, "-c", client])
    assert time.monotonic() - begun < 8
    assert caught.value.code == Exit.SERVER
    assert group_is_gone(int(note.read_text()))


def test_a_client_that_fails_first_does_not_take_the_blame(run, tmp_path):
    dead = tmp_path / "dead"
    with pytest.raises(WherryError) as caught, server(run, "--dead-when", dead) as one:
        dead.touch()
        one.run([sys.executable, "-c", "raise SystemExit(3)"])
    assert caught.value.what == (
        "vLLM no longer answers (/v1/completions answered 500); its client ended with exit code 3"
    )


# -- stopping -----------------------------------------------------------------------------------------------------


def test_a_stubborn_server_is_killed_after_the_drain(run):
    with server(run, "--stubborn", "--engine"):
        pid = state(run).pid
        begun = time.monotonic()
    assert 0.5 <= time.monotonic() - begun < 8
    assert (state(run).state, group_is_gone(pid)) == (Phase.STOPPED, True)


def test_an_error_in_the_block_stops_the_server_as_well(run):
    with pytest.raises(RuntimeError, match="ours"), server(run):
        pid = state(run).pid
        raise RuntimeError("ours")
    assert (state(run).state, group_is_gone(pid)) == (Phase.STOPPED, True)


def test_handlers_are_the_caller_s_again(run):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with server(run):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# -- refused before anything starts -------------------------------------------------------------------------------


def test_a_second_server_is_refused_with_the_first_one_s_url(run):
    with server(run) as one:
        with pytest.raises(WherryError) as caught:
            server(run)
        assert caught.value.code == Exit.PREFLIGHT
        assert caught.value.what == f"this run already has a server: ready, {one.url}, model demo"
        assert f"process {os.getpid()} on {socket.gethostname()}" in caught.value.where
    with server(run):  # the first is gone
        pass


def test_of_two_at_the_same_time_one_is_refused(run):
    first, second = server(run), server(run)
    with first, pytest.raises(WherryError, match="already has a server"), second:
        pytest.fail("two servers on one run")
    assert state(run).state is Phase.STOPPED


def test_a_taken_port_is_refused(run):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(WherryError, match=f"port {port} cannot be used") as caught:
            server(run, port=port)
    assert caught.value.code == Exit.PREFLIGHT
    assert not run.dir("serve").exists()


# -- the mode, as a process ---------------------------------------------------------------------------------------

MODE = """
import sys
import wherry.serve
stand_in, *options = sys.argv[1].split("|")
wherry.serve.vllm_command = lambda run, what, port: [sys.executable, stand_in, "--port", str(port), *options]
from wherry.__main__ import main
sys.exit(main(["serve", *sys.argv[2:]]))
"""


def start_mode(run, *options, arguments=()):
    words = "|".join([str(STAND_IN), *map(str, options)])
    recipe = run.path.parent.parent / "demo.yaml"
    return subprocess.Popen(
        [sys.executable, "-c", MODE, words, str(recipe), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for(run, phase, seconds=10):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = state(run)
        if found and found.state is phase:
            return found
        time.sleep(0.05)
    pytest.fail(f"not {phase} in {seconds} s: {state(run)}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_mode_stops_well_when_asked(run, number):
    mode = start_mode(run, "--engine")
    out = mode.stdout.readline() + mode.stdout.readline()
    found = state(run)
    mode.send_signal(number)
    _, err = mode.communicate(timeout=10)
    assert (mode.returncode, state(run).state) == (0, Phase.STOPPED)
    assert f"{found.url}/v1/chat/completions" in out
    assert "Bearer /' " + str(run.dir("serve") / "api_key") in out
    assert err.rstrip().endswith("stopped")
    assert group_is_gone(found.pid)
    assert run.manifest()["modes"]["serve"]["complete"] is True
    assert not run.is_complete("serve")


def test_the_mode_stops_well_while_it_loads(run):
    mode = start_mode(run, "--good-after", "60", "--say", "Starting to load model /m...")
    found = wait_for(run, Phase.LOADING)
    mode.send_signal(signal.SIGTERM)
    mode.communicate(timeout=10)
    assert (mode.returncode, state(run).state, group_is_gone(found.pid)) == (0, Phase.STOPPED, True)


def test_a_second_signal_ends_the_draining(run):
    run = Run.open(str(run.path.parent.parent / "demo.yaml"), None, [])
    mode = start_mode(run, "--stubborn", arguments=["serve.drain_timeout=60"])
    found = wait_for(run, Phase.READY)
    mode.send_signal(signal.SIGTERM)
    wait_for(run, Phase.DRAINING)
    time.sleep(0.2)
    mode.send_signal(signal.SIGTERM)
    mode.communicate(timeout=10)
    assert (mode.returncode, state(run).state, group_is_gone(found.pid)) == (0, Phase.STOPPED, True)


def test_the_mode_fails_in_three_lines(run):
    mode = start_mode(run, "--end-after", "0.6", "--end-with", "0")
    _, err = mode.communicate(timeout=20)
    assert mode.returncode == 5
    assert err.splitlines()[-3].startswith("error: vLLM ended with exit code 0 after ")
    assert [line.split()[0] for line in err.splitlines()[-2:]] == ["where:", "fix:"]
    assert "Traceback" not in err


def test_a_mode_that_is_killed_takes_vllm_along_and_can_be_started_again(run):
    mode = start_mode(run, "--engine")
    found = wait_for(run, Phase.READY)
    mode.kill()
    mode.communicate()
    assert state(run).state is Phase.READY
    assert state(run).is_abandoned()
    deadline = time.monotonic() + 6  # the engine ignores SIGTERM: SIGKILL follows after 2 s
    while not group_is_gone(found.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert group_is_gone(found.pid)
    with server(run):
        pass


def test_the_options_of_the_mode(run, wherry):
    recipe = run.path.parent.parent / "demo.yaml"
    code, _, err = wherry("serve", recipe, "--model", "base")
    assert (code, err.splitlines()[0]) == (2, "error: prepare of run 'demo' is not there")
    code, _, err = wherry("serve", recipe, "--port", "70000")
    assert (code, err.splitlines()[0]) == (2, "error: --port 70000 is no port")
    code, _, err = wherry("serve", recipe, "--model", "best")
    assert (code, "--model" in err) == (2, True)


def test_a_full_disk_neither_hides_the_reason_nor_keeps_the_server(run, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device", str(path))

    with pytest.raises(WherryError) as caught, server(run) as one:
        pid = state(run).pid
        monkeypatch.setattr(wherry.serve.state, "write_json", full)
        monkeypatch.setattr(wherry.serve.state, "HEARTBEAT", 0)
        assert one.run([sys.executable, "-c", ""]) == 0
        os.kill(pid, signal.SIGKILL)
        one.watch()
    assert caught.value.what.startswith("vLLM was killed by SIGKILL")
    assert group_is_gone(pid)
