"""The images, built for real on a machine that can pull none: a stand-in base, podman, and Debian's own apptainer.

Needs root on Debian bookworm and installs the rest itself (host.sh). What it makes lies in $WHERRY_CI and is deleted
at the end; WHERRY_CI_KEEP=1 keeps it, so that the next run starts from its layers.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import (
    BASE,
    HOST,
    REVISION,
    Host,
    Image,
    Sif,
    build_sif,
    build_smoke,
    copy_checkout,
    free_gb,
    good,
    require_space,
    say,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:  # a fixture may build for minutes
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    if os.geteuid() != 0:
        pytest.skip("LOUD: the container tests need root (apt, podman, a stand-in base)")
    root = Path(os.environ.get("WHERRY_CI", "/var/tmp/wherry-ci"))
    root.mkdir(parents=True, exist_ok=True)
    keeps = bool(os.environ.get("WHERRY_CI_KEEP"))
    say(request, f"{root}: {free_gb(root):.0f} GB free{', kept at the end' if keeps else ''}")
    environment = {
        "WHERRY_CI": str(root),
        "CONTAINERS_CONF": str(root / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(root / "storage.conf"),
        "TMPDIR": str(root / "tmp"),  # podman's package cache
    }
    found = Host(root, root / "checkout", environment)
    good(found.as_root(HOST, "engines"))
    if found.podman("image", "exists", BASE).returncode or not (root / "base.tar").exists():
        good(found.as_root(HOST, "base"))
    copy_checkout(found.checkout)
    yield found
    if not keeps:
        found.as_root(HOST, "clean")


@pytest.fixture(scope="session")
def image(host: Host, request: pytest.FixtureRequest) -> Image:
    require_space(request, host.root, "image")
    log, seconds = build_smoke(host, host.checkout)
    say(request, f"image: built and proved in {seconds:.0f} s, {free_gb(host.root):.0f} GB free")
    return Image(host, "localhost/wherry:smoke", log, seconds)


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
def sif_of_image(image: Image, apptainer: Host, request: pytest.FixtureRequest) -> Sif:
    """The SIF made of the image's own archive."""
    shutil.rmtree(image.host.root / "tmp", ignore_errors=True)  # podman's package cache: 11 GB that are wanted now
    (image.host.root / "tmp").mkdir()
    require_space(request, image.host.root, "sif")
    started, archive = time.monotonic(), image.host.root / "image.tar"
    archive.unlink(missing_ok=True)  # podman refuses an archive that is there
    good(image.host.podman("save", "--quiet", "--output", archive, image.tag))
    archive.chmod(0o644)
    build = 'mkdir -p "$OUT" "$APPTAINER_TMPDIR" && apptainer build --force --mksquashfs-args "$MKSQUASHFS_ARGS" '
    sif = build_sif(apptainer, "of-image", ["bash", "-c", f'{build} "$OUT/wherry.sif" docker-archive:{archive}'])
    archive.unlink()
    say(request, f"SIF of the image: {time.monotonic() - started:.0f} s, {sif.stat().st_size / 1e9:.2f} GB")
    return Sif(apptainer, sif)


@pytest.fixture(scope="session")
def sif_of_recipe(apptainer: Host, request: pytest.FixtureRequest) -> Sif:
    """The SIF made of Apptainer.def by `make sif`, on a machine with apptainer alone."""
    require_space(request, apptainer.root, "image")
    started = time.monotonic()
    base = {"BASE_IMAGE": f"docker-archive:{apptainer.root}/base.tar", "VLLM": "cpu", "REVISION": REVISION}
    sif = build_sif(apptainer, "of-recipe", [apptainer.checkout / "containers/image.sh", "sif"], **base)
    say(request, f"SIF of Apptainer.def: {time.monotonic() - started:.0f} s, {sif.stat().st_size / 1e9:.2f} GB")
    return Sif(apptainer, sif)
