"""Programs that are told an optimizer by a path, in their configuration, make one that is installed.

Each program's own code is given strings, dicts or YAML, and makes the optimizer. Beside it step torch's own,
installed, which has the same bits, and one in float64. docs/training.md has the lines and the versions.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx import backend_of, full_value, install, optim
from tests.support.training import set_gradients

pytestmark = pytest.mark.filterwarnings("error:collage_fx")

STEPS = 16
OPTIONS = {"bytes_per_parameter": 8}
SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
#: The most that the error of a displacement may be. It is near 1 without error terms.
MOST = 0.005

#: The settings, as they stand in a file below the key that names the class.
YAML = """\
lr: 1.0e-4
betas: [0.9, 0.95]
weight_decay: 0.1
collage:
  bytes_per_parameter: 8
"""
#: Configuration with the class, for litgpt's command line.
CLASS_PATH = {"class_path": "collage_fx.optim.AdamW", "init_args": {**SETTINGS, "collage": OPTIONS}}

#: Arguments for Hugging Face's trainers, which give each group the weight decay of their own option.
BY_CLASS: dict[str, Any] = {"optimizer_cls_and_kwargs": (optim.AdamW, {**SETTINGS, "collage": OPTIONS})}


def needed(module: str, packages: str) -> Any:
    """Import a module, or skip the test."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"pip install {packages}: {error}")


def indented(text: str, by: int) -> str:
    return "".join(" " * by + line for line in text.splitlines(keepends=True))


def tiny() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64, bias=False))
    return layers.bfloat16()


def whole(parameters: Any) -> list[Tensor]:
    return [full_value(p) for p in parameters]


def assert_trains(
    optimizer: Optimizer,
    *,
    step: Callable[[], Any] | None = None,
    original: type[Optimizer] = torch.optim.AdamW,
    **others: Any,
) -> None:
    """Assert that an optimizer steps as the original does when it is installed, to the bit, and near float64.

    Args:
        optimizer: the one that a program has made.
        step: how the program steps it, if not by its own method.
        original: its class.
        others: settings that are others than SETTINGS.
    """
    assert type(optimizer) is optim.of(original)
    assert backend_of(optimizer).options.bytes_per_parameter == 8
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    start = [p.detach().double() for p in parameters]

    def twin(dtype: torch.dtype) -> tuple[list[torch.nn.Parameter], Optimizer]:
        copies = [torch.nn.Parameter(p.detach().to(dtype, copy=True)) for p in parameters]
        make: Any = original
        return copies, make(copies, **{**SETTINGS, **others})

    same, direct = twin(torch.bfloat16)
    plain, eager = twin(torch.bfloat16)
    exact, reference = twin(torch.float64)
    install(direct, bytes_per_parameter=8)
    for seed in range(STEPS):
        set_gradients(parameters, seed)
        for copies in (same, plain, exact):
            for copied, p in zip(copies, parameters, strict=True):
                assert p.grad is not None
                copied.grad = p.grad.to(copied.dtype, copy=True)
        for take_step in (step or optimizer.step, direct.step, eager.step, reference.step):
            take_step()

    def error(values: list[Tensor]) -> float:
        differences = [
            torch.cat(
                [(a.detach().double() - b.detach()).flatten() for a, b in zip(many, exact, strict=True)]
            )
            for many in (values, start)
        ]
        off, moved = (float(each.norm()) for each in differences)
        return off / moved

    assert all(map(torch.equal, whole(parameters), whole(same)))
    ours, without = error(whole(parameters)), error([p.detach() for p in plain])
    met = f"displacement error: {ours:.2g} (at most {MOST}), without error terms {without:.2g}"
    print(met)
    assert ours <= MOST < without / 10, met


# ------------------------------------------------------------ by configuration


@pytest.mark.parametrize("is_partial", [False, True])
def test_hydra(is_partial: bool) -> None:
    instantiate = needed("hydra.utils", "hydra-core").instantiate
    create = needed("omegaconf", "hydra-core").OmegaConf.create
    config = create(f"_target_: collage_fx.optim.AdamW\n_partial_: {is_partial}\n{YAML}")
    parameters = tiny().parameters()
    assert_trains(instantiate(config)(parameters) if is_partial else instantiate(config, parameters))


def test_hydra_and_a_class_of_another_package() -> None:
    """The optimizer keeps the betas as they come, in a container of OmegaConf's."""
    instantiate = needed("hydra.utils", "hydra-core").instantiate
    create = needed("omegaconf", "hydra-core").OmegaConf.create
    original = needed("pytorch_optimizer", "pytorch-optimizer").Lion
    config = create(f"_target_: collage_fx.optim.pytorch_optimizer.Lion\n{YAML}")
    optimizer = instantiate(config, tiny().parameters())
    assert not isinstance(optimizer.param_groups[0]["betas"], (list, tuple))
    assert_trains(optimizer, original=original)


