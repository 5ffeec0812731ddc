"""The table of operators against torch: its metadata, and what it computes of its own tests' samples.

A row that is wrong, or that a new version of torch makes wrong, is named here, and so is an operator that a
captured step may have in it and of which nothing is known.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from collage_fx.graph import (
    OPERATORS,
    composite_of,
    depends_on_values,
    drawn_range,
    draws,
    factorizes,
    facts_of,
    foreach_name,
    foreach_rule,
    ignores_values,
    is_pointwise,
    weighted_sum,
)
from collage_fx.graph.operator_facts import is_transparent
from collage_fx.torch_compat import functional_decompositions

#: Of torch, about samples that are odd on purpose.
pytestmark = pytest.mark.filterwarnings("ignore")

aten, prims = torch.ops.aten, torch.ops.prims

#: Operators that older versions of torch don't have.
NEW = {"aten._foreach_mm": TorchVersion("2.12")}

#: Of what a captured step may have in it: the operators of which nothing is known, and why that is all right.
OPAQUE = {
    "derivatives, which a step is given": r"backward",
    "layers of networks": r"pool|conv\d?|upsample|embedding|rnn|lstm|gru|norm|softmax|glu|sampler|pad\dd"
    r"|attention|col2im|dist_forward|leaky_relu|masked_scale|transformer|trilinear",
    "products, of and in the storage format": r"mm|addmm_activation|matrix_exp",
    "formats and layouts of their own": r"fft|complex|polar|quantized?|int\dpack|fq_helper|4bit|e8m0|mkldnn"
    r"|dense|nested|packed|padded|segment_reduce|sparse|spdiags",
    "positions and counts, found in the storage format": r"bucketize|searchsorted|histc|histogram(dd)?"
    r"|lu_unpack|nonzero_static",
    "what Inductor's passes make of others": r"index_put_impl|inductor|low_memory|masked_index|softmax_online"
    r"|masked_index_put_accumulate",
    "torch's own uses": r"foobar|test|assert|constrain|philox|amp_update_scale|lazy_clone|pin_memory|resize"
    r"|reshape_copy|empty_strided|fused_adamw?",
}
#: Those of ``prims`` that ATen has by another name, which is what Inductor's decompositions make.
OTHERWISE_NAMED = (
    "as_strided_scatter bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 cat cbrt collapse "
    "erf_inv erfcx fill ndtri prod reshape shift_left shift_right_arithmetic spherical_bessel_j0 sum xor_sum "
    "zeta"
)


class Call(NamedTuple):
    """A call of a functional operator: no tensor in it is overwritten."""

    operator: Any
    args: Any
    kwargs: Any
    made_by: str = ""

    def __call__(self, function: Callable[..., Any] | None = None) -> list[Tensor]:
        result = (self.operator if function is None else function)(*self.args, **self.kwargs)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]

    @property
    def floats(self) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if _is_float(leaf)]

    def of(self, make: Callable[[Tensor], Tensor]) -> Call:
        """The call with other floating-point tensors."""
        change = lambda leaf: make(leaf) if _is_float(leaf) else leaf  # noqa: E731
        return self._replace(**pytree.tree_map(change, {"args": self.args, "kwargs": self.kwargs}))

    def with_numbers(self, make: Callable[[float], float]) -> Call:
        """The call with other Python floats."""
        change = lambda leaf: make(leaf) if isinstance(leaf, float) else leaf  # noqa: E731
        return self._replace(**pytree.tree_map(change, {"args": self.args, "kwargs": self.kwargs}))


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided


class _Watch(TorchDispatchMode):
    """Keeps calls of functional operators on strided tensors, a dozen of each."""

    def __init__(self, calls: dict[Any, list[Call]]) -> None:
        super().__init__()
        self.calls = calls
        self.name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        are_strided = all(each.layout is torch.strided for each in tensors)
        if not func._schema.is_mutable and are_strided and len(self.calls[func]) < 12:
            copied = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs or {}))
            self.calls[func].append(Call(func, copied[0], copied[1], self.name))
        return func(*args, **(kwargs or {}))


X, Y, Z = (torch.arange(6, dtype=torch.float64).reshape(2, 3) * factor + 1 for factor in (1, 2, 3))
N = torch.arange(6).reshape(2, 3)

#: Of operators that nobody calls, but that graphs have in them.
IN_GRAPHS = [
    Call(aten.__lshift__.Scalar, (N, 2), {}),
    Call(aten.__rshift__.Scalar, (N, 1), {}),
    Call(aten._unsafe_index.Tensor, (X, [torch.tensor([1])]), {}),
    Call(aten._unsafe_index_put.default, (X, [torch.tensor([1])], Y[:1]), {}),
    Call(aten.copy.default, (X, Y[:1]), {}),
    Call(aten.div.Scalar_mode, (X, 2.0), {"rounding_mode": "floor"}),
    Call(aten.embedding.default, (X, torch.tensor([[1, 0]])), {}),
    Call(aten.lift_fresh_copy.default, (X,), {}),
    Call(aten.view.dtype, (X, torch.int64), {}),
    Call(prims.convert_element_type.default, (X, torch.float32), {}),
    Call(prims.copy_strided.default, (X, [1, 2]), {}),
    Call(prims.device_put.default, (X, torch.device("cpu")), {}),
    Call(prims.div.default, (X, Y), {}),
    Call(prims.fma.default, (X, Y, Z), {}),
    Call(prims.fmod.default, (X, Y), {}),
    Call(prims.remainder.default, (X, Y), {}),
    Call(prims.rev.default, (X, [0]), {}),
]


@pytest.fixture(scope="module")
def calls() -> dict[Any, list[Call]]:
    """Those of torch's own tests, in float64 where there is such a sample; few of networks' layers."""
    found: dict[Any, list[Call]] = defaultdict(list)
    watch = _Watch(found)
    for info in op_db:
        if info.name.startswith("nn.functional.") and "pad" not in info.name:
            continue
        watch.name = info.name
        dtypes = torch.float64, torch.float32, torch.int64, torch.bool
        dtype = next((dtype for dtype in dtypes if dtype in info.dtypes), None)
        try:
            torch.default_generator.manual_seed(0)
            # info.sample_inputs formats the stack for each sample: 30 s under pytest.
            samples = info.sample_inputs_func(info, "cpu", dtype, False) if dtype else ()
            for sample in itertools.islice(samples, 30):
                with watch, torch.no_grad():
                    info.op(sample.input, *sample.args, **sample.kwargs)
        except (RuntimeError, NotImplementedError, AssertionError):
            pass  # not on this device, or not built
    for call in IN_GRAPHS:
        found[call.operator].append(call)
    return found


def _all(calls: dict[Any, list[Call]]) -> Iterator[Call]:
    return (call for of_operator in calls.values() for call in of_operator)


def _overloads(name: str) -> list[Any]:
    """Those that a row is of, without those whose results are written somewhere."""
    namespace, packet, *overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    overloads = [] if found is None else [getattr(found, each) for each in overload or found.overloads()]
    return [each for each in overloads if not each._schema.is_mutable]


def _is_taken_apart(overload: Any) -> bool:
    """Whether an operator is decomposed before the recorder or a graph sees it."""
    try:
        return bool(
            torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
        )
    except RuntimeError:  # of TorchScript alone
        return True


def _agree(first: Sequence[Tensor], second: Sequence[Tensor], rtol: float = 0) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.allclose(a, b.to(a.dtype), rtol=rtol, atol=0, equal_nan=True)
        for a, b in zip(first, second, strict=True)
    )


#: AOTAutograd computes with it, in graphs, what Python has computed with symbolic numbers.
OF_NUMBERS = {"aten.true_divide"}


@pytest.mark.parametrize("name", sorted({*OPERATORS} - OF_NUMBERS))
def test_a_row_is_of_an_operator_that_torch_has(name: str) -> None:
    overloads = _overloads(name)
    if not overloads and torch.__version__ < NEW.get(name, TorchVersion("0")):
        pytest.skip("newer than this torch")
    assert not all(map(_is_taken_apart, overloads)), f"{name} is never met"


def test_every_row_is_run(calls: dict[Any, list[Call]]) -> None:
    """Those of lists are in tests/passes/test_normalize.py; ``alias`` comes from functionalization alone.

    That ``phases`` reads a parameter's layout, and no conversion's, shows in tests/test_dither.py.
    """
    run = {str(name) for each in calls for name in (each, each.overloadpacket)}
    others = {"aten.alias", "collage_fx.phases"} | OF_NUMBERS
    assert {name for name in OPERATORS if "._foreach_" not in name} - run <= others


def _drawing(*values: float) -> Callable[[Tensor], Tensor]:
    """Makes a tensor like another of some of these values."""
    generator, chosen = torch.Generator().manual_seed(0), torch.tensor(values, dtype=torch.float64)
    return lambda like: chosen[torch.randint(len(values), like.shape, generator=generator)].to(like.dtype)


#: Of these, all sums, products and quotients of a few are exact in float64.
POWERS = (-4.0, -2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0, 4.0)


def test_what_moves_elements_is_linear_in_them_and_makes_none(calls: dict[Any, list[Call]]) -> None:
    """Whatever torch calls a view does, too."""
    wrong = []
    integers = _drawing(*range(1, 1 << 10))
    for each in [call for call in _all(calls) if facts_of(call.operator).moves and call.floats]:
        padded_with = [leaf for leaf in pytree.tree_leaves(each.args) if isinstance(leaf, float) and leaf]
        if padded_with or any(result.is_complex() for result in each()):
            continue
        first, second = each.of(integers), each.of(integers)
        others = iter(second.floats)
        both = first.of(lambda x, others=others: x + next(others))  # type: ignore[misc]
        elements = torch.cat([torch.zeros(1), *(x.flatten().abs() for x in first.floats)])
        makes_none = all(torch.isin(result.abs(), elements).all() for result in first())
        if not makes_none or not _agree([a + b for a, b in zip(first(), second(), strict=True)], both()):
            wrong.append(str(each.operator))
    assert not wrong


def test_what_passes_an_operand_on_keeps_its_elements_in_order(calls: dict[Any, list[Call]]) -> None:
    wrong = []
    for each in _all(calls):
        if (place := facts_of(each.operator).passes) is not None:
            (result,), operand = each(), each.args[place]
            same = operand if operand.numel() == result.numel() else operand.expand(result.shape)
            if not _agree([result.flatten()], [same.flatten()]):
                wrong.append(str(each.operator))
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_exact_stays_on_the_grid(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).float()
    for name in (name for name, facts in OPERATORS.items() if facts.exact):
        (overload,) = (each for each in _overloads(name) if not _is_taken_apart(each))
        assert _agree([overload(every).to(dtype).float()], [overload(every)])


def test_what_is_transparent_means_the_same_in_float32(calls: dict[Any, list[Call]]) -> None:
    """An operation that rounds its result alone gives float32's, rounded; one of several roundings, often.

    Of the many of ``special_i0e`` too much is left in bfloat16.
    """
    generator = torch.Generator().manual_seed(0)
    agreeing: dict[Any, list[float]] = defaultdict(list)
    for each in _all(calls):
        if not is_transparent(each.operator) or not each.floats or "dtype" in each.kwargs:
            continue
        for low in (0.05, -1.0):
            given = each.of(lambda x, low=low: torch.rand(x.shape, generator=generator) * 0.9 + low)  # type: ignore[misc]
            given = given.of(lambda x: x.bfloat16())
            try:
                narrow, wide = given(), given.of(lambda x: x.float())()
            except RuntimeError:
                continue  # not there for bfloat16
            for a, b in zip(narrow, wide, strict=True):
                if a.numel() and not a.is_complex():
                    agree = torch.isclose(a, b.to(a.dtype), rtol=0, atol=0, equal_nan=True)
                    agreeing[each.operator].append(agree.float().mean().item())
    del agreeing[aten.special_i0e.default]
    assert not [str(each) for each, shares in agreeing.items() if sum(shares) < len(shares) / 2]


def test_what_is_filled_has_one_element_everywhere(calls: dict[Any, list[Call]]) -> None:
    for each in _all(calls):
        if name := facts_of(each.operator).fills:
            names = [argument.name for argument in each.operator._schema.arguments]
            (result,) = each()
            assert _agree([result], [torch.full_like(result, each.args[names.index(name)])])


def test_composites_are_made_of_what_torch_computes(calls: dict[Any, list[Call]]) -> None:
    """Also where a factor is zero: NaN and infinities that it meets are read, or not, as by torch.

    Of two infinities ``lerp`` makes a NaN where torch, for weights from 1/2 on, has another formula.
    """
    wrong = []
    for each in _all(calls):
        rule = composite_of(each.operator, each.kwargs)
        if rule is None:
            continue
        of_numbers = each.of(_drawing(*POWERS)).with_numbers(lambda number: 0.5)
        specials = [math.nan, 1.0] + [math.inf] * ("lerp" not in str(each.operator))
        of_zeros = each.of(_drawing(*specials)).with_numbers(lambda number: 0.0)
        if not all(_agree(call(rule), call()) for call in (of_numbers, of_zeros)):
            wrong.append(str(each.operator))
    assert not wrong


def test_matrix_sums_are_made_of_what_torch_computes(calls: dict[Any, list[Call]]) -> None:
    """In bfloat16, for which alone they are opened; sums of -1, 0 and 1 are exact."""
    for each in _all(calls):
        if (product := facts_of(each.operator).product) is not None:

            def opened(x: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
                return weighted_sum(x, product(a, b), beta, alpha)

            for values in ((-1.0, 0.0, 1.0), (math.nan, math.inf, 1.0)):
                call = each.of(_drawing(*values)).of(lambda x: x.bfloat16())
                for numbers in ({}, {"beta": 0}, {"beta": 0.5, "alpha": 0.5}, {"alpha": 0}):
                    given = call._replace(kwargs=numbers)
                    (result,), (torchs,) = given(opened), given()
                    assert _agree([result.expand(torchs.shape)], [torchs]), (
                        f"{each.operator} {numbers} {values}"
                    )


def test_rules_for_symbolic_numbers_compute_what_torch_computes(calls: dict[Any, list[Call]]) -> None:
    """``pow`` of a number and of a tensor are different code, each off by an ulp at most."""
    wrong = []
    for each in _all(calls):
        rule = facts_of(each.operator).with_number
        numbers = [leaf for leaf in pytree.tree_leaves(each.args) if isinstance(leaf, float)]
        if rule is not None and numbers and (each.floats or not each.kwargs.get("dtype")):
            call = each.of(_drawing(*POWERS[5:]))
            if not _agree(call(rule), call(), rtol=2**-52):
                wrong.append(str(each))
    assert not wrong


@pytest.mark.parametrize("name", [name for name, facts in OPERATORS.items() if facts.function])
def test_a_function_of_numbers_is_the_operator(name: str) -> None:
    """SymPy's numbers have 15 digits."""
    function, overloads = OPERATORS[name].function, _overloads(name)
    assert function is not None
    operands = max([str(a.type) for a in each._schema.arguments].count("Tensor") for each in overloads)
    for values in ((0.375, 2.5)[:operands], (2.5, 0.375)[:operands]):
        tensors = (torch.tensor(value, dtype=torch.float64) for value in values)
        result = overloads[0].overloadpacket(*tensors).item()
        assert float(function(*map(sympy.Float, values))) == pytest.approx(result, rel=1e-14)


