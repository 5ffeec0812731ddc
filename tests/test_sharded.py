"""Parameters and state in pieces, DTensors: each process has the bits that one process alone would have."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from collage_fx import (
    CollageBackend,
    CollageError,
    backend_of,
    error_terms,
    full_value,
    install,
    load_full_state_dict,
    step_in_backward,
)
from collage_fx.choices import Rounding, Strategy
from collage_fx.errors import UnsupportedTensorError
from collage_fx.state import adopt, record_of
from collage_fx.torch_compat import local_tensor
from tests.capture.test_ways_past import ANOTHER_STEP, COMPENSATED, LR, SAME_STEP, STEPS, relative
from tests.support.processes import Processes
from tests.support.training import parameters, set_gradients

#: Two of a shape, so that there are families; some that two processes cannot share evenly; one of one row.
SHAPES = ((6, 4), (6, 4), (5, 4), (5, 4), (5,), (1, 4))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, foreach=False)


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=1e-3, weight_decay=0.1)


def in_pieces(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """As tensor parallelism has it: where there is no such dimension, each process has all."""
    fits = not placement.is_shard(1) or tensor.dim() > 1
    return distribute_tensor(tensor, mesh, [placement if fits else Replicate()])


def in_one_piece(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def set_gradients_in_pieces(
    params: Sequence[Tensor], mesh: DeviceMesh, placement: Placement, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = in_pieces(torch.randn(p.shape, generator=generator).to(p.dtype), mesh, placement)


def trained(
    make: Callable[[Any], torch.optim.Optimizer],
    strategy: Strategy,
    mesh: DeviceMesh | None,
    placement: Placement,
    shapes: Sequence[Sequence[int]] = SHAPES,
    steps: int = 4,
    metrics: bool = False,
    is_another: bool = False,
    rounding: Rounding = "dither",
) -> dict[str, Any]:
    """All that some steps leave, in one piece each; and how they were compiled.

    With ``is_another`` for Dynamo, which has compiled a step before, and would make symbols of other sizes.
    """
    if not is_another:
        torch._dynamo.reset()
    start = parameters(shapes=shapes)
    params = start
    if mesh is not None:
        params = [Parameter(in_pieces(p.detach(), mesh, placement)) for p in start]
    optimizer = make([(f"p{i}", p) for i, p in enumerate(params)])
    backend = CollageBackend(strategy=strategy, metrics=metrics, rounding=rounding)
    step: Callable[[], Any] = torch.compile(optimizer.step, backend=backend)
    for seed in range(steps):
        if mesh is None:
            set_gradients(params, seed)
        else:
            set_gradients_in_pieces(params, mesh, placement, seed)
        step()
    left: dict[str, Any] = {}
    for i, p in enumerate(params):
        tensors = {"parameter": p, **optimizer.state[p]}
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.dim() > 0:
                terms = error_terms(tensor)
                assert all(
                    type(term) is type(tensor.detach()) and term.shape == tensor.shape for term in terms
                )
                left[f"{i}.{name}"] = [in_one_piece(each.detach()) for each in (tensor, *terms)]
                left[f"{i}.{name}.full"] = [in_one_piece(full_value(tensor))]
    graphs = backend.report().graphs
    if metrics:
        backend.metrics()  # a second call adds nothing
    measured = (
        []
        if not metrics
        else [
            {name: (each.elements, each.intended, each.along, each.lost_hi) for name, each in of_step.items()}
            for of_step in backend.metrics().values()
        ]
    )
    return {
        "measured": measured,
        "left": left,
        "units": [each.route.unit for each in graphs],
        "names": [row.name for row in graphs[-1].tensors],
    }


def trained_in_pieces(
    make: Any, strategy: Strategy, placement: Placement, rounding: Rounding = "dither"
) -> dict[str, Any]:
    return trained(make, strategy, init_device_mesh("cpu", (2,)), placement, rounding=rounding)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize(("make", "strategy"), [(adamw, "light"), (adamw, "plus"), (momentum, "full")])
def test_elementwise_optimizers_leave_the_bits_of_one_process(
    two_processes: Processes, make: Any, strategy: Strategy, placement: Placement
) -> None:
    # Dither goes by places in memory, which are others where columns are shared out.
    rounding: Rounding = "nearest" if placement.is_shard(1) else "dither"
    alone = trained(make, strategy, None, placement, rounding=rounding)
    for found in two_processes.run(trained_in_pieces, make, strategy, placement, rounding):
        assert found["names"] == alone["names"]
        assert found["units"][-1] == "by family"  # the first step of some makes their state
        assert found["left"].keys() == alone["left"].keys()
        for name, tensors in alone["left"].items():
            for one, other in zip(tensors, found["left"][name], strict=True):
                assert torch.equal(one, other), name


def stepped_with_summands() -> tuple[float, float]:
    """Error of weights of five parameters alike; in the last step each process has half of a gradient.

    And the bound on the error: that of a momentum that is rounded to bfloat16, which the update repays
    .9 / (1 - .9) times at once. Half of a gradient is more.
    """
    mesh, lr = init_device_mesh("cpu", (2,)), 0.5
    start = parameters(shapes=[(6, 4)] * 5)
    params = [Parameter(in_pieces(p.detach(), mesh, Replicate())) for p in start]
    optimizer = install(torch.optim.SGD(params, lr=lr, momentum=0.9, foreach=False))
    exact = [p.detach().double() for p in start]
    momenta, largest = [torch.zeros_like(p) for p in exact], 0.0
    for seed in range(3):
        set_gradients_in_pieces(params, mesh, Replicate(), seed)
        for p, whole, momentum in zip(params, exact, momenta, strict=True):
            assert p.grad is not None
            momentum.mul_(0.9).add_(in_one_piece(p.grad).double())
            whole.sub_(momentum, alpha=lr)
            largest = max(largest, float(momentum.abs().max()))
        gradient = params[-1].grad
        if seed == 2:
            assert isinstance(gradient, DTensor)
            params[-1].grad = DTensor.from_local(gradient.to_local() / 2, mesh, [Partial()])
        optimizer.step()
    found = zip(params, exact, strict=True)
    errors = [float((in_one_piece(full_value(p)) - whole).abs().max()) for p, whole in found]
    return max(errors), (1 + 9) * lr * 2.0**-8 * largest


def test_a_gradient_in_summands_is_added_up_whatever_row_it_is_in(two_processes: Processes) -> None:
    for error, bound in two_processes.run(stepped_with_summands):
        assert error <= bound < 0.1


WIDER = ((8, 5), (8, 5), (7,))


def trained_after_another() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    trained(adamw, "plus", mesh, Shard(0), steps=1)
    return trained(adamw, "plus", mesh, Shard(0), WIDER, is_another=True)


def test_a_second_optimizer_of_other_shapes(two_processes: Processes) -> None:
    alone = trained(adamw, "plus", None, Shard(0), WIDER)
    for found in two_processes.run(trained_after_another):
        assert found["units"][-1] == "by family"
        assert found["left"].keys() == alone["left"].keys()
        for name, tensors in alone["left"].items():
            for one, other in zip(tensors, found["left"][name], strict=True):
                assert torch.equal(one, other), name


def stepped_eagerly_in_between() -> tuple[str, bool]:
    """What an eager step is refused with, and whether it has changed nothing."""
    mesh = init_device_mesh("cpu", (2,))
    params = [Parameter(in_pieces(p.detach(), mesh, Shard(0))) for p in parameters(shapes=SHAPES)]
    optimizer = adamw([(f"p{i}", p) for i, p in enumerate(params)])
    set_gradients_in_pieces(params, mesh, Shard(0), seed=0)
    torch.compile(optimizer.step, backend=CollageBackend())()
    before = [in_one_piece(full_value(p)) for p in params]
    with pytest.raises(CollageError) as refused:
        optimizer.step()
    after = [in_one_piece(full_value(p)) for p in params]
    return str(refused.value), all(map(torch.equal, before, after))


def test_an_eager_step_in_between_is_refused(two_processes: Processes) -> None:
    for text, has_changed_nothing in two_processes.run(stepped_eagerly_in_between):
        assert "AdamW.step() has been called eagerly" in text
        assert "where: p0" in text
        assert has_changed_nothing


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 4)) for _ in range(3)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(4, 1)).bfloat16()


def trained_by_fsdp() -> tuple[list[dict[str, Tensor]], dict[str, list[Tensor]], list[str]]:
    """The gradients of some steps of FSDP2, and the parameters and error terms that they leave."""
    torch._dynamo.reset()
    sharded = model()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    optimizer = adamw(sharded.named_parameters())
    backend = CollageBackend(strategy="plus")
    step: Callable[[], Any] = torch.compile(optimizer.step, backend=backend)
    gradients = []
    for seed in range(4):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
        sharded(inputs).square().mean().backward()
        gradients.append(
            {name: in_one_piece(p.grad) for name, p in sharded.named_parameters() if p.grad is not None}
        )
        step()
        optimizer.zero_grad()
    left = {
        name: [in_one_piece(each.detach()) for each in (p, *error_terms(p))]
        for name, p in sharded.named_parameters()
    }
    return gradients, left, [graph.route.unit for graph in backend.report().graphs]


def test_fsdp2_leaves_the_bits_of_one_process(two_processes: Processes) -> None:
    (gradients, left, units), _ = two_processes.run(trained_by_fsdp)
    assert units == ["by family"]
    torch._dynamo.reset()
    whole = model()
    optimizer = adamw(whole.named_parameters())
    step: Callable[[], Any] = torch.compile(optimizer.step, backend=CollageBackend(strategy="plus"))
    for of_step in gradients:
        for name, p in whole.named_parameters():
            p.grad = of_step[name]
        step()
    for name, p in whole.named_parameters():
        for one, other in zip((p.detach(), *error_terms(p)), left[name], strict=True):
            assert torch.equal(one, other), name


def stepped_past_install(index: int) -> tuple[float, str]:
    """Step a model in pieces on a way past its installed step: the error, and what was said."""
    way = (SAME_STEP + ANOTHER_STEP)[index]
    torch._dynamo.reset()
    sharded, exact = model(), model().double()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    optimizer = install(torch.optim.AdamW(sharded.parameters(), lr=LR))
    reference = torch.optim.AdamW(exact.parameters(), lr=LR)
    said = ""
    for seed in range(STEPS):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
        sharded(inputs).square().mean().backward()
        for p, q in zip(sharded.parameters(), exact.parameters(), strict=True):
            q.grad = None if p.grad is None else in_one_piece(p.grad).double()
        reference.step()
        try:
            optimizer.step() if seed < 2 else way(optimizer, optimizer.step)
        except CollageError as error:
            said = str(error)
            break
        optimizer.zero_grad()
    with warnings.catch_warnings(action="ignore"):  # of error terms that an eager step has passed by
        whole = [in_one_piece(full_value(p)) for p in sharded.parameters()]
    return relative(whole, list(exact.parameters()), list(model().parameters())), said


@pytest.mark.parametrize("index", range(len(SAME_STEP + ANOTHER_STEP)))
def test_ways_past_install_are_compensated_or_refused_under_fsdp2(
    two_processes: Processes, index: int
) -> None:
    (error, said), (_, said_by_the_other) = two_processes.run(stepped_past_install, index)
    assert bool(said) == bool(said_by_the_other), "or one process waits for the other"
    assert said or error <= COMPENSATED
    if said:  # where torch is told not to compile, a step would have to be recorded
        assert (
            "collage_fx.install(optimizer)" in said or "a DTensor in a step that has to be recorded" in said
        )


def trained_in_the_backward_pass(release: bool) -> tuple[list[Tensor], int]:
    """The parameters after some steps of FSDP2 with many parts, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sharded = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(13))).bfloat16()
    for layer in (*sharded, sharded):
        fully_shard(layer)
    optimizer = adamw(sharded.parameters())
    step_in_backward(sharded, optimizer) if release else install(optimizer)
    for seed in range(4):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).bfloat16()
        sharded(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    graphs = backend_of(optimizer).report().graphs
    return [in_one_piece(full_value(p)) for p in sharded.parameters()], len(graphs)


def test_parts_of_a_step_in_the_backward_pass_are_one_graph_under_fsdp2(two_processes: Processes) -> None:
    """Each of the 13 parts was a compilation, of which 8 are too many."""
    (released, graphs), _ = two_processes.run(trained_in_the_backward_pass, True)
    (stepped, _), _ = two_processes.run(trained_in_the_backward_pass, False)
    assert graphs == 1
    assert all(map(torch.equal, released, stepped))


def measured_in_pieces() -> Any:
    return trained(adamw, "plus", init_device_mesh("cpu", (2,)), Shard(0), steps=2, metrics=True)["measured"]


def test_metrics_are_those_of_whole_tensors(two_processes: Processes) -> None:
    alone = trained(adamw, "plus", None, Shard(0), steps=2, metrics=True)["measured"]
    assert len(alone) == 2
    for found in two_processes.run(measured_in_pieces):
        for one, other in zip(alone, found, strict=True):
            assert one.keys() == other.keys()
            for name, numbers in one.items():
                assert numbers == pytest.approx(other[name], rel=2 * 2.1e-6), name  # each to 2.1e-6


class Branches(torch.optim.Optimizer):
    """A step that Dynamo cannot capture."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad.norm() > 0:
                p.add_(p.grad, alpha=-1e-3)


def refused_when_recorded() -> tuple[str, bool]:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2,))
    p = Parameter(in_pieces(torch.ones(4, 4, dtype=torch.bfloat16), mesh, Shard(0)))
    p.grad = in_pieces(torch.ones(4, 4, dtype=torch.bfloat16), mesh, Shard(0))
    try:
        torch.compile(Branches([("weight", p)]).step, backend=CollageBackend())()
    except UnsupportedTensorError as refusal:
        return str(refusal), bool((in_one_piece(p.detach()) == 1).all())
    return "not refused", False


def test_a_recorded_step_refuses_them_by_name(two_processes: Processes) -> None:
    for told, is_unchanged in two_processes.run(refused_when_recorded):
        assert "a DTensor in a step that has to be recorded" in told
        assert "where: weight" in told
        assert is_unchanged


def continued(placement: Placement, make: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an uninterrupted run leaves, and one that is saved and goes on with new objects."""
    mesh = init_device_mesh("cpu", (2,))
    torch._dynamo.reset()
    results = []
    for interrupted in (False, True):
        params = [Parameter(in_pieces(p.detach(), mesh, placement)) for p in parameters(shapes=SHAPES)]
        optimizer = make(params)
        step: Callable[[], Any] = torch.compile(optimizer.step, backend=CollageBackend(strategy="plus"))
        for seed in range(4):
            if interrupted and seed == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                params = [Parameter(p.detach().clone()) for p in params]
                optimizer = make(params)
                optimizer.load_state_dict(saved)
                step = torch.compile(optimizer.step, backend=CollageBackend(strategy="plus"))
            set_gradients_in_pieces(params, mesh, placement, seed)
            step()
        entries = {
            f"{key}.{name}": value
            for key, state in optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }
        assert any(name.endswith("parameter.exact.rest") for name in entries)
        of_elements = {name: value for name, value in entries.items() if not name.endswith(".count")}
        assert all(isinstance(value, DTensor) for value in of_elements.values() if value.dim() > 0)
        entries.update({f"parameter.{i}": p.detach() for i, p in enumerate(params)})
        results.append({name: in_one_piece(value) for name, value in entries.items()})
    return results[0], results[1]


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("make", [adamw, momentum])
def test_a_state_dict_holds_error_terms_in_pieces(
    two_processes: Processes, make: Any, placement: Placement
) -> None:
    for one, other in two_processes.run(continued, placement, make):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


def continued_with_a_change(placement: Placement) -> tuple[list[str], list[bool]]:
    """Warnings of a run in which one process has changed an element of its piece since it was saved.

    And which parameters have error terms then.
    """
    mesh = init_device_mesh("cpu", (2,))
    torch._dynamo.reset()
    params = [Parameter(in_pieces(p.detach(), mesh, placement)) for p in parameters(shapes=SHAPES[:3])]
    optimizer = momentum(params)
    set_gradients_in_pieces(params, mesh, placement, 0)
    torch.compile(optimizer.step, backend=CollageBackend(strategy="light"))()
    if mesh.get_rank() == 0:
        optimizer.state_dict()  # needs nobody else
    saved = copy.deepcopy(optimizer.state_dict())
    params = [Parameter(p.detach().clone()) for p in params]
    if mesh.get_rank() == 1:
        local_tensor(params[1].detach())[0, 0] += 1
    optimizer = momentum(params)
    optimizer.load_state_dict(saved)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(optimizer.step, backend=CollageBackend(strategy="light"))()
    told = [str(each.message) for each in caught if "collage_fx" in str(each.message)]
    return told, [bool(in_one_piece(error_terms(p)[0]).any()) for p in params]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_all_processes_see_that_one_has_changed_its_piece(
    two_processes: Processes, placement: Placement
) -> None:
    for (told,), have_terms in two_processes.run(continued_with_a_change, placement):
        assert "error terms of other values than param_groups[0].params[1].parameter: load" in told
        assert have_terms == [True, False, True]


def loaded_whole() -> Tensor:
    """What a model of ordinary tensors has of weights in pieces, of which one row is in each process."""
    weights = {"weight": in_pieces(torch.arange(6.0).view(2, 3), init_device_mesh("cpu", (2,)), Shard(0))}
    model = torch.nn.Linear(3, 2, bias=False).bfloat16()
    load_full_state_dict(model, torch.optim.SGD(model.parameters()), weights)
    return model.weight.detach()


def test_weights_in_pieces_are_loaded_into_a_model_that_is_not(two_processes: Processes) -> None:
    for found in two_processes.run(loaded_whole):
        assert torch.equal(found, torch.arange(6).view(2, 3))


def placed(tensor: Tensor, mesh: DeviceMesh, placement: Placement | None) -> Tensor:
    return tensor.clone() if placement is None else in_pieces(tensor, mesh, placement)


def taken_up_in_other_pieces(saved_in: Placement | None) -> dict[str, list[Any]]:
    """Warnings and parameters of other values where error terms are loaded that were saved in such pieces.

    Or in one; into parameters of 16 bits, beside which they go, and of float32, to which they are added.
    """
    mesh = init_device_mesh("cpu", (2,))
    torch._dynamo.reset()
    params = [Parameter(p.detach()) for p in parameters(shapes=SHAPES)]
    optimizer = torch.optim.SGD(params, lr=1e-3)
    for p in params:
        p.grad = torch.ones_like(p)
    torch.compile(optimizer.step, backend=CollageBackend())()
    his, values = [p.detach().clone() for p in params], [full_value(p) for p in params]
    held = [Parameter(placed(hi, mesh, saved_in)) for hi in his]
    optimizer_of_held = torch.optim.SGD(held, lr=0.0)
    adopt(optimizer_of_held)
    optimizer_of_held.load_state_dict(optimizer.state_dict())
    saved = copy.deepcopy(optimizer_of_held.state_dict())
    found: dict[str, list[Any]] = {}
    for placement in (Shard(0), Shard(1), Replicate()):
        for dtype in (torch.bfloat16, torch.float32):
            params = [Parameter(in_pieces(hi.to(dtype), mesh, placement)) for hi in his]
            again = torch.optim.SGD(params, lr=0.0)
            adopt(again)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                again.load_state_dict(copy.deepcopy(saved))
                for expansion in filter(None, map(record_of, params)):
                    expansion.settle()
            told = [str(each.message) for each in caught if "collage_fx" in str(each.message)]
            wrong = [
                i
                for i, (p, v) in enumerate(zip(params, values, strict=True))
                if not torch.equal(in_one_piece(full_value(p)), v)
            ]
            found[f"{placement} {dtype}"] = [told, wrong]
    return found


@pytest.mark.parametrize("saved_in", [None, Shard(0), Replicate()], ids=str)
def test_error_terms_are_taken_up_in_other_pieces(
    two_processes: Processes, saved_in: Placement | None
) -> None:
    for found in two_processes.run(taken_up_in_other_pieces, saved_in):
        assert found == {name: [[], []] for name in found}
