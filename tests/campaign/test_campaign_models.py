"""The campaign's models and variants: published sizes, and variants that change how a step is computed, not what."""

import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need

torch = need("torch")
models = need("benchmarks.campaign.models")
variants = need("benchmarks.campaign.variants")
training = need("benchmarks.campaign.training")
loading = need("benchmarks.campaign.loading")
memory = need("benchmarks.campaign.memory")

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")

# The counts of the widely used implementations; BERT's without a pooler, with the question-answering head.
PUBLISHED_PARAMETERS = {
    "resnet50": 25_557_032,
    "vgg19": 143_667_240,
    "densenet121": 7_978_856,
    "bert-base": 108_893_186,
    "bert-large": 334_094_338,
    "gpt2-small": 124_439_808,
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_full_models_have_their_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = models.FULL[name].build()
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", models.TWINS)
def test_a_twins_batch_is_distinguished_from_its_layers_by_size(name: str) -> None:
    twin = models.TWINS[name]
    widths = {size for parameter in twin.build().parameters() for size in parameter.shape}
    assert not widths & {twin.samples // 2, twin.samples, twin.samples * 2}


def test_there_is_a_twin_of_every_model() -> None:
    assert list(models.TWINS) == list(models.FULL)
    assert {name: model.family for name, model in models.TWINS.items()} == {
        name: model.family for name, model in models.FULL.items()
    }


def started(name: str, **changes: Any) -> Any:
    options = variants.Options(**{"optimizer": "sgd", "implementation": "foreach", **changes})
    run = training.Training(name, options, full=False)
    run.start(CPU)
    return run


def parameters_after_two_steps(name: str, **changes: Any) -> Any:
    run = started(name, **changes)
    for _ in range(2):
        run.step()
    run.close()
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("resnet50", {"channels_last": True}),
        ("densenet121", {"offload": "sync"}),
        ("vgg19", {"accumulate": 4}),
        ("bert-base", {"checkpoint": True}),
        ("gpt2-small", {"implementation": "for"}),
        ("bert-large", {"implementation": "fused"}),
        ("gnmt", {"loader_workers": 0}),
        ("densenet121", {"update_in_backward": True}),
        ("gnmt", {"update_in_backward": True, "optimizer": "adam", "implementation": "for"}),
        ("gpt2-small", {"attention": "math"}),
    ],
)
def test_a_variant_computes_the_same_in_another_way(name: str, changes: dict[str, Any]) -> None:
    same = {key: value for key, value in changes.items() if key in ("optimizer",)}
    baseline, changed = parameters_after_two_steps(name, **same), parameters_after_two_steps(name, **changes)
    before = torch.cat([parameter.detach().flatten() for parameter in started(name).model.parameters()])
    if "loader_workers" not in changes:  # A loader repeats one sample.
        # Sums in another order move single values; the step as a whole is the same.
        difference = (changed - baseline).norm() / (baseline - before).norm()
        assert difference < 0.02
    assert not torch.equal(baseline, before)
    assert not torch.equal(changed, before)
    assert changed.isfinite().all()


def test_an_update_in_the_backward_pass_frees_each_gradient_at_once() -> None:
    usual, early = started("vgg19"), started("vgg19", update_in_backward=True)
    for run in (usual, early):
        run.step()
    assert all(parameter.grad is not None for parameter in usual.model.parameters())
    assert all(parameter.grad is None for parameter in early.model.parameters())
    # In this order: torch counts the gradients that a first measurement leaves into a second one of the process.
    after, before = (memory.measure_memory(run, "cpu") for run in (early, usual))
    assert after["optimizer_state_bytes"] == before["optimizer_state_bytes"] > 0
    assert after["peak_allocated_bytes"] < before["peak_allocated_bytes"]


