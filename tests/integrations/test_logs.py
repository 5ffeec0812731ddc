"""Metrics in the logs of trainers: those of the step that is logged, whichever tracker writes them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from collage_fx import CollageBackend, backend_of, install
from tests.support.processes import Processes
from tests.support.training import parameters, run_steps

pytestmark = pytest.mark.filterwarnings("error:collage_fx")

transformers = pytest.importorskip("transformers", reason="pip install 'collage-fx[trainers]'")
events = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="pip install tensorboard"
)

from collage_fx.integrations.transformers import CollageCallback  # noqa: E402
from tests.integrations.test_transformers import data, tiny_gpt2  # noqa: E402

STEPS, EVERY = 6, 2


def bytes_of(optimizer: Optimizer) -> float:
    """Count the bytes that AdamW's bfloat16 parameters and moments have by default, for each parameter.

    2 each for parameter, moments, and error terms of parameter and second moment. For each tensor 4 of the
    optimizer's count of steps, and 4 of the counts that both error terms have.
    """
    sizes = [p.numel() for group in optimizer.param_groups for p in group["params"]]
    return 10 + 12 * len(sizes) / sum(sizes)


def assert_right(
    found: dict[int, dict[str, float]], backend: CollageBackend, held: float, prefix: str = ""
) -> None:
    """Assert that a log has, for each step that is logged, what the backend has measured in that step."""
    measured = backend.metrics().overall()
    assert list(found) == list(measured) == list(range(EVERY, STEPS + 1, EVERY))
    for step, values in found.items():
        expected = {"edq_ratio": measured[step].edq_ratio, "lost_share": measured[step].lost_share}
        for name, value in {**expected, "bytes_per_parameter": held}.items():
            assert values[f"{prefix}collage/{name}"] == pytest.approx(value, rel=2**-23)  # of float32 files
        assert 0.9 < values[f"{prefix}collage/edq_ratio"] < 1.1


def events_in(folder: Path) -> dict[int, dict[str, float]]:
    """Return the scalars of the library that TensorBoard's event files hold, by step."""
    found: dict[int, dict[str, float]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        file = events.EventAccumulator(str(path))
        file.Reload()
        for tag in (each for each in file.Tags()["scalars"] if "collage/" in each):
            for event in file.Scalars(tag):
                found.setdefault(event.step, {})[tag] = event.value
    return found


# -- the numbers


def test_scalars_are_those_of_the_last_measured_step() -> None:
    params = parameters()
    optimizer = install(torch.optim.AdamW(params), metrics=True, metrics_every=2)
    backend = backend_of(optimizer)
    run_steps(optimizer.step, params, [0])
    assert backend.scalars() == {}
    run_steps(optimizer.step, params, range(1, 5))
    (*_, last) = backend.metrics().overall().values()
    assert backend.scalars() == {
        "collage/edq_ratio": last.edq_ratio,
        "collage/lost_share": last.lost_share,
        "collage/bytes_per_parameter": bytes_of(optimizer),
    }
    backend.forget_metrics()
    assert backend.scalars() == {}
    run_steps(optimizer.step, params, range(5, 10))
    (*_, last) = backend.metrics().overall().values()
    assert backend.scalars()["collage/edq_ratio"] == last.edq_ratio


def test_the_predicted_error_is_logged_as_soon_as_it_is_known() -> None:
    params = parameters()
    optimizer = install(torch.optim.AdamW(params, lr=1e-5), metrics=True, metrics_every=40)
    backend = backend_of(optimizer)
    run_steps(optimizer.step, params, range(50))
    assert "collage/predicted_error" not in backend.scalars()
    run_steps(optimizer.step, params, range(50, 90))
    logged = backend.scalars()["collage/predicted_error"]
    assert 0 < logged == backend.report().predicted_error()


def test_a_number_that_is_not_defined_is_left_out() -> None:
    """A ratio to an update of zero; those of float32 parameters, which have no error terms."""
    params = parameters()
    optimizer = install(torch.optim.SGD(params, lr=0.0), metrics=True)
    run_steps(optimizer.step, params, [0])
    assert list(backend_of(optimizer).scalars()) == ["collage/bytes_per_parameter"]
    params = parameters(torch.float32, [(64, 64)])
    packing = install(torch.optim.AdamW(params), metrics=True, state="block8")
    run_steps(packing.step, params, [0])
    assert not any(map(math.isnan, backend_of(packing).scalars().values()))


def test_without_metrics_nothing_is_logged() -> None:
    params = parameters()
    optimizer = install(torch.optim.SGD(params))
    run_steps(optimizer.step, params, [0])
    assert backend_of(optimizer).scalars() == {}


# -- Hugging Face


def train(folder: Path, resume_from: Path | None = None, **options: Any) -> tuple[Any, CollageCallback]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=3,
        logging_steps=EVERY,
        learning_rate=1e-4,
        warmup_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    callback = CollageCallback(metrics=True)
    trainer = transformers.Trainer(
        model=tiny_gpt2(), args=arguments, train_dataset=data(), callbacks=[callback]
    )
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return trainer, callback


def test_the_trainer_logs_the_steps_that_it_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its history, TensorBoard and a resumed run, which begins between two of them."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer, callback = train(tmp_path, report_to=["tensorboard"])
    history = {row["step"]: row for row in trainer.state.log_history if "loss" in row}
    held = bytes_of(trainer.optimizer)
    assert_right(history, callback.backend, held)
    assert_right(events_in(tmp_path / "tb"), callback.backend, held, "train/")
    assert not any("collage/edq_ratio" in row for row in trainer.state.log_history if "loss" not in row)

    torch._dynamo.reset()
    again, _ = train(tmp_path, tmp_path / "checkpoint-3", report_to=[])
    rows = {row["step"]: row for row in again.state.log_history if "loss" in row}
    assert [rows[step]["collage/edq_ratio"] for step in (4, 6)] == [
        history[step]["collage/edq_ratio"] for step in (4, 6)
    ]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    trainer, callback = train(tmp_path, report_to=["wandb"])
    summary = dict(wandb.run.summary)
    wandb.finish()
    last = callback.backend.metrics().overall()[STEPS]
    assert summary["train/collage/edq_ratio"] == last.edq_ratio
    assert summary["train/collage/lost_share"] == last.lost_share
    assert summary["train/collage/bytes_per_parameter"] == bytes_of(trainer.optimizer)


def test_mlflow_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "0")
    trainer, callback = train(tmp_path, report_to=["mlflow"])
    run = mlflow.last_active_run().info.run_id
    mlflow.end_run()
    client = mlflow.MlflowClient()
    names = ("edq_ratio", "lost_share", "bytes_per_parameter")
    found: dict[int, dict[str, float]] = {}
    for name in (f"collage/{each}" for each in names):
        for metric in client.get_metric_history(run, name):
            found.setdefault(metric.step, {})[name] = metric.value
    assert_right(found, callback.backend, bytes_of(trainer.optimizer))


