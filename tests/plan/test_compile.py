"""Compiling for absent GPUs: small functions on each target, and what the report says of them."""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.pallas import triton as plt
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from glm_dcp_jax import plan
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.kernels import tiles

pytestmark = pytest.mark.usefixtures("cuda_compiler")

ROWS, WIDTH = 4096, 64
OF_THIS_PROCESS = np.ones(8, np.float32)
TARGETS = {
    "8xH200": ("sm_90a", "wgmma"),
    "8xB200": ("sm_100a", "tcgen05"),
    "4xRTX-PRO-6000": ("sm_120", "mma"),
}


def gram_kernel(x_ref, out_ref):
    """out = x.T @ x, over blocks of 64 rows."""
    row, column = jnp.arange(64)[:, None], jnp.arange(WIDTH)[None, :]

    def add(block, total):
        x = tiles.load(x_ref, block * 64 + row, column)
        return total + tiles.dot(x.T, x)

    total = jax.lax.fori_loop(0, ROWS // 64, add, jnp.zeros((WIDTH, WIDTH), jnp.float32))
    tiles.store(out_ref, row, column, value=total)


def gram(x):
    out = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = plt.CompilerParams(num_warps=4, num_stages=2)
    return pl.pallas_call(gram_kernel, grid=(1,), out_shape=out, compiler_params=params, name="gram")(x)


def step(x, scale):
    return gram(x), jnp.tanh(x * scale)


@pytest.fixture(scope="module", params=TARGETS)
def compiled(request, cuda_compiler) -> tuple[str, plan.Compiled]:
    """A kernel and a fusion, for one GPU of each target."""
    _, gpu = request.param.split("x", 1)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    return request.param, plan.compile_for(step, f"1x{gpu}", x, jax.ShapeDtypeStruct((), jnp.bfloat16))


def test_kernels_are_there_by_name_with_the_targets_architecture(compiled):
    target, program = compiled
    assert "gram" in program.kernels
    assert any("fusion" in name for name in program.kernels)
    assert {kernel.architecture for kernel in program.kernels.values()} == {TARGETS[target][0]}


def test_a_kernel_reads_vectors_and_multiplies_on_the_targets_tensor_cores(compiled):
    target, program = compiled
    kernel = program.kernels["gram"]
    assert kernel.vector_loads > 0
    assert set(kernel.tensor_core_instructions) == {TARGETS[target][1]}
    assert kernel.local_memory_bytes == kernel.local_accesses == 0


def test_a_kernels_launch_fits_the_target(compiled):
    target, program = compiled
    launch = program.kernels["gram"].launch
    assert launch.grid == (1, 1, 1)
    assert launch.threads == 128
    assert 0 < launch.shared_memory_bytes <= plan.target(target).shared_memory_per_block


def test_registers_and_spills_come_from_ptxas(compiled):
    _, program = compiled
    found = program.resources()
    if found is None:
        pytest.skip("there is no ptxas: pip install nvidia-cuda-nvcc-cu12")
    assert set(found) == set(program.kernels)
    assert 16 <= found["gram"].registers <= 255
    assert found["gram"].spill_stores == found["gram"].spill_loads == 0


def test_memory_is_that_of_one_device(compiled):
    _, program = compiled
    x = ROWS * WIDTH * 2
    assert program.memory.argument_bytes == x + 2
    assert x + WIDTH * WIDTH * 4 <= program.memory.output_bytes < x + WIDTH * WIDTH * 4 + 256
    assert program.memory.alias_bytes == 0


def test_fusions_have_modelled_times_and_kernels_have_none(compiled):
    _, program = compiled
    assert program.why_no_modelled_times is None
    (times,) = program.modelled_times.values()
    assert 0 < times["performance"].total_us < 100


def test_a_program_without_fusions_says_why_nothing_is_modelled():
    program = plan.compile_for(gram, "1xH200", jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16))
    assert program.modelled_times == {}
    assert "models its own fusions only" in program.why_no_modelled_times


