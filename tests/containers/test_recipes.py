"""What can be known of the recipes without building anything: they say the same, and errors are three lines."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from machine import PROJECT, run
from spython.main.parse.parsers import DockerParser, SingularityParser

DOCKERFILE = (PROJECT / "Dockerfile").read_text()
DEFINITION = (PROJECT / "Apptainer.def").read_text()


def test_the_base_is_pinned_by_digest_and_the_same_everywhere() -> None:
    bases = [
        re.findall(r"BASE_IMAGE=(\S+)", text)
        for text in ((PROJECT / "containers/base.env").read_text(), DOCKERFILE, DEFINITION)
    ]
    assert bases[0] == bases[1] == bases[2]
    assert re.fullmatch(r"docker\.io/library/debian@sha256:[0-9a-f]{64}", bases[0][0])


def test_the_dockerfile_keeps_to_what_docker_podman_and_buildah_share() -> None:
    assert not re.search(r"^[A-Z].*(<<|--link|--exclude)|^# *syntax=", DOCKERFILE, re.M)


def test_no_package_index_is_written_down() -> None:
    for path in (PROJECT / "containers").rglob("*"):
        if path.is_file():
            assert not re.search(r"--(extra-)?index-url|--find-links", path.read_text()), path


def rendered() -> str:
    """Apptainer.def with its %arguments put in, as spython cannot."""
    arguments = dict(re.findall(r"^    ([A-Z_]+)=(\S+)$", DEFINITION, re.M))
    return re.sub(r"\{\{ (\w+) \}\}", lambda match: arguments[match[1]], DEFINITION)


def test_spython_reads_the_same_from_both(tmp_path: Path) -> None:
    """What its parsers read well: base, environment, labels, files, entrypoint (.recipe: parse() runs twice)."""
    (tmp_path / "Apptainer.def").write_text(rendered())
    docker = DockerParser(str(PROJECT / "Dockerfile")).recipe
    definition = SingularityParser(str(tmp_path / "Apptainer.def")).recipe["spython-base"]
    first, last = docker["system"], docker["cuda"]

    assert definition.fromHeader == first.fromHeader.strip()
    environment = {line.split("=")[0]: line.split("=")[1] for line in definition.environ}
    revision = environment.pop("WHERRY_REVISION")
    assert environment == {line.split("=")[0]: line.split("=")[1] for line in first.environ}
    assert revision == "unknown"
    assert last.environ == ["WHERRY_REVISION=${REVISION}"]
    labels = dict(line.split(" ", 1) for line in definition.labels)
    texts = " ".join(text for (text,) in [*first.labels, *last.labels])
    assert set(labels) == {name for name, _ in re.findall(r'([\w.-]+)="(.*?)"', texts)}
    kept = re.findall(r"^!(\S+)", (PROJECT / ".dockerignore").read_text(), re.M)
    assert definition.files == [f"{name} /opt/wherry-src/{name}" for name in kept]
    assert definition.cmd == "exec " + " ".join(first.entrypoint) + ' "$@"'


def test_the_minimum_driver_is_the_same_everywhere() -> None:
    environment = (PROJECT / "entrypoints/environment.sh").read_text()
    found = re.findall(r"minimum(?:-driver)?[ =]\"?([0-9.]+)", DOCKERFILE + DEFINITION + environment)
    assert found == ["525.60.13"] * 3


@pytest.mark.parametrize(("driver", "warned"), [("470.57.02", True), ("525.60.13", False), ("570.133.20", False)])
def test_an_old_driver_is_named_with_what_is_needed(driver: str, warned: bool) -> None:
    done = run(["bash", "-c", f"source {PROJECT}/entrypoints/environment.sh; warn_of_driver {driver}"])
    assert done.returncode == 0
    assert (driver in done.stderr and "525.60.13" in done.stderr) == warned


def stub(folder: Path, **programs: str) -> dict[str, str]:
    """An environment whose PATH has these programs first, and neither docker, podman nor apptainer."""
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    for name in ("docker", "podman"):
        if name not in programs:
            (folder / name).write_text("#!/bin/bash\nexit 1\n")
            (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:/usr/bin:/bin", "OUT": str(folder / "out"), "TMPDIR": str(folder)}


NO_SPACE = 'if [[ $* == *avail* ]]; then printf "Avail\\n3\\n"; else exec /usr/bin/df "$@"; fi'


@pytest.mark.parametrize(
    ("word", "programs", "what"),
    [
        ("image", {}, "neither docker nor podman answers, and there is no apptainer"),
        ("sif", {}, "no apptainer"),
        ("smoke", {}, "neither docker nor podman answers"),
        ("image", {"uname": "echo aarch64"}, "this machine is aarch64"),
        ("sif", {"apptainer": "exit 9", "df": NO_SPACE}, "the build needs 22 GB on one file system"),
        ("image", {"podman": "echo /var/tmp", "df": NO_SPACE}, "the build needs 32 GB and 3 GB are free"),
        ("sif", {"apptainer": "exit 9"}, "apptainer build failed"),
    ],
)
def test_what_is_missing_is_said_in_three_lines(tmp_path: Path, word: str, programs: dict[str, str], what: str) -> None:
    environment = stub(tmp_path, **programs)
    if "df" not in programs:  # whatever this machine has free
        environment = stub(tmp_path, **programs, df='printf "Avail\\n999\\n"')
    done = run([PROJECT / "containers/image.sh", word], env=environment)
    error = done.stderr[done.stderr.index("error:") :].splitlines()
    assert done.returncode == 3
    assert error[0] == f"error: {what}"
    assert [line.split()[0] for line in error] == ["error:", "where:", "fix:"]


def test_a_cluster_with_apptainer_alone_builds_from_the_definition(tmp_path: Path) -> None:
    """`make image` there: the options that apptainer gets, its folders set, versions and size at the end."""
    apptainer = """
        case $1 in
          build) printf '%s\\n' "$*" "tmp=$APPTAINER_TMPDIR cache=$APPTAINER_CACHEDIR" >&2; echo sif >"${@: -2:1}" ;;
          run) echo 'wherry 0.1.0' ;;
          exec) echo '{}' ;;
        esac"""
    environment = stub(tmp_path, apptainer=apptainer, df='printf "Avail\\n999\\n"') | {"REVISION": "abc"}
    done = run([PROJECT / "containers/image.sh", "image"], env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"build --force .*VERSION=\S+ .*REVISION=abc .*VLLM=cuda ", done.stderr)
    place = f"{tmp_path}/wherry-build-{os.geteuid()}"
    assert f"tmp={place} cache={place}/cache" in done.stderr
    assert f"{tmp_path}/out/wherry.sif: 4 bytes" in done.stdout
    assert "wherry 0.1.0" in done.stdout


def test_an_unknown_word_prints_the_usage() -> None:
    done = run([PROJECT / "containers/image.sh", "imgae"])
    assert done.returncode == 2
    assert "containers/image.sh image" in done.stderr
