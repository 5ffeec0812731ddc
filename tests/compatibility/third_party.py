"""The rows of other packages: optimizers that people use, unmodified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from collage_tools.audit import Parameters
from tests.compatibility.catalog import Subject

__all__ = ["SUBJECTS"]

Options = Mapping[str, Any]

DECAY = {"weight_decay": 0.5}

#: Learning rates with which an optimizer of that family takes steps of 1e-5 to 1e-4.
ADAM, SGD, LION = 5e-5, 5e-5, 5e-5


def _of(
    package: str, module: str, classes: Mapping[str, float | None], *options: Options, **others: Any
) -> Iterator[Subject]:
    """Subjects of one package that are tried alike; ``classes`` gives each its learning rate."""
    for name, lr in classes.items():
        yield Subject(package, f"{module}.{name}", lr, options=options or ({},), **others)


def _with_names(cls: Any, parameters: Parameters, **options: Any) -> torch.optim.Optimizer:
    return cls([(f"layer{i}.weight", p) for i, p in enumerate(parameters)], **options)


def _around_adam(cls: Any, parameters: Parameters, **options: Any) -> torch.optim.Optimizer:
    return cls(torch.optim.Adam(parameters, **options))


def _sharpness_aware(cls: Any, parameters: Parameters, **options: Any) -> torch.optim.Optimizer:
    return cls(parameters, torch.optim.AdamW, rho=0.05, **options)


def _mechanized(mechanize: Any, parameters: Parameters, **options: Any) -> torch.optim.Optimizer:
    return mechanize(torch.optim.AdamW, s_init=1.0)(parameters, **options)


def _schedule_free() -> Iterator[Subject]:
    classes: dict[str, float | None] = {
        "AdamWScheduleFree": ADAM,
        "RAdamScheduleFree": 5e-4,
        "SGDScheduleFree": SGD,
        "AdamWScheduleFreePaper": ADAM,
    }
    for name, lr in classes.items():
        yield Subject(
            "schedulefree",
            f"schedulefree.{name}",
            lr,
            options=({}, DECAY),
            foreach=(False, True) if name != "AdamWScheduleFreePaper" else (),
            prepare=lambda optimizer: optimizer.train(),
        )


def _optimi() -> Iterator[Subject]:
    """Those that carry their own (Kahan) compensation, with it and without."""
    rates: dict[str, float | None] = {
        "Adam": ADAM,
        "AdamW": ADAM,
        "Adan": ADAM,
        "Lion": LION,
        "RAdam": ADAM,
        "Ranger": 2e-4,
        "SGD": SGD,
        "StableAdamW": ADAM,
    }
    for name, lr in rates.items():
        yield from _of(
            "torch-optimi",
            "optimi",
            {name: lr},
            {"kahan_sum": True},
            {"kahan_sum": False},
            under_budget=({"kahan_sum": False},),
            always={"triton": False},
            foreach=(False, True),
            why_inaccurate=OPTIMI_RANGER if name == "Ranger" else "",
        )


#: Its rule for 16-bit parameters ends 0.298 from its rule for float64 when both are run in float64; what is
#: compiled ends 0.004 from the former (``tests/test_self_compensating.py``).
OPTIMI_RANGER = (
    "with foreach=False and kahan_sum=True, Ranger's Lookahead step multiplies by alpha what the update of "
    "the slow weights has left over (with foreach=True it does not), so that in exact arithmetic too a part "
    "of it is applied twice; float64 parameters take another path"
)


PYTORCH_OPTIMIZER: Mapping[str, float | None] = {
    "ADOPT": ADAM,
    "APOLLO": ADAM,
    "AdEMAMix": ADAM,
    "AdaBelief": ADAM,
    "Adan": ADAM,
    "CAME": 2e-6,
    "DiffGrad": ADAM,
    "GaLore": ADAM,
    "Grams": ADAM,
    "GrokFastAdamW": 1e-4,
    "Kron": ADAM,
    "LARS": 2e-4,
    "Lamb": ADAM,
    "LaProp": ADAM,
    "Lion": LION,
    "MADGRAD": 5e-6,
    "MARS": 2e-5,
    "NovoGrad": ADAM,
    "QHAdam": ADAM,
    "RAdam": 5e-4,
    "SGDW": SGD,
    "SM3": 2e-4,
    "SCION": 1e-4,
    "SCIONLight": 1e-4,
    "SignSGD": LION,
    "StableAdamW": ADAM,
    "Tiger": LION,
    "Yogi": ADAM,
}

#: ``tests/peers/programs.py`` measures it with the random numbers of eager torch.
KRON = (
    "its step draws random numbers, and compiled code draws others than eager torch does. With the same "
    "numbers (torch._inductor.config.fallback_random) the error is 0.08"
)

#: Statistics of a vector have rank t after t steps.
SHAMPOO = (
    "the preconditioner of a vector is singular for as many steps as the vector has elements. Until then its "
    "inverse root, which is computed anew and kept in bfloat16, has entries of 1 / sqrt(matrix_eps), whose "
    "roundings are larger than the update; the parameters with two dimensions are off by 0.01"
)

TORCH_OPTIMIZER: Mapping[str, float | None] = {
    "AdaBelief": ADAM,
    "AggMo": 1e-5,
    "DiffGrad": ADAM,
    "Lamb": ADAM,
    "MADGRAD": 5e-6,
    "NovoGrad": ADAM,
    "QHAdam": ADAM,
    "RAdam": 2e-4,
    "SGDW": SGD,
    "Shampoo": 1e-3,
    "Yogi": ADAM,
}

HEAVYBALL: Mapping[str, float | None] = {
    "AdamW": ADAM,
    "LaProp": ADAM,
    "Muon": ADAM,
    "SFAdamW": ADAM,
}

DADAPTATION: Mapping[str, float | None] = {"DAdaptAdaGrad": 1.0, "DAdaptAdam": 1.0, "DAdaptSGD": 1.0}

# The measured gradients do not get smaller as the weights move: what estimates the distance to the solution
# would let it grow for ever. So it starts where the steps are to be, and grows slowly.
_SLOW = {"d0": 5e-5, "growth_rate": 1.02}

_FIXED_RATE = {"lr": 1e-4, "relative_step": False, "scale_parameter": False}

SUBJECTS: Sequence[Subject] = (
    *_schedule_free(),
    *_of(
        "lion-pytorch",
        "lion_pytorch",
        {"Lion": LION},
        {},
        DECAY,
        {"decoupled_weight_decay": True, "weight_decay": 2e-5},
    ),
    *_of(
        "prodigyopt",
        "prodigyopt",
        {"Prodigy": 1.0},
        {},
        {"slice_p": 11},
        {"use_bias_correction": True},
        always=_SLOW,
    ),
    *_of("came-pytorch", "came_pytorch", {"CAME": 2e-6}, {}, DECAY),
    *_optimi(),
    *_of(
        "adam-mini",
        "adam_mini",
        {"Adam_mini": ADAM},
        construct=_with_names,
        always={"dim": 16, "n_heads": 4, "verbose": False},
    ),
    *_of("pytorch_optimizer", "pytorch_optimizer", PYTORCH_OPTIMIZER),
    # SOAP turns its bases in the 11th, 21st, ... step. In the 11th it replaces exp_avg_sq, in the 21st what
    # the 11th has left, with error terms. The other's step is another one from the 25th on. DASH computes
    # roots in the 1st, 10th, 20th, ... step.
    *_of("pytorch_optimizer", "pytorch_optimizer", {"Shampoo": 1e-3}, why_inaccurate=SHAMPOO),
    *_of("pytorch_optimizer", "pytorch_optimizer", {"SOAP": 1e-4, "ScalableShampoo": 1e-5}, steps=80),
    *_of("pytorch_optimizer", "pytorch_optimizer", {"DASH": 1e-4}, steps=60),
    # They project some gradients, for the first time that of the 26th step.
    *_of("pytorch_optimizer", "pytorch_optimizer", {"AdamP": ADAM}, steps=80),
    *_of("torch-optimizer", "torch_optimizer", {"AdamP": ADAM, "SGDP": SGD}, steps=80),
    *_of("pytorch_optimizer", "pytorch_optimizer", {"AdaFactor": 1e-4}, always={"relative_step": False}),
    *_of("pytorch_optimizer", "pytorch_optimizer", {"DAdaptAdam": 1.0, "Prodigy": 1.0}, always=_SLOW),
    *_of(
        "pytorch_optimizer",
        "pytorch_optimizer",
        {"Lookahead": ADAM, "OrthoGrad": ADAM},
        construct=_around_adam,
    ),
    *_of("pytorch_optimizer", "pytorch_optimizer", {"SAM": ADAM}, construct=_sharpness_aware, closure=True),
    *_of("torch-optimizer", "torch_optimizer", TORCH_OPTIMIZER),
    *_of("torch-optimizer", "torch_optimizer", {"AdaBound": ADAM}, always={"final_lr": 1e-4}),
    *_of("torch-optimizer", "torch_optimizer", {"Lookahead": ADAM}, construct=_around_adam),
    *_of("dadaptation", "dadaptation", DADAPTATION, always=_SLOW),
    *_of("dadaptation", "dadaptation", {"DAdaptLion": 1.0}),
    *_of("heavyball", "heavyball", HEAVYBALL),
    *_of("transformers", "transformers.optimization", {"Adafactor": None}, _FIXED_RATE, {}),
    *_of("torchao", "torchao.optim", {"_AdamW": ADAM}, {}, {"bf16_stochastic_round": True}),
    *_of("torchao", "torchao.optim", {"AdamW8bit": ADAM}),
    *_of("kron-torch", "kron_torch", {"Kron": ADAM}, why_inaccurate=KRON),
    *_of("geoopt", "geoopt.optim", {"RiemannianAdam": ADAM, "RiemannianSGD": SGD}),
    *_of("mechanic-pytorch", "mechanic_pytorch", {"mechanize": ADAM}, construct=_mechanized),
)
