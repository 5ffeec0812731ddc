"""Hugging Face's ``Trainer``, with its default optimizer, trains as float64 would and resumes to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import collage_fx.optim
from collage_fx import backend_of, full_value
from collage_fx.errors import CheckpointMismatchError
from collage_fx.state.packed import is_packed
from tests.support.processes import Processes
from tests.support.replay import DEFAULTS, KEPT, Kept, Replay
from tests.support.training import differences, everything

transformers = pytest.importorskip("transformers", reason="pip install 'collage-fx[trainers]'")

from collage_fx.integrations.transformers import CollageCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error:collage_fx")

STEPS, SAVED_AFTER, CLIP = 16, 8, 0.25


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 40, (24, 16), generator=generator)  # a third of the vocabulary is never seen
    return [{"input_ids": row, "labels": row} for row in rows]


def tiny_gpt2() -> Any:
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 64, "n_positions": 16, "vocab_size": 64}
    without = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **without)).to(torch.bfloat16)


def train(
    folder: Path,
    kept: Kept,
    resume_from: Path | None = None,
    model: Callable[[], Any] = tiny_gpt2,
    **others: Any,
) -> tuple[Replay, CollageCallback]:
    class Recorded(transformers.Trainer):  # type: ignore[misc, name-defined]  # there are no types of it
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
            optimizer: Optimizer = super().create_optimizer(*args, **kwargs)
            self.replay = Replay(optimizer)
            return optimizer

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=SAVED_AFTER,
        warmup_steps=4,
        learning_rate=1e-4,
        weight_decay=0.1,
        max_grad_norm=CLIP,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **others,
    )
    callback = CollageCallback(**kept.options)
    trainer = Recorded(model=model(), args=arguments, train_dataset=data(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return trainer.replay, callback


@pytest.mark.parametrize("kept", KEPT)
def test_its_default_optimizer_is_compensated_and_resumed_to_the_bit(kept: Kept, tmp_path: Path) -> None:
    replay, callback = train(tmp_path, kept)
    assert replay.optimizer.defaults["fused"]
    assert replay.learning_rates[0] == 0 < replay.learning_rates[1]
    assert len(replay.learning_rates) == STEPS
    replay.assert_clipped(CLIP)
    replay.assert_compensated(kept)
    assert backend_of(replay.optimizer) is callback.backend
    whole = everything(replay.optimizer)

    torch._dynamo.reset()
    resumed, _ = train(tmp_path, kept, resume_from=tmp_path / f"checkpoint-{SAVED_AFTER}")
    assert len(resumed.learning_rates) == STEPS - SAVED_AFTER
    assert not differences(everything(resumed.optimizer), whole)


#: Of float32 parameters: options, and the error of a displacement that comes from rounding the moments.
FLOAT32 = [
    pytest.param(Kept({"bytes_per_parameter": 8.2}, 24, 0.001), id="8.2 bytes"),  # 2 % are not packed
    pytest.param(Kept({"state": "bf16"}, 24, 0.005), id="bf16"),
    pytest.param(Kept({"bytes_per_parameter": 6.2}, 24, 0.016), id="6.2 bytes"),
]


def gpt2_with_a_frozen_table() -> Any:
    """Float32 weights, of which one has no gradient."""
    model = tiny_gpt2().float()
    model.transformer.wpe.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("kept", FLOAT32)
def test_float32_weights_under_autocast_with_packed_moments(kept: Kept, tmp_path: Path) -> None:
    autocast: dict[str, Any] = {"model": gpt2_with_a_frozen_table, "bf16": True}
    replay, callback = train(tmp_path, kept, **autocast)
    assert replay.learning_rates[0] == 0 < replay.learning_rates[1]
    replay.assert_near(kept.of_moments)
    moments = [replay.optimizer.state[p]["exp_avg"] for p in replay.parameters if p.requires_grad]
    assert {is_packed(each) for each in moments if each.numel() >= 4096} == {True}
    assert callback.backend is not None
    whole = everything(replay.optimizer)

    torch._dynamo.reset()
    resumed, _ = train(tmp_path, kept, resume_from=tmp_path / f"checkpoint-{SAVED_AFTER}", **autocast)
    assert not differences(everything(resumed.optimizer), whole)


def test_low_rank_adapters(tmp_path: Path) -> None:
    """Those that it resumes PEFT makes float32, which gets all of hi + lo."""
    peft = pytest.importorskip("peft", reason="pip install 'collage-fx[trainers]'")
    options = {"r": 4, "lora_alpha": 64, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    adapters = peft.LoraConfig(**options, init_lora_weights=False)

    def model() -> Any:
        return peft.get_peft_model(tiny_gpt2(), adapters, autocast_adapter_dtype=False)

    replay, _ = train(tmp_path, DEFAULTS, model=model)
    replay.assert_clipped(CLIP)
    replay.assert_compensated()

    torch._dynamo.reset()
    resumed, _ = train(tmp_path, DEFAULTS, resume_from=tmp_path / f"checkpoint-{SAVED_AFTER}", model=model)
    assert {p.dtype for p in resumed.parameters} == {torch.float32}
    for p, q in zip(replay.parameters, resumed.parameters, strict=True):  # gradients are other ones since
        assert (q - full_value(p)).norm() < 0.1 * (q - p).norm()


def resumed_by_dcp(folder: Path, by_name: bool) -> tuple[str, bool]:
    """Resume FSDP2 as accelerate does; return the callback's refusal, and whether error terms are there."""

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).bfloat16()
        fully_shard(model)
        kind: Any = collage_fx.optim.of("torch.optim.adamw.AdamW") if by_name else torch.optim.AdamW
        return model, kind(model.parameters(), lr=1e-4)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 8).bfloat16()).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    step(model, collage_fx.install(optimizer))
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(saved, checkpoint_id=folder / "checkpoint-1" / "optimizer_0")
    model, optimizer = made()
    asked = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.load(asked, checkpoint_id=folder / "checkpoint-1" / "optimizer_0")
    set_optimizer_state_dict(model, optimizer, asked["optimizer"])
    arguments = SimpleNamespace(output_dir=str(folder), max_grad_norm=None)
    try:
        CollageCallback().on_train_begin(arguments, SimpleNamespace(global_step=1), None, model, optimizer)
    except CheckpointMismatchError as refusal:
        return str(refusal), False
    return "", all(collage_fx.error_terms(p) for p in model.parameters())


@pytest.mark.parametrize("by_name", [False, True])
def test_a_resume_of_fsdp2_without_error_terms_is_refused(tmp_path: Path, by_name: bool) -> None:
    """They were lost, with a warning that gave other reasons; the remedy keeps them."""
    processes = Processes(2, tmp_path)
    try:
        found = processes.run(resumed_by_dcp, tmp_path / "run", by_name)
    finally:
        processes.stop()
    for refusal, has_terms in found:
        assert has_terms == by_name
        assert bool(refusal) != by_name
        assert by_name or "collage_fx.optim.of('torch.optim.adamw.AdamW')" in refusal
