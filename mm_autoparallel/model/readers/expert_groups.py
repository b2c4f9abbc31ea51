"""Groups of experts: how many there are, and how many of them a router may pick one token's experts from, by the names
of each framework.

DeepSeek-V2 and V3 deal their experts to groups, and a token's experts lie in a few of these (arXiv:2405.04434, section
2.1.2; arXiv:2412.19437, section 2.1.2), so that what sends a token once to each node sends it to few.
"""

from __future__ import annotations

from mm_autoparallel.model.readers.foreign import Section

_NAMES = (
    ("n_group", "topk_group"),  # transformers, and what takes its names: MindFormers, MindSpeed-MM
    ("moe_router_num_groups", "moe_router_group_topk"),  # Megatron-LM, core/transformer/transformer_config.py
)
_DEVICES = "moe_router_topk_limited_devices"
"""Megatron-LM's older name: expert parallel ranks that a token's experts lie on."""

_ANY = 0, 0
_WITHOUT = "greedy"
"""`topk_method` of DeepSeek-V2 whose router passes over the groups (transformers, models/deepseek_v2)."""


def read_groups(part: Section, num_experts: int, uneven: bool = False) -> tuple[int, int]:
    """Groups that one token's experts lie in at most, and groups that there are, as Experts has them: 0 and 0 where the
    router picks from all, and for the latter where nobody says it.

    uneven: groups that the experts do not divide into count as none. Raises JobError where they are refused, or where
    more groups are to be picked than there are.
    """
    if part.text("topk_method", "") == _WITHOUT:
        return _ANY
    for groups_key, picked_key in _NAMES:
        num_groups, picked = part.number(groups_key, 0), part.number(picked_key, 0)
        if num_groups <= 1 or not picked:
            continue
        if num_experts % num_groups and uneven:
            return _ANY
        if num_experts % num_groups:
            raise part.refuse(groups_key, f"it must divide the {num_experts} experts")
        if picked > num_groups:
            raise part.refuse(picked_key, f"it is at most {groups_key} {num_groups}")
        return (picked, num_groups) if picked < num_groups else _ANY
    return part.number(_DEVICES, 0), 0
