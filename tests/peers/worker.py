"""Process that runs a job: pytest on a suite with optimizers watched, or a script.

A suite's own package may be named ``tests``, as ours is; so this file is run by its path, and ``sys.modules``
forgets ours before pytest collects.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the job in the first argument; the exit status is pytest's, or the script's."""
    import contextlib
    import json
    import runpy

    import pytest
    import torch

    from tests.peers.making import Made, inputs_follow_parameters, watch
    from tests.peers.plugin import Recorder
    from tests.peers.recording import Job
    from tests.support.substitutes import lowered_as

    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    made = Made(job.install, torch.bfloat16 if job.dtype == "bf16" else None, job.shaken)
    if not job.judges:
        torch._inductor.config.fallback_random = (
            True  # compiled code draws the numbers that eager torch draws
        )
        watch(made)
        if made.dtype is not None:
            inputs_follow_parameters()
    if job.cpu_for_cuda:
        for cls in (torch.Tensor, torch.nn.Module):
            cls.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    recorder = Recorder(job, made)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    with lowered_as("operation by operation") if job.interpreted else contextlib.nullcontext():
        if job.is_script:
            sys.argv = job.tests
            made.is_on = True
            runpy.run_path(job.tests[0], run_name="__main__")
            return 0
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
        return int(pytest.main([*options, *job.tests], plugins=[recorder]))


if __name__ == "__main__":
    sys.exit(main())
