"""Forward passes from hi + lo: the bits of modules whose parameters are kept in float32.

The other side of each comparison is an ordinary module with float32 parameters, which knows nothing of the
library but the values.
"""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from collage_fx import (
    assign,
    error_terms,
    full_precision_forward,
    full_value,
    install,
    offload,
    step_in_backward,
)
from collage_fx.choices import ErrorFormatName
from collage_fx.errors import InvalidOptionError, UnsupportedTensorError
from collage_fx.numerics import ERROR_FORMATS
from collage_fx.torch_compat import records
from collage_fx.wings.full_precision import _Chosen
from tests.support.memory import left, peak
from tests.support.processes import Processes

TOKENS, WIDTH, LAYERS = 13, 16, 4
M = TypeVar("M", bound=nn.Module)


class RootNorm(nn.Module):
    """RMSNorm as transformers writes it: it converts to float32 and back by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class Block(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = norm()
        self.product = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.product(self.norm(x))


NORMS = (partial(nn.LayerNorm, WIDTH), partial(nn.RMSNorm, WIDTH), RootNorm)


class Model(nn.Module):
    """Blocks with norms of all kinds, or of one; the head is tied to the embedding if asked."""

    blocks: Any
    head: Any

    def __init__(self, *, is_tied: bool = False, has_alike: bool = False, saves: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(NORMS[0 if has_alike else i % 3]) for i in range(LAYERS))
        self.head = nn.Linear(WIDTH, TOKENS, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embed.weight
        self.saves = saves

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
        logits: Tensor = self.head(x)
        return logits


def model(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).to(dtype)


def norms_of(of: nn.Module) -> list[nn.Module]:
    return [each for each in of.modules() if isinstance(each, (nn.LayerNorm, nn.RMSNorm, RootNorm))]


def choose(of: Model) -> None:
    """Norms as most users choose them, and a head whose logits are float32."""
    full_precision_forward(norms_of(of))
    full_precision_forward(of.head, output_dtype=torch.float32)


class Kept(nn.Module):
    """Module kept in float32 in a model of another dtype."""

    def __init__(self, inner: nn.Module, output_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.inner, self.output_dtype = inner, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x.float())
        return result.to(self.output_dtype or x.dtype)


def in_float32(module: nn.Module, source: nn.Module) -> nn.Module:
    """Give a fresh module the whole values of another, in float32."""
    module.float()
    with torch.no_grad():
        for p, q in zip(module.parameters(), source.parameters(), strict=True):
            p.copy_(full_value(q).to(torch.float32))
    return module


def reference(of: Model, **options: Any) -> Model:
    """Make the model whose norms and head are kept in float32, with the values of another now."""
    made = Model(**options).to(of.embed.weight.dtype)
    made.load_state_dict(of.state_dict())
    for block, source in zip(made.blocks, of.blocks, strict=True):
        block.norm = Kept(in_float32(block.norm, source.norm), None)
    made.head = Kept(in_float32(made.head, of.head), torch.float32)
    return made


def batches(count: int, seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randint(TOKENS, (4, 7), generator=generator)


def adamw(of: Any) -> Optimizer:
    return torch.optim.AdamW(of, lr=3e-4, weight_decay=0.1)


def loss_of(run: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """The next token is to be the same again."""
    return nn.functional.cross_entropy(run(tokens).float().flatten(0, 1), tokens.flatten())


def take_steps(run: Callable[[Tensor], Tensor], optimizer: Optimizer, count: int) -> list[float]:
    losses = []
    for tokens in batches(count):
        loss = loss_of(run, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_error_terms(module: M) -> M:
    """Write float32 values to the parameters, as an optimizer would."""
    generator = torch.Generator().manual_seed(2)
    for p in module.parameters():
        assign(p, torch.randn(p.shape, generator=generator) / 4)
    return module


def assert_like_float32(of: Model, run: Callable[[Tensor], Tensor], other: Model, way: Any = None) -> None:
    """Compare outputs and gradients of the chosen modules with those of the float32 model, bit for bit."""
    (tokens,) = batches(1, seed=9)
    run_other = other if way is None else way
    out, expected = run(tokens), run_other(tokens)
    assert out.dtype == expected.dtype == torch.float32
    assert torch.equal(out, expected)
    of.zero_grad()
    loss_of(run, tokens).backward()
    loss_of(run_other, tokens).backward()
    for mine, its in zip(
        [*norms_of(of), of.head], [*(b.norm for b in other.blocks), other.head], strict=True
    ):
        for p, q in zip(mine.parameters(), its.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert p.grad.dtype == p.dtype
            assert torch.equal(p.grad, q.grad.to(p.dtype))
    of.zero_grad()


# The bits. --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "error_format", [name for name, each in ERROR_FORMATS.items() if each.keeps_hi and each.keeps_error]
)
def test_the_bits_of_float32_parameters_after_many_steps(
    error_format: ErrorFormatName, dtype: torch.dtype
) -> None:
    of = model(dtype)
    choose(of)
    optimizer = install(adamw(of.parameters()), error_format=error_format)
    take_steps(of, optimizer, 100)
    for each in (*norms_of(of), of.head):
        for p in each.parameters():
            assert any(bool(term.any()) for term in error_terms(p))
    assert_like_float32(of, of, reference(of))


def test_a_handle_names_the_classes_of_its_modules() -> None:
    modules = [torch.nn.LayerNorm(4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)]
    handle = full_precision_forward([each.bfloat16() for each in modules])
    assert repr(handle) == "<FullPrecisionForward of 3 modules: LayerNorm, Linear>"


def test_the_bits_within_a_budget() -> None:
    of = model()
    choose(of)
    optimizer = install(adamw(of.parameters()), bytes_per_parameter=8)
    take_steps(of, optimizer, 3)
    assert_like_float32(of, of, reference(of))


@pytest.mark.parametrize("saves", [False, True], ids=["", "checkpoints"])
def test_the_compiled_bits(saves: bool) -> None:
    """Without a graph break; the same code before the first step and after, when error terms are there."""
    of = model(saves=saves)
    choose(of)
    run = torch.compile(of, fullgraph=True)
    optimizer = install(adamw(of.parameters()))
    take_steps(run, optimizer, 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        run(*batches(1))
    take_steps(run, optimizer, 10)
    other = reference(of, saves=saves)
    assert_like_float32(of, run, other, torch.compile(other, fullgraph=True))


def test_blocks_that_are_alike_are_compiled_once() -> None:
    """As regional compilation has it; Dynamo must see nothing that tells the modules apart."""
    of = model(has_alike=True)
    choose(of)
    torch._dynamo.reset()
    for block in of.blocks:
        block.compile(fullgraph=True)
    x = torch.randn(3, WIDTH).bfloat16()
    of.blocks[0](x)
    with torch.compiler.set_stance("fail_on_recompile"):
        for block in of.blocks:
            block(x)


def test_checkpoints_recompute_the_same() -> None:
    gradients = []
    for saves in (False, True):
        of = model(saves=saves)
        choose(of)
        optimizer = install(adamw(of.parameters()))
        take_steps(of, optimizer, 5)
        loss_of(of, *batches(1)).backward()
        gradients.append([p.grad for p in of.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", ["in the backward pass", "on the host"])
def test_optimizers_that_step_elsewhere(way: str, compiles: bool) -> None:
    of = model(saves=True)
    choose(of)
    optimizer = install(adamw(of.parameters()))
    take_steps(of, optimizer, 2)
    if way == "on the host":
        offload(optimizer)
    else:
        step_in_backward(of, optimizer, bucket_bytes=0)
    run = torch.compile(of) if compiles else of
    losses = take_steps(run, optimizer, 6)
    other = model(saves=True)
    choose(other)
    beside = install(adamw(other.parameters()))
    take_steps(other, beside, 2)
    assert losses == take_steps(torch.compile(other) if compiles else other, beside, 6)
    kept = reference(of, saves=True)
    (tokens,) = batches(1, seed=9)
    assert torch.equal(run(tokens), (torch.compile(kept) if compiles else kept)(tokens))


def test_a_head_that_is_tied_to_the_embedding() -> None:
    """Both see the whole value; the gradients of both are added to the parameter's."""
    of = model(is_tied=True)
    full_precision_forward([of.embed, of.head], output_dtype=torch.float32)
    with_error_terms(of)
    (tokens,) = batches(1)
    weight = full_value(of.embed.weight).float()
    out = of.head(of.embed(tokens))
    assert torch.equal(out, weight[tokens] @ weight.T)
    of.embed(tokens).sum().backward()
    of.head(torch.ones(1, WIDTH)).sum().backward()
    counts = torch.bincount(tokens.flatten(), minlength=TOKENS)
    gradient = of.embed.weight.grad
    assert gradient is not None
    assert torch.equal(gradient, (counts + 1).bfloat16()[:, None].expand(-1, WIDTH))


