"""Times LoRA on Llama 3.1 8B's shapes with random weights on this GPU, and its peers in PyTorch.

    python tests/lora_speed.py step int4              ours; also: step int8, step none (bfloat16)
    python tests/lora_speed.py step int4 --remat mlp  keeps more for the backward pass
    python tests/lora_speed.py peer nf4               transformers + peft + bitsandbytes
    python tests/lora_speed.py peer bf16              transformers + peft; --compile: torch.compile
    python tests/lora_speed.py unsloth nf4            Unsloth; also --checkpointing true, off
    python tests/lora_speed.py linear                 packed matmuls of 4096 rows beside bfloat16's

Rank 16 on all linear layers, one row of 4096 tokens.  Ours packs eight documents into it, as
data.pack=documents does; the peer's SDPA sees one text.  Prints tokens/s of the median of ten steps
after two, and the peak of the allocator.  It needs an NVIDIA GPU of 80 GB; the peers need torch,
transformers, peft, Unsloth for its row and, for nf4, bitsandbytes.  --layers 2 is a rehearsal.
"""

import importlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from scripts import Parser, needs_gpu, needs_packages, run

T, RANK, DOCUMENTS, VOCABULARY = 4096, 16, 8, 128256
WARM, STEPS = 2, 10
PACKAGES = {"peer": ("torch", "transformers", "peft"), "unsloth": ("torch", "unsloth")}
TARGETS = [f"{name}_proj" for name in "q k v o gate up down".split()]


def report(name: str, seconds: list[float], peak: float) -> None:
    least, median, most = (1e3 * f(seconds) for f in (min, statistics.median, max))
    speed = f"{1e3 * T / median:,.0f} tokens/s, {median:.1f} ms a step ({least:.1f} to {most:.1f})"
    print(f"{name}: {speed}, peak {peak / 2**30:.2f} GiB", flush=True)


def trainer_of(quantize: str | None, remat: str, layers: int):
    from jaxllm.config import load
    from jaxllm.sharding import make_mesh
    from jaxllm.train.step import Trainer

    overrides = {
        "model.n_layers": str(layers),
        "model.init_from": "random",
        "model.remat": remat,
        "model.lora.rank": str(RANK),
        "model.quantize": quantize or "null",
        "data.pack": "documents",
        "train.batch_size": "1",
        "train.seq_len": str(T),
        "train.grad_accum": "1",
    }
    config = load("llama3_8b", overrides | {"mesh.data": "1", "mesh.fsdp": "1"})
    import jax

    return Trainer(config, make_mesh(config.mesh, jax.devices()[:1]))


def random_base(trainer):
    """Frozen weights of the right shapes, drawn on the device one by one."""
    import jax
    import jax.numpy as jnp

    key = jax.random.key(0)

    def draw(i, leaf):
        if leaf.dtype == jnp.int32:  # packed codes
            bits = jax.random.bits(jax.random.fold_in(key, i), leaf.shape)
            return jax.lax.bitcast_convert_type(bits, jnp.int32)
        if len(leaf.shape) == 2:
            return 0.02 * jax.random.normal(jax.random.fold_in(key, i), leaf.shape, leaf.dtype)
        # Scales of groups, and the weights of norms.
        return jnp.full(leaf.shape, 0.004 if leaf.dtype == jnp.bfloat16 else 1, leaf.dtype)

    leaves, structure = jax.tree.flatten(trainer.abstract_base)
    make = jax.jit(draw, static_argnums=1)
    places = jax.tree.leaves(trainer.state_shardings.base)
    drawn = [
        jax.device_put(make(i, leaf), place)
        for i, (leaf, place) in enumerate(zip(leaves, places, strict=True))
    ]
    return jax.tree.unflatten(structure, drawn)


