"""Costs of a compiled program, compared with counts made by hand."""

import pytest

from xshard.dryrun import costs, hlo, summary

# A scan over ten layers, in the form in which the TPU compiler prints it. The text does
# not state the loop's trip count, and the activations stay on the chip, in the memory
# S(1).
SCAN = """
%taken (param_0.12: bf16[10,8,8], param_1.13: s32[]) -> bf16[8,8] {
  %param_0.12 = bf16[10,8,8]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1.13 = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %slice.1 = bf16[1,8,8]{2,1,0:T(8,128)(2,1)} dynamic-slice(%param_0.12, %param_1.13, \
      %zero, %zero)
  ROOT %bitcast.8 = bf16[8,8]{1,0:T(8,128)(2,1)} bitcast(%slice.1)
}

%layer (p_0.13: bf16[4,8], p_1.14: bf16[10,8,8], p_2.9: s32[]) -> bf16[4,8] {
  %param_0.13 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_1.14 = bf16[10,8,8]{2,1,0:T(8,128)(2,1)} parameter(1)
  %param_2.9 = s32[]{:T(128)S(6)} parameter(2)
  %fusion.11 = bf16[8,8]{1,0:T(8,128)(2,1)} fusion(%param_1.14, %param_2.9), \
      kind=kLoop, calls=%taken
  ROOT %convolution.5 = bf16[4,8]{1,0:T(8,128)(2,1)} convolution(%param_0.13, \
      %fusion.11), dim_labels=bf_io->bf, CYCLES
}

%body (wide.param.2: (s32[], bf16[4,8], bf16[10,8,8])) -> (s32[], bf16[4,8], \
    bf16[10,8,8]) {
  %one = s32[]{:T(128)} constant(1)
  %wide.param.2 = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, \
      bf16[10,8,8]{2,1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%wide.param.2), index=0
  %copy.5 = s32[]{:T(128)S(6)} copy(%i)
  %next = s32[]{:T(128)} add(%copy.5, %one)
  %w = bf16[10,8,8]{2,1,0:T(8,128)(2,1)} get-tuple-element(%wide.param.2), index=2
  %x = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.2), index=1
  %fusion.13 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} fusion(%x, %w, %copy.5), kind=kOutput, \
      calls=%layer, CYCLES
  %all-reduce.2 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.13), \
      replica_groups={{0,1}}, to_apply=%sum
  ROOT %tuple.17 = (s32[], bf16[4,8]{1,0:S(1)}, bf16[10,8,8]{2,1,0}) tuple(%next, \
      %all-reduce.2, %w)
}

%condition (wide.param.1: (s32[], bf16[4,8], bf16[10,8,8])) -> pred[] {
  %bound = s32[]{:T(128)} constant(BOUND)
  %wide.param.1 = (s32[]{:T(128)}, bf16[4,8]{1,0:S(1)}, bf16[10,8,8]{2,1,0}) \
      parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%wide.param.1), index=0
  ROOT %lt.3 = pred[]{:T(512)} compare(%j, %bound), direction=LT
}

ENTRY %main (param.4: bf16[10,8,8], param.5: bf16[4,8]) -> bf16[4,8] {
  %start = s32[]{:T(128)} constant(START)
  %param.4 = bf16[10,8,8]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param.5 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(1)
  %copy-start.1 = (bf16[4,8]{1,0:S(1)}, bf16[4,8]{1,0}, u32[]{:S(2)}) \
      copy-start(%param.5)
  %copy.12 = s32[]{:T(128)S(6)} copy(%start)
  %copy-done.1 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)
  %tuple.19 = (s32[], bf16[4,8]{1,0:S(1)}, bf16[10,8,8]{2,1,0}) tuple(%copy.12, \
      %copy-done.1, %param.4)
  %while.10 = (s32[], bf16[4,8]{1,0:S(1)}, bf16[10,8,8]{2,1,0}) while(%tuple.19), \
      condition=%condition, body=%body
  ROOT %get-tuple-element.57 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} \
      get-tuple-element(%while.10), index=1
}
"""


def scan(start="0", bound="10"):
    text = SCAN.replace("START", start).replace("BOUND", bound)
    cycles = '{"window_config":{"estimated_cycles":"1831","is_mask":false}}'
    return hlo.parse(text.replace("CYCLES", f"backend_config={cycles}"))


