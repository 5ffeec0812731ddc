"""Program for ``torchrun``: a tiny Llama in FSDP2's shards, its norms and head computed from hi + lo.

    torchrun --nproc-per-node 2 -m tests.integrations.llama FOLDER

Each process has the same batch, so that the mean of all gradients is the gradient of one process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import transformers
from torch.distributed.fsdp import fully_shard
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from collage_fx import full_precision_forward, install

STEPS = 8


def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def choose(model: Any) -> None:
    """Choose norms by their class, and the head."""
    full_precision_forward(each for each in model.modules() if isinstance(each, LlamaRMSNorm))
    full_precision_forward(model.lm_head, output_dtype=torch.float32)


def losses_of_steps(*, is_chosen: bool = True) -> list[float]:
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    if torch.distributed.is_initialized():
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    if is_chosen:
        choose(model)
    optimizer = install(torch.optim.AdamW(model.parameters(), lr=3e-4))
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 64, (2, 16), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found = losses_of_steps()
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
