"""A loop under ``accelerate`` trains as float64 would, resumes to the bit, and has torch.compile's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from collage_fx import CollageError, convert, full_value, install
from tests.support.replay import KEPT, Kept, Replay
from tests.support.training import compiled, differences, everything, set_as_own_step

accelerate = pytest.importorskip("accelerate", reason="pip install 'collage-fx[trainers]'")

from collage_fx.integrations.accelerate import prepare  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error:collage_fx")

STEPS, SAVED_AFTER, ACCUMULATED, CLIP = 16, 8, 2, 0.25


def data() -> Any:
    return torch.randint(0, 40, (4 * STEPS, 8), generator=torch.Generator().manual_seed(0))


def train(folder: Path, kept: Kept, *, resume: bool = False, by_hand: bool = False) -> Replay:
    """Train by ``prepare``, or with a compiled step that is set by hand."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    own = AdamW(layers.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    replay = Replay(own)
    if by_hand:
        set_as_own_step(own, compiled(own, **kept.options))
    objects = layers, own, DataLoader(data(), batch_size=2), LambdaLR(own, lambda step: min(step, 4) / 4)
    prepared = accelerator.prepare(*objects) if by_hand else prepare(accelerator, *objects, **kept.options)
    model, optimizer, batches, warm_up = prepared
    if resume:
        accelerator.load_state(str(folder))
        batches = accelerator.skip_first_batches(batches, SAVED_AFTER * ACCUMULATED)
    for batch in batches:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(
                model(batch).float().flatten(0, 1), batch.roll(-1, 1).flatten()
            )
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and len(replay.learning_rates) == SAVED_AFTER and not resume:
            accelerator.save_state(str(folder))
    return replay


@pytest.mark.parametrize("kept", KEPT)
def test_it_is_compensated_and_resumed_to_the_bit(kept: Kept, tmp_path: Path) -> None:
    replay = train(tmp_path, kept)
    assert replay.learning_rates[0] == 0 < replay.learning_rates[1]
    assert len(replay.learning_rates) == STEPS
    replay.assert_clipped(CLIP)
    replay.assert_compensated(kept)
    whole = everything(replay.optimizer)

    torch._dynamo.reset()
    resumed = train(tmp_path, kept, resume=True)
    assert len(resumed.learning_rates) == STEPS - SAVED_AFTER
    assert not differences(everything(resumed.optimizer), whole)


@pytest.mark.parametrize("kept", KEPT)
def test_its_bits_are_those_of_the_compiled_step(kept: Kept, tmp_path: Path) -> None:
    ours, by_hand = (train(tmp_path, kept, by_hand=by_hand) for by_hand in (False, True))
    assert not differences(everything(ours.optimizer), everything(by_hand.optimizer))


def test_a_wrapper_that_keeps_the_step_for_a_scaler_calls_the_installed_one() -> None:
    accelerate.Accelerator(cpu=True)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))], lr=1e-3)
    wrapper = accelerate.optimizer.AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu"))
    install(wrapper)
    assert wrapper._optimizer_original_step_method == inner.step
    kept = [each.cell_contents for each in wrapper._optimizer_patched_step_method.__closure__]
    assert inner.step in kept


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_running_job_is_converted_and_taken_back(mixed_precision: str) -> None:
    """With ``"bf16"``, the model of accelerate computes under autocast from beginning to end."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # as of another process
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64))
    own = AdamW(layers.parameters(), lr=1e-3)
    model, optimizer, schedule = accelerator.prepare(layers, own, LambdaLR(own, lambda step: 0.9**step))
    losses, rates = [], []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        if model[0].weight.dtype is not dtype:
            before = [full_value(p) for p in model.parameters()]
            convert(model, optimizer, dtype)
            assert all(map(torch.equal, before, map(full_value, model.parameters())))
        for _ in range(4):
            text = data()[:8]
            logits = model(text).float().flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, text.roll(-1, 1).flatten())
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        rates.append(own.param_groups[0]["lr"])
    assert losses == sorted(losses, reverse=True)
    assert rates == pytest.approx([1e-3 * 0.9**4, 1e-3 * 0.9**8, 1e-3 * 0.9**12])
    assert {int(own.state[p]["step"]) for p in model.parameters()} == {12}
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_job_with_a_gradient_scaler_is_not_converted() -> None:
    accelerate.Accelerator(cpu=True)
    layers = torch.nn.Linear(4, 4)
    wrapped = accelerate.optimizer.AcceleratedOptimizer(
        AdamW(layers.parameters()), scaler=torch.amp.GradScaler("cpu")
    )
    with pytest.raises(CollageError, match="gradient scaler"):
        convert(layers, wrapped)
    assert layers.weight.dtype is torch.float32
