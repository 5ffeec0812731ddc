"""A CUDA card that is not there.

torch's build for CUDA, Dynamo, Inductor, Triton with its ptxas, CUDA graphs, and the project's launches run
as on an H100, on a machine without a card. The driver under them is a stub. Times of the device mean nothing;
those of the host are a card's where kernels do nothing (``COLLAGE_FX_FAKE_CUDA_IDLE=1``).

    ./dev test --fake-gpu                   # the tests marked gpu; --fake-gpu=2.11 for torch 2.11
    ./dev test --fake-gpu -k two_launches
    python3 -m tests.support.fake_cuda .venv-fake-gpu python -m collage_fx doctor

The first time, 760 MB are downloaded, and 2.2 GB of disk are used. This needs Linux on x86-64, a C++
compiler, and binutils.

Note [What is executed]
-----------------------
* Triton's kernels, the project's and Inductor's: by ``emulator.py``, from their PTX, all threads. Each access
  has to be in an allocation, and aligned; else the next wait returns an error and the test fails.
* torch's own operators, and copies that convert: by the CPU, at once, behind all that is queued
  (``operators.py``). So a race between an operator and a kernel is not seen.
* Copies, streams, events, graphs, allocations: by ``driver/``, in queues that run when something waits for
  them, as late as CUDA allows. Streams that nothing orders run in the least convenient order: a race that a
  card shows rarely is seen each time. Memory begins as 0xA5; what has been freed is never used again. A call
  that a capture does not allow returns error 900.
* ptxas: it runs, its machine code does not.

Not executed, or not as on a card:

* what ptxas or the card decide of last bits: contraction in ptxas, ``div.full``, approximations of exp2, log2
  and sine (here to nearest), the order of atomic additions;
* products of cuBLAS (the CPU's here), tensor cores (``tl.dot``), asynchronous copies, clusters;
* the profiler: ``benchmarks.timing.launches`` is replaced in tests by the driver's counters;
* NCCL, cuDNN, cuSOLVER: each function returns 801;
* random numbers of the card's generators (the CPU's here);
* streams that join a capture, and two threads of the host that use the card.

Variables: ``COLLAGE_FX_FAKE_CUDA_DEVICES=1`` gives one card and not two, ``_EAGER=1`` executes at once,
``_VERBOSE=1`` prints each copy and launch, ``_IDLE=1`` lets kernels do nothing. With
``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` each tensor has bounds of its own, and the emulator is a memcheck: it is
run as ``compute-sanitizer``. pytest needs ``--show-capture=no``, or prints torch's trace log.
"""

from __future__ import annotations

import os

#: Names of variables: set in the environment; kernels do nothing; number of cards.
HERE, IDLE, DEVICES = (f"COLLAGE_FX_FAKE_CUDA{each}" for each in ("", "_IDLE", "_DEVICES"))

#: Whether this process has the card.
IS_HERE = bool(os.environ.get(HERE))
