"""Sources of suites: downloaded once, unpacked beside the results."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from importlib.metadata import distribution
from pathlib import Path

from tests.peers.suites import ROOT, Suite

__all__ = ["FOLDER", "unpacked"]

#: Archives, unpacked sources and results. An archive that lies in its folder ``archives`` is not downloaded.
FOLDER = ROOT / "build" / "peers"


def unpacked(suite: Suite, folder: Path = FOLDER) -> Path:
    """Return the folder that the suite's tests are relative to; download and unpack if it is not there."""
    if suite.shipped is not None:
        return suite.shipped
    if suite.processes:
        return Path(str(distribution(suite.package).locate_file("")))
    target = folder / "sources" / f"{suite.name}-{suite.version}"
    if not target.exists():
        archive = _downloaded(suite, folder / "archives")
        partly = target.with_suffix(".partly")
        _unpack(archive, partly, suite)
        partly.rename(target)
    return target


def _downloaded(suite: Suite, folder: Path) -> Path:
    """Return the archive with a suite's source."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{suite.package}-{suite.version}.tar.gz"
    if path.exists():
        return path
    if suite.archive is not None:
        partly = path.with_suffix(".partly")
        address = suite.archive.format(release=suite.version)
        try:
            urllib.request.urlretrieve(address, partly)
        except urllib.error.URLError as error:
            raise SystemExit(f"{address} cannot be read ({error}): put it at {path} by hand") from error
        partly.rename(path)
        return path
    wanted = f"{suite.package}=={suite.version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), wanted], check=True)
    if not path.exists():
        raise FileNotFoundError(f"pip download {wanted} left no {path.name} in {folder}")
    return path


def _unpack(archive: Path, target: Path, suite: Suite) -> None:
    """Unpack the members of an archive, without its first folder."""
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            _, _, member.name = member.name.partition("/")
            if member.isfile() and member.name.startswith(tuple(suite.members)):
                opened.extract(member, target, filter="data")
