"""Tests of GPU programs' own spellings: asynchronous pairs, wrapped calls, tiled layouts."""

from predict.program.communication import collectives_in_text
from predict.program.flops import matmul_flops_in_text
from tests.host_copies import host_copies_in_text
from tests.predict.program.loop_tasks import tasks_of_loop_in_text

MESH = {"pipeline": 2, "data": 2, "model": 2}
GPU_TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%wrapped (p: f32[8,16]) -> f32[4,16] {
  %p = f32[8,16]{1,0} parameter(0)
  ROOT %rs = f32[4,16]{1,0} reduce-scatter(%p), channel_id=7, replica_groups=[4,2]<=[8], \
use_global_device_ids=true, dimensions={0}, to_apply=%add
}, execution_thread="parallel"

%branch_0 (q: f32[8,16]) -> f32[8,16] {
  ROOT %q = f32[8,16]{1,0} parameter(0)
}

%branch_1 (r: f32[8,16]) -> f32[8,16] {
  %r = f32[8,16]{1,0} parameter(0)
  %start.1 = (f32[8,16]{1,0}, f32[8,16]{1,0}, u32[], u32[]) collective-permute-start(%r), \
channel_id=3, source_target_pairs={{0,4},{1,5},{2,6},{3,7}}
  ROOT %done.1 = f32[8,16]{1,0} collective-permute-done(%start.1)
}

%body (s: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %s = (s32[], /*index=1*/f32[8,16]{1,0:T(8,128)}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[8,16]{1,0} get-tuple-element(%s), index=1
  %k = s32[] get-tuple-element(%s), index=0
  %c = f32[8,16]{1,0} conditional(%k, %v, %v), branch_computations={%branch_0, %branch_1}
  %send = (f32[8,16]{1,0}, u32[], token[]) send(%c, %v), channel_id=9, \
frontend_attributes={_xla_send_recv_source_target_pairs={{0,4},{1,5}}}
  %send-done = token[] send-done(%send), channel_id=9
  %rs-start = ((f32[8,16]{1,0}), f32[4,16]{1,0}, u32[]) async-start(%c), calls=%wrapped
  %rs-done = f32[4,16]{1,0} async-done(%rs-start)
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%i, %c)
}

