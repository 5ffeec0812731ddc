"""Trainers that step in the backward pass leave the bits of trainers that step after it."""

from __future__ import annotations

import functools
import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collage_fx import backend_of, full_value
from collage_fx.errors import InvalidOptionError
from collage_fx.integrations.trainers import InstallingCallback
from tests.integrations import test_lightning as lightnings
from tests.integrations import test_transformers as transformers_own

pytestmark = pytest.mark.filterwarnings("error:collage_fx")

STEPS, ACCUMULATED = 6, 2


def alive(of: nn.Module) -> int:
    return sum(p.grad.nbytes for p in of.parameters() if p.grad is not None)


def trained_by_transformers(
    folder: Path, *, in_backward: bool, resume: bool = False, **others: Any
) -> tuple[list[Tensor], list[int]]:
    transformers = pytest.importorskip("transformers", reason="pip install 'collage-fx[trainers]'")
    from collage_fx.integrations.transformers import CollageCallback

    left: list[int] = []

    class Watched(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            left.append(alive(model))

    options = {"max_grad_norm": 0.0, "max_steps": STEPS, **others}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        save_steps=STEPS // 2,
        warmup_steps=2,
        learning_rate=1e-4,
        gradient_accumulation_steps=ACCUMULATED,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    model = transformers_own.tiny_gpt2()
    callbacks = [CollageCallback(in_backward=in_backward), Watched()]
    trainer = transformers.Trainer(
        model, arguments, train_dataset=transformers_own.data(), callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}") if resume else None)
    assert backend_of(trainer.optimizer).report().tensors
    return [full_value(p) for p in model.parameters()], left


def test_transformers_trainer(tmp_path: Path) -> None:
    expected, kept = trained_by_transformers(tmp_path / "after", in_backward=False)
    found, left = trained_by_transformers(tmp_path / "in", in_backward=True)
    assert all(map(torch.equal, found, expected))
    assert max(left[1:]) == 0 < min(kept)
    for folder in ("after", "in"):
        resumed, _ = trained_by_transformers(tmp_path / folder, in_backward=True, resume=True)
        assert all(map(torch.equal, resumed, expected))


def test_transformers_trainer_clips_by_the_norm_of_the_step_before(tmp_path: Path) -> None:
    expected, _ = trained_by_transformers(tmp_path / "after", in_backward=False, max_grad_norm=0.25)
    found, _ = trained_by_transformers(tmp_path / "in", in_backward=True, max_grad_norm=0.25)
    start = transformers_own.tiny_gpt2().parameters()
    moved = [value - p.detach() for value, p in zip(expected, start, strict=True)]
    off = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True)) ** 0.5
    way = sum(float(each.square().sum()) for each in moved) ** 0.5
    assert 0 < off < 0.2 * way  # norms change little from step to step


def trained_by_accelerate(*, in_backward: bool) -> list[Tensor]:
    accelerate = pytest.importorskip("accelerate", reason="pip install 'collage-fx[trainers]'")
    from collage_fx.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64)).bfloat16()
    own = torch.optim.AdamW(layers.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 40, (4 * STEPS, 8), generator=torch.Generator().manual_seed(0))
    batches: Any = torch.utils.data.DataLoader(tokens, batch_size=2)  # type: ignore[arg-type]
    model, optimizer, batches = prepare(accelerator, layers, own, batches, in_backward=in_backward)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(
                nn.functional.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten())
            )
            if in_backward and accelerator.sync_gradients:
                assert alive(model) == 0
            optimizer.step()
            optimizer.zero_grad()
    return [full_value(p) for p in layers.parameters()]


def test_accelerate() -> None:
    found, expected = (trained_by_accelerate(in_backward=way) for way in (True, False))
    assert all(map(torch.equal, found, expected))


def trained_by_lightning(*, in_backward: bool, **options: Any) -> list[Tensor]:
    lightning = pytest.importorskip("lightning.pytorch", reason="pip install 'collage-fx[trainers]'")
    from collage_fx.integrations.lightning import CollageCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            logits = self.layers(batch)
            return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch.flatten())

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert in_backward == (alive(self) == 0)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-true",
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[CollageCallback(in_backward=in_backward)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, torch.utils.data.DataLoader(lightnings.data(), batch_size=2))
    return [full_value(p) for p in module.parameters()]


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_lightning() -> None:
    found, expected = (trained_by_lightning(in_backward=way) for way in (True, False))
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_lightning_clips_no_values() -> None:
    with pytest.raises(InvalidOptionError, match="clipped by value"):
        trained_by_lightning(in_backward=True, gradient_clip_val=0.5, gradient_clip_algorithm="value")


@pytest.mark.parametrize("trainer", ["accelerate", "lightning", "transformers"])
def test_a_misspelt_keyword_is_named(trainer: str) -> None:
    pytest.importorskip(trainer, reason="pip install 'collage-fx[trainers]'")
    module = importlib.import_module(f"collage_fx.integrations.{trainer}")
    call = functools.partial(module.prepare, None) if trainer == "accelerate" else module.CollageCallback
    with pytest.raises(InvalidOptionError, match="'in_backwards'; did you mean in_backward"):
        call(in_backwards=True)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("clips_values", [False, True])
def test_clipping_by_value_is_refused_in_the_backward_pass_alone(
    in_backward: bool, max_norm: float | None, clips_values: bool
) -> None:
    layer = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    callback = InstallingCallback(in_backward=in_backward, strategy="light")
    refused = in_backward and max_norm is not None and clips_values
    with pytest.raises(InvalidOptionError, match="clipped by value") if refused else nullcontext():
        callback.install(optimizer, layer, accumulate=1, max_norm=max_norm, clips_values=clips_values)
    assert backend_of(optimizer) is callback.backend
    assert callback.backend.options.strategy == "light"
