"""workload.samples: what a job leaves out follows from the mean sample, what contradicts it is refused, and all plans
of the job are told over the same drawn batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.sample_loads import Scarcity, loads_ms, relative_loads, sample_cost, sample_laws
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.drawn_batches import draw_batches

MODEL = {
    "name": "two parts and a microphone",
    "encoders": [
        {
            "name": "vision",
            "stem": {"type": "patches", "in_features": 1176},
            "layers": {
                "num_layers": 2, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 16, "norm": "layer",
                "gated": False,
            },
            "projector": {"merge_tokens": 4, "layer_sizes": [4096, 4096, 2048]},
        },
        {
            "name": "audio",
            "stem": {"type": "mel_frames", "num_mel_bins": 128},
            "layers": {"num_layers": 2, "hidden_size": 512, "ffn_size": 2048, "num_heads": 8, "norm": "layer"},
            "projector": {"merge_tokens": 2, "layer_sizes": [512, 2048]},
        },
    ],
    "text": {
        "vocab_size": 32000,
        "layers": {"num_layers": 4, "hidden_size": 2048, "ffn_size": 5632, "num_heads": 16, "norm": "rms"},
    },
}  # fmt: skip
DRAWN = {
    "images": {"mean": 2.0, "spread_fraction": 0.7},
    "patches": {"values": [400, 3600]},
    "audios": 0.5,
    "audio_seconds": {"constant": 20},
    "text_tokens": {"mean": 600, "spread_fraction": 1.0, "most": 4000},
}
TEXT = {"text_tokens": 1000}


def job_of(samples: Any, folder: Path = Path(), **more: Any) -> Job:
    workload = {"global_batch_size": 16, "samples": samples} | more.pop("workload", {})
    cluster = {"num_nodes": 1, "devices_per_node": 4, "device": "a100-80g"}
    document = {"model": more.pop("model", MODEL), "cluster": cluster, "workload": workload, **more}
    return parse_job(document, folder / "job.yaml")


def test_the_workload_follows_from_the_mean_sample() -> None:
    workload = job_of(DRAWN).workload
    assert workload.images_per_sample == 2
    assert workload.image_tokens_per_sample == pytest.approx(2.0 * 2000 / 4, rel=0.03)
    assert workload.audio_tokens_per_sample == pytest.approx(0.5 * 20 * 25, rel=0.03)
    assert workload.seq_length == pytest.approx(1000 + 250 + 590, rel=0.05)
    assert workload.seq_length % 64 == 0
    assert job_of(DRAWN, workload={"seq_length": 1856}).workload.seq_length == 1856


def test_frames_that_the_models_patch_joins_are_images_of_a_sample() -> None:
    videos = {"videos": 1, "frames": 9, "frame_patches": 400}
    workload = job_of(DRAWN | videos).workload
    assert workload.images_per_sample == 2 + 5
    assert workload.image_tokens_per_sample == pytest.approx(2.0 * 2000 / 4 + 5 * 400 / 4, rel=0.03)


def test_files_are_read_beside_the_job_and_their_content_counts(tmp_path: Path) -> None:
    rows = [{"patches": [400] * (1 + number % 2), "text_tokens": 100 + number} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = job_of("a.jsonl", tmp_path), job_of({"file": "b.jsonl"}, tmp_path)
    assert first.samples is not None
    assert (len(first.samples), first.sha256) == (40, second.sha256)
    assert first.sha256 != job_of({"file": "b.jsonl", "seed": 1}, tmp_path).sha256
    source = first.workload.samples
    assert source is not None
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert job_of("a.jsonl", tmp_path).sha256 != second.sha256
    with pytest.raises(JobError, match=r"sha256 .* the file has changed"):
        job_of({"file": "a.jsonl", "sha256": source.sha256}, tmp_path)


@pytest.mark.parametrize(
    ("samples", "more", "message"),
    [
        (DRAWN, {"workload": {"seq_length": 8192}}, "workload.seq_length is 8192, and workload.samples has 1,8"),
        (DRAWN, {"workload": {"images_per_sample": 7}}, "workload.images_per_sample is 7, and workload.samples has 2"),
        (DRAWN, {"workload": {"length_spread_fraction": 0.2}}, "length_spread_fraction and samples both say"),
        (DRAWN, {"workload": {"micro_batch_scale": {"text": [1.0, 2.0]}}}, "micro_batch_scale and samples both say"),
        (TEXT, {"workload": {"image_tokens_per_sample": 512}}, "image_tokens_per_sample is 512, .* 0.0 on average"),
        (TEXT, {"workload": {"audios_per_sample": 2}}, "audios_per_sample is 2, and workload.samples has 0.0"),
        (TEXT, {"workload": {"samples_per_sequence": 4}}, "samples_per_sequence is 4, and workload.samples has 1.0"),
        ({}, {}, "workload.samples.*either file names the samples, or images, .* neither is given"),
        ({"file": "a", "images": 1, "patches": 4}, {}, "and both are given"),
        ({"images": 1}, {}, "images and patches go together"),
        ({"videos": 1, "frames": 8}, {}, "videos, frames and frame_patches go together"),
        ({"videos": 1, "frames": 1e9, "frame_patches": 4}, {}, "workload.samples: 20,000 drawn samples have"),
        ({"text_tokens": {"mean": 5}}, {}, "workload.samples.text_tokens.*mean needs spread_fraction"),
        ({"text_tokens": {"mean": 5, "values": [4]}}, {}, "mean and values of them is given"),
        ({"text_tokens": {"values": [4], "weights": [1, 2]}}, {}, "weights are 2 and values 1"),
        ({"text_tokens": {"mean": 5, "spread_fraction": 1, "most": 4}}, {}, "most 4 is not above mean 5"),
        ({"text_tokens": 5, "batches": 3}, {}, "workload.samples.batches"),
        ({"text_tokens": 5}, {"workload": {"global_batch_size": 200_000}}, "are more than 50,000,000 samples"),
        ({"text_tokens": 5, "sha256": "x"}, {}, "sha256 is of a file"),
        ({"text_tokenz": 5}, {}, 'text_tokenz.*did you mean "text_tokens"'),
        ("none.jsonl", {}, "sample file .*none.jsonl: there is no such file"),
    ],
)
def test_what_is_wrong_or_contradicts_is_named(samples: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        job_of(samples, **more)


@pytest.mark.parametrize(
    ("stem", "merge", "fixed_count"),
    [
        ({}, 4, None),  # rotary positions, as Qwen2-VL's
        ({"num_positions": 2304}, 4, None),  # stretched to any size, as Qwen3-VL's
        ({"num_positions": 577, "class_token": True}, 1, 576),  # CLIP
        ({"num_positions": 1025, "class_token": True}, 4, 1024),  # InternViT
        ({"num_positions": 4096}, 16, 4096),  # SigLIP, as Gemma 3 has it
    ],
)
def test_pixels_tell_patches_where_an_encoder_takes_any_size(
    stem: dict[str, Any], merge: int, fixed_count: int | None, tmp_path: Path
) -> None:
    vision = MODEL["encoders"][0]  # type: ignore[index]
    own = {"stem": vision["stem"] | stem, "projector": {"merge_tokens": merge, "layer_sizes": [1024 * merge, 2048]}}
    (tmp_path / "a.jsonl").write_text('{"image_sizes": [[448, 448]], "text_tokens": 24}\n')
    model = MODEL | {"encoders": [vision | own]}
    if fixed_count is None:
        assert job_of("a.jsonl", tmp_path, model=model).workload.image_tokens_per_sample == 256
        return
    with pytest.raises(JobError, match=f"a.jsonl: line 1: .* takes images of one size, {fixed_count} patches"):
        job_of("a.jsonl", tmp_path, model=model)


def test_a_patch_that_somebody_says_counts_with_the_models_merging(tmp_path: Path) -> None:
    """Of an encoder of one size too: 33 patches a side are merged one by one, and not rounded to pairs."""
    vision = MODEL["encoders"][0]  # type: ignore[index]
    own = {
        "stem": vision["stem"] | {"num_positions": 577, "class_token": True},
        "projector": {"layer_sizes": [1024, 2048]},
    }
    (tmp_path / "a.jsonl").write_text('{"image_sizes": [[462, 462]], "text_tokens": 24}\n')
    model = MODEL | {"encoders": [vision | own]}
    job = job_of({"file": "a.jsonl", "patch_size": 14}, tmp_path, model=model)
    assert job.workload.image_tokens_per_sample == 33 * 33


def test_a_sequence_holds_its_images(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"tokens": 1040, "patches": 4096}\n{"tokens": 10, "patches": 4096}\n')
    with pytest.raises(JobError, match=r"a.jsonl: line 2: its tokens are 10, .* alone become 1,024"):
        job_of("a.jsonl", tmp_path)


def test_images_and_audio_of_a_sequence_are_those_of_its_samples() -> None:
    job, plain = job_of(DRAWN | {"packing": {"tokens": 16384}}), job_of(DRAWN)
    assert job.samples is not None
    each = len(job.samples) / job.samples.num_sequences
    assert each > 4
    for key in ("images_per_sample", "image_tokens_per_sample", "audio_tokens_per_sample"):
        assert getattr(job.workload, key) == pytest.approx(each * getattr(plain.workload, key), rel=0.1)


def test_an_objective_needs_samples() -> None:
    with pytest.raises(JobError, match=r"search.objective is mean, of steps over drawn batches"):
        job_of(None, search={"objective": "mean"}, workload={"seq_length": 512})


def test_loads_are_those_of_the_jobs_own_costs() -> None:
    """The mean sample has load 1, a sequence twice as long more than twice of it, and all are what the laws say."""
    job = job_of(DRAWN)
    assert job.samples is not None
    laws, relative = sample_laws(CostModel(job), job.samples), relative_loads(CostModel(job), job.samples)
    assert list(laws) == ["vision", "audio", "text"]
    for name, law in laws.items():
        once, twice = law.span_ms(np.array([law.mean_span_count, 2 * law.mean_span_count]))
        assert 2 * once < twice < 4 * once
        assert np.mean(relative[name]) == pytest.approx(loads_ms(job.samples, law, job.model).mean() / law.mean_ms)
        assert np.mean(relative[name]) == pytest.approx(1.0, rel=0.5)
    cost, sample = sample_cost(laws, job.model), job.samples.sample(7)
    assert cost.encoder_ms(sample) == pytest.approx(loads_ms(job.samples, laws["vision"], job.model)[7])
    assert cost.decoder_ms(sample) == pytest.approx(loads_ms(job.samples, laws["text"], job.model)[7])
    assert cost.merge_tokens == job.model.merge_tokens == 4
    encoder = job.model.encoders[0]
    whole = encoder.model_copy(update={"projector": encoder.projector.model_copy(update={"merge_tokens": 1})})
    assert sample_cost(laws, job.model.model_copy(update={"encoders": (whole,)})).merge_tokens == 1


def test_an_image_costs_what_it_does_where_few_samples_have_one() -> None:
    """A mean sample with a part of an image is a pass that launching alone takes, and no image is."""
    often, seldom = (
        job_of({"images": {"values": [1, 0], "weights": [part, 1 - part]}, "patches": 4096, "text_tokens": 900})
        for part in (0.999, 0.02)
    )
    assert often.samples is not None
    assert seldom.samples is not None
    laws = [sample_laws(CostModel(job), job.samples)["vision"] for job in (often, seldom)]
    assert laws[1].span_ms(np.array([4096.0])) == pytest.approx(laws[0].span_ms(np.array([4096.0])), rel=0.02)
    rare, usual = (Scarcity(CostModel(job), job.samples) for job in (seldom, often))
    assert usual("vision", 1) == pytest.approx(1.0, rel=0.02)
    assert rare("vision", 1) > rare("vision", 8) > 1.0  # more samples a pass fill it
    assert rare("text", 1) == 1.0
    drawn = draw_batches(CostModel(seldom))
    least = min(float(np.mean(drawn.factors("vision", mbs))) for mbs in (1, 2, 3, 5, 8, 32))
    assert drawn.mean_factor["vision"] <= least * (1 + 1e-12)  # whatever takes so many at once, no plan expects less


def test_several_images_a_sample_are_not_scarce() -> None:
    job = job_of({"images": 3, "patches": 400, "text_tokens": 900})
    assert job.samples is not None
    scarcity = Scarcity(CostModel(job), job.samples)
    assert {scarcity("vision", mbs) for mbs in (1, 2, 8)} == {1.0}
