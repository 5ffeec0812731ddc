"""Instructions of a full block are those on the shortest path, in text like that of cuobjdump."""

from __future__ import annotations

import pytest

from collage_tools.gpu_code.sass import CARDS, busiest, by_pipe, full_block


def sass(*lines: str) -> str:
    """Return lines as cuobjdump writes them, 16 bytes each; ``{n}`` is the address of line n."""
    address = [f"0x{16 * i:x}" for i in range(len(lines))]
    return "".join(
        f"        /*{16 * i:04x}*/  {line.format(*address)} ;  /* 0x0000 */\n        /* 0x00 */\n"
        for i, line in enumerate(lines)
    )


#: The last block from line 7 on, with its mask; a slow path of a root at 3; a subroutine at the end.
BRANCHES = sass(
    "@P0 BRA {7}",
    "MUFU.RSQ R0, R1",
    "@!P2 BRA {5}",
    "CALL.REL.NOINC {13}",
    "BRA {6}",
    "FFMA R0, R0, R1, R1",
    "EXIT",
    "ISETP.GT.AND P0, PT, R0, R1, PT",
    "@P0 LDG.E R2, desc[UR4][R2.64]",
    "MUFU.RSQ R0, R1",
    "FFMA R0, R0, R1, R1",
    "@!P1 EXIT",
    "EXIT",
    "RET.REL.NODEC R6 0x0",
)


def test_the_path_of_a_full_block() -> None:
    assert full_block(BRANCHES) == {"BRA": 2, "MUFU.RSQ": 1, "FFMA": 1, "EXIT": 1}
    last = {"BRA": 1, "ISETP.GT.AND": 1, "LDG.E": 1, "MUFU.RSQ": 1, "FFMA": 1, "EXIT": 2}
    assert full_block(BRANCHES.replace("@!P2 BRA", "@!P2 CALL")) == last


def test_the_path_goes_through_a_wide_access() -> None:
    """Also where the last block has fewer instructions, as in pieces of a turn each."""
    blocks = sass("@P0 BRA {3}", "LDG.E.128 R4, desc[UR4][R2.64]", *["FADD R1, R1, R2"] * 4, "EXIT")
    blocks = blocks.replace("@P0 BRA 0x30", "@P0 BRA 0x60")
    assert full_block(blocks) == {"BRA": 1, "LDG.E.128": 1, "FADD": 4, "EXIT": 1}
    assert full_block(blocks.replace(".128", "")) == {"BRA": 1, "EXIT": 1}


def test_loops_turn_as_often_as_there_are_tiles() -> None:
    loop = sass(
        "S2R R0", "FADD R1, R1, R2", "@P1 BRA {4}", "DFMA R4, R4, R4, R2", "@!P6 BRA {6}", "BRA {1}", "EXIT"
    )
    assert full_block(loop) == {"S2R": 1, "FADD": 1, "BRA": 2, "EXIT": 1}
    # A turn: FADD, the branch past DFMA, the branch out of the loop, the branch back.
    assert full_block(loop, tiles=4) == {"S2R": 1, "FADD": 4, "BRA": 2 + 3 * 3, "EXIT": 1}


def test_pipes_and_the_busiest() -> None:
    pipes = by_pipe({"FADD": 3, "FSETP.GT.AND": 4, "BRA": 1, "DFMA": 2})
    assert pipes == {"issue": 10, "FMA": 3, "ALU": 4, "FP64": 2}
    card = CARDS["sm_90"]
    rate = card.multiprocessors * card.clock
    pipe, seconds = busiest(pipes, card)
    assert pipe == "issue"
    assert seconds * rate == pytest.approx(10 / 128)
    pipe, seconds = busiest({**pipes, "XU": 2}, card)
    assert pipe == "XU"
    assert seconds * rate == pytest.approx(2 / 16)
    assert busiest({}, card)[1] == 0.0
