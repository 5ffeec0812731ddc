"""Tests of other suites that pass plainly and may fail with ``install``, each with its reason.

The command fails for every other test, and names entries that no failure needs any more.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from tests.peers.recording import Result

__all__ = ["LISTED", "Listed", "reason_for"]


@dataclass(frozen=True)
class Listed:
    """Failures that are expected.

    Attributes:
        suite: its name.
        tests: pattern of node ids, as of the shell.
        error: regular expression that is found in the error.
        reason: why this is right, or what is missing.
        dtypes: where it is so.
    """

    suite: str
    tests: str
    error: str
    reason: str
    dtypes: tuple[str, ...] = ("float32", "bf16")


LISTED: tuple[Listed, ...] = (
    Listed(
        "pytorch-optimizer",
        "*::test_create_compiled_optimizer*",
        r"CompileCounter .*frame_count",
        "counts the frames that a compiler of its own gets; an installed step is compiled by ours",
    ),
    Listed(
        "pytorch-optimizer",
        "*omplex*",
        r"UnsupportedTensorError: a parameter of dtype torch\.complex64",
        "complex parameters are refused by name; where the class refuses them, too, its error comes later",
    ),
    Listed(
        "pytorch-optimizer",
        "*[Ss]parse*",
        r"UnsupportedTensorError: a tensor of layout torch\.sparse_coo",
        "sparse gradients are refused by name",
    ),
    Listed(
        "pytorch-optimizer",
        "*lomo*",
        r"UnsupportedOptimizerError: (Ada)?LOMO has no step, or one that only raises",
        "its hooks update parameters in the backward pass: it is refused where it is installed",
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_probe_propagates_unexpected_errors",
        r"SGD has no step, or one that only raises",
        "the test's own step only raises, for which it is refused where it is installed",
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_variant_training[[]adam_debias-ranger21_*",
        "Loss did not decrease enough",
        "a loss that float32 reaches by little: parameters end 2.6 % of their way from float32's at most, in "
        "plain bf16 11 %, which happens to be on the side of a lower loss",
        ("bf16",),
    ),
    *(
        Listed(
            "pytorch-optimizer",
            f"*{name}*",
            "Apart: parameters end",
            "plain torch.compile, with aot_eager or Inductor, ends as far from eager torch in this test",
            ("float32",),
        )
        for name in ("apollo_", "lorarite_", "adamuon_", "scion_", "scionlight_")
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_training[[]lamb_*pre_norm*",
        "Apart: parameters end",
        "a bias of one element cancels to 0 or to 1e-8 by its last bit, on which the class branches; plain "
        "torch.compile ends as far from eager torch, with the backend eager, too",
        ("float32",),
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_sign_based_foreach_parity[[]tiger*",
        "Apart: parameters end",
        "an average cancels exactly, and the last bit of the sum decides on the sign of the step",
        ("float32",),
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_checkpoint_resume[[]schedulefree[]]",
        "Tensor-likes are not equal",
        "Dynamo captures a first step, and makes torch's AdamW count by tensors: 1 ulp of float32 "
        "from the later steps, which are recorded; a resumed run begins with such a step",
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_adan_low_precision_decay",
        "Tensor-likes are not equal",
        "it expects the rounding of bfloat16 after each operation",
    ),
    Listed(
        "pytorch-optimizer",
        "*[[]lbfgs*",
        "UnsupportedOptimizerError: LBFGS",
        "LBFGS is refused by name",
    ),
    Listed(
        "pytorch-optimizer",
        "*came_*",
        "Apart: parameters end",
        "its losses rise to 137; eager torch ends as far off if the data change by 1e-6 of themselves",
        ("float32",),
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_training[[]spectralsphere_*",
        "Loss did not decrease enough",
        "it orthogonalizes in bfloat16: plain torch.compile ends as far from eager torch, .27 of the way; "
        "the loss is .578, that of eager torch .570 and of the test .576",
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_checkpoint_resume[[]spectralsphere[]]",
        "Apart: parameters end",
        "it orthogonalizes in bfloat16: plain torch.compile ends 1.1 of the way from eager torch",
        ("float32",),
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_checkpoint_resume[[]shampoo[]]",
        "Apart: parameters end",
        "plain torch.compile ends .052 of the way from eager torch, too, as float64 does (.051)",
        ("float32",),
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_create_optimizer_compile_wiring[[]*",
        "Expected 'compile' to be called once",
        "the test counts the calls of torch.compile, and install makes one",
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_create_compiled_optimizer[[]*",
        "EagerStepError: the step of this .* has been replaced after install",
        "a factory compiles the step after the optimizer has been installed where it was made: the message "
        "says to install it below that line",
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_conda_projected_second_moment",
        "Tensor-likes are not close",
        "a gradient of rank 1: the step is the sign of projections that cancel but for bfloat16's roundings",
        ("bf16",),
    ),
    Listed(
        "pytorch-optimizer",
        "*::test_safe_fp16_methods",
        "UnsupportedOptimizerError: SafeFP16Optimizer",
        "a wrapper with float32 masters that is no Optimizer: the message says to install what it holds",
    ),
    Listed(
        "heavyball",
        "*Scion*",
        r"UncompensatedParameterError: mm .* reads it in bfloat16",
        "the first step overwrites weights and adds a product of bfloat16 matrices of moments, in graphs of "
        "their own: it cannot be told from weights that are rotated in bfloat16; strict=False takes it",
        ("bf16",),
    ),
    Listed(
        "heavyball",
        "*test_mars_flag_changes_behavior",
        "AssertionError: assert 0.0 > 1e-06",
        "the flag moves float32 weights by 1e-5, less than half an ulp of most of them: ours move as far in "
        "their error terms, and plain bfloat16 weights end elsewhere because they are rounded at random",
        ("bf16",),
    ),
    *(
        Listed("heavyball", pattern, "Apart: parameters end", reason, ("float32",))
        for pattern, reason in (
            (
                "*test_clip*None-_test_global_l2norm-MuonLaProp*",
                "weights move by .09 of an ulp: .11 of that, and .043 if plain runs begin an ulp apart",
            ),
            (
                "*test_ndim_tensor*1-?-OrthoLaProp*",
                "eager torch ends up to 4.2 of its way off if gradients change by 2e-7 of themselves",
            ),
            (
                "*test_toy_parameters_change*OrthoLaProp*",
                "its other tests of the same steps: eager torch ends farther off if they begin an ulp apart",
            ),
        )
    ),
    Listed(
        "heavyball",
        "*test_merge*True-True-size3-PSGDKron*",
        "took more than",
        "two weights of 32128 x 768 in blocks of 256 x 256 are graphs of some 10,000 operations, which take "
        "minutes to compile; the test takes three minutes plainly",
    ),
    Listed(
        "torchao",
        "*::test_optim_bf16_stochastic_round_correctness*",
        "Scalars are not close",
        "the loss after steps of 1e-5 is that of hi, which moves when the sum of the steps exceeds half an "
        "ulp; stochastic rounding moves a part of hi at once",
    ),
    Listed(
        "torchao",
        "*_Adam*4bit_*",
        "unhashable type: non-nested SymInt",
        "plain torch.compile of the step fails, too: a part before a break of the graph leaves symbols of "
        "sizes in the state that it makes",
        ("float32",),
    ),
)


def reason_for(suite: str, dtype: str, result: Result, listed: tuple[Listed, ...] = LISTED) -> Listed | None:
    """Return the entry that a failed test belongs to."""
    for entry in listed:
        is_meant = entry.suite == suite and dtype in entry.dtypes
        if (
            is_meant
            and fnmatch.fnmatchcase(result.test, entry.tests)
            and re.search(entry.error, result.error)
        ):
            return entry
    return None
