"""How far quantised records move the model from transformers' numbers: measured on the goldens, and held to bounds.

The goldens are small random networks: one key that is selected differently changes all that follows, and nothing in
them was trained to bear noise. The bounds say that a format still does what it did when it was measured, not how good
it is on GLM-5.2. `scripts/test -m "slow or not slow" tests/oracle/test_record_accuracy.py -s` prints the tables of
docs/results/record-formats.md.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from test_goldens import GOLDEN, WHOLE, golden, prompts_of

from glm_dcp_jax import LLM
from glm_dcp_jax.cache.records import RecordFormat

FORMATS = {
    "float32": {"kv_cache_dtype": "float32"},
    "bfloat16": {"kv_cache_dtype": "bfloat16"},
    "fp8_ds_mla": {"kv_cache_dtype": "fp8_ds_mla"},
    "nvfp4_ds_mla": {"kv_cache_dtype": "nvfp4_ds_mla"},
    "nvfp4_ds_mla fp8 rope": {"kv_cache_dtype": "nvfp4_ds_mla", "nvfp4_rope_dtype": "fp8"},
}


class Agreement(NamedTuple):
    """logits: mean |difference| over the standard deviation of the golden's logits. selections: share of selected
    positions that are the golden's. greedy: share of rows whose best token is."""

    logits: float
    selections: float
    greedy: float


ZERO = 4e-5
"""What is printed as 0.0000."""
MEASURED = {
    "float32": {"tiny-a": Agreement(ZERO, 1.0, 1.0), "tiny-d": Agreement(ZERO, 1.0, 1.0)},
    "bfloat16": {"tiny-a": Agreement(0.3566, 0.8277, 0.4444), "tiny-d": Agreement(0.4863, 0.8025, 0.3948)},
    "fp8_ds_mla": {"tiny-a": Agreement(0.6061, 0.6686, 0.2162), "tiny-d": Agreement(0.7311, 0.6936, 0.1489)},
    "nvfp4_ds_mla": {
        "tiny-a": Agreement(0.7101, 0.6209, 0.1321),
        "tiny-d": Agreement(0.8394, 0.6603, 0.0827),
    },
    "nvfp4_ds_mla fp8 rope": {
        "tiny-a": Agreement(0.7092, 0.6214, 0.1306),
        "tiny-d": Agreement(0.8338, 0.6575, 0.0875),
    },
}


def measure(model: str, **flags) -> Agreement:
    """Every prompt with its greedy continuation in one prefill: teacher-forced, so that rows compare one by one."""
    llm = LLM(
        model=str(GOLDEN / model),
        tensor_parallel_size=4,
        decode_context_parallel_size=4,
        block_size=16,
        dtype="float32",
        max_model_len=WHOLE,
        max_num_batched_tokens=WHOLE,
        kv_cache_memory_bytes=32 * 2**20,
        precompile_token_paddings=(WHOLE,),
        **flags,
    )
    differences, spread, kept, selected, equal = [], [], 0, 0, []
    for prompt in prompts_of(model):
        stored = {key[3:]: value for key, value in golden(model).items() if key.startswith(f"p{prompt}_")}
        seen = llm.compute_logits([*stored["ids"].tolist(), *stored["greedy_ids"].tolist()], capture=True)
        wanted = np.concatenate([stored["logits"], stored["greedy_logits"][1:]])
        found = seen.logits[: len(wanted)]
        differences.append(np.abs(found - wanted).ravel())
        spread.append(wanted.ravel())
        equal.append(found.argmax(axis=1) == wanted.argmax(axis=1))
        for layer, chosen in seen.selections.items():
            reference = np.concatenate([stored[f"topk_L{layer}"], stored[f"greedy_topk_L{layer}"]])
            for ours, theirs in zip(chosen, reference, strict=True):
                theirs = theirs[theirs >= 0]
                if len(theirs) == chosen.shape[1]:  # earlier rows select all they see
                    kept += len(np.intersect1d(ours, theirs))
                    selected += len(theirs)
    return Agreement(
        float(np.concatenate(differences).mean() / np.concatenate(spread).std()),
        kept / selected,
        float(np.concatenate(equal).mean()),
    )


@pytest.mark.parametrize("model", ["tiny-a", pytest.param("tiny-d", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "nvfp4_ds_mla",
        *(pytest.param(name, marks=pytest.mark.slow) for name in FORMATS if name != "nvfp4_ds_mla"),
    ],
)
def test_agreement_with_the_golden(devices, name, model):
    """Within a tenth of what was measured: sums in another order, as on another machine, flip a few more selections."""
    devices(4)
    found, measured = measure(model, **FORMATS[name]), MEASURED[name][model]
    print(f"| {name} | {model} | {found.logits:.4f} | {found.selections:.4f} | {found.greedy:.4f} |")
    assert found.logits <= 1.1 * measured.logits
    assert found.selections >= 0.9 * measured.selections
    assert found.greedy >= 0.9 * measured.greedy - 0.02


ATTENTION_ERRORS = {
    "float32": ZERO,
    "bfloat16": 0.0022,
    "fp8_ds_mla": 0.0329,
    "nvfp4_ds_mla": 0.1171,
    "nvfp4_ds_mla fp8 rope": 0.1175,
}


@pytest.mark.parametrize("name", FORMATS)
def test_attention_over_normal_latents(name):
    """Root mean square of the error of attention's output over that of the output: GLM-5.2's sizes, one layer."""
    rng = np.random.default_rng(0)
    latent, rope = rng.standard_normal((2048, 512)), rng.standard_normal((2048, 64))
    q = rng.standard_normal((64, 576))
    record = RecordFormat.sized(
        FORMATS[name]["kv_cache_dtype"], 512, 64, 128, FORMATS[name].get("nvfp4_rope_dtype", "bfloat16")
    )
    encoded = record.encode(latent.astype(np.float32), rope.astype(np.float32))
    decoded = np.asarray(record.decode(encoded, jnp.float32), np.float64)

    def attend(records: np.ndarray) -> np.ndarray:
        scores = q @ records.T / 16
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights @ records[:, :512] / weights.sum(axis=1, keepdims=True)

    exact = attend(np.concatenate([latent, rope], axis=1))
    error = np.sqrt(np.mean((attend(decoded) - exact) ** 2) / np.mean(exact**2))
    print(f"| {name} | {error:.4f} |")
    assert error <= 1.1 * ATTENTION_ERRORS[name]
