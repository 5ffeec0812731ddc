"""Machine instructions of a step, by callgrind: ``python -m benchmarks.count FOLDER PEER...``.

Runs once as it is, which fills Inductor's cache, and then under valgrind, which writes a count for each peer
into the folder. Valgrind knows no AVX-512, so ATen, Inductor and the compiler are told to use AVX2; there is
one thread.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.measure import STEPS_TO_SETTLE, compile_cache
from benchmarks.peers import PEERS, make_gradients, make_parameters

#: Large enough that what a call costs beside its loops is a fraction of an instruction per parameter.
SHAPES = ((2048, 2048),)
ENVIRONMENT = {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}

SWITCH = """
#include <valgrind/callgrind.h>
extern "C" void start() { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
extern "C" void stop() { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""


def why_not() -> str:
    """What is missing to count; empty where nothing is."""
    if platform.machine() != "x86_64":
        return "counted on x86-64 alone"
    if shutil.which("valgrind") is None:
        return "valgrind is not installed"
    if not any(
        Path(root, "valgrind/callgrind.h").exists() for root in ("/usr/include", "/usr/local/include")
    ):
        return "valgrind's header callgrind.h is not installed"
    return ""


#: Inductor says -march=native; the last word counts.
COMPILER = """#!/bin/sh
exec {compiler} "$@" -march=x86-64-v3
"""


def count_instructions(peers: Sequence[str], folder: Path, time_limit: float) -> dict[str, float | str]:
    """Instructions per parameter of one step of each peer, or the reason that there is none.

    Args:
        peers: names of those that run on a CPU.
        folder: for caches and valgrind's output.
        time_limit: seconds; peers that were not reached have that as their reason.
    """
    reason = why_not()
    if reason:
        return dict.fromkeys(peers, reason)
    folder.mkdir(parents=True, exist_ok=True)
    compiler = _build(folder)
    script = [sys.executable, "-m", "benchmarks.count", str(folder), *peers]
    valgrind = [
        *("valgrind", "--tool=callgrind", "--instr-atstart=no"),
        f"--callgrind-out-file={folder / 'callgrind'}",
    ]
    with open(folder / "log.txt", "w") as log:
        for command in (script, valgrind + script):
            try:
                subprocess.run(
                    command,
                    env={**os.environ, **ENVIRONMENT, "CXX": compiler},
                    stdout=log,
                    stderr=log,
                    timeout=time_limit,
                )
            except subprocess.TimeoutExpired:
                print(f"counting took longer than {time_limit:.0f} s", flush=True)
    found = json.loads((folder / "counts.json").read_text()) if (folder / "counts.json").exists() else {}
    return {peer: found.get(peer, "not counted in time") for peer in peers}


def _build(folder: Path) -> str:
    """The switch, as a library, and the compiler for AVX2; the latter's path."""
    compiler = os.environ.get("CXX", "g++")
    wrapper = folder / Path(compiler).name  # by the name Inductor knows what options a compiler has
    wrapper.write_text(COMPILER.format(compiler=shutil.which(compiler)))
    wrapper.chmod(0o755)
    source = folder / "switch.cpp"
    source.write_text(SWITCH)
    subprocess.run([wrapper, "-shared", "-fPIC", "-O1", "-o", folder / "switch.so", source], check=True)
    return str(wrapper)


def main(folder: Path, names: Sequence[str]) -> None:
    switch = ctypes.CDLL(str(folder / "switch.so"))
    counts: dict[str, float | str] = {}
    dumps = 0
    for name in names:
        peer = PEERS[name]
        gradients = make_gradients(SHAPES, peer.dtype, "cpu")
        with compile_cache(str(folder / "cache")):
            try:
                step = peer.make(make_parameters(SHAPES, peer.dtype, "cpu", gradients))
                for _ in range(STEPS_TO_SETTLE):
                    step()
            except Exception as error:  # a package's fault is that package's row
                counts[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
        switch.start()
        step()
        switch.stop()
        dumps += 1
        dump = folder / f"callgrind.{dumps}"
        if dump.exists():  # not in the run without valgrind
            counts[name] = _total(dump.read_text()) / sum(gradient.numel() for gradient in gradients)
            (folder / "counts.json").write_text(json.dumps(counts))


def _total(dump: str) -> int:
    return int(next(line for line in dump.splitlines() if line.startswith("totals:")).split()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    main(Path(sys.argv[1]), sys.argv[2:])
