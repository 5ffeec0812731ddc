"""Train the GPT of train_gpt.py in pure bfloat16 by FSDP2, killed and resumed without losing a bit.

    torchrun --nproc-per-node 2 -m examples.train_fsdp [--steps 200] [--bytes-per-parameter 5.1]
        [--device cpu] [--quick] [--resume]

Parameters, gradients, optimizer state and error terms are in pieces, of which each process has one. The
learning rate warms up from 0, gradients are clipped, and torch.distributed.checkpoint saves all of it now
and then. Kill it whenever you like: with ``--resume`` it goes on from the last complete checkpoint, and every
loss is the one that it would have been, to the last bit. So are those of one process, ``python -m
examples.train_fsdp``, which takes the parts of a batch one after the other.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from collage_fx import install
from examples.train_gpt import GPT, QUICK, Recipe, Text, batches, loss_of

PARTS = 2  # of a batch, whatever the number of processes that share them


def sharded(model: GPT, device: str) -> GPT:
    """The model, its parameters in as many pieces as there are processes."""
    if torch.distributed.is_initialized():
        mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def piece_of(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def summed(number: Tensor) -> Tensor:
    """A number of each process, added up."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(number)
    return number


@torch.no_grad()
def clip(parameters: Iterable[Tensor], most: float) -> None:
    """Scale gradients down to a norm of ``most``.

    ``clip_grad_norm_`` rounds the norms of pieces to bfloat16 before it adds them, so that the result
    depends on the number of processes. A sum in float64, rounded to float32, does not.
    """
    pieces = [piece_of(p.grad) for p in parameters]
    norm = summed(sum((g.double().square().sum() for g in pieces), torch.zeros((), dtype=torch.float64)))
    for gradient in pieces:
        gradient.mul_((most / norm.sqrt().float()).clamp(max=1))


def lr_of(recipe: Recipe, step: int) -> float:
    """The warm-up begins with 0."""
    return recipe.lr(step - 1) if step else 0.0


def train(
    recipe: Recipe,
    text: Text,
    device: str,
    folder: Path,
    *,
    save_every: int,
    resume: bool,
    bytes_per_parameter: float | None = None,
) -> Iterator[tuple[int, float]]:
    """Pairs (number of the step, its loss over the whole batch)."""
    rank, world = 0, 1
    if torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(recipe.seed)
    model = sharded(GPT(recipe).to(device, torch.bfloat16), device)
    optimizer = torch.optim.AdamW(
        model.named_parameters(), lr=0.0, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    install(optimizer, bytes_per_parameter=bytes_per_parameter)

    done = load_last(model, optimizer, folder) if resume else 0
    data = batches(text.training, recipe.batch, recipe.context, recipe.seed, device)
    for number, batch in enumerate(itertools.islice(data, done, recipe.steps), done):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = lr_of(recipe, number)
        loss = torch.zeros((), device=device)
        for part in range(rank, PARTS, world):
            of_part = loss_of(model, *(each[part::PARTS] for each in batch))
            (of_part * (world / PARTS)).backward()
            loss += of_part.detach() / PARTS
        clip(model.parameters(), recipe.clip)
        optimizer.step()
        if (number + 1) % save_every == 0:
            save(model, optimizer, folder / f"step-{number + 1:06}")
        yield number, summed(loss).item()


def save(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    states, optimizer_states = get_state_dict(model, optimizer)
    checkpoint.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=folder)


def load_last(model: nn.Module, optimizer: Optimizer, folder: Path) -> int:
    """Load the last complete checkpoint, and return how many steps had been taken; 0 if there is none."""
    # What torch writes last; a process that is killed before has left no checkpoint.
    complete = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    if not complete:
        return 0
    states, optimizer_states = get_state_dict(model, optimizer)
    found: dict[str, Any] = {"model": states, "optimizer": optimizer_states}
    checkpoint.load(found, checkpoint_id=complete[-1])
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return int(complete[-1].name.removeprefix("step-"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT in pure bfloat16 by FSDP2.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bytes-per-parameter", type=float, help="see CollageBackend")
    parser.add_argument("--save-every", type=int, default=20, help="steps (default 20)")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint, if there is one"
    )
    parser.add_argument("--out", type=Path, default=Path("fsdp_checkpoints"), help="folder for checkpoints")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.set_num_threads(1)
    if "RANK" in os.environ:  # torchrun says so
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
        if PARTS % torch.distributed.get_world_size():
            parser.error(f"a batch has {PARTS} parts, which so many processes cannot share")
    recipe = replace(QUICK if options.quick else Recipe(), steps=options.steps)
    text = Text.of_standard_library()
    steps = train(
        recipe,
        text,
        options.device,
        options.out,
        save_every=options.save_every,
        resume=options.resume,
        bytes_per_parameter=options.bytes_per_parameter,
    )
    for number, loss in steps:
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            print(f"step {number}: loss {loss!r}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
