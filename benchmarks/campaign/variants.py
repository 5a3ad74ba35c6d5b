"""The runs of the campaign: options of a run, variants in the order of their value, and where each applies."""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from whatif.questions.validate.validate_records import DEFAULT_OPTIONS
from whatif.questions.validate.validate_what_ifs import changed_options, is_plain, what_ifs_between

from .models import FULL, TWINS, Model

# On a CPU compiling takes longer than all other runs of a model together: only the CNNs, whose memory
# format it changes, and one of each other kind that can be compiled.
COMPILED_ON_CPU = ("resnet50", "densenet121", "vgg19", "bert-base", "gpt2-small")

# The most typical models: within a tier these come before the others.
FIRST_MODELS = ("resnet50", "bert-base", "gpt2-small")

# If a CPU only emulates a type, its runs take ten times as long, and come after the others.
EMULATED_TIER = 5


@dataclass(frozen=True)
class Options:
    """All options that a variant can change."""

    batch_factor: float = 1.0
    precision: str = "ieee"  # ieee | tf32 | default (torch's): a GPU's float32 products, convolutions and RNNs
    amp: str = ""  # "" | fp16 | bf16
    optimizer: str = "adam"  # adam | sgd (with momentum)
    implementation: str = "for"  # for | foreach | fused
    capturable: bool = False  # whether a CUDA graph could hold Adam's update: its step counters are on the GPU
    channels_last: bool = False
    execution: str = "eager"  # eager | cuda_graph | compile
    checkpoint: bool = False
    accumulate: int = 1  # forward and backward passes of a step, each of a whole batch
    offload: str = ""  # "" | sync (torch's save_on_cpu) | stream (copies on a separate stream)
    bn_eval: bool = False
    loader_workers: int = -1  # -1: the batch is already on the device
    update_in_backward: bool = False  # each parameter is updated as soon as its gradient is ready
    attention: str = ""  # "" (torch chooses) | math (two products and a softmax between them)


@dataclass(frozen=True)
class Variant:
    """Changes to a model's baseline; a lower tier runs first. `elsewhere`: reasons against a device type."""

    tier: int
    changes: Mapping[str, Any]
    elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One run to record, or the reason for not recording it."""

    model: str
    variant: str
    options: Options
    tier: int
    reason: str = ""

    @property
    def name(self) -> str:
        """The stem of the run's files."""
        return f"{self.model}--{self.variant}"


def _gpu_only(tier: int, reason: str, **changes: Any) -> Variant:
    return Variant(tier, changes, {"cpu": reason})


_ADAM = {name: {"optimizer": "adam", "implementation": name} for name in ("for", "foreach", "fused")}
_BF16_FUSED = {"amp": "bf16", **_ADAM["fused"]}
_TF32_ON_GPUS, _GRAPHS_ON_GPUS = "TF32 exists on GPUs only", "CUDA graphs exist on GPUs only"
_ONE_SIZE_ON_CPU = "half and twice the batch answer the question on a CPU"

VARIANTS: dict[str, Variant] = {
    "baseline": Variant(0, {}),
    "amp_fp16": _gpu_only(0, "a CPU computes float16 slower than float32", amp="fp16"),
    "amp_bf16": Variant(0, {"amp": "bf16"}),
    "adam_for": Variant(0, _ADAM["for"]),
    "adam_fused": Variant(0, _ADAM["fused"]),
    "adam_foreach": Variant(0, _ADAM["foreach"]),
    "channels_last": Variant(1, {"channels_last": True}),
    "amp_bf16_channels_last": Variant(1, {"amp": "bf16", "channels_last": True}),
    "batch_x0.5": Variant(1, {"batch_factor": 0.5}),
    "batch_x2": Variant(1, {"batch_factor": 2.0}),
    "adam_capturable": _gpu_only(1, _GRAPHS_ON_GPUS, capturable=True),
    "cuda_graph": _gpu_only(1, _GRAPHS_ON_GPUS, execution="cuda_graph", capturable=True),
    "tf32": _gpu_only(1, _TF32_ON_GPUS, precision="tf32"),
    "default_precision": _gpu_only(1, _TF32_ON_GPUS, precision="default"),
    "default_precision_amp_bf16": _gpu_only(1, _TF32_ON_GPUS, precision="default", amp="bf16"),
    "amp_bf16_adam_fused": Variant(1, _BF16_FUSED),
    "amp_bf16_adam_fused_channels_last": _gpu_only(
        1, "its parts answer the question on a CPU", channels_last=True, **_BF16_FUSED
    ),
    "checkpoint": Variant(2, {"checkpoint": True}),
    "accumulate_x4": Variant(2, {"accumulate": 4}),
    "bn_eval": Variant(2, {"bn_eval": True}),
    "loader_0": Variant(2, {"loader_workers": 0}),
    "loader_2": Variant(2, {"loader_workers": 2}, {"cuda": "a GPU's run uses four workers"}),
    "loader_4": _gpu_only(2, "a CPU's run uses two workers", loader_workers=4),
    "offload": Variant(2, {"offload": "sync"}),
    "offload_stream": _gpu_only(2, "a CPU has no streams", offload="stream"),
    "batch_x0.25": _gpu_only(3, _ONE_SIZE_ON_CPU, batch_factor=0.25),
    "batch_x4": _gpu_only(3, _ONE_SIZE_ON_CPU, batch_factor=4.0),
    "update_in_backward": Variant(2, {"update_in_backward": True}),
    "math_attention": Variant(2, {"attention": "math"}),
    "compile": Variant(4, {"execution": "compile"}),
}