@pytest.mark.parametrize(
    "start, bound, rounds", [("0", "10", 10), ("4", "10", 6), ("9", "3", 0)]
)
def test_a_loop_body_is_counted_once_per_iteration(start, bound, rounds):
    program = scan(start, bound)
    assert program.times()["body"] == rounds and program.unknown_loops() == 0
    flops, hbm_bytes, cycles, _ = costs.of(program)
    assert flops == rounds * 2 * 4 * 8 * 8
    # Each round moves the counter and a slice of the weights. The batch and the
    # counter's start value move once. The rest stays on the chip.
    counter = 4 + 8
    weights = 2 * 8 * 8
    batch = 2 * 4 * 8
    start_bytes = 4
    assert hbm_bytes == rounds * (counter + weights) + batch + start_bytes
    # The instructions inside a fusion carry the same estimate, which must not count
    # twice.
    assert cycles == rounds * 1831


def test_a_loop_of_unknown_length_counts_once_and_is_reported():
    program = hlo.parse(SCAN.replace("direction=LT", "direction=NE"))
    assert program.unknown_loops() == 1 and program.times()["body"] == 1
    assert costs.of(program).flops == 2 * 4 * 8 * 8


def test_a_parameter_number_is_not_taken_for_a_loop_bound():
    text = SCAN.replace("START", "0").replace("constant(BOUND)", "parameter(7)")
    program = hlo.parse(text)
    assert program.unknown_loops() == 1 and program.times()["body"] == 1


def test_a_trip_count_from_the_compiler_is_used():
    attributes = 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    text = SCAN.replace("direction=LT", "direction=NE")
    program = hlo.parse(text.replace("body=%body", attributes))
    assert program.unknown_loops() == 0 and program.times()["body"] == 7


def convolution(attributes, left, right, result):
    return hlo.parse(
        f"%x = f32[{left}]{{0}} parameter(0)\n%w = f32[{right}]{{0}} parameter(1)\n"
        f"%y = f32[{result}]{{0}} convolution(%x, %w), {attributes}\n"
    )


@pytest.mark.parametrize(
    "attributes, left, right, result, products",
    [
        ("dim_labels=bf_io->bf", "4,8", "8,16", "4,16", 4 * 8 * 16),
        # The middle element of the kernel meets all 5 elements of the row; its two ends
        # meet 4 each.
        (
            "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
            "1,5,2",
            "3,2,7",
            "1,5,7",
            13 * 2 * 7,
        ),
        (
            "window={size=3 stride=2}, dim_labels=b0f_0io->b0f",
            "1,5,1",
            "3,1,1",
            "1,2,1",
            6,
        ),
        # The gradient of a strided convolution: every second element that the kernel
        # meets is an inserted zero.
        (
            "window={size=2 pad=1_1 lhs_dilate=2}, dim_labels=b0f_0io->b0f",
            "1,3,1",
            "2,1,1",
            "1,6,1",
            6,
        ),
        # A batched product of four pairs of matrices, in the form in which the TPU
        # compiler prints it.
        (
            "window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
            "4,8,5",
            "4,5,6",
            "4,8,6",
            4 * 8 * 5 * 6,
        ),
        (
            "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, "
            "feature_group_count=4",
            "1,2,2,4",
            "3,3,1,4",
            "1,2,2,4",
            16 * 4,
        ),
    ],
)
def test_a_convolution_counts_two_flops_per_product_outside_the_padding(
    attributes, left, right, result, products
):
    assert costs.of(convolution(attributes, left, right, result)).flops == 2 * products


def test_a_matrix_product_counts_flops_and_bytes():
    program = hlo.parse(
        "%x = f32[3,4,8]{2,1,0} parameter(0)\n%w = f32[3,8,5]{2,1,0} parameter(1)\n"
        "%y = f32[3,4,5]{2,1,0} dot(%x, %w), lhs_batch_dims={0}, "
        "lhs_contracting_dims={2}\n"
    )
    flops = 2 * 3 * 4 * 8 * 5
    hbm_bytes = 4 * (3 * 4 * 8 + 3 * 8 * 5 + 3 * 4 * 5)
    assert costs.of(program) == (flops, hbm_bytes, 0, 0)


def test_an_in_place_update_moves_only_the_updated_part():
    program = hlo.parse(
        "%x = f32[100,8]{1,0} parameter(0)\n"
        "%u = f32[1,8]{1,0} parameter(1)\n"
        "%i = s32[] parameter(2)\n"
        "%y = f32[100,8]{1,0} dynamic-update-slice(%x, %u, %i, %i)\n"
    )
    assert costs.of(program).hbm_bytes == 2 * 4 * 8 + 2 * 4


