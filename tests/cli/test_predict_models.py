"""``whatif predict`` of models by configuration: Hugging Face tasks, timm, LoRA, frozen parts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.predicting import refused, report
from tests.helpers import need
from whatif.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_database")]
need("transformers")

FOLDER = Path(__file__).resolve().parent.parent / "data" / "hugging_face"
GPT2 = str(FOLDER / "config.json")
# Two blocks of width 64: four products of a block have 12 · 64² weights.
WIDTH, BLOCKS, VOCABULARY = 64, 2, 256
SMALL: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 64, "vocab_size": 100, "architectures": ["BertForMaskedLM"]},
    "vit": {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 64, "image_size": 32, "patch_size": 8, "architectures": ["ViTForImageClassification"]},
    "t5": {"model_type": "t5", "d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 64,
           "vocab_size": 100, "architectures": ["T5ForConditionalGeneration"]},
    "llama": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "dtype": "bfloat16",
              "architectures": ["LlamaForCausalLM"]},
    "deberta": {"model_type": "deberta", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                "intermediate_size": 64, "vocab_size": 100, "pad_token_id": 0, "architectures": ["DebertaForMaskedLM"]},
    "mixtral": {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "num_local_experts": 4,
                "architectures": ["MixtralForCausalLM"]},
    "unknown": {"model_type": "no_such_model", "architectures": ["NoSuchForCausalLM"]},
    "nothing": {"hidden_size": 32},
    "unnamed": {"model_type": "gpt2"},
}  # fmt: skip


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name, config in SMALL.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_configuration_file_and_its_folder_are_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    by_file = report(capsys, GPT2, "--task", "causal-lm", "--input", "batch=2,seq=128")
    by_folder = report(capsys, str(FOLDER), "--input", "batch=2,seq=128")
    assert by_file["predicted_ms"] == by_folder["predicted_ms"]
    weights = BLOCKS * 12 * WIDTH**2 + WIDTH * VOCABULARY
    # Each weight once forward and twice backward; of the scores half, six products of a block's attention (two forward,
    # four backward, beside the scores that are computed again).
    attention = BLOCKS * 6 * 2 * 2 * 128 * 128 * WIDTH // 2
    assert by_file["flops"] == 3 * 2 * 2 * 128 * weights + attention
    eager = report(capsys, GPT2, "--task", "causal-lm", "--input", "batch=2,seq=128", "--attention", "eager")
    assert eager["flops"] == by_file["flops"] + attention  # all of the scores
    assert "causal attention as half if one fused kernel computes it" in by_file["flops_count"]
    assert by_file["tokens_per_s"] == pytest.approx(128 * by_file["samples_per_s"])
    assert by_file["samples_per_s"] == pytest.approx(2e3 / by_file["predicted_ms"])
    assert not [warning for warning in by_file["warnings"] if "clocks" in warning]


def test_transformers_gpt2_is_cut_across_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """Its linear layers have transposed weights (transformers' Conv1D)."""
    cut = report(capsys, GPT2, "tensor_parallel:workers=2,bandwidth=900GB/s", "--input", "batch=2,seq=128")
    (done,) = cut["transforms"]
    assert done["changed"]
    assert f"{2 * BLOCKS} parts" in str(cut["warnings"]) + str(cut["notes"])


@pytest.mark.parametrize("positions", ["32768", "65536"])
def test_long_sequences_stay_below_the_peak(positions: str, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, str(models / "llama"), "--input", f"batch=1,seq={positions}", "--device", "A100-SXM-80",
                   "--kwargs", f'{{"max_position_embeddings": {positions}}}')  # fmt: skip
    assert 1 < found["mfu_pct"] < 80


@pytest.mark.parametrize(
    ("name", "more", "tokens"),
    [
        ("bert", ["--input", "batch=2,seq=16"], True),
        ("bert", ["--task", "sequence-classification", "--input", "batch=2,seq=16"], True),
        ("bert", ["--task", "sequence-classification", "--input", "batch=2,seq=16", "--kwargs", '{"num_labels": 1}'],
         True),
        ("llama", ["--task", "sequence-classification", "--input", "batch=2,seq=16"], True),
        ("vit", ["--input", "batch=2"], False),
        ("vit", ["--input", "batch=2", "--inference"], False),
        ("t5", ["--input", "batch=2,seq=16,target=8"], True),
        ("t5", ["--input", "batch=2,seq=16", "--inference"], True),
    ],
)  # fmt: skip
def test_tasks(name: str, more: list[str], tokens: bool, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, str(models / name), *more)
    assert (found["tokens_per_s"] is not None) == tokens
    assert ("the loss is the model's own" in found["notes"]) == ("--inference" not in more)
    assert found["peak_bytes"] > 0
    assert found["fits"] is True


def test_a_configurations_own_format_is_taken(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama, words = str(models / "llama"), ("--input", "batch=1,seq=64", "--inference")
    own, half, single = (
        report(capsys, llama, *words, *more) for more in ((), ("--dtype", "bf16"), ("--dtype", "fp32"))
    )
    assert own["peak_bytes"] == half["peak_bytes"] < single["peak_bytes"]


def test_adapters_train_and_the_model_does_not(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama, words = str(models / "llama"), ("--input", "batch=2,seq=64", "--optimizer", "adamw:for-loop")
    whole, adapted = report(capsys, llama, *words), report(capsys, llama, *words, "--lora", "r=4")
    # q_proj (64 to 64) and v_proj (64 to 32) of two layers.
    assert f"adapters of rank 4 on 4 linear layers; {2 * 4 * (64 + 64 + 64 + 32):,} of " in adapted["notes"][1]
    assert adapted["peak_bytes"] < whole["peak_bytes"]
    assert 0.6 < adapted["flops"] / whole["flops"] < 0.8
    every = report(capsys, llama, *words, "--lora", "r=4,targets=all-linear,dropout=0.1")
    assert "on 14 linear layers" in every["notes"][1]


def test_frozen_parts_have_no_weight_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    words = (GPT2, "--input", "batch=2,seq=64", "--optimizer", "sgd")
    whole = report(capsys, *words)
    frozen = report(capsys, *words, "--freeze", r"h\.\d+\.mlp")
    # Two products of a block's weight gradients are left out: 8 · 64² weights.
    assert whole["flops"] - frozen["flops"] == BLOCKS * 2 * 2 * 64 * 8 * WIDTH**2


def test_adafactor_reads_its_norms_back(capsys: pytest.CaptureFixture[str]) -> None:
    words = (GPT2, "--input", "batch=2,seq=64", "--optimizer")
    adafactor, lists, adam = (report(capsys, *words, name) for name in ("adafactor", "adafactor:foreach", "adamw"))
    assert adafactor["peak_bytes"] < adam["peak_bytes"]
    assert adafactor["kernels"] > lists["kernels"] > adam["kernels"]


@pytest.mark.parametrize("names", [["amp"], ["fused_adam"], ["batch_size:factor=2"], ["device:to=V100-SXM2-32"],
                                   ["amp", "fused_adam"]])  # fmt: skip
def test_a_saved_step_gives_the_same_answers(
    names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.json.gz"
    words = (GPT2, "--input", "batch=8,seq=128", "--optimizer", "adam:for-loop", "--device", "A100-SXM-80")
    prediction = report(capsys, *words, *names, "--save", str(path))
    label = " + ".join(names)
    assert f"{path} is the step without {label}: name what-ifs again where you use it" in prediction["notes"]
    assert main(["apply", *names, str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted_ms"] == pytest.approx(prediction["predicted_ms"], rel=0.01)
    assert found["baseline_ms"] == pytest.approx(prediction["baseline_ms"], rel=0.01)


def test_a_model_that_looks_for_padding_has_none(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeBERTa and Longformer read tokens to warn about padding: "expected a step that does not depend on its data"."""
    found = report(capsys, str(models / "deberta"), "--input", "batch=2,seq=8")
    assert found["unknown_operators"] == {}


def test_a_model_of_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A stand-in with the three functions of timm that are called."""
    (tmp_path / "timm.py").write_text(
        "from torch import nn\n"
        "def is_model(name): return name == 'tiny'\n"
        "def list_models(pattern): return ['tiny']\n"
        "def create_model(name, pretrained, width=4):\n"
        "    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.Flatten(), nn.LazyLinear(5) if width == 0 else "
        "nn.Linear(width * 36, 5))\n"
        "    model.default_cfg = {'input_size': (3, 8, 8)}\n"
        "    return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "timm", raising=False)
    found = report(capsys, "timm:tiny", "--input", "batch=2", "--kwargs", '{"width": 2}')
    assert found["flops"] == 2 * 2 * (2 * 36 * 27 * 2 + 2 * 36 * 5 * 3)
    # Versions before 0.9 have no `timm.layers`.
    eager = report(capsys, "timm:tiny", "--input", "batch=2", "--kwargs", '{"width": 2}', "--attention", "eager")
    assert eager["flops"] == found["flops"]
    assert "got 'tinny'; similar names: tiny" in refused(capsys, "timm:tinny", "--input", "batch=2")


def test_a_timm_that_breaks_on_import_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchvision of another build of torch raises no ImportError."""
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "timm", raising=False)
    error = refused(capsys, "timm:resnet50", "--input", "batch=2")
    assert "expected a package timm that can be imported, got RuntimeError (operator torchvision::nms" in error


def test_a_folders_code_is_not_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for kind, said in (("no_such_model", "trust_remote_code stays off"), ("gpt2", "")):
        config = {"model_type": kind, "auto_map": code, "architectures": ["GPT2LMHeadModel"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = (str(tmp_path), "--input", "batch=1,seq=8")
        if said:
            assert said in refused(capsys, *words)
        else:
            assert any("own code is not executed" in note for note in report(capsys, *words)["notes"])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no/such-model", "--input", "batch=1,seq=8"], "hf download no/such-model config.json"),
        (["./no_such_folder", "--input", "batch=1,seq=8"], "no such file or folder"),
        ([GPT2], "expected --input batch=8,seq=2048"),
        ([GPT2, "--input", "batch=0,seq=8"], "'batch=0'"),
        ([GPT2, "--input", "batch=1,seq=abc"], "'seq=abc'"),
        ([GPT2, "--input", "seq=8"], "expected --input batch=...,seq=..."),
        ([GPT2, "--input", "batch=1,seq=999"], "at most 128"),
        ([GPT2, "--input", "batch=1", "--task", "image-classification"], "for this task; give --task with another one"),
        ([GPT2, "--input", "batch=1,seq=8", "--kwargs", '{"trust_remote_code": true}'], "executes no code"),
        ([GPT2, "--input", "batch=1,seq=8", "--lora", "r=0"], "'r=0'"),
        ([GPT2, "--input", "batch=1,seq=8", "--lora", "r=4,targets=q_proj"], "c_attn, c_fc, c_proj, lm_head"),
        ([GPT2, "--input", "batch=1,seq=8", "--freeze", "("], "'('"),
        ([GPT2, "--input", "batch=1,seq=8", "--freeze", "nothing_so"], "'nothing_so'"),
        ([GPT2, "--input", "batch=1,seq=8", "--freeze", "."], "parameters to train"),
        (["{}/unnamed", "--input", "batch=1,seq=8"], "write a function that returns the model and its inputs"),
        (["{}/unknown", "--input", "batch=1,seq=8"], "update transformers"),
        (["{}/mixtral", "--input", "batch=1,seq=8"], "use --dtype bf16. --debug"),
        (["{}/nothing", "--input", "batch=1,seq=8"], "no model_type"),
        (["{}/tokenizer", "--input", "batch=1,seq=8"], "only a tokenizer"),
        (["{}/book.ipynb", "--input", "batch=1,seq=8"], "got a notebook"),
        (["{}/model.safetensors", "--input", "batch=1,seq=8"], "got weights"),
        (["code.py", "--input", "8"], "file.py:Model"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(
    words: list[str], said: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (models / "tokenizer").mkdir()
    (models / "tokenizer" / "tokenizer.json").write_text("{}")
    assert said in refused(capsys, words[0].replace("{}", str(models)), *words[1:])