#: The command line of LightningCLI, and a file for it and for litgpt.
ARGUMENTS = [
    "--optimizer=collage_fx.optim.AdamW",
    "--optimizer.lr=1e-4",
    "--optimizer.betas=[0.9, 0.95]",
    "--optimizer.weight_decay=0.1",
    "--optimizer.collage.bytes_per_parameter=8",
]
FILE = f"optimizer:\n  class_path: collage_fx.optim.AdamW\n  init_args:\n{indented(YAML, 4)}"


def lightning_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str, **others: Any) -> Any:
    lightning = needed("lightning", "'collage-fx[trainers]'")
    needed("jsonargparse", "'jsonargparse[signatures]'")
    made_by = needed("lightning.pytorch.cli", "'collage-fx[trainers]'").LightningCLI

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # there are no types of it
        def __init__(self) -> None:
            super().__init__()
            self.layers = tiny()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return torch.nn.functional.cross_entropy(
                self.layers(batch).float().flatten(0, 1), batch.roll(-1, 1).flatten()
            )

        def train_dataloader(self) -> Any:
            rows: Any = torch.randint(0, 40, (32, 8), generator=torch.Generator().manual_seed(0))
            return torch.utils.data.DataLoader(rows, batch_size=2)

    fixed = ["--trainer.accelerator=cpu", "--trainer.precision=bf16-true", "--trainer.logger=false"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments, *fixed])
    return made_by(Module, save_config_callback=None, seed_everything_default=False, **others)


@pytest.mark.parametrize("is_file", [False, True])
def test_lightning_cli(is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    cli = lightning_cli(monkeypatch, *([f"--config={path}"] if is_file else ARGUMENTS), run=False)
    assert_trains(cli.model.configure_optimizers())


def test_lightning_cli_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = {"dirpath": str(tmp_path), "filename": "{epoch}", "save_top_k": -1}
    callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saving}
    arguments = [
        "fit",
        *ARGUMENTS,
        "--trainer.max_epochs=2",
        "--trainer.enable_progress_bar=false",
        f"--trainer.callbacks={json.dumps(callback)}",
    ]
    trained = whole(lightning_cli(monkeypatch, *arguments).model.parameters())
    torch._dynamo.reset()
    resumed = lightning_cli(monkeypatch, *arguments, f"--ckpt_path={tmp_path}/epoch=0.ckpt")
    assert resumed.trainer.global_step == 32
    assert all(map(torch.equal, trained, whole(resumed.model.parameters())))


@pytest.mark.parametrize("is_file", [False, True])
def test_litgpt(is_file: bool, tmp_path: Path) -> None:
    setup = needed("litgpt.finetune.full", "litgpt").setup
    make = needed("litgpt.utils", "litgpt").instantiate_torch_optimizer
    parser = needed("jsonargparse", "'jsonargparse[signatures]'").ArgumentParser()
    parser.add_function_arguments(setup, as_positional=True)
    parser.add_argument("--config", action="config")
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    arguments = ["--config", str(path)] if is_file else ["--optimizer", json.dumps(CLASS_PATH)]
    chosen = parser.parse_args(["a/checkpoint", *arguments]).optimizer

    fabric = needed("lightning", "'collage-fx[trainers]'").Fabric(accelerator="cpu", precision="bf16-true")
    optimizer = make(chosen, fabric.setup(tiny()).parameters(), fused=False)
    assert_trains(optimizer, step=fabric.setup_optimizers(optimizer).step)


def test_torchtune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = needed("torchtune.config", "torchtune 'torchao<0.18'")
    path = tmp_path / "config.yaml"
    path.write_text("optimizer:\n  _component_: torch.optim.AdamW\n  lr: 2e-5\n  betas: [0.9, 0.95]\n")
    arguments = [
        "optimizer=collage_fx.optim.AdamW",
        "optimizer.lr=1e-4",
        "optimizer.weight_decay=0.1",
        "optimizer.collage.bytes_per_parameter=8",
    ]
    made = []

    def recipe(cfg: Any) -> None:
        made.append(config.instantiate(cfg.optimizer, tiny().parameters()))

    monkeypatch.setattr(sys, "argv", ["recipe", "--config", str(path), *arguments])
    with pytest.raises(SystemExit):
        config.parse(recipe)()
    assert_trains(made[0])