@pytest.mark.parametrize("name", [name for name, facts in OPERATORS.items() if facts.sign])
def test_a_sign_is_that_of_the_function(name: str) -> None:
    facts, (x, y) = OPERATORS[name], sympy.symbols("x y")
    assert facts.function is not None
    assert sympy.sympify(f"x {facts.sign} y") == facts.function(x, y)


def _functional_overloads() -> list[Any]:
    """All that a captured graph may have in it, but for those that Inductor's decompositions take apart.

    It leaves some calls of operators of the core set as they are.
    """
    decomposed = functional_decompositions()
    found = [
        each
        for namespace in (aten, prims)
        for name in dir(namespace)
        if isinstance(getattr(namespace, name), torch._ops.OpOverloadPacket)
        for each in _overloads(f"{str(namespace).rpartition('.')[2]}.{name}")
    ]
    return [
        each
        for each in found
        if not _is_taken_apart(each) and (each not in decomposed or torch.Tag.core in each.tags)
    ]


def test_what_divides_is_what_raises_where_an_integer_divisor_is_zero() -> None:
    wrong = []
    for each in _functional_overloads():
        kinds = [
            str(a.type) for a in each._schema.arguments if not a.has_default_value() and not a.kwarg_only
        ]
        options = {"rounding_mode": "floor"} if "rounding_mode" in str(each._schema) else {}
        of_kind = {"Tensor": torch.tensor([3, 0]), "number": 0}
        if len(kinds) == 2 and set(kinds) <= set(of_kind):
            try:
                each(*map(of_kind.__getitem__, kinds), **options)
                raises = False
            except RuntimeError as error:
                raises = "zero" in str(error).lower()
            if raises != facts_of(each).divides:
                wrong.append(str(each))
    assert not wrong


