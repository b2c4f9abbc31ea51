"""What a launch of MindSpeed-MM trains: model, workload and search space, from the arguments of its processes.

The hook has the arguments as its process got them; `plan --script` takes them from a launch script's text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.mindspeed_mm.adapters import find_adapters
from mm_autoparallel.integrations.mindspeed_mm.arguments import (
    as_mapping,
    decoder_settings,
    find_argument,
    find_count,
    find_switch,
    flag_of,
)
from mm_autoparallel.integrations.mindspeed_mm.flags import DISPATCHER, FUSED, MODEL, SEQUENCE_PARALLEL
from mm_autoparallel.integrations.mindspeed_mm.fsdp2_config import Sharding, find_sharding, keeps
from mm_autoparallel.integrations.mindspeed_mm.image_tokens import tokens_of_images
from mm_autoparallel.integrations.mindspeed_mm.search_space import NO_OVERLAP, list_limits
from mm_autoparallel.integrations.mindspeed_mm.trained_model import model_section, read_trained_model
from mm_autoparallel.model.job.model import Encoder, Model, Patches
from mm_autoparallel.model.readers.megatron_choices import read_megatron_choices
from mm_autoparallel.model.readers.megatron_precision import read_megatron_precision

DATA = "--mm-data"
FSDP = "--use-torch-fsdp2"


_FSDP_BYTES = 12.0
"""Of a parameter's shard under FSDP2, and its two moments: fp32 (transformers_model.py)."""


def describe_arguments(
    arguments: Sequence[str], given: Given, find: Callable[[str], Path] = Path, flags: str = "auto-parallel-"
) -> Described:
    """The model, workload and search space of a training with `arguments`.

    find: the path here of a path that they name. flags: how the options that say `given` begin, for messages. Raises
    JobError where an argument is missing, or a file cannot be read.
    """
    named = find_argument(arguments, MODEL)
    if named is None:
        raise JobError(f"{MODEL} is missing; the path of a model.json is expected among the script's arguments")
    path = find(named)
    source, model = read_trained_model(path, decoder_settings(arguments), given.model_config, find)
    image_tokens, notes = _image_tokens(arguments, given, model, find, flags)
    document = dict(model_section(read_document(path, "model file"), path))
    choices, told_choices = _read_choices(arguments, document, model)
    half = find_switch(arguments, "--bf16") or find_switch(arguments, "--fp16")
    sharded = find_switch(arguments, FSDP)
    sharding = find_sharding(arguments, document.get("model_id"), find, given.world_size) if sharded else None
    workload: dict[str, object] = {
        "global_batch_size": find_count(arguments, "--global-batch-size"),
        "seq_length": find_count(arguments, "--seq-length"),
        "stack": "mindspeed-mm",
        "attention": "flash" if find_switch(arguments, "--use-flash-attn") else "unfused",
        "overlap_grad_reduce": find_switch(arguments, "--overlap-grad-reduce") or sharded,
        "overlap_param_gather": find_switch(arguments, "--overlap-param-gather") or sharded,
        **({"overlap_p2p": False} if find_switch(arguments, NO_OVERLAP) else {}),
        **(_sharded_bytes(sharding) if sharding else _parameter_bytes(arguments, half)),
        **image_tokens,
        **choices,
    }
    adapters = find_adapters(arguments, document, model)
    space = list_limits(arguments, document, model, given.max_vpp)
    search, told, notes = dict(space.limits), space.told, (*notes, *told_choices)
    if sharding:  # FSDP2 shards weights too, beside neither a pipeline nor tensor parallel ranks
        search |= {"pp": (1,), "tp": (1,), "ep": (1,), "zero": (3,), "max_vpp": 1, "sequence_parallel": (True,)}
        search["reshard"] = (True, False)
        told = ("PP, TP and EP above 1 (FSDP2 runs with none of them)",)
        notes = (*notes, *sharding.notes)
        unnamed = _list_unnamed(sharding, model)
        if unnamed:
            search["modes"] = ()
            notes += (
                f"no pattern of {sharding.path} names the layers of {unnamed}, so that none is planned to recompute",
            )
    not_searched = tuple(words.replace("--auto-parallel-", f"--{flags}") for words in told)
    return Described(
        source, workload | space.workload, search, notes=notes, not_searched=not_searched, adapters=adapters
    )


_HIDING = ("--use-ascend-coc", "--moe-alltoall-overlap-comm", "--moe-allgather-overlap-comm")
"""MindSpeed's flags that hide traffic behind products or experts; nobody says how much of it."""


