"""Tests of a model with two stacks: its split into parts, and its run in a pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from models.check import check
from models.functions import can_share_vocab, functions_of
from models.layers.basic import Linear
from models.stack import Stack, block_function, checkpoint_policy, periods, run_layers
from pipeline.runtime.executor import make_loss_and_grad
from pipeline.runtime.gather import ParamSharding
from pipeline.schedule import make_schedule
from pipeline.stack_layout import cut
from sharding.gather_modes import all_once
from sharding.mesh import MeshConfig, make_mesh
from sharding.spec import is_spec

WIDTH = 8
BATCH = 2
MICROBATCHES = 4


class Encode(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = Linear({"embed": WIDTH}, {"embed": WIDTH}, stddev=0.5, rngs=rngs)

    def __call__(self, x, batch, keys):
        return x | {"memory": x["memory"] + jnp.tanh(self.linear(x["memory"]))}


class Decode(Encode):
    def __call__(self, x, batch, keys):
        read = self.linear(x["memory"]) * batch["mask"][:, None]
        return x | {"x": x["x"] + jnp.tanh(read + x["x"])}


class EncoderDecoder(nnx.Module):
    stacks = ("encoder", "decoder")

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = Linear({"embed": WIDTH}, {"embed": WIDTH}, stddev=0.5, rngs=rngs)
        self.encoder = Stack(lambda rngs: Encode(rngs=rngs), 2, rngs=rngs)
        self.decoder = Stack(lambda rngs: Decode(rngs=rngs), 3, rngs=rngs)

    def embed(self, batch):
        return {"memory": self.table(batch["source"]), "x": jnp.zeros_like(batch["target"])}

    def before_decoder(self, x, batch):
        return {"memory": jnp.tanh(x["memory"]), "x": self.table(batch["target"])}

    def head(self, x, batch):
        loss = jnp.sum(jnp.square(x["x"] - batch["target"]))
        return loss, jnp.sum(batch["mask"]), {}


@pytest.mark.parametrize("make", [nnx.eval_shape, lambda build: build()], ids=["abstract", "real"])
def test_stacks_are_listed_in_the_order_of_execution(make):
    model = make(lambda: EncoderDecoder(rngs=nnx.Rngs(0)))
    functions = functions_of(model, remat="none")
    assert list(functions.num_layers.items()) == [("encoder", 2), ("decoder", 3)]
    assert list(functions.before) == ["decoder"]
    params = nnx.to_pure_dict(nnx.split(model)[1])
    assert functions.join(functions.split(params)).keys() == params.keys()


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "schedule, chunks, stages", [("1f1b", 1, 1), ("interleaved_1f1b", 2, 2), ("zbv", 2, 2)]
)
@pytest.mark.parametrize("remat", ["stage", "none"])
def test_two_stacks_in_a_pipeline_equal_sequential_execution(schedule, chunks, stages, remat):
    with jax.enable_x64(True):
        model = EncoderDecoder(rngs=nnx.Rngs(0))
        # As in training, the functions come from an abstract model.
        functions = functions_of(
            nnx.eval_shape(lambda: EncoderDecoder(rngs=nnx.Rngs(0))), remat="none"
        )
        params = jax.tree.map(
            lambda x: x.astype("float64"), functions.split(nnx.to_pure_dict(nnx.split(model)[1]))
        )
        rng = np.random.default_rng(0)
        shape = (MICROBATCHES, BATCH)
        batch = {name: rng.normal(size=(*shape, WIDTH)) for name in ("source", "target")}
        batch["mask"] = rng.integers(2, size=shape).astype(np.float64)

        def plain(params):
            flat = {name: jnp.asarray(a.reshape(-1, *a.shape[2:])) for name, a in batch.items()}
            x = functions.embed(params["non_stack"], flat)
            x = run_layers(functions.blocks["encoder"], params["stacks"]["encoder"], x, flat)
            x = functions.before["decoder"](params["non_stack"], x, flat)
            x = run_layers(functions.blocks["decoder"], params["stacks"]["decoder"], x, flat)
            return functions.head(params["non_stack"], x, flat)[0]

        expected_loss, expected = jax.value_and_grad(plain)(params)
        mesh = make_mesh(MeshConfig(pipeline=stages), jax.devices())
        table = make_schedule(schedule, stages, MICROBATCHES, chunks)
        layouts = cut(functions.num_layers, table.placement)
        slots = {
            name: jax.tree.map(layouts[name].to_slots, layers)
            for name, layers in params["stacks"].items()
        }
        specs = {
            "non_stack": jax.tree.map(lambda _: PartitionSpec(), params["non_stack"]),
            "stacks": jax.tree.map(lambda _: PartitionSpec("pipeline"), slots),
        }
        kept_axes = jax.tree.map(lambda _: frozenset(), specs, is_leaf=is_spec)
        param_sharding = ParamSharding(
            mesh=mesh, specs=specs, gather_modes=all_once(specs), kept_axes=kept_axes
        )
        recomputes = remat == "stage"
        run = make_loss_and_grad(functions, table, layouts, param_sharding, recomputes=recomputes)
        with jax.set_mesh(mesh):
            sums, grads = jax.jit(run)({"non_stack": params["non_stack"], "stacks": slots}, batch)
        layers = {
            name: jax.tree.map(layouts[name].to_layers, jax.tree.map(np.asarray, tree))
            for name, tree in grads["stacks"].items()
        }
        # Sums are in another order, so float64 rounding differs.
        np.testing.assert_allclose(sums["loss"], expected_loss, rtol=1e-12)

        def close(a, b):
            return np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)

        jax.tree.map(close, {"non_stack": grads["non_stack"], "stacks": layers}, expected)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ("aaaa", (("a", 4), None)),
        ("abab", (("ab", 2), None)),
        ("aaabbbb", (("a", 3), ("b", 4))),
        ("wwwwwfwwwwwfww", (("wwwwwf", 2), ("w", 2))),
        ("abcde", (("abcde", 1), None)),
        # ModernBERT with 3n, 3n + 1 and 3n + 2 layers; the first layer differs from all others.
        ("Fwwfwwfww", (("Fww", 1), ("fww", 2))),
        ("Fwwfwwf", (("F", 1), ("wwf", 2))),
        ("Fwwfwwfw", (("Fw", 1), ("wfw", 2))),
    ],
)
def test_layers_are_divided_into_the_shortest_periods(types, expected):
    assert periods(types) == expected


class Recorder(nnx.Module):
    """A block that adds digits: the number of its layer, and its own digit."""

    def __init__(self, digit: float):
        self.digit = nnx.Param(jnp.full((), digit), out_sharding=())

    def __call__(self, x, batch, keys):
        drawn = jax.vmap(lambda key: jax.random.uniform(key, x["drawn"].shape[1:]))(keys)
        layers = x["layers"] * 10 + batch["layer"]
        return {"layers": layers, "digits": x["digits"] * 10 + self.digit[...], "drawn": drawn}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_layers_of_periods_have_numbers_and_random_keys_of_their_own(remat):
    policy = checkpoint_policy(remat, ())
    zeros = {name: jnp.zeros(()) for name in ("layers", "digits")} | {"drawn": jnp.zeros((2, 3))}
    batch = {"dropout_keys": jax.random.split(jax.random.key(0), 2)}
    stack = Stack([lambda rngs: Recorder(1.0), lambda rngs: Recorder(2.0)], 2, rngs=nnx.Rngs(0))
    single = Stack(lambda rngs: Recorder(3.0), 1, rngs=nnx.Rngs(0))
    assert (stack.num_layers, stack.layers_per_block, single.layers_per_block) == (2, 2, 1)

    def run(stack: Stack, x, first_layer: int):
        block = block_function(stack.layers, policy, first_layer=first_layer)
        return run_layers(block, nnx.split(stack.layers)[1], x, batch)

    x = run(single, run(stack, zeros, first_layer=1), first_layer=5)
    assert (float(x["layers"]), float(x["digits"])) == (12345, 12123)
    keys = jax.vmap(jax.random.fold_in, (0, None))(batch["dropout_keys"], 1 + 5)
    np.testing.assert_array_equal(
        x["drawn"], jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)
    )


@pytest.mark.parametrize("stacks", [("encoder",), ()])
def test_stacks_without_an_order_are_rejected(stacks):
    class Unordered(EncoderDecoder):
        pass

    Unordered.stacks = stacks
    with pytest.raises(
        ValueError, match=r"Unordered has the stacks decoder, encoder, and .*decoder"
    ):
        functions_of(Unordered(rngs=nnx.Rngs(0)), remat="none")


class Misfit(EncoderDecoder):
    """An encoder-decoder in which the result of one method is modified."""

    def __init__(self, **changes):
        super().__init__(rngs=nnx.Rngs(0))
        self.changes = changes

    def embed(self, batch):
        return self._changed("embed", super().embed(batch))

    def before_decoder(self, x, batch):
        return self._changed("before", super().before_decoder(x, batch))

    def head(self, x, batch):
        return self._changed("head", super().head(x, batch))

    def _changed(self, method, result):
        return self.changes.get(method, lambda result: result)(result)


def inputs_of(model):
    """Return (parameters, batch)."""
    batch = {name: jnp.zeros((2, WIDTH)) for name in ("source", "target")} | {"mask": jnp.ones(2)}
    return nnx.to_pure_dict(nnx.split(model)[1]), batch


@pytest.mark.parametrize(
    "method, change, message",
    [
        ("embed", lambda x: x | {"m": jnp.zeros(2, bool)}, r"embed returns bool\[2\] at x\['m'\]"),
        ("before", lambda x: x | {"x": x["x"].astype("bfloat16")}, "a block of decoder takes"),
        ("before", lambda x: x | {"m": jnp.zeros(2, int)}, r"before_decoder returns int32\[2\]"),
        ("head", lambda h: (jnp.zeros(2), h[1], {}), r"head's loss has the shape \(2,\)"),
        ("head", lambda h: ((h[0], h[0]), h[1], {}), r"head's loss is of type tuple; it must be"),
        ("head", lambda h: (h[0], [h[1]], {}), r"head's weight is of type list; it must be"),
        ("head", lambda h: ({}, {}, {}), r"head's loss is of type dict; it must be"),
        ("head", lambda h: ({"a": (h[0],)}, {"a": h[1]}, {}), r"head's loss is of type dict"),
        ("head", lambda h: (*h[:2], {"hits": jnp.zeros(1)}), r"head's hits has the shape \(1,\)"),
        ("head", lambda h: (*h[:2], {"grad_norm": h[0]}), "'grad_norm' has a name that the step"),
        ("head", lambda h: (*h[:2], {"loss": h[0]}), "'loss' has a name that the step itself"),
        ("head", lambda h: (*h[:2], {"hits": [h[0]] * 3}), "'hits' must be a sum, or a pair"),
        ("head", lambda h: ({"a": h[0]}, h[1], {}), r"losses are \{a\}, .* weights a scalar"),
        ("head", lambda h: ({"a": h[0]}, {"b": h[1]}, {}), r"losses are \{a\}, .* weights \{b\}"),
        ("head", lambda h: ({"a": h[0]}, {"a": h[1]}, {"a": (h[0], h[1])}), "name of a loss"),
        ("head", lambda h: ({"a": h[0]}, {"a": h[1]}, {"hits": h[1]}), "'hits' must be a pair"),
        ("head", lambda h: ({"a": h[0]}, {"a": h[0]}, {}), "loss 'a' depends on target"),
        ("head", lambda h: ({"a": h[0]}, {"a": jnp.zeros(())}, {}), "depends on nothing"),
    ],
)
def test_check_rejects_incompatible_functions(method, change, message):
    model = Misfit(**{method: change})
    with pytest.raises(ValueError, match=message):
        check(functions_of(model, remat="none"), *inputs_of(model))


def test_check_rejects_a_block_that_changes_its_dtype():
    class Narrow(Encode):
        def __call__(self, x, batch, keys):
            return jax.tree.map(lambda leaf: leaf.astype("bfloat16"), x)

    model = EncoderDecoder(rngs=nnx.Rngs(0))
    model.encoder = Stack(lambda rngs: Narrow(rngs=rngs), 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="a block of encoder takes activations .*bfloat16"):
        check(functions_of(model, remat="none"), *inputs_of(model))


def test_check_rejects_one_sum_of_weights_for_two_arrays_of_weights():
    class TwoWeights(EncoderDecoder):
        def head(self, x, batch):
            loss, weight, metrics = super().head(x, batch)
            return loss * batch["weights"].sum() + batch["label_weights"].sum(), weight, metrics

    params, batch = inputs_of(TwoWeights(rngs=nnx.Rngs(0)))
    batch |= {"weights": jnp.ones(2), "label_weights": jnp.ones(2)}
    with pytest.raises(ValueError, match="depends on label_weights and weights, but has one sum"):
        check(functions_of(TwoWeights(rngs=nnx.Rngs(0)), remat="none"), params, batch)


def test_check_accepts_sums_that_are_plain_numbers():
    model = Misfit(head=lambda sums: (sums[0], 3, {"rows": 2}))
    check(functions_of(model, remat="none"), *inputs_of(model))


def test_can_share_vocab_is_declared_by_the_model_class():
    class Says:
        can_share_vocab = True

        def head(self):
            return None

    class Inherits(Says):
        pass

    class Changes(Says):
        def head(self):
            return None

    class SaysAgain(Changes):
        can_share_vocab = True

    said = [can_share_vocab(cls()) for cls in (Says, Inherits, Changes, SaysAgain, object)]
    assert said == [True, True, False, True, False]