def test_a_copy_to_the_host_counts_the_part_that_moves():
    program = hlo.parse(
        "%x = f32[100,8]{1,0:S(5)} parameter(0)\n"
        "%u = f32[1,8]{1,0:S(1)} parameter(1)\n"
        "%i = s32[] parameter(2)\n"
        "%start = ((f32[100,8]{1,0:S(5)}, f32[1,8]{1,0:S(1)}, s32[], s32[]), "
        "f32[100,8]{1,0:S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%x, %u, %i)\n"
        "%done = f32[100,8]{1,0:S(5)} dynamic-update-slice-done(%start)\n"
        "%back = (f32[100,8]{1,0}, f32[100,8]{1,0:S(5)}, u32[]{:S(2)}) "
        "copy-start(%done)\n"
        "%near = (f32[100,8]{1,0:S(1)}, f32[100,8]{1,0}, u32[]{:S(2)}) "
        "copy-start(%back)\n"
    )
    assert costs.of(program).host_bytes == 4 * 8 + 4 * 100 * 8


def test_the_more_expensive_branch_of_a_conditional_counts():
    def branch(name, size):
        return (
            f"%{name} (p: f32[{size}]) -> f32[{size}] {{\n"
            f"  %p = f32[{size}]{{0}} parameter(0)\n"
            f"  ROOT %c = f32[{size}]{{0}} copy(%p)\n"
            "}\n"
        )

    main = (
        "ENTRY %main (i: s32[]) -> f32[5] {\n"
        "  %i = s32[] parameter(0)\n"
        "  ROOT %c = f32[5]{0} conditional(%i, %i, %i), "
        "branch_computations={%a, %b}\n"
        "}\n"
    )
    program = hlo.parse(branch("a", 3) + branch("b", 5) + main)
    assert costs.of(program).hbm_bytes == 2 * 4 * 5


# The forward kernel of splash attention, in the form in which the TPU compiler prints
# it, shortened. It has two heads of 8 positions, and its values are already on the
# chip. A second kernel, whose cost is unknown, follows.
CALLS = """
ENTRY %f (n: s8[1,1,1], q: bf16[2,8,4], v: bf16[2,8,4], s: s32[8,128]) -> bf16[2,8,4] {
  %n = s8[1,1,1]{2,1,0:T(8,128)(4,1)} parameter(0)
  %q = bf16[2,8,4]{2,1,0:T(8,128)(2,1)} parameter(1)
  %v = bf16[2,8,4]{2,1,0:T(8,128)(2,1)S(1)} parameter(2)
  %s = s32[8,128]{1,0:T(8,128)} parameter(3)
  %splash_mha_PHASE.3 = (f32[8,128]{1,0:T(8,128)}, bf16[2,8,4]{2,1,0:T(8,128)(2,1)}, \
      f32[2,8,128]{2,1,0:T(8,128)S(1)}) custom-call(%n, %q, %q, %v, /*index=4*/%s), \
      custom_call_target="tpu_custom_call", \
      operand_layout_constraints={s8[1,1,1]{2,1,0}}, \
      frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 8, \\"k_layout\\": 1}",
"more":"1"
}}, metadata={op_name="jit(step)/while/body/SCOPE/vmap(static_sparsity_splash)/\
splash_mha_PHASE/pallas_call"}
  %get.1 = bf16[2,8,4]{2,1,0:T(8,128)(2,1)} get-tuple-element(%splash_mha_PHASE.3), \
      index=1, frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}
  %bytes = u8[64]{0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %their_kernel.12 = bf16[2,8,4]{2,1,0:T(8,128)(2,1)} custom-call(%get.1), \
      custom_call_target="tpu_custom_call"
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
    assert costs.of(program) == (flops, moved, 0, 0)
    ours, theirs = sorted(costs.kernels(program), key=lambda row: row["kernel"])
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
    assert costs.of(program) == (0, 0, 0, 0)
    assert {row["flops"] for row in costs.kernels(program)} == {None}


def test_a_result_lists_counted_and_uncounted_kernels():
    rows = costs.kernels(calls())
    shown = summary._kernels({"kernels": rows})
    assert shown == [
        "kernels of a step\n"
        "kernel                    times  a chip does  moves\n"
        "splash_mha_fwd_residuals  1      1.15 kFLOP   8.58 kB\n"
        "their_kernel              1      not counted  not counted"
    ]
    assert summary._kernels({"kernels": []}) == []