def _read_choices(
    arguments: Sequence[str], document: Mapping[str, Any], model: Model
) -> tuple[dict[str, object], list[str]]:
    """What experts' tokens are exchanged by and beside, as keys of a workload; and a sentence for what is not counted.

    model.json's own keys count before flags. Raises JobError where the arguments ask for fewer bits or for graphs,
    neither of which MindSpeed-MM's layers on Megatron are planned with.
    """
    decoder = document.get("text_decoder")
    stated = as_mapping(arguments) | {
        flag_of(key): value
        for key, value in (decoder.items() if isinstance(decoder, Mapping) else ())
        if key.startswith("moe_") and value is not None
    }
    try:
        precision = read_megatron_precision(stated).precision
        choices = read_megatron_choices(stated)
    except ValueError as failure:
        raise JobError(f"the script's arguments: {failure}") from None
    if precision != "bf16":
        raise JobError(
            f"the script's arguments ask for products in {precision} (--fp8-format, --fp8-recipe, --fp4-format), and "
            "MindSpeed-MM's layers on Megatron are planned in bf16 alone; take these flags out to plan in bf16"
        )
    if choices.graphs not in ("", "none"):
        raise JobError(
            "the script's arguments ask for CUDA graphs (--cuda-graph-impl and its like), which MindSpeed has none of; "
            "take these flags out"
        )
    if choices.overlap == "micro_batches":
        raise JobError(
            "the script's arguments ask for the exchange of tokens beside other micro-batches (--moe-fb-overlap), with "
            "which a pipeline needs --num-layers-per-virtual-pipeline-stage, and MindSpeed-MM refuses that; take it out"
        )
    experts = model.text.layers.experts
    if experts and choices.dispatcher not in ("", "alltoall"):
        raise JobError(
            f"the script's arguments ask for the token dispatcher {choices.dispatcher}, which is NVIDIA's; pass "
            f"{DISPATCHER} alltoall"
        )
    facts: dict[str, str] = {"dispatcher": choices.dispatcher} if experts and choices.dispatcher else {}
    if all(find_switch(arguments, flag) for flag in (FUSED, SEQUENCE_PARALLEL)):
        facts["tp_overlap"] = "mc2"
    workload: dict[str, object] = {"facts": facts} if facts else {}
    if experts and experts.shared_ffn_size:
        workload["overlap_all_to_all"] = choices.overlap
    told = [
        f"{flag} hides traffic that is counted in the open here: steps are shorter than planned"
        for flag in _HIDING
        if find_switch(arguments, flag)
    ]
    return workload, told


def _sharded_bytes(sharding: Sharding) -> dict[str, float]:
    """What of a parameter lies in memory; its shard counts as the optimizer's copy of what is gathered."""
    gathered_bytes = sharding.weight_bytes
    return {
        "weight_bytes": gathered_bytes,
        "gradient_bytes": 4.0,
        "optimizer_bytes": _FSDP_BYTES - gathered_bytes,
    }


def _list_unnamed(sharding: Sharding, model: Model) -> str:
    """Parts whose layers could recompute, and that no pattern names."""
    if sharding.all_or_none is not None:
        return ""
    paths = sharding.list_paths(model)
    return " and ".join(m.name for m in model.modalities if keeps(m) and m.name not in paths)


def _parameter_bytes(arguments: Sequence[str], half: bool) -> dict[str, float]:
    """What of a parameter lies in memory, where it is not the usual. Without mixed precision it is its own copy."""
    if not half:
        return {"weight_bytes": 4.0, "gradient_bytes": 4.0, "optimizer_bytes": 8.0}
    # A bf16 weight is then the upper half of its fp32 copy (MindSpeed, reuse_fp32_param).
    return {"optimizer_bytes": 10.0} if find_switch(arguments, "--reuse-fp32-param") else {}


def _image_tokens(
    arguments: Sequence[str], given: Given, model: Model, find: Callable[[str], Path], flags: str
) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """Tokens of a sample's images after merging: as a person says, else the most that the data file allows."""
    encoder = next((e for e in model.encoders if e.media == "images"), None)
    if encoder is None:
        return {}, ()
    images = given.images or 1
    if given.image_tokens is not None:
        return {"image_tokens_per_sample": given.image_tokens, "images_per_sample": images}, ()
    named = find_argument(arguments, DATA)
    found = None
    if named is not None:
        data = find(named)
        seq_length = find_count(arguments, "--seq-length")
        content = _data_section(read_document(data, "data file"))
        found = tokens_of_images(content, data, encoder, _patch_size(encoder), images, seq_length)
    if found is None:
        raise JobError(
            f"how many tokens the images of a sample come to cannot be told from the data file; give "
            f"--{flags}image-tokens (and --{flags}images, how many images those are)"
        )
    note = (
        f"assumed: {images} image(s) of {found.tokens // images} tokens in a sample, {found.reason} ({named}); "
        f"--{flags}image-tokens and --{flags}images say otherwise"
    )
    return {"image_tokens_per_sample": found.tokens, "images_per_sample": found.spans}, (note,)


def _data_section(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The data's part of a YAML that has the arguments too, else the whole file."""
    section = document.get("data") if "gpt_args" in document else None
    return section if isinstance(section, Mapping) else document


def _patch_size(encoder: Encoder) -> int | None:
    """Pixels of a patch's side: patches hold three colours of one frame or two; no number is both p² and 2·p²."""
    assert isinstance(encoder.stem, Patches)
    of_colour, rest = divmod(encoder.stem.in_features, 3)
    for frames in (1, 2):
        side = isqrt(of_colour // frames)
        if not rest and frames * side**2 == of_colour:
            return side
    return None