@pytest.mark.parametrize(
    "make",
    [
        *NORMS,
        partial(nn.Linear, WIDTH, 5),
        partial(nn.Linear, WIDTH, 5, bias=False),
        partial(nn.GroupNorm, 4, WIDTH),
        partial(nn.BatchNorm1d, WIDTH, track_running_stats=False),
        partial(nn.Bilinear, WIDTH, WIDTH, 3),
        partial(nn.PReLU, WIDTH),
    ],
    ids=lambda make: getattr(make, "func", make).__name__,
)
def test_modules_of_many_kinds(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = with_error_terms(make().bfloat16())
    other = in_float32(make(), module)
    full_precision_forward(module)
    x = torch.randn(6, WIDTH).bfloat16().requires_grad_()
    inputs = [x, x] if isinstance(module, nn.Bilinear) else [x]
    out, expected = module(*inputs), other(*(each.float() for each in inputs))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())


# What comes in and goes out. --------------------------------------------------------------------------------


def test_dtypes_of_outputs() -> None:
    x = torch.randn(3, WIDTH)
    of = model()
    full_precision_forward([of.head, of.embed])
    assert of.head(x.bfloat16()).dtype == torch.bfloat16
    assert of.head(x.half()).dtype == torch.float16
    assert of.head(x).dtype == torch.float32
    assert of.head(input=x.bfloat16()).dtype == torch.bfloat16
    assert of.embed(torch.tensor([1])).dtype == torch.bfloat16
    full_precision_forward([of.head, of.embed], output_dtype=torch.float32)  # instead of the first
    assert of.head(x.bfloat16()).dtype == of.embed(torch.tensor([1])).dtype == torch.float32


