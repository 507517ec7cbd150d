"""wherry doctor as a command, its table, and what it says of all ranks together.

NCCL needs GPUs: its verdicts are made from log lines and numbers written here. The meeting of real ranks (gloo) is in
tests/integration/test_doctor.py.
"""

import json

import pytest

from wherry import doctor, ranks
from wherry.doctor import network, table
from wherry.doctor.check import CHECKS, Check, Result, made, passed
from wherry.doctor.context import Context
from wherry.doctor.jobscript import read
from wherry.errors import Exit
from wherry.explain.entries import CHECKS as ENTRIES
from wherry.plan import gpus

RECIPE = "model: {name: org/llama-3.1-8b}\ndata: {train: rows.jsonl}\ntrain: {args: {max_length: 512}}\n"


@pytest.fixture
def recipe(tmp_path, runs, monkeypatch):
    monkeypatch.setenv("WHERRY_DEVICE", "cpu")
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')
    monkeypatch.chdir(tmp_path)
    return path


# ---- the command -----------------------------------------------------------------------------------------------------


def test_without_slurm_gpu_or_recipe_it_says_what_it_could_not_look_at(wherry):
    code, out, err = wherry("doctor")
    assert code in (Exit.DONE, Exit.PREFLIGHT), err  # this machine may have faults of its own
    assert "no NVIDIA driver here: device.driver" in out or "device.driver " in out
    assert "no job script is given" in out
    assert "no recipe or run is given" in out
    assert "Traceback" not in err


def test_json(wherry, recipe):
    code, out, err = wherry("doctor", recipe, "--json", "--gpus", "8xH100-80")
    results = json.loads(out)
    assert {result["status"] for result in results} <= {"pass", "warn", "fail", "skip"}
    assert code == (Exit.PREFLIGHT if any(result["status"] == "fail" for result in results) else 0), err
    assert next(r for r in results if r["id"] == "recipe.read")["status"] == "pass"


def test_a_recipe_that_cannot_be_read_is_a_result_beside_the_others(wherry, recipe):
    recipe.write_text(RECIPE + "serv: {}\n")
    code, out, _ = wherry("doctor", recipe)
    assert code == Exit.PREFLIGHT
    assert "FAIL recipe.read" in out
    assert "did you mean serve?" in out
    assert "node.shm" in out


def test_a_job_script_with_a_fault_is_exit_3(wherry, recipe, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/bash\n#SBATCH --gpus-per-task=1\nsrun python train.py\n")
    code, out, _ = wherry("doctor", path, recipe)
    assert code == Exit.PREFLIGHT
    assert "FAIL script.gpus-per-task" in out
    code, out, _ = wherry("doctor", f"--script={path}", "--sbatch=--gpu-bind=single:1")
    assert "FAIL script.gpu-bind" in out


def test_usage(wherry, tmp_path):
    code, _, err = wherry("doctor", tmp_path / "none.sh")
    assert code == Exit.USAGE
    assert "no job script" in err
    code, _, err = wherry("doctor", "a.sh", "b.sh")
    assert code == Exit.USAGE
    assert "two job scripts" in err


def test_a_check_that_breaks_is_a_warning():
    def broken(context):
        raise ZeroDivisionError("odd machine")

    context = Context(ranks.Rank(0, 0, 1, 1), {}, node="n1")
    results = made([Check("node.odd", "node", broken), Check("node.good", "node", lambda _: passed("fine"))], context)
    assert [result.status for result in results] == ["warn", "pass"]
    assert "odd machine" in results[0].found


def test_who_makes_which_check():
    checks = [Check(f"node.{scope}", scope, lambda _: passed("")) for scope in ("once", "node", "rank")]

    def ids(rank, local):
        return [result.id for result in made(checks, Context(ranks.Rank(rank, local, 16, 8), {}))]

    assert ids(0, 0) == ["node.once", "node.node", "node.rank"]
    assert ids(8, 0) == ["node.node", "node.rank"]
    assert ids(9, 1) == ["node.rank"]


def test_every_check_has_an_entry_and_every_entry_a_check():
    ids = {check.id for check in CHECKS} | {"recipe.read"}
    ids |= {"network.allreduce", "network.transport", "network.clocks", "network.image"}
    assert ids == {entry.name for entry in ENTRIES}


# ---- job scripts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("30", 0.5),
        ("90:30", 1.508),
        ("12:00:00", 12),
        ("2-12", 60),
        ("1-06:30", 30.5),
        ("1-00:00:36", 24.01),
        ("x", None),
    ],
)
def test_time_limits_as_sbatch_reads_them(tmp_path, text, hours):
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/bash\n#SBATCH -t {text}\n")
    assert read(path).hours == (pytest.approx(hours, rel=1e-3) if hours else None)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ("--gpus-per-node=8", 8),
        ("--gpus-per-node=h100:4", 4),
        ("--gres=gpu:2", 2),
        ("--gres=lustre:1,gpu:a100:4", 4),
        ("-N 3 --gpus=24", 8),
        ("-G 2", 2),
        ("--ntasks-per-node=8 --gpus-per-task=1", 8),
        ("--mem=0", 0),
    ],
)
def test_gpus_a_node_however_they_are_asked_for(tmp_path, options, count):
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/bash\n")
    assert read(path, options).gpus_per_node == count


