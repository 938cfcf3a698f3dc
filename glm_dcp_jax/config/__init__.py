"""Configuration: what the model is (config.json) and how the engine runs it (flags). Imports nothing of ours."""

from glm_dcp_jax.config.engine import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from glm_dcp_jax.config.errors import ConfigError
from glm_dcp_jax.config.flags import FLAGS, Flag, engine_config
from glm_dcp_jax.config.generation import SamplingDefaults, sampling_defaults
from glm_dcp_jax.config.model import ModelConfig
from glm_dcp_jax.config.processes import ProcessConfig
from glm_dcp_jax.config.refused import REFUSED
from glm_dcp_jax.config.schedule import Run
from glm_dcp_jax.config.speculative import SpeculativeConfig

__all__ = [
    "FLAGS",
    "REFUSED",
    "CacheConfig",
    "ConfigError",
    "EngineConfig",
    "Flag",
    "ModelConfig",
    "ParallelConfig",
    "ProcessConfig",
    "Run",
    "SamplingDefaults",
    "SchedulerConfig",
    "SpeculativeConfig",
    "engine_config",
    "sampling_defaults",
]
