"""TRL's ``SFTTrainer`` is one of Hugging Face's: the same callback, the same bits after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.support.replay import Replay
from tests.support.training import differences, everything

trl = pytest.importorskip("trl", reason="pip install 'collage-fx[trainers]'")

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402

from collage_fx.integrations.transformers import CollageCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error:collage_fx")

STEPS, SAVED_AFTER, CLIP = 12, 6, 0.25


def tiny_tokenizer() -> Any:
    words = {f"w{i}": i for i in range(62)} | {"<end>": 62, "<pad>": 63}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<pad>", unk_token="<end>"
    )


def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def data() -> Any:
    rows = torch.randint(0, 40, (24, 12), generator=torch.Generator().manual_seed(0)).tolist()
    return datasets.Dataset.from_dict({"text": [" ".join(f"w{i}" for i in row) for row in rows]})


def train(folder: Path, resume_from: Path | None = None) -> Replay:
    class Recorded(trl.SFTTrainer):  # type: ignore[misc, name-defined]  # there are no types of it
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
            optimizer: Optimizer = super().create_optimizer(*args, **kwargs)
            self.replay = Replay(optimizer)
            return optimizer

    arguments = trl.SFTConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=SAVED_AFTER,
        warmup_steps=4,
        learning_rate=1e-4,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        max_grad_norm=CLIP,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Recorded(
        model=tiny_llama(),
        args=arguments,
        train_dataset=data(),
        processing_class=tiny_tokenizer(),
        callbacks=[CollageCallback()],
    )
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return trainer.replay


def test_it_is_compensated_and_resumed_to_the_bit(tmp_path: Path) -> None:
    replay = train(tmp_path)
    assert replay.learning_rates[0] == 0 < replay.learning_rates[1]
    assert len(replay.learning_rates) == STEPS
    replay.assert_clipped(CLIP)
    replay.assert_compensated()
    whole = everything(replay.optimizer)

    torch._dynamo.reset()
    resumed = train(tmp_path, resume_from=tmp_path / f"checkpoint-{SAVED_AFTER}")
    assert len(resumed.learning_rates) == STEPS - SAVED_AFTER
    assert not differences(everything(resumed.optimizer), whole)