%cond (u: (s32[], f32[8,16])) -> pred[] {
  %u = (s32[], f32[8,16]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: f32[8,16], b: bf16[64]) -> f32[8,16] {
  %a = f32[8,16]{1,0} parameter(0), metadata={op_name="state[\\'{replica_groups={}\\']"}
  %b = bf16[64]{0:S(5)} parameter(1)
  %ar-start = (f32[8,16]{1,0}, bf16[64]{0}) all-reduce-start(%a, %b), channel_id=1, \
replica_groups={{0,2},{1,3},{4,6},{5,7}}, use_global_device_ids=true, to_apply=%add, \
metadata={op_name="jit(step)/psum, channel_id={9}" source_file="a.py"}
  %ar-done = (f32[8,16]{1,0}, bf16[64]{0}) all-reduce-done(%ar-start)
  %ag-start = ((bf16[64]{0}, f32[8]{0}), (bf16[128]{0}, f32[16]{0})) all-gather-start(%b, %a), \
channel_id=2, replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}
  %ag-done = (bf16[128]{0}, f32[16]{0}) all-gather-done(%ag-start)
  %sugar = ((f32[8,16]{1,0}), f32[2,16]{1,0}) reduce-scatter-start(%a), channel_id=4, \
async_execution_thread="parallel", replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, \
to_apply=%add
  %sugar-done = f32[2,16]{1,0} reduce-scatter-done(%sugar)
  %init = (s32[], f32[8,16]{1,0}) tuple(%a, %a)
  %loop = (s32[], f32[8,16]{1,0}) while(%init), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"11"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %out = f32[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_collectives_asynchronous_forms_count_once_with_the_bytes_of_their_result():
    found = collectives_in_text(GPU_TEXT, MESH)
    assert [(c.name, c.kind, c.axes, c.loop_depth, c.trip_count, c.bytes) for c in found] == [
        ("ar-start", "all-reduce", ("data",), 0, 1, 8 * 16 * 4 + 64 * 2),
        ("ag-start", "all-gather", ("data",), 0, 1, 128 * 2 + 16 * 4),
        ("sugar", "reduce-scatter", ("data", "model"), 0, 1, 2 * 16 * 4),
        ("start.1", "collective-permute", ("pipeline",), 1, 11, 8 * 16 * 4),
        ("send", "collective-permute", ("pipeline",), 1, 11, 8 * 16 * 4),
        ("rs", "reduce-scatter", ("model",), 1, 11, 4 * 16 * 4),
    ]
    assert found[0].op_name == "jit(step)/psum, channel_id={9}"


def test_collectives_list_overlapping_kernels():
    text = GPU_TEXT.replace(
        "%ar-done =", "%work = f32[8,16]{1,0} negate(%a)\n  %ar-done ="
    ).replace("use_global_device_ids=true, dimensions={0}", 'dimensions={0}, "is_sync":true')
    found = {c.name: c for c in collectives_in_text(text, MESH)}
    assert {name: (c.is_async, c.is_overlapped) for name, c in found.items()} == {
        "ar-start": (True, True),
        "ag-start": (True, False),
        "sugar": (True, False),
        "start.1": (True, False),
        "send": (True, False),
        "rs": (False, False),  # wrapped, but marked as synchronous
    }
    assert found["ar-start"].loop == "" and found["rs"].loop == "loop 1"


HOST_TEXT = """HloModule jit_step, is_scheduled=true

%body (s: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %s = (s32[], f32[4,8,16]{2,1,0:S(5)}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %stack = f32[4,8,16]{2,1,0:S(5)} get-tuple-element(%s), index=1
  %ds = ((f32[4,8,16]{2,1,0:S(5)}, s32[]), f32[1,8,16]{2,1,0}, u32[]) fusion-start(%stack, %i), \
kind=kLoop, calls=%sliced
  %work = s32[] negate(%i)
  %row = f32[1,8,16]{2,1,0} fusion-done(%ds)
  %dus = ((f32[4,8,16]{2,1,0:S(5)}, f32[1,8,16]{2,1,0}, s32[]), f32[4,8,16]{2,1,0:S(5)}, u32[]) \
async-start(%stack, %row, %i), calls=%updated
  %new = f32[4,8,16]{2,1,0:S(5)} async-done(%dus)
  ROOT %t = (s32[], f32[4,8,16]{2,1,0:S(5)}) tuple(%work, %new)
}

ENTRY %main (a: f32[4,8,16]) -> f32[4,8,16] {
  %a = f32[4,8,16]{2,1,0:T(8,128)S(5)} parameter(0)
  %loop = (s32[], f32[4,8,16]{2,1,0:S(5)}) while(%a), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}, metadata={op_name="jit(f)/optimizer/while"}
  %all = f32[4,8,16]{2,1,0:S(5)} get-tuple-element(%loop), index=1
  %cs = (f32[4,8,16]{2,1,0}, f32[4,8,16]{2,1,0:S(5)}, u32[]) copy-start(%all)
  %cd = f32[4,8,16]{2,1,0} copy-done(%cs)
  ROOT %back = f32[4,8,16]{2,1,0:S(5)} copy(%cd)
}
"""


def test_host_copies_have_the_bytes_that_move():
    row = 8 * 16 * 4
    whole = 4 * 8 * 16 * 4
    assert [
        (c.name, c.direction, c.bytes, c.trip_count, c.is_async, c.is_overlapped, c.loop)
        for c in host_copies_in_text(HOST_TEXT)
    ] == [
        ("ds", "to device", row, 4, True, True, "optimizer"),
        ("dus", "to host", row, 4, True, False, "optimizer"),
        ("cs", "to device", whole, 1, True, False, ""),
        ("back", "to host", whole, 1, False, False, ""),
    ]


def test_collectives_read_both_spellings_of_an_asynchronous_all_reduce():
    old = "(f32[8,16]{1,0}, bf16[64]{0}) all-reduce-start(%a, %b)"
    new = f"((f32[8,16]{{1,0}}, bf16[64]{{0}}), {old.split(') all')[0]})) all-reduce-start(%a, %b)"
    texts = (GPU_TEXT, GPU_TEXT.replace(old, new))
    assert texts[0] != texts[1]
    sizes = [{c.name: c.bytes for c in collectives_in_text(t, MESH)} for t in texts]
    assert sizes[0] == sizes[1]


LIBRARY_TEXT = """HloModule jit_step, is_scheduled=true

%body (s: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %s = (s32[], f32[8,16]{1,0}) parameter(0)
  %v = f32[8,16]{1,0} get-tuple-element((s32[], f32[8,16]{1,0:T(8,128)}) %s), index=1
  %w = f32[16,32]{1,0} constant({...})
  %gemm = (f32[8,32]{1,0}, s8[4194304]{0}) custom-call(f32[8,16]{1,0} %v, f32[16,32]{1,0} %w), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"alpha_real":1,\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],\
"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"epilogue":"DEFAULT"}}
  %u = f32[8,32]{1,0} get-tuple-element(%gemm), index=0
  %start = (f32[8,32]{1,0}, f32[8,32]{1,0}) collective-permute-start(%u), \
source_target_pairs={{0,1}}
  %late = f32[8,8]{1,0} custom-call(%v, %v), custom_call_target="__onednn$matmul", \
control-predecessors={%start}, backend_config={"onednn_matmul_config":{"transpose_b":true}}
  %done = f32[8,32]{1,0} collective-permute-done(%start)
  %dot = f32[8,16]{1,0} dot(%done, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %other = f32[8]{0} custom-call(%dot), custom_call_target="TopK"
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%s, %dot)
}

ENTRY %main (a: f32[8,16], i: f32[1,32,9,9], k: f32[32,32,3,3]) -> f32[8,16] {
  %a = f32[8,16]{1,0} parameter(0)
  %image = f32[1,32,9,9]{3,2,1,0} parameter(1)
  %kernel = f32[64,32,3,3]{3,2,1,0} parameter(2)
  %conv = (f32[1,64,7,7]{3,2,1,0}, u8[0]{0}) custom-call(%image, %kernel), window={size=3x3}, \
dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$convForward"
  %dy = f32[1,64,7,7]{3,2,1,0} get-tuple-element(%conv), index=0
  %dx = (f32[1,32,9,9]{3,2,1,0}, u8[0]{0}) custom-call(%dy, %kernel), window={size=3x3}, \
dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$convBackwardInput"
  %dk = (f32[64,32,3,3]{3,2,1,0}, u8[0]{0}) custom-call(%image, %dy), window={size=3x3}, \
dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$convBackwardFilter"
  %init = (s32[], f32[8,16]{1,0}) tuple(%a, %a)
  %loop = (s32[], f32[8,16]{1,0}) while(%init), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"11"}}
  ROOT %out = f32[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_matmul_flops_count_library_calls():
    convolution = 2 * 64 * 7 * 7 * 32 * 3 * 3
    in_loop = 2 * 8 * 16 * 32 + 2 * 8 * 8 * 16 + 2 * 8 * 32 * 16
    assert matmul_flops_in_text(LIBRARY_TEXT) == 3 * convolution + 11 * in_loop


def test_tasks_of_loop_of_asynchronous_permutations():
    tasks = tasks_of_loop_in_text(LIBRARY_TEXT, {"pipeline": 2})
    assert [(task.name, task.pairs, sorted(task.needs)) for task in tasks] == [
        ("gemm", (), []),
        ("start", ((0, 1),), ["gemm"]),
        ("late", (), ["gemm", "start"]),
        ("dot", (), ["gemm", "start"]),
    ]
