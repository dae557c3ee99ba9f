"""Tables of jax primitives, by how XLA treats their inputs and outputs."""

from predict.memory.operations import RENAMES

COLLECTIVES = ("all_gather", "psum", "reduce_scatter", "all_to_all", "ppermute", "pmax", "pmin")
#: Operations that cannot be part of a fusion: their inputs and outputs are arrays in memory.
UNFUSED = (
    "dot_general",
    "ragged_dot",
    "ragged_dot_general",
    "conv_general_dilated",
    "sort",
    "top_k",
    "cumsum",
    "cumprod",
    "cummax",
    "cumlogsumexp",
    "concatenate",
    "gather",
    "random_bits",
    "threefry2x32",
    "rng_bit_generator",
    "scatter",
    "scatter-add",
    "dynamic_update_slice",
    *COLLECTIVES,
)
PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general")
#: Unfusible operations that write into their first input, or each output into its own input, unless
#: another operation still reads that input.
IN_PLACE = ("scatter", "scatter-add", "dynamic_update_slice", "psum")
#: Prefixes of hand-written kernels, such as cuDNN's, which cannot be part of a fusion either.
KERNELS = ("dot_product_attention", "custom_", "pallas", "ffi")
#: These end a fusion: their inputs are not allocated, but their outputs are.
REDUCTIONS = (
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
    "argmax",
    "argmin",
    "reduce",
    "reduce_window",
)
#: Operations that return an existing array under another name or shape.
VIEWS = (
    "reshape",
    "squeeze",
    "expand_dims",
    "shard_map",
    "sharding_constraint",
    "stop_gradient",
    "copy",
    "bitcast_convert_type",
    "random_wrap",
    "random_unwrap",
    *RENAMES,
)
#: Too expensive to be recomputed for a second reader, so the result is stored. `erf` is not: XLA's
#: cost model for GPUs counts one operation for it.
COSTLY = (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "tanh",
    "logistic",
    "erfc",
    "erf_inv",
    "sqrt",
    "rsqrt",
    "cbrt",
    "div",
    "rem",
    "pow",
    "sin",
    "cos",
)
#: These read elements from other positions than those they write, so they cannot work in place.
MOVES = ("transpose", "rev", "slice", "dynamic_slice", "pad", "broadcast_in_dim", "roll")