@pytest.mark.parametrize("name", [name for name, facts in OPERATORS.items() if facts.cuts_bits])
def test_what_cuts_bits_makes_the_same_of_two_integers(name: str) -> None:
    first, second = _overloads(name)[0].overloadpacket(torch.tensor([100, 101]), 4).tolist()
    assert first == second != 0


def test_what_gives_other_results_each_time_draws(calls: dict[Any, list[Call]]) -> None:
    """But for memory that nobody has written to, as there is in a part of what these two return."""
    unwritten = re.compile("empty|_ctc_loss|linalg_lstsq")
    strided = (each for each in _all(calls) if all(made.layout is torch.strided for made in each()))
    varying = {each.operator for each in strided if not _agree(each(), each())}
    assert not [str(each) for each in varying if not draws(each) and not unwritten.search(str(each))]


def test_random_integers_are_of_the_range_that_is_read_off() -> None:
    """Those of newer versions' Philox generators are numbers that a key stands for, and draw nothing."""
    by_name = {"self": torch.zeros(99), "size": [99], "low": 5, "high": 7, "seed": torch.tensor(0)}
    packets = [getattr(aten, name) for name in dir(aten) if "randint" in name and "philox" not in name]
    for each in (*packets, prims.inductor_randint):
        for overload in each.overloads():
            operator, arguments = getattr(each, overload), getattr(each, overload)._schema.arguments
            if operator._schema.is_mutable or any(
                str(a.type) == "Tensor" and a.name == "high" for a in arguments
            ):
                continue
            given = [by_name[a.name] for a in arguments if a.name in by_name]
            options = {"generator": None} if any(a.name == "generator" for a in arguments) else {}
            low, high = drawn_range(operator, given, options) or (0, 0)
            assert set(operator(*given, **options).tolist()) == set(range(low, high))
            assert draws(operator) or "seed" in str(operator._schema)