def test_an_embedding_in_bfloat16_is_hi() -> None:
    """As docs/full-precision.md says: rounding hi + lo gives hi."""
    of = with_error_terms(model())
    tokens = torch.arange(TOKENS)
    before = of.embed(tokens)
    full_precision_forward(of.embed)
    assert torch.equal(of.embed(tokens), before)


class Router(nn.Module):
    """Several inputs and outputs, in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, inputs: dict[str, Tensor], *, bias: Tensor, count: int) -> dict[str, Any]:
        self.seen = count
        scores = inputs["x"] @ self.weight.T + bias
        return {"scores": scores, "chosen": scores.topk(count).indices, "dtype": scores.dtype}


def test_containers_and_attributes() -> None:
    torch.manual_seed(0)
    router = with_error_terms(Router().bfloat16())
    x, bias = torch.randn(3, WIDTH).bfloat16(), torch.randn(4).bfloat16()
    full_precision_forward(router, output_dtype=torch.float32)
    found = router({"x": x}, bias=bias, count=2)
    scores = x.float() @ full_value(router.weight).float().T + bias.float()
    assert torch.equal(found["scores"], scores)
    assert torch.equal(found["chosen"], scores.topk(2).indices)
    assert found["dtype"] is torch.float32
    assert router.seen == 2  # set in the forward pass


def test_autocast_does_not_reach_chosen_modules() -> None:
    of = with_error_terms(model())
    choose(of)
    x = torch.randn(3, WIDTH).bfloat16()
    before = of.head(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(of.head(x), before)


def test_float32_gradients_are_not_rounded() -> None:
    of = with_error_terms(model())
    other = nn.Linear(WIDTH, TOKENS)
    in_float32(other, of.head)
    of.head.weight.grad_dtype = torch.float32
    full_precision_forward(of.head, output_dtype=torch.float32)
    x = torch.randn(3, WIDTH).bfloat16()
    of.head(x).square().sum().backward()
    other(x.float()).square().sum().backward()
    assert of.head.weight.grad is not None
    assert of.head.weight.grad.dtype is torch.float32
    expected = other.weight.grad
    assert expected is not None
    assert torch.equal(of.head.weight.grad, expected)


def test_parameters_that_are_float32_already() -> None:
    module = nn.LayerNorm(WIDTH)
    x = torch.randn(3, WIDTH).bfloat16()
    expected = module(x.float()).bfloat16()
    full_precision_forward(module)
    assert torch.equal(module(x), expected)


# What stays as it is. ---------------------------------------------------------------------------------------


def test_the_module_stays_the_same_to_others() -> None:
    of = with_error_terms(model())
    before = {name: (id(p), type(p)) for name, p in of.named_parameters()}
    keys = list(of.state_dict())
    choose(of)
    assert {name: (id(p), type(p)) for name, p in of.named_parameters()} == before
    assert list(of.state_dict()) == keys
    assert type(of.head) is nn.Linear
    assert of.head.weight is dict(of.named_parameters())["head.weight"]
    of.load_state_dict(of.state_dict())


def test_removal_and_context() -> None:
    of = with_error_terms(model())
    (tokens,) = batches(1)
    before = of(tokens)
    handle = full_precision_forward(norms_of(of))
    changed = of(tokens)
    assert not torch.equal(changed, before)
    handle.remove()
    assert torch.equal(of(tokens), before)
    with full_precision_forward(norms_of(of)):
        assert torch.equal(of(tokens), changed)
    assert torch.equal(of(tokens), before)
    assert not any("forward" in vars(each) for each in of.modules())
    assert not {module for module, _ in records.all_of(_Chosen)} & {*of.modules()}


def test_a_forward_that_another_program_has_put_there() -> None:
    """As Liger's kernels are: methods of the instance."""
    of = with_error_terms(model())
    norm = of.blocks[0].norm

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * x

    vars(norm)["forward"] = forward.__get__(norm)
    x = torch.randn(3, WIDTH).bfloat16()
    before = norm(x)
    with full_precision_forward(norm):
        assert torch.equal(norm(x), (full_value(norm.weight).float() * x.float()).bfloat16())
    assert torch.equal(norm(x), before)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_compute_alike(way: str) -> None:
    """A copy of the model has its own parameters, which begin as hi, and its own choice."""
    of = with_error_terms(model())
    choose(of)
    if way == "deepcopy":
        copied = copy.deepcopy(of)
    else:
        file = io.BytesIO()
        torch.save(of, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    (tokens,) = batches(1)
    expected = of(tokens)
    for p, q in zip(copied.parameters(), of.parameters(), strict=True):
        assert p is not q
        assert torch.equal(full_value(p), q.double())
    assert copied(tokens).dtype is torch.float32
    assert_like_float32(copied, copied, reference(copied))
    for p, q in zip(copied.parameters(), of.parameters(), strict=True):
        assign(p, q)
    assert torch.equal(copied(tokens), expected)
    full_precision_forward([*norms_of(copied), copied.head]).remove()
    assert torch.equal(of(tokens), expected)


def test_no_memory_between_forward_passes() -> None:
    """And in one, without gradients, float32 copies of one module at a time."""
    of = with_error_terms(model())
    full_precision_forward(norms_of(of))
    (tokens,) = batches(1)
    of(tokens)
    before = {id(each) for each in gc.get_objects() if issubclass(type(each), Tensor)}
    with torch.no_grad():
        of(tokens)
    gc.collect()
    assert not [
        each for each in gc.get_objects() if issubclass(type(each), Tensor) and id(each) not in before
    ]


def test_memory_of_a_large_head() -> None:
    """Without gradients, four bytes an element while the head computes, and part of a table beside it."""
    head = nn.Linear(2048, 4096, bias=False).bfloat16()
    assign(head.weight, head.weight.float() * 1.001)
    x = torch.randn(1, 2048).bfloat16()
    full_precision_forward(head)
    head(x)
    copied = 4 * head.weight.numel()
    with torch.no_grad():
        assert copied <= peak(lambda: head(x)) <= 3 * copied
        assert left(lambda: head(x)) < copied / 100


# Refusals. --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Block(NORMS[0]), "a Block whose parameters are those of submodules"),
        (lambda: nn.MultiheadAttention(WIDTH, 2), "a MultiheadAttention whose parameters are those of"),
        (nn.GELU, "a GELU without parameters"),
    ],
)
def test_modules_that_cannot_be_chosen(make: Callable[[], nn.Module], expected: str) -> None:
    of = model()
    with pytest.raises(UnsupportedTensorError, match=expected):
        full_precision_forward([of.head, make()])
    assert "forward" not in vars(of.head)  # nothing has changed


