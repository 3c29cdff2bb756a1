"""The training state and the jitted steps on it: pure functions that JAX itself shards.

A model is split once into its graph (static) and its parameters (a pytree); everything else is
plain `jax.jit`, `jax.value_and_grad` and optax.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxllm import sharding
from jaxllm.config import IGNORE, Config, evaluated
from jaxllm.errors import InputError
from jaxllm.layers.adapter import DropoutKey, draw
from jaxllm.layers.linear import Summed
from jaxllm.layers.norm import plain
from jaxllm.models import abstract, create
from jaxllm.models.language_model import LanguageModel
from jaxllm.train import optim
from jaxllm.weights.checksums import device_checksums
from jaxllm.weights.packed import Packing, base_packing, frozen, frozen_shardings
from jaxllm.weights.places import named_params
from pallas_kernels.options import own_settings
from pallas_kernels.totals import summed

# Modules whose layers use each of their matrices once.
_ONCE = {"flax.nnx.helpers", "jaxllm.models.language_model"}
_ONCE |= {f"jaxllm.layers.{x}" for x in "adapter attention embedding linear mlp norm vlstm".split()}
NONE = nnx.State({})  # no copies, or no base


class TrainState(NamedTuple):
    """Everything that a step changes; the data position follows from `step`."""

    step: jax.Array  # int32, steps done
    params: nnx.State  # fp32: all, or only the adapters
    opt_state: optax.OptState
    watch: optim.Watch
    # The blocks' matrices in the compute dtype.  The optimizer writes them while the new parameters
    # are in registers; a cast in the next step would read the parameters again.
    copies: nnx.State = NONE  # like params, with None for the other parameters
    base: nnx.State = NONE  # the frozen weights that adapters adapt, which no step changes

    @property
    def whole(self) -> nnx.State:
        """All parameters of the model, for `Trainer.graph`."""
        return nnx.merge_state(self.params, self.base)

    def saved(self) -> "TrainState":
        """The part that a checkpoint stores; `Trainer.complete` adds copies and base again."""
        return self._replace(copies=NONE, base=NONE)


class Checked(NamedTuple):
    """The arrays of a step that its checksums cover, in the order in which a fault spreads."""

    before: TrainState
    gradient: nnx.State
    after: TrainState  # as saved


def step_model(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
    """(graph, dropout keys' shapes) of the model as the train step computes it, perhaps in fp8."""
    graph, _, keys = nnx.split(abstract(config.model, config.train.fp8), nnx.Param, DropoutKey)
    return graph, keys


def _with_totals(params: nnx.State, totals: nnx.State) -> nnx.State:
    """Pairs parameters with totals, so that the gradients of `totals` are the next totals."""

    def pair(p, total):
        join = Summed if p.get_metadata().get("summed") else summed
        return p.replace(join(p.get_value(), total.get_value()))

    return jax.tree.map(pair, params, totals, is_leaf=lambda p: isinstance(p, nnx.Variable))


class Trainer:
    """Builds the sharded state and the compiled steps of one configuration on one mesh."""

    def __init__(self, config: Config, mesh: Mesh, packing: Packing | None = None):
        """packing: how the frozen weights are packed, if they already are."""
        self.config, self.mesh = config, mesh
        self.optimizer = optim.make_optimizer(config.optimizer, config.train.steps)
        self.schedule = optim.learning_rate(config.optimizer, config.train.steps)
        # `graph` is for evaluation and generation, which use neither fp8 nor dropout.
        model = abstract(evaluated(config.model), "none")
        self.graph, self.abstract_params = nnx.split(model, nnx.Param)
        pads = config.model.padded_vocab_size - config.model.vocab_size  # pad rows of each table
        pads *= config.model.d_model * (1 if model.head is None else 2)
        for name, p in named_params(self.abstract_params).items():
            if p.dtype != jnp.float32:
                raise InputError(f"the model's {name} is {p.dtype}: make it a float32 parameter")
        # Each use of a matrix adds its whole total, so each matrix must be used exactly once.
        layers = {type(x).__module__ for path, x in nnx.iter_modules(model) if path}
        once = layers <= _ONCE and plain(model, LanguageModel, "loss", "advance", "walk")
        shared = len(jax.tree.leaves(model)) - len(jax.tree.leaves(self.abstract_params))
        self.sums_in_place = mesh.size == 1 and once and not shared
        self.n_params = sum(p.size for p in jax.tree.leaves(self.abstract_params)) - pads
        self.lora, self.packing, self.abstract_base = config.model.adapters, packing, NONE
        if self.lora is not None:
            self.packing = packing or base_packing(config.model)
            self.abstract_params, base = nnx.split_state(self.abstract_params, nnx.LoRAParam, ...)
            self.abstract_base_params = base
            self.abstract_base = frozen(base, config.model, self.packing)
        self.n_trained = sum(p.size for p in jax.tree.leaves(self.abstract_params))
        self.step_graph, self.abstract_keys = step_model(config)
        dtype = jnp.dtype(config.model.compute_dtype)
        copied = lambda _, p: p.replace(bool(p.get_metadata().get("copied")) and p.dtype != dtype)
        self.copied = nnx.map_state(copied, self.abstract_params)
        self.batch_sharding = NamedSharding(mesh, sharding.P(sharding.BATCH, None))
        # For the forward and backward pass; the state may split the parameters further.
        self.working_shardings = sharding.shardings(self.abstract_params, mesh)
        self.state_shardings = self._state_shardings(self.abstract_params)

    def describe(self) -> str:
        """The model in a few words."""
        text = f"{self.config.model.type}, {self.n_params:,} parameters"
        if self.lora is None:
            return text
        held = str(self.packing) if self.packing else self.config.model.compute_dtype
        return f"{text}, of which {self.n_trained:,} in adapters are trained; the others are {held}"

    def _draw(self) -> nnx.State:
        """The initial parameters, drawn from the seed."""
        if self.lora is None:
            params = nnx.state(create(self.config.model, seed=self.config.train.seed), nnx.Param)
            # The arrays will be donated, and a user's parameter may share its array with another.
            ours = lambda p: "axes" in p.get_metadata()
            return nnx.map_state(lambda _, p: p if ours(p) else jax.tree.map(jnp.array, p), params)
        leaves, structure = jax.tree.flatten(self.abstract_params)
        keys = jax.random.split(jax.random.key(self.config.train.seed), len(leaves))
        # A comes before B, which begins as zero.
        drawn = [
            jnp.zeros(p.shape, p.dtype) if i % 2 else draw(keys[i], p.shape)
            for i, p in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, drawn)

    def _state_shardings(self, params: nnx.State) -> TrainState:
        whole = NamedSharding(self.mesh, sharding.P())
        of_params = self.working_shardings
        if self.config.mesh.shard_optimizer:
            split = lambda p, s: sharding.split_over_data(s, p.shape)
            of_params = jax.tree.map(split, params, of_params)
        masked = lambda node: isinstance(node, optax.MaskedNode)  # parameters of another rule
        # jit(optimizer.init) loses the sharding; moments get their parameters' sharding.
        of_opt = optax.tree.map_params(
            self.optimizer,  # pyrefly: ignore[bad-argument-type]
            lambda moment, s: moment if masked(moment) else s,
            jax.eval_shape(self.optimizer.init, params),
            of_params,
            transform_non_params=lambda _: whole,
            is_leaf=masked,
        )
        of_copies = self._matrices(self.working_shardings)
        of_base = frozen_shardings(self.abstract_base, self.mesh)
        # pyrefly: ignore[bad-argument-type]
        return TrainState(whole, of_params, of_opt, optim.Watch(whole, whole), of_copies, of_base)

    def init(self, params: nnx.State | None = None, base: nnx.State = NONE) -> TrainState:
        """The state before the first step, created with its final sharding.

        params: initial weights, whose buffers are donated; None: drawn from the seed.
        base: the frozen weights, with `state_shardings.base`.
        """
        with jax.set_mesh(self.mesh):
            if drawn := params is None:
                params = self._draw()
            mesh = self.config.mesh  # these axes shard some draws unlike the state
            if self.lora is not None or (drawn and (mesh.shard_optimizer or mesh.tensor > 1)):
                # `start` can then reuse their buffers.
                params = jax.device_put(params, self.state_shardings.params)
            shardings = self.state_shardings._replace(base=NONE)
            start = jax.jit(self._start, out_shardings=shardings, donate_argnums=0)
            return start(params)._replace(base=base)

    def _start(self, params: nnx.State) -> TrainState:
        opt_state, copies = self.optimizer.init(params), self._make_copies(params)
        watch = optim.Watch(jnp.full(optim.WINDOW, jnp.finfo("float32").max), jnp.int32(0))
        return TrainState(jnp.int32(0), params, opt_state, watch, copies)

    def _placed(self, params: nnx.State, shardings: nnx.State) -> nnx.State:
        """Moves arrays like the parameters to these shardings if the optimizer is split."""
        split = self.config.mesh.shard_optimizer
        return jax.lax.with_sharding_constraint(params, shardings) if split else params

    def complete(self, saved: TrainState, base: nnx.State = NONE) -> TrainState:
        """Completes a restored state with its copies and the frozen weights."""
        make = jax.jit(self._make_copies, out_shardings=self.state_shardings.copies)
        return saved._replace(copies=make(saved.params), base=base)

    def dropout_keys(self, step: jax.Array, part: jax.Array | int) -> nnx.State:
        """The adapters' dropout keys for one part of a step's batch; often there are none."""
        leaves, structure = jax.tree.flatten(self.abstract_keys)
        key = jax.random.fold_in(jax.random.key(self.config.train.seed), step)
        keys = jax.random.split(jax.random.fold_in(key, part), max(len(leaves), 1))
        return jax.tree.unflatten(structure, list(jax.random.key_data(keys))[: len(leaves)])

    def _matrices(self, tree: nnx.State) -> nnx.State:
        """The same tree, with None for every parameter that has no copy."""
        return jax.tree.map(lambda copied, x: x if copied else None, self.copied, tree)

    def _make_copies(self, params: nnx.State) -> nnx.State:
        dtype = self.config.model.compute_dtype
        return jax.tree.map(lambda p: p.astype(dtype), self._matrices(params))

    def working(self, state: TrainState) -> nnx.State:
        """The parameters for the forward pass: the copies where they exist."""
        return jax.tree.map(lambda p, copy: p if copy is None else copy, state.params, state.copies)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, for lowering and restoring."""
        shapes = jax.eval_shape(self._start, self.abstract_params)._replace(base=self.abstract_base)
        placed = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        return jax.tree.map(placed, shapes, self.state_shardings)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch: (B, T) int32 each, sharded over data and fsdp.

        It has tokens and labels, and with packed data also segment_ids and positions.
        """
        shape = self.config.train.batch_size, self.config.train.seq_len
        like = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)
        packed = ["segment_ids", "positions"] if self.config.data.packed else []
        return dict.fromkeys(["tokens", "labels", *packed], like)

    def put_batch(self, batch: dict) -> dict[str, jax.Array]:
        """Global arrays from this process's rows (numpy) of a batch, its `sharding.batch_part`."""
        return jax.make_array_from_process_local_data(self.batch_sharding, batch)

    def trace_train_step(self) -> jax.stages.Traced:
        """Traces the train step (state, batch) -> (state, metrics); it donates the state's buffers.

        After tracing, `pallas_kernels.dispatch.explain()` describes how the ops run;
        `.lower().compile()` gives the program of the whole run.
        """
        return self._trace(self._train_step)

    def trace_verified_step(self) -> jax.stages.Traced:
        """Traces (state, batch, seen) -> (state, metrics, checksums), which donates the state.

        seen: `device_checksums` of `Checked`; the state changes only if this step's are equal.
        """
        table = (self.mesh.size, len(jax.tree.leaves(self.checked())), 2)
        seen = jax.ShapeDtypeStruct(table, jnp.uint32, sharding=self.state_shardings.step)
        return self._trace(self._verified_step, seen)

    def _trace(self, step: Callable, *seen: jax.ShapeDtypeStruct) -> jax.stages.Traced:
        results = (self.state_shardings, self.state_shardings.step, *(x.sharding for x in seen))
        step = jax.jit(step, donate_argnums=0, out_shardings=results)
        with jax.set_mesh(self.mesh):
            return step.trace(self.abstract_state(), self.abstract_batch(), *seen)

    def checked(self) -> Checked:
        """Shapes, dtypes and shardings of what the checksums of a step cover."""
        state = self.abstract_state()
        return Checked(state, state.params, state.saved())

    def eval_step(self) -> Callable:
        """Jitted (params, batch) -> (sum of losses, number of predicted tokens), both fp32.

        params: of the whole model (`TrainState.whole`).
        """
        step = jax.jit(functools.partial(self._loss_sum, graph=self.graph))

        def run(params, batch):
            with jax.set_mesh(self.mesh):
                return step(params, batch)

        return run

    def _loss_sum(self, params, batch, scale=1.0, graph=None) -> tuple[jax.Array, jax.Array]:
        loss = nnx.merge(graph or self.step_graph, params).loss(**batch, scale=scale)
        return loss, (batch["labels"] != IGNORE).sum().astype(jnp.float32)

    def _in_parts(self, batch: dict, n: int) -> dict:
        """(B, T) arrays as (n, B / n, T); part i has rows i, i + n, ..., some on every device."""
        split = lambda x: x.reshape(-1, n, x.shape[-1]).swapaxes(0, 1)
        place = lambda x: sharding.constrain(split(x), None, sharding.BATCH, None)
        return jax.tree.map(place, batch)

    def _side_by_side(self, batch: dict) -> list[dict]:
        """Halves the batch on a tensor axis if each device has an even number of rows.

        While the devices sum one half's activations, they compute the other half (Wang et al.
        2024, "Domino"): XLA finds this overlap once both halves are in one program.
        """
        axes = self.mesh.shape
        rows = batch["tokens"].shape[0] // (axes["data"] * axes["fsdp"])
        if axes["tensor"] == 1 or rows % 2:
            return [batch]
        halves = self._in_parts(batch, 2)
        return [{name: rows[i] for name, rows in halves.items()} for i in range(2)]

    def _train_step(self, state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        good, new, metrics = self._updated(state, *self._gradients(state, batch))
        return self._accepted(good, new, state), metrics

    def _verified_step(
        self, state: TrainState, batch: dict, seen: jax.Array
    ) -> tuple[TrainState, dict, jax.Array]:
        loss, grads = self._gradients(state, batch)
        shardings = [x.sharding for x in jax.tree.leaves(self.checked())]
        # The barrier keeps XLA from merging this update with the one below: a merged update holds
        # the whole new state until `same` is known; now XLA holds one array at a time.
        apart = jax.lax.optimization_barrier((state, loss, grads))
        checked = Checked(state, grads, self._updated(*apart)[1].saved())
        sums = device_checksums(jax.tree.leaves(checked), shardings)
        good, new, metrics = self._updated(state, loss, grads)
        same = (sums == seen).all()
        # If not `same`, only the copies change: they are cast again from the old parameters.
        keep = functools.partial(jnp.where, same)
        step, watch = jax.tree.map(keep, (new.step, new.watch), (state.step, state.watch))
        new = new._replace(step=step, watch=watch)
        return self._accepted(good & same, new, state), metrics, sums

    def _gradients(self, state: TrainState, batch: dict) -> tuple[jax.Array, nnx.State]:
        """The loss and its gradients, in the working parameters' dtypes, or summed in fp32."""
        count = jnp.maximum((batch["labels"] != IGNORE).sum(), 1).astype(jnp.float32)

        def mean_loss(params, part, number):  # this part's share of the mean over the batch
            pieces, losses = self._side_by_side(part), []
            for i, piece in enumerate(pieces):
                keys = self.dropout_keys(state.step, number * len(pieces) + i)
                params_of_piece = nnx.merge_state(params, state.base, keys)
                losses.append(self._loss_sum(params_of_piece, piece, 1 / count)[0])
            return functools.reduce(jnp.add, losses)

        def grad(params, part, number):
            loss, grads = jax.value_and_grad(mean_loss)(params, part, number)
            # Split like the state, so their sum over the replicas is a reduce-scatter.
            return loss, self._placed(grads, self.state_shardings.params)

        working = self._placed(self.working(state), self.working_shardings)
        if (parts := self.config.train.grad_accum) == 1:
            return grad(working, batch, 0)
        split = self._in_parts(batch, parts)

        def add(sums, part):
            return jax.tree.map(jnp.add, sums, grad(working, *part)), None

        def add_in_place(sums, part):
            share = lambda totals: mean_loss(_with_totals(working, totals), *part)
            loss, totals = jax.value_and_grad(share)(sums[1])
            return (sums[0] + loss, totals), None

        # On several devices each part's gradients are summed over devices; totals stay local.
        add = add_in_place if self.sums_in_place else add
        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state.params))
        return jax.lax.scan(add, zero, (split, jnp.arange(parts)))[0]

    @own_settings()  # optax promotes dtypes
    def _updated(
        self, state: TrainState, loss: jax.Array, grads: nnx.State
    ) -> tuple[jax.Array, TrainState, dict]:
        """(whether to accept the update, the new state without copies and base, the metrics)."""
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        opt_state = optim.at_step(state.opt_state, state.step)
        updates, opt_state = self.optimizer.update(grads, opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        norm = optim.global_norm(grads)
        good, watch = optim.check_update(state.watch, loss, norm, self.config.train.skip_spikes)
        rate = jnp.asarray(self.schedule(state.step), jnp.float32)
        metrics = {"loss": loss, "grad_norm": norm, "lr": rate, "skips": watch.skips}
        # pyrefly: ignore[bad-argument-type]
        return good, TrainState(state.step + 1, params, opt_state, watch), metrics

    def _accepted(self, good: jax.Array, new: TrainState, old: TrainState) -> TrainState:
        """The new state with copies and base; unless `good`, with old parameters and moments."""
        pairs = (new.params, new.opt_state), (old.params, old.opt_state)
        params, opt_state = jax.tree.map(functools.partial(jnp.where, good), *pairs)
        # The copies are cast before they are gathered, which halves the bytes.
        copies = self._make_copies(self._placed(params, self.state_shardings.params))
        return new._replace(params=params, opt_state=opt_state, copies=copies, base=old.base)
