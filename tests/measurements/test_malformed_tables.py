"""A malformed table is refused whole, with file, row, line and column; a row that says too much is refused alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.errors import TableError
from mm_autoparallel.measurements.catalog import FORMATS, read_table

Rows = list[dict[str, str]]
Published = Callable[[str], Rows]
WriteTable = Callable[..., Path]


@pytest.mark.parametrize(
    ("table", "column", "cell", "words"),
    [
        ("korthikanti2022", "hidden", "", "column hidden: the cell is empty"),
        ("korthikanti2022", "value", "", "column value: the cell is empty"),
        ("korthikanti2022", "value", "1.42 s", 'column value: "1.42 s" is no number'),
        ("korthikanti2022", "value", "-3", 'column value: "-3" is measured, so it must be above zero'),
        ("korthikanti2022", "value", "nan", 'column value: "nan" is not finite'),
        (
            "korthikanti2022",
            "unit",
            "fortnights",
            'column unit: "fortnights" is no unit known here; known are us, ms, s',
        ),
        ("korthikanti2022", "layers", "12.5", 'column layers: "12.5" is no whole number'),
        (
            "korthikanti2022",
            "sequence_parallel",
            "maybe",
            'column sequence_parallel: "maybe" is neither true nor false',
        ),
        ("korthikanti2022", "n_gpus", "16", "column n_gpus: 16 devices, and PP"),
        ("sc21", "derived_iter_s", "9.9", "column derived_iter_s: 9.9 s, and"),
        ("vtrain", "iter_ms", "fast", 'column iter_ms: "fast" is no number'),
        ("vtrain", "vocab", "many", 'column vocab: "many" is no whole number of tokens'),
        ("vtrain", "vocab", "50,257", 'column vocab: "50,257" is no whole number of tokens'),
        ("vtrain", "params_b", "39.1", "column params_b: 39.1 B parameters, and the sizes of the row make 3.559 B"),
        ("vtrain", "hidden", "6144", "column params_b: 3.6 B parameters, and the sizes of the row make"),
        ("sc21", "params_b", "17", "column params_b: 17 B parameters, and the sizes of the row make 1.652 B"),
        ("megatron_bridge_performance", "tokens_s_gpu", "402432", "column tokens_s_gpu: 402432 tokens a second and"),
        ("megatron_bridge_performance", "measured_ms", "10.4209", "column tokens_s_gpu: 6288 tokens a second and"),
        ("simumax_b200", "measured_peak_alloc_gib", "0", 'column measured_peak_alloc_gib: "0" is measured'),
        ("megatron_ci", "peak_alloc_bytes", "5 GiB", 'column peak_alloc_bytes: "5 GiB" is no number'),
        ("mindspeed_mm_ci", "per_rank_max_alloc_mib", "0:24900.0;x:1", "column per_rank_max_alloc_mib: 'x:1' is no"),
        (
            "mindspeed_mm_ci",
            "per_rank_max_alloc_mib",
            "9:24900.0",
            "column per_rank_max_alloc_mib: it names rank 9 of 8",
        ),
        ("megatron_bridge", "outcome", "perhaps", "column outcome: 'perhaps' is no outcome known here; known are ok"),
        ("megatron_bridge", "step_ms", "", "column step_ms: the cell is empty"),
        ("torchtitan", "parallel", "magic", "column parallel: 'magic' is no degree"),
        ("torchtitan", "parallel", "FSDP0", "column parallel: 'FSDP0' is no degree"),
        (
            "korthikanti2022",
            "value",
            "1e101",
            'column value: "1e101" cannot have been measured; a number from 1e-15 to',
        ),
        ("vtrain", "iter_ms", "1e-320", 'column iter_ms: "1e-320" cannot have been measured; a number from 1e-12 to'),
        ("vtrain", "vocab", "9" * 5000, "is no whole number of tokens"),
        ("vtrain", "layers", "1e30", 'column layers: "1e30" is above 1,000,000,000,000,000'),
        ("torchtitan", "seq", "long", 'column seq: "long" is no whole number of tokens'),
        ("torchtitan", "seq", "8,192", 'column seq: "8,192" is no whole number of tokens'),
        ("torchtitan", "seq", "8 k", 'column seq: "8 k" is no whole number of tokens'),
        ("torchtitan", "tps_per_gpu", "5,762", 'column tps_per_gpu: "5,762" is no number'),
    ],
)
def test_a_malformed_cell_is_named(
    table: str, column: str, cell: str, words: str, published: Published, write_table: WriteTable
) -> None:
    good = published(table)[0]
    rows = [good, good | {column: cell}]
    path = write_table(rows)
    with pytest.raises(TableError) as raised:
        read_table(path)
    assert str(raised.value).startswith(f"table {path}: row 1 (line 3), ")
    assert words in str(raised.value)


def test_unknown_and_missing_columns_are_named_with_the_nearest_format(
    published: Published, write_table: WriteTable
) -> None:
    rows = [
        {"speed" if key == "value" else key: cell for key, cell in row.items()} for row in published("korthikanti2022")
    ]
    with pytest.raises(TableError) as raised:
        read_table(write_table(rows))
    text = str(raised.value)
    assert "the nearest is korthikanti" in text
    assert "the columns speed are unknown" in text
    assert "the columns value are missing" in text


def test_an_unknown_column_costs_the_rows_that_fill_it_for_it_may_change_what_they_mean(
    published: Published, write_table: WriteTable
) -> None:
    good = published("simumax_b200")[0]
    rows = [good | {"fp8": "", "pages": ""}, good | {"fp8": "true", "pages": "1"}, good | {"fp8": "", "pages": ""}]
    cases, refused = read_table(write_table(rows))
    assert [case.row for case in cases] == [0, 2]
    (refusal,) = refused
    assert refusal.row == 1
    assert 'simumax does not know what the row says under fp8 ("true") and pages ("1")' in refusal.reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("job,plan\n1,2,3\n", 'row 0 (line 2) has 3 cells and the header has 2 columns; "3" stands beyond'),
        (
            "job,plan\n1,2\n3\n",
            "row 1 (line 3) has 1 cells and the header has 2 columns; the first column without a cell is plan",
        ),
        ("a,,c\n1,2,3\n", "column 2 of the header has no name"),
        ("a,a\n1,2\n", "the column a stands twice"),
        ('job,plan\n"1,2\n', "it is no valid CSV"),
        ("a\0b", "it is binary; a CSV file is expected"),
        (",".join(f"c{i}" for i in range(200_000)), "it has 200,000 columns; at most 1,000 are read"),
        ("a,b\n" + "1,2\n" * 200_000, "none of its columns (a, b …) is known"),
        ("job,plan\n" + "1,2\n" * 200_000, "it has more than 10,000 rows"),
        ("a" * 1000, "has a name of 1,000 characters"),
    ],
)
def test_what_is_no_table_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TableError) as raised:
        read_table(path)
    assert str(raised.value).startswith(f"table {path}: ")
    assert words in str(raised.value)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="there is no such file"):
        read_table(tmp_path / "none.csv")


def test_no_header_fits_two_formats() -> None:
    for format_ in FORMATS:
        columns = (format_.required, format_.required | format_.optional)
        assert [other.name for header in columns for other in FORMATS if other.fits(header)] == [format_.name] * 2


GOOD_ROW = {"megatron_ci": 19}
"""A row that can be represented, where the first of a table cannot."""


@pytest.mark.parametrize(
    ("table", "column", "cell", "words"),
    [
        ("korthikanti2022", "gpu", "TPU v4", "the device 'TPU v4' is not in the catalog; known are ascend-910b-64g"),
        ("korthikanti2022", "gpu", "A100-40GB", "has 40 GB, and a100-80g has 80"),
        ("korthikanti2022", "gpu", "H100 NVL", "is a variant (NVL) that differs from h100-80g"),
        ("korthikanti2022", "precision", "fp8", "the precision 'fp8' is not understood"),
        ("korthikanti2022", "recompute", "sometimes", "the recompute 'sometimes' is not understood; known are full"),
        ("korthikanti2022", "kind", "simulated", "only measured ones are predicted"),
        ("korthikanti2022", "metric", "power", "the metric 'power' is not predicted"),
        ("korthikanti2022", "heads", "60", "is no multiple of num_heads 60"),
        ("simumax_b200", "layers", "13", "13 layers do not lie evenly on 2 chunks"),
        ("vtrain", "interconnect", "carrier pigeons", "the interconnect 'carrier pigeons' is not understood"),
        ("vtrain", "software", "JAX", "the software 'JAX' is not understood"),
        ("simumax_b200", "model", "llama9-1b", "the model 'llama9-1b' is not known"),
        ("simumax_b200", "precision", "fp8", "the precision 'fp8' is not understood"),
        ("megatron_ci", "spec", "magic", "the layer specification 'magic' is not understood"),
        ("megatron_ci", "global-batch-size", "", "global-batch-size is blank"),
        ("megatron_ci", "attention-backend", "magic", "the attention backend 'magic' is not understood"),
        ("mindspeed_mm_ci", "case", "finetune_other", "the sizes of the case 'finetune_other' are not known"),
        ("megatron_bridge", "model", "Nemotron", "the model 'Nemotron' is not known"),
    ],
)
def test_a_row_that_cannot_be_represented_is_refused_alone(
    table: str, column: str, cell: str, words: str, published: Published, write_table: WriteTable
) -> None:
    good = published(table)[GOOD_ROW.get(table, 0)]
    cases, refused = read_table(write_table([good, good | {column: cell}, good]))
    assert [case.row for case in cases] == [0, 2]
    (refusal,) = refused
    assert refusal.row == 1
    assert words in refusal.reason


def test_rows_of_torchtitan_that_are_refused_name_the_fact(published: Published, write_table: WriteTable) -> None:
    cases, refused = read_table(write_table(published("torchtitan")))
    assert (len(cases), [one.row for one in refused]) == (16, [14, 15])
    for one in refused:
        assert "rowwise FP8 under tensor parallelism" in one.reason


def test_a_technique_that_nobody_described_is_refused(published: Published, write_table: WriteTable) -> None:
    row = published("torchtitan")[0] | {"gpu": "H100-80GB", "activation_ckpt": "none"}
    cases, (refused,) = read_table(write_table([row, row | {"techniques": "FSDP+DiLoCo"}]))
    assert len(cases) == 1
    assert "the technique 'diloco'" in refused.reason


def test_a_profile_is_no_step(write_table: WriteTable) -> None:
    row = {
        "kind": "layer compute",
        "key": "layernum[2]_bsz1_seq2048",
        "value": "15.08",
        "unit": "ms",
        "model": "llama2-7b bf16 seq2048",
        "gpu": "not stated in file",
        "source": "github PKU-DAIR/Hetu-Galvatron@cea12ffb",
    }
    _, refused = read_table(write_table([row, row | {"gpu": "A100-80GB"}]))
    assert "device is not stated" in refused[0].reason
    assert refused[1].reason == "it is the time of some layers of a model, not a step of training"
    with pytest.raises(TableError, match="column unit: 'miles' is no unit known here"):
        read_table(write_table([row | {"unit": "miles"}]))


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
def test_another_separator_is_named(separator: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"{separator.join(['model', 'hidden', 'heads'] * 40)}\n", encoding="utf-8")
    with pytest.raises(TableError, match=rf"its first line has no comma and 119 {name}; columns apart by commas"):
        read_table(path)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_what_spreadsheets_call_unicode_is_named(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes("\ufeffmodel,hidden\n".encode(encoding))
    with pytest.raises(TableError, match=r"it is UTF-16 text; a CSV file in UTF-8 is expected"):
        read_table(path)


def test_marks_line_ends_and_another_order_of_columns_change_nothing(
    published: Published, write_table: WriteTable
) -> None:
    for table in ("torchtitan", "sc21", "vtrain", "megatron_bridge_performance"):
        rows = published(table)[:2]
        plain = write_table(rows)
        cases, _ = read_table(plain)
        turned = write_table([dict(sorted(row.items(), reverse=True)) for row in rows])
        text = turned.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\n", "\r\n")
        turned.write_bytes(b"\xef\xbb\xbf" + text.encode())
        for case, other in zip(cases, read_table(turned)[0], strict=True):
            assert (case.job.sha256, case.plan, case.measured_ms) == (other.job.sha256, other.plan, other.measured_ms)


@pytest.mark.parametrize("cell", ["²", "²;40", "--5", "9" * 5000])
def test_digits_are_those_of_ascii(cell: str, write_table: WriteTable) -> None:
    row = {
        "model": "llama3-70b", "device": "b200-192g", "global_batch_size": "32", "seq_length": "4096", "pp": "2",
        "tp": "1", "dp": "4", "mbs": "1",
    }  # fmt: skip
    with pytest.raises(TableError, match=r"column layers_per_stage: .* is no list of whole numbers"):
        read_table(write_table([row | {"layers_per_stage": cell}]))
    _, (refused,) = read_table(write_table([row | {"images_per_sample": cell}]))
    assert "images_per_sample" in refused.reason
