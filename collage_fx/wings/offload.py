"""Optimizers in host memory, for models on a device: state and error terms take no memory of the device.

``offload(optimizer)``. A parameter on the device is hi alone, 2 bytes. Gradients go down and new hi go up, 2
bytes each, while the backward pass goes on. The host steps by compiled kernels, with all of its cores.

Note [Twins]
------------
The optimizer works with *twins* of the parameters in host memory, so its state is there, too. A hook copies a
complete gradient to the host, and frees it. A thread waits for the copy, steps twins a part at a time as in
``gradient_release.py``, and copies their hi back. ``optimizer.step()`` waits for the thread. The next forward
pass waits, on the device, for the last copies.

On a GPU twins and gradients are in pinned memory, which is copied without work for the host.

Only the twin has error terms, which ``full_value``, ``assign`` and ``error_terms`` of the parameter use. What
the program writes to the parameter reaches the twin by ``state/host_twins.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from collage_fx.choices import takes_options
from collage_fx.errors import UnsupportedOptimizerError, UnsupportedTensorError
from collage_fx.installation import InstallOptions, install, kept_backend, remove_release
from collage_fx.options import refuse_unknown
from collage_fx.state import hand_over, host_twin, parameter_names, set_host_twin, uploading
from collage_fx.torch_compat import gradient_dtype, sharding_of
from collage_fx.wings import gradient_release


@takes_options
def offload(
    optimizer: Any,
    *,
    accumulate: int | Callable[[], bool] = 1,
    bucket_bytes: int | None = None,
    max_norm: float | None = None,
    clip: gradient_release.Clip = "last step",
    scaler: torch.amp.GradScaler | None = None,
    **options: Unpack[InstallOptions],
) -> Offload:
    """Keep an optimizer's state and error terms in host memory, and step there, in the backward pass.

    The program stays as it is: it calls ``optimizer.step()`` after each backward pass. The bits are those of
    the optimizer of a model on the CPU. Checkpoints are those of any installed optimizer.

    Args:
        optimizer: an optimizer of parameters on a device, as for :func:`~collage_fx.step_in_backward`, before
            its first step or later. It is installed.
        accumulate: number of backward passes, or a function; gradients are summed on the host. This and the
            next four are options of :func:`~collage_fx.step_in_backward`.
        bucket_bytes: bytes of gradients that wait on the host to be stepped together.
        max_norm: largest norm of the gradients.
        clip: kind of clipping.
        scaler: the ``GradScaler`` that scales the loss.
        options: options of :func:`collage_fx.install`, such as ``bytes_per_parameter=8``; an optimizer that
            is installed keeps its own, and is not to be asked for others here.

    Returns:
        a handle: ``release.remove()`` moves everything back to the device.

    Raises:
        CollageError: the optimizer needs all gradients at once, or a closure; or a parameter is a DTensor,
            for which FSDP2 has ``CPUOffloadPolicy``. Nothing has changed.
    """
    refuse_unknown(options.keys() - {"backend"}, offload)
    given = gradient_release.ReleaseOptions(accumulate, bucket_bytes, max_norm, clip, scaler)
    chosen = gradient_release.sole_optimizer(optimizer, given, where="offload")
    _refuse_dtensors(chosen)
    gradient_release.refuse_joint(chosen, where="offload")
    if kept := kept_backend(chosen, options):
        options = {"backend": kept}
    return Offload(chosen, given, options)


def _refuse_dtensors(optimizer: Optimizer) -> None:
    for name, parameter in parameter_names(optimizer):
        if sharding_of(parameter) is not None:
            raise UnsupportedTensorError(
                "a DTensor, which is not offloaded here",
                where=name,
                remedy="shard the model with fully_shard(..., offload_policy=CPUOffloadPolicy()), and "
                "install the optimizer",
            )


class Link:
    """Copies between a device and the host; here the device is the CPU, as in tests."""

    def host_like(self, tensor: Tensor) -> Tensor:
        """Return memory on the host with the layout of a tensor."""
        return torch.empty_like(tensor, device="cpu")

    def download(self, into: Tensor, tensor: Tensor) -> Callable[[], None]:
        """Begin to copy a tensor to the host; return a function that waits for the copy."""
        into.copy_(tensor)
        return lambda: None

    def upload(self, into: Tensor, tensor: Tensor) -> None:
        """Begin to copy a tensor to the device."""
        into.copy_(tensor)

    def settle(self) -> None:
        """Make the device wait for the copies before it continues."""


class CudaLink(Link):
    """Copies between a CUDA device and pinned memory, on streams of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._down, self._up = (torch.cuda.Stream(device) for _ in range(2))

    def host_like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def download(self, into: Tensor, tensor: Tensor) -> Callable[[], None]:
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            into.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._down)
            arrived = torch.cuda.Event()
            arrived.record()
        return arrived.synchronize

    def upload(self, into: Tensor, tensor: Tensor) -> None:
        with torch.cuda.stream(self._up):
            into.copy_(tensor, non_blocking=True)

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._up)


