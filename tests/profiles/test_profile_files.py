"""Profile files and the table: what is looked up, what is interpolated, and what is refused in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.layers import Layers
from mm_autoparallel.model.job.model import Decoder, Model
from mm_autoparallel.model.profiles.store import ProfileFile, hash_model, read_profile_files
from mm_autoparallel.model.profiles.table import Point, ProfileTable, build_table

MODEL = Model(
    name="small",
    text=Decoder(vocab_size=1024, layers=Layers(num_layers=4, hidden_size=256, ffn_size=512, num_heads=4, norm="rms")),
)
KINDS = ["text_pre", "text_layer", "text_post"]


def entry(tokens: int = 1024, scale: float = 1.0, **changed: Any) -> dict[str, Any]:
    def timing(median_ms: float) -> dict[str, Any]:
        return {"median_ms": median_ms, "mad_ms": 0.01, "num_samples": 20}

    return {
        "kind": "text_layer",
        "tp": 1,
        "mbs": 1,
        "tokens": tokens,
        "forward_ms": timing(1.0 * scale),
        "backward_input_ms": timing(1.5 * scale),
        "backward_weight_ms": timing(0.75 * scale),
        "activation_bytes": int(4000 * scale),
        "checkpoint_bytes": int(400 * scale),
        "transient_bytes": int(2000 * scale),
        **changed,
    }


def profile(*entries: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {
        "schema": "mm-autoparallel/profile/1",
        "model": {"name": "small", "sha256": hash_model(MODEL)},
        "device": "h200-141g",
        "software": {"torch": "2.13.0"},
        "date": "2025-11-21",
        "command": "mm-autoparallel profile job.yaml --device cuda",
        "entries": list(entries) or [entry()],
        **changed,
    }


def read(tmp_path: Path, *documents: dict[str, Any]) -> ProfileTable:
    for index, document in enumerate(documents):
        (tmp_path / f"{index}.json").write_text(json.dumps(document))
    return build_table(read_profile_files([tmp_path], MODEL, "h200-141g"), KINDS)


def point(**changed: Any) -> Point:
    return Point(**({"kind": "text_layer", "tp": 1, "cp": 1, "mbs": 1, "tokens": 1024, "spans": 1} | changed))


def test_an_exact_hit_is_measured(tmp_path: Path) -> None:
    found = read(tmp_path, profile()).look_up(point())
    assert found
    assert (found.time_source, found.forward_ms, found.backward_input_ms) == ("measured", 1.0, 1.5)
    assert (found.backward_weight_ms, found.activation_bytes) == (0.75, 4000)
    assert (found.checkpoint_bytes, found.transient_bytes) == (400, 2000)


def test_a_kind_without_any_entry_is_left_to_others(tmp_path: Path) -> None:
    assert read(tmp_path, profile()).look_up(point(kind="text_post")) is None
    assert build_table([], KINDS).look_up(point()) is None


@given(
    linear=st.floats(1e-6, 1e-2),
    quadratic=st.floats(0, 1e-6),
    low=st.integers(1, 4096),
    gap=st.integers(2, 4096),
    part=st.floats(0.01, 0.99),
)
def test_interpolation_is_exact_for_linear_and_quadratic_costs(
    linear: float, quadratic: float, low: int, gap: int, part: float
) -> None:
    def forward_ms(tokens: int) -> float:
        return linear * tokens + quadratic * tokens * tokens

    def timing(tokens: int) -> dict[str, Any]:
        return {"median_ms": forward_ms(tokens), "mad_ms": 0.0, "num_samples": 1}

    ends = [entry(tokens, forward_ms=timing(tokens)) for tokens in (low, low + gap)]
    table = build_table([(Path("p.json"), ProfileFile.model_validate(profile(*ends)))], KINDS)
    tokens = low + min(max(1, int(part * gap)), gap - 1)
    found = table.look_up(point(tokens=tokens))
    assert found
    assert (found.time_source, found.memory_source) == ("interpolated", "interpolated")
    assert found.forward_ms == pytest.approx(forward_ms(tokens), rel=1e-9)


def test_the_nearest_measurements_on_both_sides_count(tmp_path: Path) -> None:
    table = read(tmp_path, profile(entry(1024), entry(8192, scale=100)), profile(entry(2048, scale=2)))
    found = table.look_up(point(tokens=1536))
    assert found
    assert found.forward_ms == pytest.approx(1.5)


@pytest.mark.parametrize("asked", [{"tokens": 512}, {"tokens": 4096}, {"tp": 2}, {"cp": 2}, {"mbs": 2}, {"spans": 4}])
def test_nothing_is_extrapolated(tmp_path: Path, asked: dict[str, int]) -> None:
    table = read(tmp_path, profile(entry(1024), entry(2048)))
    with pytest.raises(
        ProfileError, match=r"text_layer was profiled, but not at TP .* \(there is: .*1024 tokens"
    ) as told:
        table.look_up(point(**asked))
    assert str(point(**asked)) in str(told.value)
    assert "mm-autoparallel profile" in str(told.value)


NAN = float("nan")


def profile_of_entry(**changed: Any) -> dict[str, Any]:
    return profile(entry(**changed))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (profile(schema="mm-autoparallel/profile/2"), r"0\.json: schema"),
        (profile(device="a100-80g"), r"0\.json: device is a100-80g and the job's cluster has h200-141g"),
        (profile(model={"name": "other", "sha256": "0" * 64}), r"0\.json: model\.sha256 .* another model"),
        (profile(model={"name": "other", "sha256": "short"}), r"0\.json: model\.sha256"),
        ({key: value for key, value in profile().items() if key != "date"}, r"0\.json: date is missing"),
        (profile(extra=1), r"0\.json: extra is not a key known here"),
        (profile() | {"entries": []}, r"0\.json: entries is empty"),
        (profile_of_entry(kind="text_layr"), r"0\.json: entries\[0\]\.kind is text_layr, .* text_layer"),
        (profile_of_entry(forward_ms={"median_ms": NAN, "mad_ms": 0.0, "num_samples": 1}), r"0\.json: .*NaN"),
        (
            profile_of_entry(forward_ms={"median_ms": -1.0, "mad_ms": 0.0, "num_samples": 1}),
            r"0\.json: entries\[0\]\.forward_ms\.median_ms is -1\.0; it must be at least 0",
        ),
        (
            profile_of_entry(forward_ms={"median_ms": 1.0, "mad_ms": 0.0, "num_samples": 0}),
            r"0\.json: entries\[0\]\.forward_ms\.num_samples is 0; it must be at least 1",
        ),
        (profile_of_entry(activation_bytes="1 GB"), r'0\.json: entries\[0\]\.activation_bytes is "1 GB"'),
        (profile_of_entry(tp=0), r"0\.json: entries\[0\]\.tp is 0"),
        (profile(entry(), entry()), r"0\.json: entries\[1\] gives text_layer at TP 1.* keep one of the two"),
    ],
)
def test_bad_files_name_file_and_key(tmp_path: Path, document: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        read(tmp_path, document)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04\x95\x00\x00", r"binary|UTF-8"),
        (b'{"schema": ', r"no valid JSON"),
        (b"[1, 2]", r"a mapping of keys to values is expected"),
    ],
)
def test_files_that_are_no_documents(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=rf"profile file .*bad\.json: .*({message})"):
        read_profile_files([path], MODEL, "h200-141g")


def test_missing_files_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"absent\.json: there is no such file"):
        read_profile_files([tmp_path / "absent.json"], MODEL, "h200-141g")
    with pytest.raises(ProfileError, match=r"holds no \*\.json file"):
        read_profile_files([tmp_path], MODEL, "h200-141g")


def test_two_files_may_not_disagree(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"1\.json: entries\[0\] gives .* and so does .*0\.json"):
        read(tmp_path, profile(), profile(entry(scale=2)))


def test_the_hash_sees_sizes_and_freezing_but_no_name() -> None:
    assert hash_model(MODEL) == hash_model(MODEL.model_copy(update={"name": "renamed"}))
    assert hash_model(MODEL) != hash_model(MODEL.with_freeze({"text": True}))
    longer = MODEL.text.model_copy(update={"vocab_size": 2048})
    assert hash_model(MODEL) != hash_model(MODEL.model_copy(update={"text": longer}))