def test_options_that_cannot_be_right() -> None:
    of = model()
    with pytest.raises(InvalidOptionError, match="no floating-point dtype"):
        full_precision_forward(of.head, output_dtype=torch.int32)
    vars(of.head)["forward"] = lambda x: x
    with pytest.raises(InvalidOptionError, match="another program has replaced the forward"):
        full_precision_forward(of.head)
    del vars(of.head)["forward"]
    handle = full_precision_forward(of.head)
    vars(of.head)["forward"] = lambda x: x
    with pytest.raises(InvalidOptionError, match="another program has replaced the forward"):
        handle.remove()


# Several processes. -----------------------------------------------------------------------------------------


def trained(way: str, **options: Any) -> tuple[list[float], list[Tensor], int]:
    """Losses of some steps on the same batches, the whole values that they leave, and bytes of state."""
    torch._dynamo.reset()
    of = model(saves="checkpoints" in way)
    if "compiled" in way:
        for block in of.blocks:
            block.compile(fullgraph=True)
    run: nn.Module = of
    if "FSDP2" in way:
        for block in of.blocks:
            fully_shard(block, reshard_after_forward="kept" not in way)
        if "own head" in way:
            fully_shard(of.head)
        fully_shard(of)
    if "tensor parallel" in way:
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(of, mesh, {"head": ColwiseParallel(use_local_output=True, output_layouts=None)})
    if "plainly" not in way:
        choose(of)
    if "DDP" in way:
        run = DistributedDataParallel(of)
    optimizer = install(adamw(of.parameters()), **options)
    losses = take_steps(run, optimizer, 8)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    values = [full_value(p) for p in held]
    kept = sum(each.nbytes for p in held for each in optimizer.state[p].values() if isinstance(each, Tensor))
    return losses, [v.full_tensor() if isinstance(v, DTensor) else v for v in values], kept