def link_to(device: torch.device) -> Link:
    """Return the copies between a device and the host."""
    return CudaLink(device) if device.type == "cuda" else Link()


class Offload(gradient_release.GradientRelease):
    """Optimizer whose state is in host memory: the result of :func:`offload`.

    Attributes:
        twins: device parameters and their twins in host memory.
        norm, largest: as in :class:`~collage_fx.GradientRelease`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        given: gradient_release.ReleaseOptions | None = None,
        options: InstallOptions | None = None,
        connect: Callable[[torch.device], Link] = link_to,
    ) -> None:
        remove_release(optimizer)  # twins of twins would not be where gradients come
        is_reduced_late = gradient_release.reduced_late(p for _, p in parameter_names(optimizer))
        self._connect = connect
        self._link_to: dict[torch.device, Link] = {}
        named = list(parameter_names(optimizer))
        self.twins = [(p, self._twin_of(p)) for _, p in named]
        self._device_of = {id(twin): p for p, twin in self.twins}
        _give_parameters(optimizer, {id(p): twin for p, twin in self.twins})
        for p, twin in self.twins:
            set_host_twin(p, twin)
        install(optimizer, **(options or {}))
        of_twins = {id(twin): name for (name, _), (_, twin) in zip(named, self.twins, strict=True)}
        super().__init__(optimizer, of_twins, given or gradient_release.ReleaseOptions())
        self._worker = ThreadPoolExecutor(1, "collage_fx_offload")
        self._jobs: list[Future[None]] = []
        if not is_reduced_late:
            self.watch()

    def _twin_of(self, parameter: Tensor) -> torch.nn.Parameter:
        """Return a copy of a parameter in host memory."""
        if parameter.device not in self._link_to:
            self._link_to[parameter.device] = self._connect(parameter.device)
        with torch.no_grad():
            made = self._link_to[parameter.device].host_like(parameter.detach())
            made.copy_(parameter)
        twin = torch.nn.Parameter(made, parameter.requires_grad)
        if (dtype := gradient_dtype(parameter)) is not parameter.dtype:
            twin.grad_dtype = dtype
        return twin

    def _ask(self) -> None:
        """Give twins to parameters on a device that the optimizer has now, and had not before."""
        lists = [group["params"] for group in self._optimizer.param_groups]
        new = [(each, i, p) for each in lists for i, p in enumerate(each) if id(p) not in self._device_of]
        if new:
            _refuse_dtensors(self._optimizer)
        for each, i, p in new:
            twin = each[i] = self._twin_of(p)
            if p in self._optimizer.state:
                self._optimizer.state[twin] = self._optimizer.state.pop(p)
            set_host_twin(p, twin)
            self.twins.append((p, twin))
            self._device_of[id(twin)] = p
        held = {id(twin) for each in lists for twin in each}
        for p, twin in self.twins:
            if id(twin) not in held:  # the program has taken it from the optimizer
                set_host_twin(p, None)
                hand_over(twin, p, name="offload")
                del self._device_of[id(twin)]
            elif twin.requires_grad != p.requires_grad:
                twin.requires_grad_(p.requires_grad)
        self.twins = [each for each in self.twins if id(each[1]) in held]
        super()._ask()

    def _given(self) -> list[Tensor]:
        return [*self._device_of.values()]

    def _hook_of(self, twin: Tensor) -> tuple[Tensor, Callable[[Tensor], None]]:
        return self._device_of[id(twin)], lambda p: self.begin(p, twin)

    def finish(self, step: Callable[[], Any]) -> Any:
        """Wait for the host, step the twins that are left, and make the device wait for their values."""
        self._ask()
        for p, twin in self.twins:
            if p.grad is not None:  # it came before the parameter was the optimizer's
                self.begin(p, twin)
        self._wait()
        returned = super().finish(step)
        for link in self._link_to.values():
            link.settle()
        return returned

    def _wait(self) -> None:
        """Wait until nothing runs in the thread, and raise its first exception."""
        jobs, self._jobs = self._jobs, []
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            wait_for(jobs)
            raise

    def hand_on(self, parameters: Sequence[Tensor]) -> None:
        """Copy the values of stepped twins to the device."""
        with torch.no_grad():
            for twin in parameters:
                on_device = self._device_of[id(twin)]
                with uploading(on_device):
                    self._link_to[on_device.device].upload(on_device, twin)

    def refuse_copy(self) -> None:
        """Raise: a copy of the twins would step no copy of the model."""
        raise UnsupportedOptimizerError(
            "an offloaded optimizer is copied, or pickled: it works with tensors in host memory, so the copy "
            "would step no model",
            where=f"a copy of {type(self._optimizer).__name__}",
            remedy="copy the model, make an optimizer of the copy, and give it the state: "
            "other.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
        )

    def remove(self) -> None:
        """Move the optimizer back to the device, with its state and error terms."""
        super().remove()
        self._worker.shutdown()
        for p, _ in self.twins:
            set_host_twin(p, None)
        _give_parameters(self._optimizer, {id(twin): p for p, twin in self.twins})

    def begin(self, parameter: Tensor, twin: Tensor) -> None:
        """Copy a gradient to the host, and free it; the thread goes on from there."""
        if self._is_watching and not self._jobs:
            self._begin()
            if not self._is_watching:
                return
        if id(twin) not in self._device_of:  # the program has taken it from the optimizer
            return
        gradient = parameter.grad
        assert gradient is not None
        link, is_complete = self._link_to[parameter.device], self.is_last_pass(twin)
        if is_complete and self._common is None:  # the thread may be late
            self._common = gradient_release.CommonValues(self._optimizer)
        host_twin(parameter)  # of what the program has written since the last step
        with torch.no_grad():
            on_host = link.host_like(gradient)
            wait = link.download(on_host, gradient)
        parameter.grad = None
        if any(job.done() and job.exception() for job in self._jobs):
            self._wait()
        self._jobs.append(self._worker.submit(self._arrive, twin, on_host, wait, is_complete))

    def _arrive(self, twin: Tensor, gradient: Tensor, wait: Callable[[], None], is_complete: bool) -> None:
        """Give a twin its gradient, in the thread."""
        wait()
        with torch.no_grad():
            if twin.grad is None:
                twin.grad = gradient
            else:
                twin.grad.add_(gradient)
        self.take_complete(twin, is_complete)


def _give_parameters(optimizer: Optimizer, replaced: dict[int, Any]) -> None:
    """Replace an optimizer's parameters, and move its state and their error terms to where they are."""
    saved = optimizer.state_dict()
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(p), p) for p in group["params"]]
    optimizer.state.clear()
    optimizer.load_state_dict(saved)
