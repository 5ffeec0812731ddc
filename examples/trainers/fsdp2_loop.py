"""Train a small Llama in pure bfloat16 in FSDP2's shards: ``install(optimizer)`` after ``fully_shard``.

torchrun --nproc-per-node 2 -m examples.trainers.fsdp2_loop [--resume]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from collage_fx import backend_of, install


def train(out: Path, steps: int = 200, *, resume: bool = False) -> Any:
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    rows: Any = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: steps * 8 * 64].view(-1, 8, 64)
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    every = max(1, steps // 10)
    install(optimizer, bytes_per_parameter=8, metrics=True, metrics_every=every)
    if resume:
        states = get_state_dict(model, optimizer)
        checkpoint.load(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=out)
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    for step in range(steps // 2 if resume else 0, steps):
        batch = rows[step][dist.get_rank() :: dist.get_world_size()].to(device)  # this process's part
        (loss := model(input_ids=batch, labels=batch).loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0:
            scalars = backend_of(optimizer).scalars()  # on all processes: shards are summed
            print(f"process {dist.get_rank()}, step {step + 1}: loss {loss.item():.3f}, {scalars}")
        if step + 1 == steps // 2:
            states = get_state_dict(model, optimizer)
            checkpoint.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=out)
    return optimizer


if __name__ == "__main__":
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(Path("trained/fsdp2"), resume="--resume" in sys.argv)
    dist.destroy_process_group()
