"""Packed tensors as a program sees them: their values, until somebody writes to them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx import error_terms, full_value, reset_error_terms
from collage_fx.errors import UnsupportedTensorError
from collage_fx.numerics import PACKED_FORMATS
from collage_fx.state.error_terms import ErrorTermRecord, ensure_record, record_of
from collage_fx.state.packed import PackedTensor, is_packed, unpack
from collage_fx.torch_compat import storage_of, without_torch_function
from tests.support.substitutes import parts_of_elements

BLOCK8, _ = PACKED_FORMATS["block8"]


def packed(seed: int = 0) -> tuple[Tensor, Tensor, ErrorTermRecord]:
    """A packed tensor, its value, and its record."""
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    value = BLOCK8.join(*BLOCK8.split(tensor.float(), tensor.dtype)).bfloat16()
    expansion = ensure_record(tensor, BLOCK8, name="tensor")
    expansion.use("tensor")
    assert is_packed(tensor)
    return tensor, value, expansion


def memory(tensor: Tensor) -> int:
    with without_torch_function():
        return tensor.untyped_storage().nbytes()


def test_its_memory_is_given_back() -> None:
    tensor, *_ = packed()
    assert memory(tensor) == 2
    assert BLOCK8.nbytes(tensor) == 64 * 64 + 64 * 2 + 4
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((64, 64), torch.bfloat16, "cpu")


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda t: t.float().sum(),
    "add": lambda t: t + 1,
    "reflected": lambda t: 1 - t,
    "clone": torch.clone,
    "stack": lambda t: torch.stack([t, t]),
    "foreach": lambda t: torch._foreach_mul([t], 2.0)[0],
    "dtype": lambda t: t.to(torch.float64),
    "compared": lambda t: t == t,
    "stride": lambda t: torch.tensor(t.stride()),
    "text": lambda t: torch.tensor([ord(c) for c in repr(t)]),
    "list": lambda t: torch.tensor(t.tolist()),
    "out": lambda t: torch.add(t, t, out=torch.empty(64, 64, dtype=torch.bfloat16)),
    "copied into another": lambda t: torch.zeros(64, 64).copy_(t),
    "deep copy": lambda t: copy.deepcopy(t) * 1,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)) * 1,
    "detach": lambda t: t.detach() * 1,
    "data": lambda t: t.data * 1,
    "iterated": lambda t: torch.stack([row.clone() for row in t.clone()]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_see_the_value_and_leave_it_packed(read: Callable[[Tensor], Any]) -> None:
    tensor, value, _ = packed()
    result = read(tensor)
    assert is_packed(tensor)
    assert type(result) is Tensor
    assert torch.equal(result, read(value))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda t: t.mul_(2),
    "operator": lambda t: t.__iadd__(1),
    "foreach": lambda t: torch._foreach_add_([t], 1.0),
    "detach": lambda t: t.detach().zero_(),
    "data": lambda t: t.data.fill_(3),
    "of an alias's alias": lambda t: t.detach().data.fill_(3),
    "item": lambda t: t.__setitem__(0, 5),
    "view": lambda t: t[0].zero_(),
    "flat view": lambda t: t.view(-1).mul_(2),
    "out": lambda t: torch.mul(t, 2, out=t),
    "assigned": lambda t: setattr(t, "data", torch.ones(64, 64).bfloat16()),
    "memory": lambda t: t.view(torch.int16).numpy().fill(0),
    "lerp": lambda t: t.lerp_(torch.ones(64, 64).bfloat16(), 0.5),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_unpack_and_are_packed_with_the_next_step(write: Callable[[Tensor], Any]) -> None:
    tensor, value, expansion = packed()
    before, whole = value.clone(), full_value(tensor, torch.float32)
    write(tensor)
    write(value)
    assert type(tensor) is Tensor
    assert torch.equal(tensor, value)
    assert error_terms(tensor) == ()
    expansion.use("tensor")
    assert is_packed(tensor)
    written = torch.where(value == before, whole, value.float())  # elements that are the same keep their bits
    assert torch.equal(tensor, BLOCK8.join(*BLOCK8.split(written, value.dtype)).bfloat16())


def test_what_an_operation_in_place_returns_is_the_tensor() -> None:
    tensor, *_ = packed()
    assert tensor.mul_(2) is tensor


def test_other_objects_of_it_follow() -> None:
    tensor, value, _ = packed()
    one, other = tensor.detach(), tensor.data
    assert isinstance(one, PackedTensor)
    one.add_(1)
    assert torch.equal(other, value + 1)
    assert type(tensor) is type(one) is type(other) is Tensor
    other.add_(1)
    assert torch.equal(tensor, value + 1 + 1)


def test_another_object_keeps_the_value_when_the_tensor_is_gone() -> None:
    tensor, value, expansion = packed()
    alias, buffers = tensor.detach(), weakref.ref(expansion.auxiliaries[0])
    del tensor, expansion
    gc.collect()
    assert torch.equal(alias, value)
    alias.add_(1)
    assert type(alias) is Tensor
    assert torch.equal(alias, value + 1)
    gc.collect()
    assert buffers() is None


def test_the_value_is_more_than_the_tensor_shows() -> None:
    tensor, value, expansion = packed()
    exact = BLOCK8.join(tensor, *expansion.auxiliaries).double()
    assert torch.equal(full_value(tensor), exact)
    (term,) = error_terms(tensor)
    assert torch.equal(value.double() + term.double(), exact)
    assert is_packed(tensor)


def test_unpacked_and_packed_again_it_has_the_same_codes() -> None:
    """Of 8 bits, values in bfloat16 would be of other codes where another scale suits them."""
    tensor, value, expansion = packed()
    expansion.auxiliaries[0][:, :32] //= 3
    before = [each.clone() for each in expansion.auxiliaries]
    unpack(tensor)
    assert type(tensor) is Tensor
    assert tensor.stride() == (64, 1)
    expansion.use("tensor")
    assert all(map(torch.equal, before, expansion.auxiliaries))
    encoded = BLOCK8.split(tensor.float(), value.dtype)[1]
    assert not torch.equal(encoded, before[0])


def test_a_large_tensor_is_encoded_in_parts() -> None:
    tensor = torch.randn(100, 96, generator=torch.Generator().manual_seed(1)).half()
    expected = BLOCK8.split(tensor.float(), tensor.dtype)[1:]
    expansion = ensure_record(tensor, BLOCK8, name="tensor")
    with parts_of_elements(1 << 10):
        expansion.use("tensor")
    assert all(map(torch.equal, expansion.auxiliaries, expected))


def test_zeros_are_packed_as_they_are() -> None:
    tensor = torch.zeros(64, 64).bfloat16()
    ensure_record(tensor, BLOCK8, name="tensor").use("tensor")
    assert not tensor.any()


def test_reset_leaves_an_ordinary_tensor_with_the_value() -> None:
    tensor, value, _ = packed()
    reset_error_terms(tensor)
    assert type(tensor) is Tensor
    assert record_of(tensor) is None
    assert torch.equal(tensor, value)


def test_code_that_goes_past_python_reads_nans_and_cannot_write() -> None:
    tensor, *_ = packed()
    with without_torch_function():
        assert torch.isnan(tensor).all()
        with pytest.raises(RuntimeError, match="single memory location"):
            tensor.add_(1)
        assert storage_of(tensor)


def test_negative_numbers_are_refused_where_none_can_be_stored() -> None:
    _, positive = PACKED_FORMATS["block8"]
    tensor = torch.rand(64, 64).bfloat16()
    tensor[3, 5] = -1
    before = tensor.clone()
    with pytest.raises(UnsupportedTensorError, match=r"negative numbers.*\n.*exp_avg_sq"):
        ensure_record(tensor, positive, name="exp_avg_sq").use("exp_avg_sq")
    assert not is_packed(tensor)
    assert torch.equal(tensor, before)
    tensor[3, 5] = float("nan")
    ensure_record(tensor, positive, name="exp_avg_sq").use("exp_avg_sq")
    assert is_packed(tensor)