def test_a_donated_argument_is_aliased():
    pool, row = jax.ShapeDtypeStruct((1024, 128), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.float32)
    program = plan.compile_for(lambda pool, row: pool.at[3].set(row), "1xH200", pool, row, donate_argnums=0)
    assert program.memory.alias_bytes == program.memory.output_bytes == 1024 * 128 * 4
    assert program.memory.peak_bytes == 1024 * 128 * 4 + 128 * 4 + program.memory.temp_bytes


def test_a_jitted_function_is_compiled_as_it_is_and_of_arrays_only_the_shape_counts():
    power = jax.jit(lambda x, n: x**n, static_argnums=1)
    program = plan.compile_for(power, "1xB200", jnp.ones((8, 128)), 3)
    assert program.device_kind == "NVIDIA B200"
    assert program.memory.argument_bytes == 8 * 128 * 4
    with pytest.raises(ValueError, match="already jitted; give static_argnums to its jax.jit"):
        plan.compile_for(power, "1xB200", jnp.ones((8, 128)), 3, static_argnums=1)


@pytest.fixture(scope="module")
def exchange(cuda_compiler):
    """Four GPUs, three layers: an all-gather that only the layer's end needs, compute, and an all-reduce."""
    gpus = plan.devices("4xRTX-PRO-6000")
    mesh = Mesh(gpus, ("dcp",))

    def layer(x, weights):
        records = jax.lax.all_gather(x, "dcp", tiled=True)
        total = jax.lax.psum(jnp.tanh(x @ weights) @ weights, "dcp")
        return total + records.reshape(4, *x.shape).sum(0).astype(x.dtype), None

    def layers(x, weights):
        return jax.lax.scan(layer, x, weights)[0]

    place = partial(NamedSharding, mesh)
    return plan.compile_for(
        jax.shard_map(layers, mesh=mesh, in_specs=(P("dcp"), P()), out_specs=P("dcp"), check_vma=False),
        gpus,
        jax.ShapeDtypeStruct((4 * 256, 1024), jnp.bfloat16, sharding=place(P("dcp"))),
        jax.ShapeDtypeStruct((3, 1024, 1024), jnp.bfloat16, sharding=place(P())),
        compiler_options={"xla_gpu_enable_latency_hiding_scheduler": True},
    )


def test_collectives_of_a_loop_are_found_with_their_sizes(exchange):
    found = {one.kind: one for one in exchange.collectives}
    assert sorted(found) == ["all-gather", "all-reduce"] and len(exchange.collectives) == 2
    assert {(one.executions, one.ranks) for one in found.values()} == {(3, 4)}
    local = 256 * 1024 * 2
    assert (found["all-gather"].operand_bytes, found["all-gather"].result_bytes) == (local, 4 * local)
    assert (found["all-reduce"].operand_bytes, found["all-reduce"].result_bytes) == (local, local)


def test_the_schedule_says_which_collective_is_hidden(exchange):
    found = {one.kind: one for one in exchange.collectives}
    assert not found["all-gather"].blocks
    order = [one.name for one in exchange.schedule.computations[found["all-gather"].computation].instructions]
    between = order[found["all-gather"].start + 1 : found["all-gather"].done]
    assert set(found["all-gather"].compute_between) <= set(between)


def test_memory_of_a_sharded_program_is_that_of_one_device(exchange):
    assert exchange.num_devices == 4
    assert exchange.memory.argument_bytes == 256 * 1024 * 2 + 3 * 1024 * 1024 * 2


def test_arguments_that_are_not_used_do_no_harm():
    program = plan.compile_for(lambda x, unused: x * 2, "1xH200", jnp.ones(64), jnp.ones(4096))
    assert (program.num_devices, program.memory.argument_bytes) == (1, 64 * 4)


def test_shardings_of_arguments_split_a_plain_function():
    gpus = plan.devices("8xH200")
    mesh = Mesh(gpus[:2], ("dcp",))
    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32, sharding=NamedSharding(mesh, P("dcp")))
    program = plan.compile_for(lambda x: jnp.sin(x).sum(), gpus, x)
    assert (program.num_devices, program.memory.argument_bytes) == (2, 4 * 1024 * 4)
    assert [(one.kind, one.ranks) for one in program.collectives] == [("all-reduce", 2)]