# -- Lightning


@pytest.mark.parametrize("accumulated", [1, 2])
def test_lightning_logs_the_steps_that_it_logs(accumulated: int, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="pip install 'collage-fx[trainers]'")
    from lightning.pytorch.loggers import TensorBoardLogger

    from collage_fx.integrations.lightning import CollageCallback as Callback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # there are no types of it
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layers(batch).float().square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    callback = Callback(metrics=True)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        precision="bf16-true",
        accelerator="cpu",
        accumulate_grad_batches=accumulated,
        log_every_n_steps=EVERY,
        logger=TensorBoardLogger(tmp_path),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback],
    )
    batches: Any = torch.randint(0, 64, (2 * STEPS * accumulated, 8))
    trainer.fit(Module(), DataLoader(batches, batch_size=2))
    found = {step + 1: values for step, values in events_in(tmp_path).items()}  # it counts from 0
    assert_right(found, callback.backend, bytes_of(trainer.optimizers[0]))


# -- accelerate, torchtitan


def test_accelerate_gives_them_to_its_trackers(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install 'collage-fx[trainers]'")
    from collage_fx.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("run")
    params = parameters()
    optimizer = prepare(accelerator, torch.optim.AdamW(params), metrics=True, metrics_every=EVERY)
    for step in range(1, STEPS + 1):
        run_steps(optimizer.step, params, [step])
        if step % EVERY == 0:
            accelerator.log(backend_of(optimizer).scalars(), step=step)
    accelerator.end_training()
    assert_right(events_in(tmp_path), backend_of(optimizer), bytes_of(optimizer.optimizer))


#: Numbers of torchtitan's on a GPU's memory.
MEMORY = (
    "max_active_gib",
    "max_active_pct",
    "max_reserved_gib",
    "max_reserved_pct",
    "num_alloc_retries",
    "num_ooms",
)


@pytest.fixture
def a_process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("a_process_group")
def test_torchtitan_gives_them_to_its_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = pytest.importorskip(
        "torchtitan.components.optimizer", reason="pip install 'collage-fx[trainers]'"
    )
    from torchtitan.components import metrics
    from torchtitan.distributed import ParallelDims

    from collage_fx.integrations.torchtitan import CollageMetrics, collage

    no_memory = SimpleNamespace(**dict.fromkeys(MEMORY, 0))
    no_gpu = SimpleNamespace(
        device_name="none", get_peak_stats=lambda: no_memory, reset_peak_stats=lambda: None
    )
    monkeypatch.setattr(metrics, "build_device_memory_monitor", lambda: no_gpu)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).bfloat16()
    config = collage(optimizers.default_adamw(lr=1e-4), metrics=True, metrics_every=EVERY)
    container = config.build(model_parts=[model])
    one = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1)
    processor = CollageMetrics.Config(log_freq=EVERY, enable_tensorboard=True).build(
        parallel_dims=ParallelDims(**one, world_size=1), dump_folder=str(tmp_path)
    )
    assert isinstance(processor, CollageMetrics)
    processor.optimizers, processor.num_flops_per_token = container, 1  # as torchtitan's Trainer does
    for step in range(1, STEPS + 1):
        run_steps(container.step, list(model.parameters()), [step])
        processor.data_loading_times.append(0.0)
        if processor.should_log(step):
            processor.log(step, 1.0, 1.0, 1.0, extra_metrics={"lr": 1e-4})
    processor.close()
    assert_right(events_in(tmp_path), backend_of(container), bytes_of(container.optimizers[0]))


# -- several processes


def logged() -> dict[int, dict[str, float]]:
    """Train plain bfloat16 weights, in FSDP2's shards if there are processes, and return what is logged."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5)).bfloat16()
    inputs = torch.randn(8, 16).bfloat16()
    if torch.distributed.is_initialized():
        fully_shard(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer = install(adamw, strategy="none", metrics=True, metrics_every=EVERY)
    found = {}
    for step in range(1, STEPS + 1):
        model(inputs).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            found[step] = backend_of(optimizer).scalars()
    return found


def test_shards_are_logged_as_whole_tensors(tmp_path: Path) -> None:
    """By both processes, alike: tensors are so small that no element is left out of a sample."""
    processes = Processes(2, tmp_path)
    try:
        both = processes.run(logged)
    finally:
        processes.stop()
    for step, expected in logged().items():
        assert 0.1 < expected["collage/lost_share"] < 0.9
        for found in both:
            assert found[step]["collage/lost_share"] == expected["collage/lost_share"]
            # Squares of a tensor are summed in float32, elsewhere in another order.
            assert found[step]["collage/edq_ratio"] == pytest.approx(
                expected["collage/edq_ratio"], rel=2**-22
            )