def test_options_of_the_command_line_win_and_lines_are_joined(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(
        "#!/bin/bash\n#SBATCH --nodes=1 # few\n#SBATCH --time 10\nsrun \\\n  train # more\n#SBATCH --late\n"
    )
    script = read(path, "--nodes=4")
    assert script.options == {"nodes": "4", "time": "10"}
    assert script.commands == ["srun   train"]
    assert script.late == ["--late"]


# ---- the table -------------------------------------------------------------------------------------------------------


def results(count):
    fix = "drain it"
    found = [Result("node.shm", "pass", "500 GiB", "", f"node{i}") for i in range(count)]
    found += [Result("device.ecc", "fail" if i == 1 else "pass", "2 errors", fix, f"node{i}") for i in range(count)]
    found += [Result("device.visible", "warn", "odd", "look", f"node{i}", i) for i in range(2)]
    return [*found, Result("script.port", "skip", "no script", "", "node0")]


def test_a_column_for_each_of_a_few_nodes():
    lines = table.as_text(results(3)).splitlines()
    assert lines[0].split() == ["node0", "node1", "node2"]
    assert next(line for line in lines if line.startswith("device.ecc")).split()[1:] == ["ok", "FAIL", "ok"]
    assert "FAIL device.ecc on node1" in lines
    assert "warn device.visible on node0 (rank 0), node1 (rank 1)" in lines
    assert "  no script: script.port" in lines
    assert lines[-2] == "5 pass, 2 warn, 1 fail, 1 skip"


def test_many_nodes_are_counted():
    text = table.as_text(results(40))
    assert "device.ecc      FAIL on 1, ok on 39" in text
    assert "FAIL device.ecc on node1" in text


# ---- all ranks together ----------------------------------------------------------------------------------------------


def cluster(tmp_path, ports=8):
    for i in range(ports):
        folder = tmp_path / f"sys/class/infiniband/mlx5_{i}/ports/1"
        folder.mkdir(parents=True)
        (folder / "state").write_text("4: ACTIVE\n")
        (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    return Context(ranks.Rank(0, 0, 16, 8), {}, tmp_path, node="n0")


def met(**values):
    facts = [
        {
            "node": f"n{i // 8}",
            "rank": i,
            "time": 1000.0,
            "image": "sha256:1",
            "revision": "a",
            "transport": {"NET/IB": 4, "P2P": 8},
        }
        for i in range(16)
    ]
    return network.Met(**({"bandwidth": 350.0, "on_gpu": True, "facts": facts} | values))


def verdicts(context, what):
    return {r.id: r for r in network.group_results(context, what, gpus.parse("2x8xH100-80"))}


def test_healthy_ranks(tmp_path):
    found = verdicts(cluster(tmp_path), met())
    assert {result.status for result in found.values()} == {"pass"}
    assert found["network.transport"].found == "InfiniBand, GPU to GPU (NVLink or PCIe)"


def test_slow_all_reduce(tmp_path):
    context = cluster(tmp_path)
    assert verdicts(context, met(bandwidth=150.0))["network.allreduce"].status == "warn"
    slow = verdicts(context, met(bandwidth=5.0))["network.allreduce"]
    assert slow.status == "fail"
    assert "network.transport" in slow.fix


def test_ranks_that_do_not_meet(tmp_path):
    found = verdicts(cluster(tmp_path), network.Met(error="timed out"))
    assert found["network.allreduce"].status == "fail"
    assert "network.interface" in found["network.allreduce"].fix
    assert found["network.transport"].status == "skip"


def test_every_node_speaks_for_itself_where_ranks_do_not_meet(monkeypatch, capsys):
    for name, value in {"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(network, "meet", lambda context, mine, log: network.Met(error="timed out", results=mine))
    assert doctor.main([]) == Exit.PREFLIGHT
    out = capsys.readouterr().out
    assert "FAIL network.allreduce" in out
    assert "the 16 ranks did not meet within 60 s: timed out" in out
    assert "node.shm" in out
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert doctor.main([]) == Exit.PREFLIGHT
    assert capsys.readouterr().out == ""


def test_sockets_in_silence(tmp_path):
    what = met()
    for fact in what.facts:
        fact["transport"] = {"NET/Socket": 4, "P2P": 8}
    found = verdicts(cluster(tmp_path), what)["network.transport"]
    assert found.status == "fail"
    assert "TCP sockets" in found.found
    assert "NCCL_IB_DISABLE" in found.fix


def test_gpus_that_talk_through_host_memory(tmp_path):
    what = met()
    for fact in what.facts:
        fact["transport"] = {"NET/IB": 4, "SHM": 8}
    found = verdicts(cluster(tmp_path), what)["network.transport"]
    assert found.status == "warn"
    assert "NCCL_P2P_DISABLE" in found.fix


def test_clocks_and_images_that_differ(tmp_path):
    what = met()
    what.facts[9]["time"] += 60
    what.facts[9]["image"] = "sha256:2"
    found = verdicts(cluster(tmp_path), what)
    assert found["network.clocks"].status == "warn"
    assert "NTP" in found["network.clocks"].fix
    assert found["network.image"].status == "fail"
    assert "WHERRY_SIF" in found["network.image"].fix


def test_an_image_is_told_by_its_own_labels_and_not_by_what_the_job_says(tmp_path):
    seen = set()
    for date in ("Monday", "Tuesday", "Tuesday"):
        root = tmp_path / date
        (root / ".singularity.d").mkdir(parents=True, exist_ok=True)
        (root / ".singularity.d/labels.json").write_text(json.dumps({"org.label-schema.build-date": date}))
        seen.add(network.image_here(Context(ranks.Rank(0, 0, 2, 1), {"WHERRY_IMAGE": "wherry.sif 1"}, root)))
    assert len(seen) == 2
    assert network.image_here(Context(ranks.Rank(0, 0, 2, 1), {"WHERRY_IMAGE": "docker 1"}, tmp_path)) == "docker 1"


def test_what_nccls_log_says_of_its_transport(tmp_path):
    (tmp_path / "nccl.host.1").write_text(
        "host:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\n"
        "host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA\n"
        "host:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
        "host:1:2 [0] NCCL INFO Channel 02/0 : 0[0] -> 2[2] via SHM/direct/direct\n"
    )
    found = network.transport(tmp_path / "nccl")
    assert {name: found[name] for name in network.WORDS if name in found} == {"NET/IB": 1, "P2P": 1, "SHM": 1}
