"""The images, built for real on a machine that can pull none: a stand-in base, podman, and Debian's own apptainer.

Needs root on Debian bookworm and installs the rest itself (host.sh, fixtures.py).
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import fixtures
import pytest
from machine import Host, Image, Sif, build_sif, build_smoke, free_gb, good, require_space, say

host, base, apptainer, sif_of_recipe = fixtures.host, fixtures.base, fixtures.apptainer, fixtures.sif_of_recipe


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:  # a fixture may build for minutes
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def image(host: Host, base: Path, request: pytest.FixtureRequest) -> Image:
    require_space(request, host.root, "image")
    log, seconds = build_smoke(host, host.checkout)
    say(request, f"image: built and proved in {seconds:.0f} s, {free_gb(host.root):.0f} GB free")
    return Image(host, "localhost/wherry:smoke", log, seconds)


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