WAYS = [
    "FSDP2",
    "FSDP2, own head",
    "FSDP2, kept",
    "FSDP2, checkpoints",
    "FSDP2, compiled",
    "FSDP2, compiled, checkpoints",
    "DDP",
]


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_have_the_losses_of_one(two_processes: Processes, way: str) -> None:
    losses, values, _ = trained(way.replace("FSDP2", "").replace("DDP", ""))
    for found, whole, _ in two_processes.run(trained, way):
        assert found == losses
        assert all(map(torch.equal, whole, values))
    assert losses != trained(way.replace("FSDP2", "").replace("DDP", "") + "plainly")[0]


@pytest.mark.parametrize("error_format", ["mcf", "byte", "fp32"])
def test_two_processes_with_other_error_formats(two_processes: Processes, error_format: str) -> None:
    losses, values, _ = trained("", error_format=error_format)
    for found, whole, _ in two_processes.run(partial(trained, error_format=error_format), "FSDP2"):
        assert found == losses
        assert all(map(torch.equal, whole, values))


def test_state_is_not_larger(two_processes: Processes) -> None:
    chosen, plain = (two_processes.run(trained, way) for way in ("FSDP2", "FSDP2, plainly"))
    assert [kept for *_, kept in chosen] == [kept for *_, kept in plain]


