"""Costs of the kernels in a compiled program, compared with counts made by hand."""

import pytest

from xshard.dryrun import costs, hlo, kernels, summary

# The forward kernel of splash attention, in the form in which the TPU compiler prints
# it, shortened. It has two heads of 8 positions, and its values are already on the
# chip. A second kernel, whose cost is unknown, follows.
CALLS = """
ENTRY %main (n: s8[1,1,1], q: bf16[2,8,4], v: bf16[2,8,4], s: s32[8,128]) -> bf16[2,8,4] {
  %n = s8[1,1,1]{2,1,0:T(8,128)(4,1)} parameter(0)
  %q = bf16[2,8,4]{2,1,0:T(8,128)(2,1)} parameter(1)
  %v = bf16[2,8,4]{2,1,0:T(8,128)(2,1)S(1)} parameter(2)
  %s = s32[8,128]{1,0:T(8,128)} parameter(3)
  %splash_mha_PHASE.3 = (f32[8,128]{1,0:T(8,128)}, bf16[2,8,4]{2,1,0:T(8,128)(2,1)}, f32[2,8,128]{2,1,0:T(8,128)S(1)}) custom-call(%n, %q, %q, %v, /*index=4*/%s), custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,1,1]{2,1,0}}, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 8, \\"k_layout\\": 1}",
"more":"1"
}}, metadata={op_name="jit(step)/while/body/SCOPE/vmap(static_sparsity_splash)/splash_mha_PHASE/pallas_call"}
  %get.1 = bf16[2,8,4]{2,1,0:T(8,128)(2,1)} get-tuple-element(%splash_mha_PHASE.3), index=1, frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}
  %bytes = u8[64]{0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %their_kernel.12 = bf16[2,8,4]{2,1,0:T(8,128)(2,1)} custom-call(%get.1), custom_call_target="tpu_custom_call"
}
"""


def calls(phase="fwd_residuals", scope="causal"):
    return hlo.parse(CALLS.replace("PHASE", phase).replace("SCOPE", scope))


@pytest.mark.parametrize(
    "phase, products",
    [
        ("fwd_residuals", 2),
        ("fwd_segmented_no_residuals", 2),
        ("dkv_no_residuals", 4),
        ("dq_no_residuals", 3),
    ],
)
def test_causal_attention_counts_half_of_its_scores(phase, products):
    program = calls(phase)
    # Each position has a score for itself and for each earlier position.
    flops = 2 * products * 2 * (8 * 9 // 2) * 4
    # The kernel reads the block numbers, queries, keys and positions, and writes a sum
    # and the result. The rest is on the chip.
    moved = 1 + 2 * (2 * 2 * 8 * 4) + 4 * 8 * 128 + 4 * 8 * 128 + 2 * 2 * 8 * 4
    assert costs.of(program) == (flops, moved, 0)
    ours, theirs = sorted(kernels.rows(program), key=lambda row: row["kernel"])
    assert ours == {
        "kernel": f"splash_mha_{phase}",
        "count": 1,
        "flops": flops,
        "hbm_bytes": moved,
    }
    assert theirs == {
        "kernel": "their_kernel",
        "count": 1,
        "flops": None,
        "hbm_bytes": None,
    }


@pytest.mark.parametrize("scope", ["layer", "not_causal"])
def test_attention_with_another_mask_is_not_counted(scope):
    program = calls(scope=scope)
    assert costs.of(program) == (0, 0, 0)
    assert {row["flops"] for row in kernels.rows(program)} == {None}


def test_a_result_lists_counted_and_uncounted_kernels():
    rows = kernels.rows(calls())
    shown = summary._kernels({"kernels": rows})
    assert shown == [
        "kernels of a step\n"
        "kernel                    times  a chip does  moves\n"
        "splash_mha_fwd_residuals  1      1.15 kFLOP   8.58 kB\n"
        "their_kernel              1      not counted  not counted"
    ]
    assert summary._kernels({"kernels": []}) == []
