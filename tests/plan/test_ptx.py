"""What is read from PTX, on texts that show each form once."""

import pytest

from glm_dcp_jax.plan.ptx import Launch, PtxKernel, kernels_of, launches_of

MODULE = """\
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];

.visible .entry gather(
	.param .u64 .ptr .global .align 1 gather_param_0
)
.reqntid 128, 1, 1
{
	.local .align 16 .b8 	__local_depot0[64];
	ld.param.b64 	%rd1, [gather_param_0];
	// begin inline asm
	mov.u32 %r1, 0x0;
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	// end inline asm
	ld.global.nc.L1::no_allocate.v2.b64 	{%rd5, %rd6}, [%rd1];
	@%p2 ld.global.L1::evict_last.L2::cache_hint.b32 { %r5 }, [ %rd1 + 64 ], %rd9;
	ld.global.nc.b8 	%rs1, [%rd1+3];
	cp.async.cg.shared.global [ %r20 + 0 ], [ %rd14 + 0 ], 0x10, %r21;
	@%p3 cp.async.ca.shared.global [ %r22 + 0 ], [ %rd15 + 0 ], 0x4;
	ld.shared.v4.b32 	{%r6, %r7, %r8, %r9}, [%r20];
	st.local.b32 	[%rd2], %r6;
	ld.local.b32 	%r7, [%rd2+4];
	@%p1 st.global.v4.b32 [ %rd3 + 0 ], { %r1, %r2, %r3, %r4 };
	st.global.b16 	[%rd3+16], %rs2;
	{
	.reg .pred complete;
}
	st.global.v8.b32 	[%rd4], {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8};
	ret;
}

.visible .entry multiply(
)
{
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 	{%r1, %r2, %r3, %r4}, [%r5];
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 	{%r1}, {%r2}, {%r3}, {%r4};
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 	{%r1}, {%r2}, {%r3}, {%r4};
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, p, 1, 1, 0, 1;
	@%p9 tcgen05.mma.cta_group::1.kind::f16 [ %r171 + 0 ], %rd41, %rd41, %r64, %p8;
	tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r18];
	ret;
}
"""

THUNKS = """\
001: kCustomKernel  [source | next=002 (1) ] gather grid: [32, 2, 1] threads: [64, 2, 1]  shared_memory: 2048 bytes
003: kAsyncStart    [prev=001 (2)  | next=031 (13)] stream=communication_stream[0], async_id=18
    002: kAllGather [source | sink] kAllGather
004: kCopy         [prev=001 (2) | next=005 (1)] kCopy
"""


@pytest.fixture
def kernels() -> dict[str, PtxKernel]:
    return kernels_of(
        [".version 8.8\n.target sm_90a\n.global .b8 constant[4];\n", MODULE], launches_of(THUNKS)
    )


def test_kernels_go_by_the_names_of_their_entries(kernels):
    assert list(kernels) == ["gather", "multiply"]
    assert kernels["gather"].architecture == "sm_90a"


def test_loads_are_counted_by_width_and_asynchronous_copies_are_loads(kernels):
    assert kernels["gather"].global_loads == {16: 3, 4: 2, 1: 1}
    assert kernels["gather"].vector_loads == 3


def test_stores_are_counted_by_width_also_after_a_block_of_inline_assembly(kernels):
    assert kernels["gather"].global_stores == {16: 1, 2: 1, 32: 1}
    assert kernels["gather"].vector_stores == 2


def test_local_memory_is_seen(kernels):
    assert (kernels["gather"].local_memory_bytes, kernels["gather"].local_accesses) == (64, 2)


def test_tensor_core_instructions_are_told_apart(kernels):
    assert kernels["multiply"].tensor_core_instructions == {"mma": 2, "wgmma": 1, "tcgen05": 1}


def test_a_kernel_is_not_charged_with_its_neighbour(kernels):
    assert not kernels["gather"].tensor_core_instructions
    multiply = kernels["multiply"]
    assert not multiply.global_loads and not multiply.global_stores
    assert (multiply.local_memory_bytes, multiply.local_accesses) == (0, 0)


def test_launches_come_from_the_thunk_sequence(kernels):
    assert kernels["gather"].launch == Launch((32, 2, 1), 128, 2048)
    assert kernels["multiply"].launch is None
