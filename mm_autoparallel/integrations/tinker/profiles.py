"""A folder of block measurements as Tinker writes it: profiled_data.csv, model_info_seq*.json, p2p_*.csv.

Times are µs of a micro-batch of `mbs` samples on one device, collectives of TP and EP inside; sizes are MiB, of the
number type's 2 bytes. Four blocks a configuration, by the order in which they first stand there: the embedding, a
layer, the final norm, the head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, is_folder, is_there, read_document, read_text

DATA, INTRA, INTER = "profiled_data.csv", "p2p_intra_node.csv", "p2p_inter_node.csv"
COLUMNS = (
    "config,block_name,forward-compute,backward_compute,input_size,output_size,weights,activations,fwd_reserved,"
    "bwd_reserved"
)
OUT_OF_MEMORY = 1e9
"""A figure of a configuration that did not fit its device, in the column's unit."""

UPSTREAM_INTRA_GB_PER_S = (3, 6, 9, 12, 15, 17, 18, 18, 18, 19, 19)
"""What Tinker writes as bandwidth within a node without measuring it, by messages of 1, 2, 4 … 1024 MB."""
UPSTREAM_SEQ_LENGTH = 4096
NUM_BLOCKS = 4
_WORDS = re.compile(r"([a-zA-Z]+)(\d+)")
_MAX_SIZE = 1 << 20


@dataclass(frozen=True, order=True)
class Config:
    """What blocks were measured under: TP, sequence parallelism (0 or 1), EP, samples of a micro-batch, algorithm."""

    tp: int = 1
    sp: int = 0
    ep: int = 1
    mbs: int = 1
    algo: int = 0

    @classmethod
    def parse(cls, name: str) -> Config:
        """From a name such as `example-7b_tp2_sp1_ep1_mbs4_algo0`; what it does not say is as above."""
        found = {word: int(number) for word, number in _WORDS.findall(name) if word in cls.__dataclass_fields__}
        return cls(**found)


@dataclass(frozen=True)
class Block:
    """One measured block. Times in µs, sizes in MiB; see the module's docstring."""

    name: str
    forward_us: float
    backward_us: float
    input_mib: float
    output_mib: float
    weights_mib: float
    activations_mib: float
    forward_reserved_mib: float
    backward_reserved_mib: float

    @property
    def reserved_mib(self) -> float:
        """Of forward and backward, what is held longer."""
        return max(self.forward_reserved_mib, self.backward_reserved_mib)

    @property
    def is_out_of_memory(self) -> bool:
        """Whether it did not fit when it was measured."""
        figures = (self.forward_us, self.backward_us, self.activations_mib, self.reserved_mib)
        return any(figure >= OUT_OF_MEMORY for figure in figures)


@dataclass(frozen=True)
class Blocks:
    """The four blocks of a configuration: embedding, layer, final norm, head."""

    pre: Block
    layer: Block
    norm: Block
    head: Block


@dataclass(frozen=True)
class Folder:
    """What was measured. num_layers: of the model, None where nobody says. intra, inter: GB/s within and between nodes
    by messages of 1, 2, 4 … MB. notes: a sentence for each thing that was assumed or left out."""

    path: Path
    blocks: Mapping[Config, Blocks]
    seq_length: int
    is_bf16: bool
    num_layers: int | None
    intra_gb_per_s: tuple[float, ...]
    inter_gb_per_s: tuple[float, ...]
    model_name: str = "example"
    model_size: str = "7b"
    notes: tuple[str, ...] = field(default=(), compare=False)


def find_folder(named: str) -> Path:
    """The folder that is named: a path, or a name below ./profiled_data. Raises JobError where neither is there."""
    for path in (Path(named), Path("profiled_data") / named):
        if is_folder(path):
            return path
    raise JobError(f"{named}: no folder of that name is here or below profiled_data; give the folder of {DATA}")


def read_folder(path: Path) -> Folder:
    """The measurements in the folder at `path`. Raises JobError naming file, line and column that cannot be read."""
    info, notes = _read_info(path)
    blocks, left_out = _read_blocks(path / DATA)
    intra, inter, told = _read_bandwidths(path)
    version = next(iter(sorted(path.glob("VERSION_*.json"))), None)
    named = read_document(version, "version file") if version else {}
    return Folder(
        path,
        blocks,
        int(info.get("seq_length", UPSTREAM_SEQ_LENGTH)),
        bool(info.get("bf16", True)),
        info.get("num_layers"),
        intra,
        inter,
        str(named.get("model_name") or "example"),
        str(named.get("model_size") or "7b"),
        (*notes, *left_out, *told),
    )