def test_what_fake_tensors_cannot_do_depends_on_values(calls: dict[Any, list[Call]]) -> None:
    wrong = []
    for each in _all(calls):
        with FakeTensorMode() as mode:
            arguments = {"args": each.args, "kwargs": each.kwargs}
            fake = each._replace(**pytree.tree_map_only(Tensor, mode.from_tensor, arguments))
            try:
                fake()
            except (DataDependentOutputException, DynamicOutputShapeException):
                if not depends_on_values(each.operator):
                    wrong.append(str(each.operator))
    assert not wrong


def test_what_ignores_values_has_the_same_results_for_others(calls: dict[Any, list[Call]]) -> None:
    wrong = []
    for each in _all(calls):
        if ignores_values(each.operator) and each.floats and not draws(each.operator):
            is_same = _agree(each.of(_drawing(1.0, 2.0))(), each.of(_drawing(3.0, 4.0))())
            if not is_same and "empty" not in str(each.operator):
                wrong.append(str(each.operator))
    assert not wrong


def test_what_is_pointwise_reads_one_element_of_each_operand(calls: dict[Any, list[Call]]) -> None:
    """Flattened and in another order its operands give the same, up to two results of one or two ulps.

    Functions of vector instructions are other code than those of the elements that are left over.
    """
    wrong = []
    for each in _all(calls):
        tensors = [leaf for leaf in pytree.tree_leaves((each.args, each.kwargs)) if isinstance(leaf, Tensor)]
        shapes = {x.shape for x in tensors if x.dim()}
        if len(shapes) == 1 and is_pointwise(each.operator) and not draws(each.operator):
            order = torch.randperm(shapes.pop().numel(), generator=torch.Generator().manual_seed(0))
            reorder = partial(_reordered, order)
            change = pytree.tree_map_only(Tensor, reorder, {"args": each.args, "kwargs": each.kwargs})
            results, others = each(), each._replace(**change)()
            if not _agree(list(map(reorder, results)), others, rtol=2**-50):
                wrong.append(str(each.operator))
    assert not wrong


