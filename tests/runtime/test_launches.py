"""The table that launches read: what is uploaded, and when."""

from __future__ import annotations

from array import array

import pytest
import torch

from collage_fx.codegen import FIRST_OF_PIECE, LENGTH
from collage_fx.errors import ChangedTensorError
from collage_fx.runtime import LONGEST_PIECE, Call, Column, Kernel
from collage_fx.runtime.launches import UPLOADS, Launches
from collage_fx.torch_compat import TableKernel
from tests.support.substitutes import captured_into_a_cuda_graph, uploading_to_a_gpu

NOTHING = torch.empty(0, dtype=torch.uint8)

#: Kernel whose arguments are a tensor of two bytes per element and its length.
KERNEL = Kernel(None, TableKernel("kernel", (0, 1), 1024, {}), (Column(2), Column(LENGTH)))


def test_a_captured_graph_uploads_nothing() -> None:
    """What it would upload in every replay is refused, and uploaded by the next step that is not captured."""
    table = Launches(torch.device("cpu"), [], lambda index: index)
    table.add([Call(KERNEL, (0, 1), 0, 10, ())])
    here, there = array("q", [1 << 12]), array("q", [1 << 13])
    table.update(here, NOTHING)
    assert table.table[:2].tolist() == [1 << 12, 10]
    with captured_into_a_cuda_graph():
        table.update(here, NOTHING)
        with pytest.raises(ChangedTensorError, match="at another address"):
            table.update(there, NOTHING)
        with pytest.raises(ChangedTensorError, match="at another address"):
            table.update(there, NOTHING)
    assert table.table[:2].tolist() == [1 << 12, 10]
    table.update(there, NOTHING)
    assert table.table[:2].tolist() == [1 << 13, 10]


def test_only_the_members_that_are_there_are_launched() -> None:
    """Their rows stay in the table, and what is made whichever members are there is launched always."""
    table = Launches(torch.device("cpu"), [], lambda index: index)
    launch = table.add([Call(KERNEL, (i, 3), 0, 10, (), member) for i, member in enumerate((-1, 0, 1))])
    addresses = array("q", [1 << 12, 1 << 13, 1 << 14])

    def launched(present: array[int] | None) -> list[int]:
        table.update(addresses, NOTHING, present)
        return sorted(word >> 32 for words in launch.programs.values() for word in words.tolist())

    assert launched(None) == [0, 1, 2]
    assert launched(array("b", [0, 1])) == [0, 2]
    assert launched(array("b", [0, 0])) == [0]
    assert launched(None) == [0, 1, 2]


@pytest.mark.parametrize("sets", [1, 3])
def test_four_uploads_of_each_set_of_rows_can_be_pending(sets: int) -> None:
    table = Launches(torch.device("cpu"), [], lambda index: index)
    table.add([Call(KERNEL, (0, sets), 0, 10, (), member) for member in range(sets)])
    addresses = [array("q", [n << 12] * sets + [10]) for n in range(1, 20)]
    for member in range(sets):
        table.update(addresses[0], NOTHING, array("b", [member == each for each in range(sets)]))
    with uploading_to_a_gpu(table) as waited:
        for given in addresses[1:]:
            table.update(given, NOTHING, array("b", [0] * (sets - 1) + [1]))
    assert waited == [*range(len(addresses) - 1 - UPLOADS * sets)]


def test_numbers_are_words_behind_the_rows() -> None:
    """Rows have their addresses: of pieces' first indices, of a number of the host, and of a cell."""
    function = TableKernel("kernel", (0, 1, 2, 3, 4), 1 << 20, {})
    columns = (Column(2), Column(FIRST_OF_PIECE), Column(0, of_host=8), Column(0), Column(LENGTH))
    table = Launches(torch.device("cpu"), [3], lambda index: index)
    table.add([Call(Kernel(None, function, columns), (0, 5, 1, 3, 4), 0, LONGEST_PIECE + 10, ())])
    rate = torch.tensor(0.5, dtype=torch.float64)
    table.update(array("q", [1 << 12, rate.data_ptr()]), NOTHING)
    rows, numbers = table.table[:10].view(2, 5), table.table[10:]
    assert rows[:, 0].tolist() == [1 << 12, (1 << 12) + 2 * LONGEST_PIECE]
    assert rows[:, 4].tolist() == [LONGEST_PIECE, 10]
    places = (rows[:, 1:4] - numbers.data_ptr()) // 8
    assert numbers[places[:, 0]].tolist() == [0, LONGEST_PIECE]
    assert numbers.view(torch.float64)[places[:, 1]].tolist() == [0.5, 0.5]
    assert places[0, 1:].tolist() == places[1, 1:].tolist()
    assert sorted({*places.flatten().tolist()}) == list(range(len(numbers)))