def test_batch_normalisation_in_eval_mode_keeps_its_statistics() -> None:
    run = started("resnet50", bn_eval=True)
    run.step()
    norms = [module for module in run.model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert norms
    assert all(norm.num_batches_tracked == 0 and not norm.training for norm in norms)


def test_checkpointing_lowers_the_measured_peak_and_a_larger_batch_raises_it() -> None:
    peaks = []
    for changes in ({"checkpoint": True}, {}, {"batch_factor": 2.0}):
        run = started("resnet50", **changes)
        run.step()  # The optimizer's state appears in the first step.
        sizes = memory.measure_memory(run, "cpu")
        peaks.append(sizes["peak_allocated_bytes"])
        resident = [key for key in sizes if key.endswith("_bytes") and not key.startswith("peak")]
        assert peaks[-1] > sum(sizes[key] for key in resident)
        assert sizes["parameter_bytes"] == sizes["gradient_bytes"] == sizes["optimizer_state_bytes"]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_whole_batches_of_the_decoded_sample(workers: int) -> None:
    twin = models.TWINS["resnet50"]
    (images,), classes = twin.make_batch(twin.samples)
    batches = loading.load(((images,), classes), samples=4, baseline_samples=twin.samples, workers=workers, device=CPU)
    for _ in range(2):
        (loaded,), answers = next(batches)
        assert loaded.shape == (4, *images.shape[1:])
        assert answers.tolist() == [classes[0].item()] * 4
        inside = images[0].abs() < 3  # Beyond what a byte holds, values are cut.
        torch.testing.assert_close(loaded[3][inside], images[0][inside], rtol=0, atol=1 / 40)
    batches.close()  # ends the workers


def test_the_loaders_workers_rest_while_another_training_runs() -> None:
    run = started("vgg19", loader_workers=2)
    run.step()
    for act, stopped in ((run.pause, True), (run.resume, False)):
        act()
        end_s = time.monotonic() + 30  # A signal reaches a process when it is next on a core.
        while [state == "T" for state in worker_states()] != [stopped] * 2 and time.monotonic() < end_s:
            time.sleep(0.01)
        assert [state == "T" for state in worker_states()] == [stopped] * 2
    run.step()
    run.close()


def worker_states() -> list[str]:
    return [Path(f"/proc/{worker.pid}/stat").read_text().split()[2] for worker in active_children()]


def jobs_of(**options: Any) -> dict[str, Any]:
    return {job.name: job for job in variants.all_jobs(**{"full": False, "device": "cpu", **options})}


def test_what_does_not_apply_has_a_reason() -> None:
    jobs = jobs_of()
    assert len(jobs) == len(variants.VARIANTS) * len(models.TWINS)
    for name in ("gnmt--cuda_graph", "vgg19--tf32", "resnet50--amp_fp16", "bert-base--channels_last", "vgg19--bn_eval"):
        assert jobs[name].reason
    assert jobs["gnmt--adam_for"].reason == "the same as the baseline"
    assert not jobs["vgg19--adam_for"].reason
    compiled = [name for name, job in jobs.items() if "compile" in name and not job.reason]
    assert set(compiled) == {f"{name}--compile" for name in variants.COMPILED_ON_CPU}
    assert "bert-large--compile" not in compiled
    on_gpu = jobs_of(full=True, device="cuda")
    assert not any(on_gpu[f"{name}--cuda_graph"].reason or on_gpu[f"{name}--tf32"].reason for name in models.FULL)
    assert on_gpu["resnet50--loader_2"].reason
    assert on_gpu["gpt2-small--cuda_graph"].options.capturable
    assert variants.baseline_of(on_gpu["gpt2-small--cuda_graph"], list(on_gpu.values())).variant == "adam_capturable"
    assert on_gpu["resnet50--adam_capturable"].reason == "the same as the baseline"  # SGD
    assert on_gpu["bert-base--default_precision"].reason == "its products are in float32 by default too"
    amp = on_gpu["resnet50--default_precision_amp_bf16"]
    assert variants.baseline_of(amp, list(on_gpu.values())).variant == "default_precision"


def test_the_most_valuable_jobs_come_first_and_emulated_types_last() -> None:
    jobs = list(jobs_of().values())
    assert [job.tier for job in jobs] == sorted(job.tier for job in jobs)
    first = [job for job in jobs if job.tier == 0 and job.model in variants.FIRST_MODELS]
    assert jobs[: len(first)] == first
    assert {(job.model, job.variant) for job in jobs[:3]} == {(name, "baseline") for name in variants.FIRST_MODELS}
    late = [job for job in jobs_of(emulated=True).values() if not job.reason]
    bf16 = [job for job in late if job.options.amp == "bf16"]
    assert bf16
    assert late[-len(bf16) :] == bf16