def _reordered(order: Tensor, x: Tensor) -> Tensor:
    return x.flatten()[order] if x.dim() else x


def test_what_factorizes_is_what_is_not_there_for_16_bits(calls: dict[Any, list[Call]]) -> None:
    """Of the operators that linear algebra is made of."""
    algebra = re.compile(
        r"linalg|cholesky|geqrf|^lu|ormqr|^qr$|svd|pinverse|triangular_solve|logdet|matrix_exp"
    )
    missing: dict[Any, bool] = {}
    for each in _all(calls):
        if algebra.search(each.made_by) and each.floats and all(x.numel() for x in each.floats):
            try:
                each.of(lambda x: x.bfloat16())()
                missing.setdefault(each.operator, False)
            except RuntimeError:
                missing[each.operator] = True
    assert [str(each) for each, is_missing in missing.items() if is_missing != factorizes(each)] == []


def test_operators_of_which_nothing_is_known_are_named() -> None:
    """A new one may need a row: without, no error term passes it."""
    named = [rf"(^|\.|_)({names})(_|\.|$)" for names in OPAQUE.values()]
    named += [rf"^prims\.({OTHERWISE_NAMED.replace(' ', '|')})\."]
    unknown = []
    for each in _functional_overloads():
        takes, gives = ([str(x.type) for x in xs] for xs in (each._schema.arguments, each._schema.returns))
        is_of_tensors = any("Tensor" in kind for kind in takes) and any("Tensor" in kind for kind in gives)
        has_row = any(name in OPERATORS for name in (str(each), str(each.overloadpacket)))
        is_list = bool(foreach_rule(foreach_name(each)))
        is_known = (
            has_row or is_list or is_transparent(each) or depends_on_values(each) or ignores_values(each)
        )
        if is_of_tensors and not is_known and not any(re.search(pattern, str(each)) for pattern in named):
            unknown.append(str(each))
    assert not unknown
