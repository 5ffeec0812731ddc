"""Integration with Hugging Face's ``Trainer`` and its subclasses, such as TRL's ``SFTTrainer``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from accelerate.state import GradientState
from torch.distributed.checkpoint import FileSystemReader
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from collage_fx.choices import takes_options
from collage_fx.errors import CheckpointMismatchError
from collage_fx.installation import inner_optimizers, kept_backend
from collage_fx.integrations.trainers import InstallingCallback

__all__ = ["CollageCallback"]


@takes_options
class CollageCallback(InstallingCallback, TrainerCallback):  # type: ignore[misc]  # its types are not looked at
    """Callback that compensates the optimizer of a ``Trainer``: ``Trainer(callbacks=[CollageCallback()])``.

    The model must be in bfloat16 or float16 (``from_pretrained(..., dtype=torch.bfloat16)``). Any ``optim``
    of torch works, including the default ``adamw_torch_fused``. The trainer's checkpoints hold the error
    terms; ``model.safetensors`` alone holds only ``hi``: see :func:`collage_fx.save_full_state_dict`.

    Args:
        in_backward: step in the backward pass, by :func:`collage_fx.step_in_backward`; gradients are then
            clipped to the trainer's ``max_grad_norm`` by the norm of the step before. The norm that the
            trainer logs is of gradients that are gone, so 0.
        options: options of :class:`collage_fx.CollageBackend`, such as ``strategy="light"``. An optimizer
            that is installed keeps its own, and is not to be asked for others here. With ``metrics=True``
            the log of the trainer has :meth:`collage_fx.CollageBackend.scalars`, in ``log_history`` and in
            each tracker of ``report_to``; unless ``metrics_every`` is given, the steps that are logged are
            measured.

    Attributes:
        backend: the backend, for ``backend.report()``.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Install the optimizer after the trainer has created it and loaded its state.

        Raises:
            CheckpointMismatchError: the trainer has loaded FSDP2's checkpoint without its error terms.
        """
        if state is not None and state.global_step:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            _refuse_left_out(optimizer, folder)
        self.install(
            optimizer, model, accumulate=lambda: GradientState().sync_gradients, max_norm=args.max_grad_norm
        )
        _put_first(self)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the steps that the trainer logs."""
        of_epoch = state.max_steps / max(1, state.num_train_epochs)
        every = state.logging_steps if args.logging_strategy == "steps" else of_epoch
        self.backend.meter.follow(max(1, int(every)), state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Add the backend's scalars to the log of a training step, before trackers are given it."""
        if logs and "loss" in logs:
            found = self.backend.scalars()
            logs.update(found)
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(found)


def _put_first(callback: TrainerCallback) -> None:
    """Move a callback to the front of the trainer's callbacks, which call it now.

    The trainer puts trackers such as TensorBoard before a program's callbacks, and gives no access to others.
    """
    frame = inspect.currentframe()
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            handler.callbacks.remove(callback)
            handler.callbacks.insert(0, callback)
            return
        frame = frame.f_back


def _refuse_left_out(optimizer: Any, checkpoint: Path) -> None:
    """Raise if a plain optimizer has loaded a sharded checkpoint: it did not ask for its error terms."""
    folder = checkpoint / "optimizer_0"
    plain = [each for each in inner_optimizers(optimizer) if kept_backend(each) is None]
    if not plain or not folder.is_dir():
        return
    loaded = {key for each in plain for of in each.state.values() for key in of}
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    is_complete = any(key.startswith("collage_fx.") for key in loaded)
    if is_complete or not any(".collage_fx." in key for key in saved):
        return
    name = f"{type(plain[0]).__module__}.{type(plain[0]).__qualname__}"
    raise CheckpointMismatchError(
        "the trainer has loaded the optimizer before this callback could install it, so without the error "
        "terms that the checkpoint has",
        where=str(folder),
        remedy=f"Trainer(optimizer_cls_and_kwargs=(collage_fx.optim.of({name!r}), {{'lr': ...}})), which is "
        "installed when it is made",
    )
