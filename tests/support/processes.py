"""Functions that several processes run at once, connected by gloo; what they are given of the environment."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed

__all__ = ["Processes", "environment"]

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Ours, in which collage_fx is found also where it is not installed."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


class Processes:
    """Processes that wait for functions to run. They are started once, because that takes seconds.

    Args:
        count: how many; also the world size.
        directory: an empty one.
    """

    def __init__(self, count: int, directory: Path) -> None:
        # Forked from a process that has imported all of this, and done nothing else: torch takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._inductor.compile_fx", "torch.distributed.fsdp", "collage_fx"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            arguments = (rank, count, directory / "store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 300) -> list[Any]:
        """What ``function(*args)`` returns in each process, to which it is sent by name.

        Raises AssertionError with the traceback of a process in which it has raised.
        """
        self.start(function, *args)
        answers, results = [], []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(seconds), f"process {rank} has not answered within {seconds} s"
            answers.append(pipe.recv())
        for rank, (succeeded, result) in enumerate(answers):
            assert succeeded, f"in process {rank}:\n{result}"
            results.append(result)
        return results

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Have ``function(*args)`` run in each process, without waiting for it."""
        for pipe in self._pipes:
            pipe.send((function, args))

    def kill(self) -> None:
        """End the processes by SIGKILL, whatever they are doing."""
        for process in self._processes:
            process.kill()
            process.join()

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


def _serve(rank: int, count: int, store: Path, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(*args)))
        except BaseException:  # of which torch.distributed.checkpoint has its own
            pipe.send((False, traceback.format_exc()))