def chosen_before_sharding() -> str:
    of = model()
    choose(of)
    for block in of.blocks:
        fully_shard(block)
    fully_shard(of)
    with pytest.raises(UnsupportedTensorError) as refused:
        of(*batches(1))
    return str(refused.value)


def embedding() -> nn.Module:
    return nn.Embedding(5, WIDTH, max_norm=1.0)


def normed() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(WIDTH)


def weight_normed() -> nn.Module:
    return torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


def spectral_normed() -> nn.Module:
    return torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [embedding, normed, weight_normed, spectral_normed, pruned])
def test_forwards_that_write_or_have_other_tensors_are_refused(make: Callable[[], nn.Module]) -> None:
    module = make().bfloat16()
    if make in (weight_normed, spectral_normed, pruned):
        module(torch.randn(3, WIDTH).bfloat16())
    with pytest.raises(UnsupportedTensorError, match=r"max_norm|computes with torch\.bfloat16"):
        full_precision_forward(module)
    assert "forward" not in vars(module)


def test_the_remedy_for_a_batch_norm() -> None:
    module, exact = normed().bfloat16(), nn.BatchNorm1d(WIDTH)
    for name, buffer in module.named_buffers():
        setattr(module, name, buffer.float() if buffer.is_floating_point() else buffer)
    full_precision_forward(module)
    x = torch.randn(16, WIDTH).bfloat16()
    assert torch.equal(module(x), exact(x.float()).bfloat16())
    buffers = zip(module.buffers(), exact.buffers(), strict=True)
    assert all(torch.equal(one, other) for one, other in buffers)


def test_modules_that_are_sharded_later_are_refused(two_processes: Processes) -> None:
    for text in two_processes.run(chosen_before_sharding):
        assert "call full_precision_forward after fully_shard" in text


def flattened_by_fsdp1() -> str:
    of = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    full_precision_forward(of.module.head)
    with pytest.raises(UnsupportedTensorError) as refused:
        of(*batches(1))
    return str(refused.value)


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_is_refused(two_processes: Processes) -> None:
    for text in two_processes.run(flattened_by_fsdp1):
        assert "shard the model with fully_shard (FSDP2)" in text


def with_float32_shards() -> bool:
    """FSDP2's own mixed precision: the shards are float32, and bfloat16 is gathered."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, TOKENS)
    x = torch.randn(3, WIDTH)
    expected = head(x.bfloat16().float())
    fully_shard(head, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    full_precision_forward(head, output_dtype=torch.float32)
    return torch.equal(head(x), expected)


def test_float32_shards_that_are_gathered_in_bfloat16(two_processes: Processes) -> None:
    assert all(two_processes.run(with_float32_shards))


def parallel_products() -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of two products that tensor parallelism shards; of the same alone."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False)).bfloat16()
    values = [torch.randn(p.shape) / 4 for p in whole.parameters()]
    x = torch.randn(3, WIDTH).bfloat16()
    found = []
    for parts in (copy.deepcopy(whole), whole):
        if parts is not whole:
            parallelize_module(
                parts, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
            )
        for p, value in zip(parts.parameters(), values, strict=True):
            assign(p, value)
        full_precision_forward([parts[0], parts[2]], output_dtype=torch.float32)
        out = parts(x)
        out.square().sum().backward()
        gradients = [p.grad for p in parts.parameters()]
        found.append([out.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)])
    return found[0], found[1]


def test_tensor_parallelism(two_processes: Processes) -> None:
    """Sums of two processes are of other order: float32's rounding of a sum of eight, and bfloat16's."""
    for (out, *gradients), (expected, *others) in two_processes.run(parallel_products):
        largest = expected.abs().max()
        assert (out - expected).abs().max() <= 8 * 2**-24 * largest
        for gradient, other in zip(gradients, others, strict=True):
            assert gradient.dtype == other.dtype == torch.bfloat16
            assert (gradient - other).abs().max() <= 2**-7 * other.abs().max()