@pytest.mark.parametrize("program", ["ppo_trainer", "sft_trainer_engine"])
def test_verl(program: str) -> None:
    folder = Path(needed("verl", "verl").__file__).parent / "trainer" / "config"
    build_optimizer = needed("verl.workers.config.optimizer", "verl").build_optimizer
    as_dataclass = needed("verl.utils.config", "verl").omega_conf_to_dataclass
    hydra = needed("hydra", "hydra-core")
    key = {"ppo_trainer": "actor_rollout_ref.actor.optim", "sft_trainer_engine": "optim"}[program]
    arguments = [
        f"{key}.optimizer_impl=collage_fx.optim",
        f"+{key}.override_optimizer_config.collage.bytes_per_parameter=8",
        f"{key}.lr=1e-4",
        f"{key}.betas=[0.9,0.95]",
        f"{key}.weight_decay=0.1",
    ]
    with hydra.initialize_config_dir(str(folder), version_base=None):
        config = hydra.compose(program, arguments)
    for name in key.split("."):
        config = config[name]
    assert_trains(build_optimizer(tiny().parameters(), as_dataclass(config)))


def test_nemo_automodel(tmp_path: Path) -> None:
    load = needed("nemo_automodel.components.config.loader", "nemo-automodel").load_yaml_config
    recipe = needed("nemo_automodel.recipes._typed_config", "nemo-automodel").RecipeConfig
    path = tmp_path / "config.yaml"
    path.write_text(f"optimizer:\n  _target_: collage_fx.optim.AdamW\n{indented(YAML, 2)}")
    (optimizer,) = recipe(load(path)).optimizer.build(tiny())
    assert_trains(optimizer)


def test_mmengine(tmp_path: Path) -> None:
    build = needed("mmengine.optim", "mmengine").build_optim_wrapper
    load = needed("mmengine.config", "mmengine").Config.fromfile
    path = tmp_path / "config.py"
    settings = {"type": "collage_fx.optim.AdamW", **SETTINGS, "collage": OPTIONS}
    path.write_text(f"optim_wrapper = dict(type='OptimWrapper', optimizer={settings})\n")
    wrapper = build(tiny(), load(path).optim_wrapper)
    assert_trains(wrapper.optimizer, step=wrapper.step)


def test_speechbrain() -> None:
    """HyperPyYAML, which reads its configuration: a ``Brain`` calls ``opt_class`` with parameters."""
    load = needed("hyperpyyaml", "hyperpyyaml").load_hyperpyyaml
    config = load(f"opt_class: !name:collage_fx.optim.AdamW\n{indented(YAML, 2)}")
    assert_trains(config["opt_class"](tiny().parameters()))


# ------------------------------------------------------------ by class


def test_transformers(tmp_path: Path) -> None:
    transformers = needed("transformers", "'collage-fx[trainers]'")
    of_it = importlib.import_module("tests.integrations.test_transformers")
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = transformers.Trainer(of_it.tiny_gpt2(), arguments, **BY_CLASS)
    assert_trains(trainer.create_optimizer(), weight_decay=0)
    with pytest.raises(ValueError, match=r"collage_fx\.optim\.AdamW"):  # no path is allowed here
        transformers.TrainingArguments(str(tmp_path), optim="collage_fx.optim.AdamW")


def test_transformers_trains_as_with_a_callback_and_resumes(tmp_path: Path) -> None:
    transformers = needed("transformers", "'collage-fx[trainers]'")
    callback = needed("collage_fx.integrations.transformers", "'collage-fx[trainers]'").CollageCallback
    of_it = importlib.import_module("tests.integrations.test_transformers")

    def trained(folder: Path, resume_from: str | None = None, **others: Any) -> list[Tensor]:
        torch._dynamo.reset()
        arguments = transformers.TrainingArguments(
            str(folder),
            max_steps=STEPS,
            save_steps=STEPS // 2,
            warmup_steps=4,
            learning_rate=1e-4,
            adam_beta2=0.95,
            weight_decay=0.1,
            gradient_accumulation_steps=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(of_it.tiny_gpt2(), arguments, train_dataset=of_it.data(), **others)
        trainer.train(resume_from_checkpoint=resume_from)
        return whole(trainer.model.parameters())

    once = trained(tmp_path / "class", **BY_CLASS)
    assert all(map(torch.equal, once, trained(tmp_path / "callback", callbacks=[callback(**OPTIONS)])))
    half_way = f"{tmp_path}/class/checkpoint-{STEPS // 2}"
    assert all(map(torch.equal, once, trained(tmp_path / "class", half_way, **BY_CLASS)))


def test_trl(tmp_path: Path) -> None:
    trl = needed("trl", "'collage-fx[trainers]'")
    of_it = importlib.import_module("tests.integrations.test_trl")
    trainer = trl.SFTTrainer(
        importlib.import_module("tests.integrations.test_transformers").tiny_gpt2(),
        trl.SFTConfig(str(tmp_path), use_cpu=True, report_to=[]),
        train_dataset=of_it.data(),
        processing_class=of_it.tiny_tokenizer(),
        **BY_CLASS,
    )
    assert_trains(trainer.create_optimizer(), weight_decay=0)