def step(a) -> None:
    from jaxllm.train.process import set_xla_flags

    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    set_xla_flags(True)
    import jax
    import numpy as np

    from jaxllm.train.programs import compile_autotuned
    from pallas_kernels import dispatch

    quantize = None if a.weights == "none" else a.weights
    trainer, device = trainer_of(quantize, a.remat, a.layers), jax.devices()[0]
    print(device.device_kind, trainer.describe(), flush=True)
    begin = time.perf_counter()
    traced = trainer.trace_train_step()
    print(dispatch.explain(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        program = compile_autotuned(traced.lower, Path(folder) / "timings" if a.autotune else None)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    found = program.memory_analysis()
    sizes = ("argument", "output", "alias", "temp")
    parts = {name: getattr(found, f"{name}_size_in_bytes") / 2**30 for name in sizes}
    print("the program, GiB:", {name: round(size, 2) for name, size in parts.items()}, flush=True)
    state = trainer.init(base=random_base(trainer))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (1, T + 1), dtype=np.int32)
    at = np.arange(T, dtype=np.int32)[None]
    length = T // DOCUMENTS
    batch = dict(tokens=tokens[:, :-1], labels=tokens[:, 1:])
    batch |= dict(segment_ids=at // length, positions=at % length)
    batch, seconds = trainer.put_batch(batch), []
    for _ in range(WARM + STEPS):
        begin = time.perf_counter()
        state, metrics = program(state, batch)
        loss = float(metrics["loss"])
        seconds.append(time.perf_counter() - begin)
    assert np.isfinite(loss), loss
    stats = device.memory_stats() or {}
    report(
        f"jaxllm, base {a.weights}, remat {a.remat}",
        seconds[WARM:],
        stats.get("peak_bytes_in_use", 0),
    )


def llama(a):
    """transformers' configuration of Llama 3.1 8B."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=a.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0),
        attn_implementation="sdpa",
        use_cache=False,
    )


def say_versions(*modules: str) -> None:
    import torch

    for module in modules:
        print(module, importlib.import_module(module).__version__, end="  ")
    print(torch.cuda.get_device_name(), flush=True)


def train(model, count: int) -> list[float]:
    """Seconds of each of so many steps on random tokens, with AdamW on what requires gradients."""
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens = torch.randint(0, VOCABULARY, (1, T), device="cuda")
    seconds = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    assert torch.isfinite(loss), loss
    return seconds


def peer(a) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    say_versions("torch", "transformers", "peft")
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(llama(a), dtype=torch.bfloat16)
    if a.weights == "nf4":
        pack(model)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS)
    if not a.compile:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        model.enable_input_require_grads()
    model = get_peft_model(model, lora).train()
    run = torch.compile(model) if a.compile else model
    seconds = train(run, WARM + STEPS + 2 * a.compile)
    how = "torch.compile" if a.compile else "gradient checkpointing"
    report(f"peft, base {a.weights}, {how}", seconds[-STEPS:], torch.cuda.max_memory_allocated())


def unsloth(a) -> None:
    """Unsloth reads weights from folders only, so this writes one, of 15 GiB."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", f"{tempfile.gettempdir()}/unsloth_compiled")
    from unsloth import FastLanguageModel  # isort: skip  (before what it patches)
    import torch

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    say_versions("torch", "transformers", "peft", "unsloth")
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_random(llama(a), Path(folder))
        print(f"wrote weights in {time.perf_counter() - begin:.0f} s", flush=True)
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=T, dtype=torch.bfloat16, load_in_4bit=a.weights == "nf4"
        )
    print(f"loaded after {time.perf_counter() - begin:.0f} s", flush=True)
    packed = any(type(layer).__name__ == "Linear4bit" for layer in model.modules())
    assert packed == (a.weights == "nf4")  # Unsloth only warns if it cannot pack
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=TARGETS,
        use_gradient_checkpointing={"unsloth": "unsloth", "true": True, "off": False}[
            a.checkpointing
        ],
    )
    seconds = train(model, WARM + STEPS)
    name = f"Unsloth, base {a.weights}, checkpointing {a.checkpointing}"
    report(name, seconds[-STEPS:], torch.cuda.max_memory_allocated())


