"""Ten questions of users, and where the documentation answers each."""

from __future__ import annotations

__all__ = ["QUESTIONS"]

#: Question -> page, anchor on it, words of the answer. Each page is the README, or linked from there.
QUESTIONS: dict[str, tuple[str, str, str]] = {
    "does it work with my optimizer?": ("compatibility.md", "does-it-work-with-my-optimizer", "SGD"),
    "and with FSDP2, Hugging Face, DeepSpeed?": ("training.md", "what-goes-with-it", "DeepSpeed's ZeRO"),
    "what does it cost in GB and time?": ("README.md", "status", "times as fast"),
    "is bf16 hurting me?": ("metrics.md", "metrics-is-bf16-hurting-this-training", "lost_share"),
    "how do I save, resume, export?": ("checkpoints.md", "what-each-file-holds", "save_full_state_dict"),
    "what if it fails?": ("troubleshooting.md", "troubleshooting", "symptom"),
    "can I use autocast?": ("pure-bf16.md", "what-to-keep-in-float32", "autocast"),
    "what about fp32 gradients?": ("training.md", "several-dtypes", "p.grad_dtype = torch.float32"),
    "which option?": ("choosing.md", "which-option-for-which-training", "bytes_per_parameter=8"),
    "what runs on a GPU?": ("gpu.md", "measured-on-an-h200", "H200"),
    "how do I get rid of it?": ("faq.md", "how-do-i-get-rid-of-it", "collage_fx.uninstall(opt)"),
}