def _read_info(path: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """Sequence length, layers and number type."""
    files = sorted(path.glob("model_info_seq*.json"))
    if not files:
        return {}, (f"{path} has no model_info_seq*.json: sequences of {UPSTREAM_SEQ_LENGTH} in bf16 are assumed",)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise JobError(f"{path} has several of {names}; one model a folder is expected")
    document = read_document(files[0], "model information")
    found: dict[str, int] = {}
    for key in ("seq_length", "num_layers"):
        value = document.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_SIZE:
            raise JobError(f"{files[0]}: {key} is {describe_value(value)}; a whole number of at least 1 is expected")
        found[key] = value
    for key in ("bf16", "fp16"):
        if not isinstance(document.get(key, False), bool):
            raise JobError(f"{files[0]}: {key} is {describe_value(document[key])}; true or false is expected")
    if document.get("bf16") and document.get("fp16"):
        raise JobError(f"{files[0]}: bf16 and fp16 are both true; one number type is expected")
    found["bf16"] = bool(document.get("bf16", not document.get("fp16", False)))
    if found.get("num_layers") == 1:  # what a cut network says of itself
        del found["num_layers"]
    return found, ()


def _read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of each line that is not empty, behind the header. Raises JobError."""
    lines = read_text(path, "measurements", "CSV file").splitlines()
    if not lines or ",".join(cell.strip() for cell in lines[0].split(",")) != COLUMNS:
        raise JobError(f"{path}: line 1 is {describe_value(lines[0] if lines else '')}; {COLUMNS} is expected")
    for number, line in enumerate(lines[1:], 2):
        if line.strip(", \t"):
            yield number, [cell.strip() for cell in line.split(",")]


def _read_blocks(path: Path) -> tuple[dict[Config, Blocks], tuple[str, ...]]:
    found: dict[Config, dict[str, Block]] = {}
    names: dict[Config, str] = {}
    places: dict[Config, int] = {}
    for number, cells in _read_rows(path):
        if len(cells) != len(COLUMNS.split(",")):
            raise JobError(f"{path}: line {number} has {len(cells)} cells; {len(COLUMNS.split(','))} are expected")
        config = Config.parse(cells[0])
        figures = [_figure(path, number, at, cell) for at, cell in enumerate(cells[2:], 2)]
        found.setdefault(config, {})[cells[1]] = Block(cells[1], *figures)
        names[config], places[config] = cells[0], places.get(config, number)
    blocks, left_out = {}, []
    for config, by_name in found.items():
        if len(by_name) != NUM_BLOCKS:
            raise JobError(
                f"{path}: line {places[config]}: {names[config]} has the blocks {', '.join(by_name)}; {NUM_BLOCKS} are "
                "expected: embedding, layer, final norm and head, in this order"
            )
        if any(block.is_out_of_memory for block in by_name.values()):
            left_out.append(names[config])
            continue
        blocks[config] = Blocks(*by_name.values())
    if not blocks:
        raise JobError(f"{path} has no configuration that fitted its device when it was measured")
    told = f"left out, because they did not fit when they were measured: {', '.join(left_out)}"
    return blocks, (told,) if left_out else ()


def _figure(path: Path, line: int, at: int, cell: str) -> float:
    column = COLUMNS.split(",")[at]
    try:
        figure = float(cell)
    except ValueError:
        raise JobError(f"{path}: line {line}, {column}: {describe_value(cell)} is no number") from None
    if not math.isfinite(figure) or not 0.0 <= figure <= OUT_OF_MEMORY:
        raise JobError(f"{path}: line {line}, {column}: {cell} is none of 0 to {OUT_OF_MEMORY:.0f}")
    return figure


def _read_bandwidths(path: Path) -> tuple[tuple[float, ...], tuple[float, ...], tuple[str, ...]]:
    """GB/s within and between nodes; one stands for the other where that is missing."""
    there = {name: _read_bandwidth(path / name) for name in (INTRA, INTER) if is_there(path / name)}
    if not there:
        raise JobError(f"{path} has neither {INTRA} nor {INTER}; one of them is needed")
    notes = [
        f"{path} has no {name}: the other file's figures stand for it" for name in (INTRA, INTER) if name not in there
    ]
    if there.get(INTRA) == UPSTREAM_INTRA_GB_PER_S:
        notes.append(f"{path / INTRA} holds the figures that Tinker writes without measuring them")
    first = next(iter(there.values()))
    return there.get(INTRA, first), there.get(INTER, first), tuple(notes)


def _read_bandwidth(path: Path) -> tuple[float, ...]:
    rows = [row.split(",") for row in read_text(path, "bandwidths", "CSV file").split("\n") if row.strip()]
    if len(rows) != 2 or len(rows[0]) != len(rows[1]):
        raise JobError(f"{path}: two lines of the same length are expected, MB and GB/s")
    figures: list[float] = []
    for sizes, cell in zip(*rows, strict=True):
        try:
            size, figure = float(sizes), float(cell)
        except ValueError:
            raise JobError(f"{path}: {describe_value(sizes)} and {describe_value(cell)} are no two numbers") from None
        if not (math.isfinite(figure) and figure > 0.0) or size != 2.0 ** len(figures):
            raise JobError(f"{path}: {sizes} MB at {cell} GB/s; sizes 1, 2, 4 … and figures above 0 are expected")
        figures.append(figure)
    return tuple(figures)