def write_random(config, folder: Path) -> None:
    """Writes a model of random weights in bfloat16, and a tokenizer of a few words."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 2
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: w.shape for name, w in LlamaForCausalLM(config).state_dict().items()}
    make = lambda shape: torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    draw = lambda s: make(s).normal_(0, 0.02) if len(s) > 1 else make(s).fill_(1)
    part = lambda name: f"part-{name.rpartition('.layers.')[2].partition('.')[0]}.safetensors"
    index = {name: part(name) for name in shapes}  # a file for each block
    for file in set(index.values()):
        drawn = {name: draw(shape).cpu() for name, shape in shapes.items() if index[name] == file}
        save_file(drawn, folder / file, {"format": "pt"})
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def pack(model) -> None:
    """Replaces the linear layers of the blocks by bitsandbytes' of 4 bits."""
    import bitsandbytes
    import torch

    print("bitsandbytes", bitsandbytes.__version__, flush=True)
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, layer in list(part.named_children()):
                if isinstance(layer, torch.nn.Linear):
                    new = bitsandbytes.nn.Linear4bit(
                        layer.in_features,
                        layer.out_features,
                        bias=False,
                        compute_dtype=torch.bfloat16,
                        quant_type="nf4",
                        device="meta",
                    )
                    new.weight = bitsandbytes.nn.Params4bit(
                        layer.weight.data.cpu(), requires_grad=False, quant_type="nf4"
                    )
                    setattr(part, name, new.cuda())


def linear(a) -> None:
    import jax
    import jax.numpy as jnp

    from pallas_kernels import quantize, quantized_linear

    print(jax.devices()[0].device_kind)
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)

    def timed(f, *args) -> float:
        f = jax.jit(f)
        jax.block_until_ready(f(*args))
        rounds = []
        for _ in range(5):
            begin = time.perf_counter()
            jax.block_until_ready([f(*args) for _ in range(20)])
            rounds.append((time.perf_counter() - begin) / 20)
        return min(rounds) * 1e6

    # o and q, k and v, q with k and v, gate and up, down.
    for k, n in ((4096, 4096), (4096, 1024), (4096, 6144), (4096, 14336), (14336, 4096)):
        x, dy, w = draw(0, T, k), draw(1, T, n), draw(2, k, n)
        plain = timed(jnp.matmul, x, w), timed(lambda dy, w: dy @ w.T, dy, w)
        print(f"{T} x {k} x {n}: bfloat16 {plain[0]:.0f} us, dx {plain[1]:.0f} us", flush=True)
        for bits in (4, 8):
            packed = jax.jit(lambda w, bits=bits: quantize(w, bits=bits, group=128))(w)
            forward = timed(quantized_linear, x, packed)
            pull = lambda x, w, dy: jax.vjp(lambda x: quantized_linear(x, w), x)[1](dy)
            back = timed(pull, x, packed, dy)
            print(
                f"    int{bits}: {forward:.0f} us ({plain[0] / forward:.2f} of bfloat16's speed),"
                f" dx {back:.0f} us ({plain[1] / back:.2f})",
                flush=True,
            )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("what", choices=("step", "peer", "unsloth", "linear"))
    parser.add_argument("weights", nargs="?", default="int4")
    parser.add_argument("--remat", default="block")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--autotune", action="store_true", help="compile twice, as a run does")
    parser.add_argument("--checkpointing", default="unsloth", choices=("unsloth", "true", "off"))
    a = parser.parse_args()
    if a.what in ("peer", "unsloth") and a.weights not in ("nf4", "bf16"):
        parser.error(f"{a.what} has nf4 and bf16, not {a.weights}")
    if a.what == "step" and a.weights not in ("int4", "int8", "none"):
        parser.error(f"step has int4, int8 and none, not {a.weights}")
    needs_packages(*PACKAGES.get(a.what, ()), *["bitsandbytes"] * (a.weights == "nf4"))
    needs_gpu()
    {"step": step, "peer": peer, "unsloth": unsloth, "linear": linear}[a.what](a)


if __name__ == "__main__":
    run(main)