def test_compiler_options_reach_the_compiler():
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_flag"):
        plan.compile_for(jnp.sin, "1xH200", jnp.ones(8), compiler_options={"xla_gpu_no_such_flag": True})


def test_arguments_that_leave_the_program_on_the_cpu_are_refused():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(
        ValueError, match=r"placed on 1 x cpu, not on the 4 x NVIDIA H200.*give its arguments shard"
    ):
        plan.compile_for(lambda x: x + 1, "4xH200", x)


@pytest.mark.parametrize(
    "where",
    [None, 3, (), [], ["1xH200"], b"1xH200", ["1xH200", None], {"8xH200": 1}],
    ids=repr,
)
def test_what_names_no_gpus_is_refused_with_what_would(where):
    with pytest.raises(ConfigError, match="no GPUs to compile for in .*as '8xH200' .*RTX-PRO-6000.*devices"):
        plan.compile_for(jnp.sin, where, jnp.ones(8))


def test_cpus_are_no_gpus():
    for where in (jax.devices()[:1], jax.devices(), [*plan.devices("1xH200"), jax.devices()[0]]):
        with pytest.raises(ConfigError, match="no GPUs to compile for in .*Cpu"):
            plan.compile_for(jnp.sin, where, jnp.ones(8))


@pytest.mark.parametrize(
    ("function", "arguments", "argument_bytes"),
    [
        (lambda: jnp.arange(8.0) * jax.random.normal(jax.random.key(0), (8,)), (), 0),
        (jax.jit(lambda: jnp.arange(8.0) + OF_THIS_PROCESS), (), 0),
        (lambda x, y: x * y, (2, 0.5), 8),
        (lambda x, y: x * y, (jnp.ones(64), 3), 64 * 4 + 4),
        (lambda pair: pair["x"] + pair["y"][0], ({"x": 1, "y": [jnp.ones(64)]},), 64 * 4 + 4),
    ],
    ids=["nothing", "nothing, jitted", "numbers", "an array and a number", "a tree"],
)
def test_numbers_and_programs_without_arguments_go_to_the_one_gpu(function, arguments, argument_bytes):
    program = plan.compile_for(function, "1xH200", *arguments)
    assert (program.device_kind, program.num_devices) == ("NVIDIA H200", 1)
    assert program.memory.argument_bytes == argument_bytes
    assert program.kernels


def test_several_gpus_need_a_place_for_numbers_too():
    with pytest.raises(ValueError, match=r"placed on 1 x cpu, not on the 2 x NVIDIA H200"):
        plan.compile_for(lambda x: x + 1, "2xH200", 3)


def test_the_dump_folder_is_not_the_callers():
    with pytest.raises(ValueError, match="xla_dump_to is where kernels are read from, and temporary"):
        plan.compile_for(jnp.sin, "1xH200", jnp.ones(8), compiler_options={"xla_dump_to": "kept"})


def test_a_compiler_without_ptxas_says_what_to_install():
    class Lowered:
        def compile(self, compiler_options):
            raise jax.errors.JaxRuntimeError(
                "UNAVAILABLE: No PTX compilation provider is available. Neither ..."
            )

    with pytest.raises(ConfigError, match="pip install nvidia-cuda-nvcc-cu12"):
        plan.compile_lowered(Lowered(), "1xH200")


@pytest.fixture
def cache_folder(tmp_path):
    """jax's persistent cache in a folder of its own, storing everything."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    usual = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in usual.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_nothing_goes_to_the_persistent_cache_and_others_use_it_afterwards(cache_folder):
    plan.compile_for(lambda x: jnp.cos(x) * 3, "1xH200", jnp.ones(8))
    with plan.no_persistent_cache(), plan.no_persistent_cache():
        pass
    assert os.listdir(cache_folder) == []
    jax.jit(lambda x: jnp.cos(x) * 5)(1.0)
    assert os.listdir(cache_folder) != []
