"""GLM-5.2 and its family, served in JAX on NVIDIA GPUs with decode context parallelism.

`LLM` and `SamplingParams` are loaded on first use, because jax reads its settings when it is imported: with this
package alone imported, environment variables can still be set.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from glm_dcp_jax._version import __version__

if TYPE_CHECKING:
    from glm_dcp_jax.engine.llm import LLM
    from glm_dcp_jax.engine.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "glm_dcp_jax.engine.llm",
    "SamplingParams": "glm_dcp_jax.engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
