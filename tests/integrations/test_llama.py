"""Norms and head of a Llama of transformers computed from hi + lo: by ``Trainer``, and in shards of FSDP2."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from collage_fx import full_value
from tests.support.processes import environment

transformers = pytest.importorskip("transformers", reason="pip install 'collage-fx[trainers]'")

from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402

from collage_fx.integrations.transformers import CollageCallback  # noqa: E402
from tests.integrations.llama import choose, losses_of_steps, tiny_llama  # noqa: E402


def output_of_float32_norms(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of a copy whose norms and head are float32, with hooks that convert, by hand."""
    kept = copy.deepcopy(model)
    for each, source in zip(kept.modules(), model.modules(), strict=True):
        if isinstance(each, LlamaRMSNorm) or source is model.get_submodule("lm_head"):
            vars(each).pop("forward")
            weight = full_value(source.get_parameter("weight")).float()
            each.register_parameter("weight", torch.nn.Parameter(weight))
            each.register_forward_pre_hook(lambda _, inputs: tuple(x.float() for x in inputs))
            if isinstance(each, LlamaRMSNorm):
                each.register_forward_hook(lambda _, inputs, output: output.bfloat16())
    logits: Tensor = kept(input_ids=tokens).logits
    return logits


def test_trainer(tmp_path: Path) -> None:
    model = tiny_llama()
    choose(model)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 64, (24, 16), generator=generator)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=8,
        learning_rate=1e-4,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[CollageCallback()],
    )
    trainer.train()
    norms = [each for each in model.modules() if isinstance(each, LlamaRMSNorm)]
    assert all(bool((full_value(each.weight) != each.weight).any()) for each in norms)
    model.eval()
    logits = model(input_ids=rows[:2]).logits
    assert logits.dtype is torch.float32
    assert torch.equal(logits, output_of_float32_norms(model, rows[:2]))
    trainer.save_model(str(tmp_path / "saved"))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))


def test_torchrun_with_two_processes(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.integrations.llama", str(tmp_path)]
    subprocess.run([sys.executable, *command], env=environment(), check=True)
    alone = losses_of_steps()
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [alone, alone]
    assert alone != losses_of_steps(is_chosen=False)
