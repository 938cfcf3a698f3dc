"""Which part of the network each instruction of a compiled step belongs to: by the weights and pools that it reads."""

import re
from collections.abc import Sequence

from glm_dcp_jax.plan.exposure import PartOf
from glm_dcp_jax.plan.kernel_costs import kernel_name
from glm_dcp_jax.plan.operands import Origins
from glm_dcp_jax.plan.schedule import Instruction, Schedule
from glm_dcp_jax.plan.weights import Leaf

RECORDS, INDEX_KEYS, COLLECTIVES, OTHER = "records", "index_keys", "collectives", "other"
PARTS = (
    "embedding",
    "head",
    "attention",
    "dense",
    "routed_experts",
    "shared_experts",
    "router",
    "norms",
    "join",
    "indexer",
    INDEX_KEYS,
    RECORDS,
    COLLECTIVES,
    OTHER,
)
"""As weights.WEIGHT_PARTS, with the MTP layer's among those of the others (`join`: its input projection); then what is
no weight. `other` is arithmetic on activations."""

_KERNELS = {
    "sparse_attention": RECORDS,
    "combine": RECORDS,
    "pack_records": RECORDS,
    "unpack_records": RECORDS,
    "write_records": RECORDS,
    "index_scores": INDEX_KEYS,
    "write_index_keys": INDEX_KEYS,
    "topk_maxima": INDEX_KEYS,
    "topk_choose": INDEX_KEYS,
}
_SCOPES = {"top_k": INDEX_KEYS, "index_merge": INDEX_KEYS, "select": INDEX_KEYS, "plan": RECORDS}
_LEAF = re.compile(r"leaves\[(\d+)\]")


def parts_of(schedule: Schedule, leaves: Sequence[Leaf]) -> PartOf:
    """For a program's instructions. leaves: those that the program takes, in its order."""
    origins = Origins.of(schedule)

    def part(computation: str, instruction: Instruction) -> str:
        if instruction.collective:
            return COLLECTIVES
        kernel = kernel_name(instruction)
        if kernel in _KERNELS:
            return _KERNELS[kernel]
        found = [origins.argument(computation, name) for name in instruction.operands]
        read = [leaves[int(match[1])] for name in found if (match := _LEAF.fullmatch(name))]
        if read:
            return max(read, key=lambda leaf: leaf.nbytes).inner
        if any(name.startswith("pools") for name in found):
            return INDEX_KEYS if any("index_keys" in name for name in found) else RECORDS
        scopes = re.split(r"[/()]", instruction.op_name)
        return next((_SCOPES[scope] for scope in scopes if scope in _SCOPES), OTHER)

    return part