def baseline_options(model: Model) -> Options:
    """SGD with momentum in torch's default form for CNNs, for-loop Adam (Daydream's FusedAdam study) for others."""
    return Options(optimizer="sgd", implementation="foreach") if model.family == "cnn" else Options()


def all_jobs(
    *, full: bool, device: str, models: Collection[str] = (), variants: Collection[str] = (), emulated: bool = False
) -> list[Job]:
    """List the jobs of a device type (cpu | cuda), the most valuable first: by tier, `FIRST_MODELS`, variant and model.

    Empty `models` and `variants` select all. `emulated`: whether this CPU only emulates bfloat16.
    """
    specifications = FULL if full else TWINS
    jobs = []
    for (variant_name, variant), model_name in itertools.product(VARIANTS.items(), specifications):
        if (models and model_name not in models) or (variants and variant_name not in variants):
            continue
        model = specifications[model_name]
        options = replace(baseline_options(model), **variant.changes)
        # SGD has no step counter.
        options = replace(options, capturable=options.capturable and options.optimizer == "adam")
        reason = variant.elsewhere.get(device) or _reason(model_name, model, variant_name, options, device)
        tier = EMULATED_TIER if emulated and options.amp == "bf16" else variant.tier
        jobs.append(Job(model_name, variant_name, options, tier, reason))
    # The sort is stable: within a tier, and among models of equal value, the order above stays.
    return sorted(jobs, key=lambda job: (job.tier, job.model not in FIRST_MODELS))


def baseline_of(job: Job, jobs: Collection[Job]) -> Job | None:
    """Return the job against which a job is timed: that of its model with the fewest differences, or None.

    Pairs runs as `whatif validate` does: every difference must have a what-if.
    """
    after = asdict(job.options)
    reached = []
    for candidate in jobs:
        before = asdict(candidate.options)
        is_plain_run = candidate.model == job.model and not candidate.reason and is_plain(before, DEFAULT_OPTIONS)
        what_ifs, missing = what_ifs_between(before, after)
        if is_plain_run and what_ifs and not missing:
            reached.append((len(changed_options(before, after)), candidate))
    return min(reached, key=lambda found: found[0], default=(0, None))[1]


def pair_clock(before: Options, after: Options) -> str:
    """The clock for comparing a pair on a CPU: loader workers take no CPU time of the training thread."""
    return "cpu_samples_ms" if before.loader_workers == after.loader_workers else "samples_ms"


def _reason(model_name: str, model: Model, variant: str, options: Options, device: str) -> str:
    """Why the variant would not change the model, or cannot run; empty if it applies."""
    if variant != "baseline" and options == baseline_options(model):
        return "the same as the baseline"
    if options.channels_last and model.family != "cnn":
        return "the model has no images"
    if options.precision == "default" and model.family == "transformer":
        return "its products are in float32 by default too"
    if options.bn_eval and not model.batch_norm:
        return "the model has no batch normalisation"
    if options.attention and model.family != "transformer":
        return "the model has no attention of torch's own"
    if options.checkpoint and not model.blocks:
        return "the model has no repeated blocks to checkpoint"
    samples = model.samples * options.batch_factor
    if samples != int(samples) or samples < 1:
        return f"the batch would be {samples:g} samples"
    if options.execution == "compile" and device == "cpu" and model_name not in COMPILED_ON_CPU:
        return f"on a CPU only {', '.join(COMPILED_ON_CPU)} are compiled: it takes longer than all other runs"
    return ""
