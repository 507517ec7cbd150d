"""The machine, its apptainer and the SIF of Apptainer.def: for the container tests, and for those on a Slurm cluster.

What it makes lies in $WHERRY_CI and is deleted at the end. WHERRY_CI_KEEP=1 keeps it, so that the next run starts from
its layers; WHERRY_CI_KEEP=sif keeps the SIF and apptainer alone, for the suite that follows.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import BASE, HOST, REVISION, Host, Sif, build_sif, copy_checkout, free_gb, good, require_space, say


@pytest.fixture(scope="session")
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    if os.geteuid() != 0:
        pytest.skip("LOUD: tests that build images need root (apt, podman, a stand-in base)")
    root = Path(os.environ.get("WHERRY_CI", "/var/tmp/wherry-ci"))
    root.mkdir(parents=True, exist_ok=True)
    kept = os.environ.get("WHERRY_CI_KEEP")
    say(request, f"{root}: {free_gb(root):.0f} GB free{f', kept at the end: {kept}' if kept else ''}")
    environment = {
        "WHERRY_CI": str(root),
        "CONTAINERS_CONF": str(root / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(root / "storage.conf"),
        "TMPDIR": str(root / "tmp"),  # podman's package cache
    }
    found = Host(root, root / "checkout", environment)
    good(found.as_root(HOST, "engines"))
    copy_checkout(found.checkout)
    yield found
    if kept != "1":
        found.as_root(HOST, "clean", *(["but-sif"] if kept == "sif" else []))


@pytest.fixture(scope="session")
def base(host: Host) -> Path:
    """The stand-in base: localhost/debian:bookworm-slim, and this archive of it."""
    archive = host.root / "base.tar"
    if host.podman("image", "exists", BASE).returncode or not archive.exists():
        good(host.as_root(HOST, "base"))
    return archive


@pytest.fixture(scope="session")
def apptainer(host: Host, request: pytest.FixtureRequest) -> Host:
    if not (host.root / "apptainer/bin/apptainer").exists():
        done = host.as_root(HOST, "apptainer")
        if done.returncode:
            say(request, "SKIPPED ALOUD: apptainer cannot be had from Debian today: " + done.stderr.strip()[-500:])
            pytest.skip("LOUD: apptainer cannot be had from Debian today, nothing was proved about a SIF")
    say(request, good(host.as_user("apptainer", "--version")).strip())
    return host


@pytest.fixture(scope="session")
def sif_of_recipe(apptainer: Host, request: pytest.FixtureRequest) -> Sif:
    """The SIF made of Apptainer.def by `make sif`, on a machine with apptainer alone; one of the same files is kept."""
    path = apptainer.root / "home/of-recipe.sif"
    note, files = path.with_suffix(".files"), files_of(apptainer.checkout)
    if path.exists() and note.exists() and note.read_text() == files:
        say(request, f"SIF of Apptainer.def: {path}, built before from the same files")
        return Sif(apptainer, path)
    require_space(request, apptainer.root, "image")
    archive = request.getfixturevalue("base")
    started = time.monotonic()
    settings = {"BASE_IMAGE": f"docker-archive:{archive}", "VLLM": "cpu", "REVISION": REVISION}
    path = build_sif(apptainer, "of-recipe", [apptainer.checkout / "containers/image.sh", "sif"], **settings)
    note.write_text(files)
    say(request, f"SIF of Apptainer.def: {time.monotonic() - started:.0f} s, {path.stat().st_size / 1e9:.2f} GB")
    return Sif(apptainer, path)


def files_of(checkout: Path) -> str:
    """A hash of everything that Apptainer.def puts in."""
    total = hashlib.sha256()
    for name in ("Apptainer.def", "pyproject.toml", "src", "recipes", "entrypoints", "containers"):
        top = checkout / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file():
                total.update(f"{path.relative_to(checkout)}\0".encode() + path.read_bytes())
    return total.hexdigest()
