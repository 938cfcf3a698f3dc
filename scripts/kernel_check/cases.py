"""All cases, in the order of the report."""

from kernel_check.attention_cases import attention_cases
from kernel_check.case import Case, Sizes
from kernel_check.index_cases import index_cases
from kernel_check.record_cases import record_cases
from kernel_check.weight_cases import weight_cases


def all_cases(sizes: Sizes) -> list[Case]:
    """Every op at every size."""
    return [*record_cases(sizes), *index_cases(sizes), *attention_cases(sizes), *weight_cases(sizes)]
