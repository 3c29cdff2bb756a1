"""Times generation with random weights, by the rows of a batch, beside PyTorch on this GPU.

    python tests/generation_speed.py gpt2_124m                          1 to 256 rows
    python tests/generation_speed.py llama3_8b --rows 1 --quantize int4
    python tests/generation_speed.py llama3_1b --rows 64 --prompt 2048 --kv_cache_dtype float8
    python tests/generation_speed.py gpt2_124m --rows 1 --peer          in PyTorch
    python tests/generation_speed.py llama3_8b --rows 1 --quantize int4 --peer

The prompts of a batch have different lengths: from half of --prompt up to it.  A row gives the time
of all prompts up to their first tokens and that of a further token, without compilation, and the
floor of the latter: the bytes of the weights and of the keys and values that it reads, at the
bandwidth of a copy on this GPU.  --peer is transformers' model in PyTorch with a static cache, its
step compiled into CUDA graphs, and with int8 or int4 the weights and calls of gpt-fast: run it by
itself, because PyTorch's and JAX's memory do not make room for each other.
"""

import functools
import statistics
import sys
import time
from typing import NamedTuple

import numpy as np
from scripts import Parser, one_of, run

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("config", help="a shipped configuration, such as gpt2_124m")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of a batch")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the longest (128)")
    parser.add_argument("--tokens", type=int, default=256, help="to time after it (256)")
    parser.add_argument("--quantize", help="format of jaxllm convert, such as int4")
    parser.add_argument("--group", type=int, default=128, help="with --quantize (128)")
    parser.add_argument("--head", help="format of the head, with --quantize (bfloat16)")
    parser.add_argument("--kv_cache_dtype", choices=("auto", "float8"), default="auto")
    parser.add_argument("--peer", action="store_true", help="PyTorch instead of ours")
    args = parser.parse_args(argv)
    if min(args.rows) < 1:
        parser.error(f"--rows {min(args.rows)} is not positive")
    (theirs if args.peer else ours)(args)
    return 0


def prompts(rows: int, longest: int, vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = np.linspace(longest, max(longest // 2, 1), rows).astype(int)
    return [rng.integers(0, vocabulary, n).tolist() for n in lengths]


class Times(NamedTuple):
    """Seconds: of the first run, with compilation; of the prompts; of a further token."""

    first: float
    prompts: float
    token: float


def show(rows: int, times: Times, floor: float | None = None) -> None:
    cells = [f"{rows:>4} rows", f"prompts {1e3 * times.prompts:.1f} ms"]
    cells += [f"{1e3 * times.token:8.3f} ms a token", f"{rows / times.token:10,.0f} tokens/s"]
    if floor is not None:
        cells.append(f"floor {1e3 * floor:.3f} ms ({floor / times.token:.2f})")
    print("  ".join([*cells, f"first run {times.first:.1f} s"]), flush=True)


# ---- ours ------------------------------------------------------------------------------------


def ours(args) -> None:
    import jax

    from jaxllm import config as configs
    from jaxllm.config import MeshConfig, SampleConfig
    from jaxllm.infer import decode
    from jaxllm.sharding import make_mesh
    from jaxllm.weights.convert import FORMATS
    from pallas_kernels.bench import timing

    for form in filter(None, (args.quantize, args.head)):
        one_of("format", form, FORMATS)
    model = configs.load(args.config).model
    longest, most = args.prompt + args.tokens + 1, decode.most_tokens(model)
    if most is not None and longest > most:
        sys.exit(
            f"error: --prompt={args.prompt} and --tokens={args.tokens} exceed {most} positions"
        )
    if args.tokens < 2 * decode.block_size():
        sys.exit(
            f"error: --tokens={args.tokens} is less than {2 * decode.block_size()}, two blocks"
        )
    on_gpu = jax.default_backend() == "gpu"
    bandwidth = 1e12 * timing.ceilings()["copy_TB_per_s"] if on_gpu else None
    head = f", head {args.head}" if args.head else ""
    print(f"{args.config}, {args.quantize or model.compute_dtype}{head}, on {jax.devices()[0]}")
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        graph, params, weights = random_weights(model, args.quantize, args.group, args.head)
        for rows in args.rows:
            texts = prompts(rows, args.prompt, model.vocab_size)
            start = functools.partial(
                decode.stream_tokens,
                graph,
                params,
                texts,
                SampleConfig(tokens=args.tokens + 1, temperature=0.0),
                float8_cache=args.kv_cache_dtype == "float8",
            )
            try:
                times = timed(start)
            except jax.errors.JaxRuntimeError as e:
                print(f"{rows:>4} rows  failed: {str(e).splitlines()[0]}")
                continue
            halfway = sum(map(len, texts)) + rows * args.tokens // 2
            moved = weights + halfway * cache_bytes(model, args.kv_cache_dtype)
            moved += rows * state_bytes(model)
            floor = None if bandwidth is None else moved / bandwidth
            show(rows, times, floor)


def random_weights(model, quantized: str | None, group: int, head: str | None = None):
    """(graph, parameters, bytes of them that a token reads), as `jaxllm generate` has them.

    Matrices are in bfloat16 or packed, vectors in float32; tables are not read as a whole unless
    the head is tied.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxllm.infer.decode import in_compute_dtype
    from jaxllm.weights.convert import FORMATS
    from jaxllm.weights.packed import Packing, create_packed

    model = model.model_copy(update={"kernels": "xla" if model.kernels == "xla" else "auto"})
    packing = None
    if quantized:
        packing = Packing(*FORMATS[quantized], group, True, FORMATS[head] if head else None)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: create_packed(model, packing)), nnx.Param)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key, shape, own):
        if len(shape) == 1:
            return jnp.ones(shape)
        w = 0.02 * jax.random.normal(key, shape, jnp.float32)
        return own.pack(w) if own else w.astype(jnp.bfloat16)

    weights = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        own = packing and packing.of(name, leaf.shape)
        weights[name] = draw(jax.random.fold_in(jax.random.key(0), len(weights)), leaf.shape, own)
    tables = {"embedding.wpe"} | ({"embedding.wte"} if "head.weight" in weights else set())
    read = [w for name, w in weights.items() if name not in tables]
    params = jax.tree.unflatten(jax.tree.structure(abstract), list(weights.values()))
    size = sum(x.nbytes for x in jax.tree.leaves(read))
    params = in_compute_dtype(params, model.compute_dtype, table=False, consume=True)
    return graph, params, size


def cache_bytes(model, dtype: str) -> int:
    """The bytes of keys and values of one token of a row in all layers."""
    if model.type == "vlstm":
        return 0
    heads = getattr(model, "n_kv_heads", None) or model.n_heads
    width = getattr(model, "head_dim", None) or model.d_model // model.n_heads
    return model.n_layers * 2 * heads * width * (1 if dtype == "float8" else 2)


def state_bytes(model) -> int:
    """The bytes of a row's states C in all layers, which a token reads and writes."""
    if model.type != "vlstm":
        return 0
    return 2 * 4 * model.n_layers * model.n_heads * model.qk_dim * model.v_dim


def timed(start) -> Times:
    """The times of a first run, and the medians of three more.

    The clock of further tokens starts when their first block has been read.
    """
    from jaxllm.infer import decode

    begun = time.perf_counter()
    for _ in start():  # compiles
        pass
    first = time.perf_counter() - begun
    size, prompts, seconds = decode.block_size(), [], []
    for _ in range(3):
        begun = time.perf_counter()
        for i, _ in enumerate(start()):
            if i == 0:
                prompts.append(time.perf_counter() - begun)
            if i == size:  # the last token of the first block
                clock, at = time.perf_counter(), i
        seconds.append((time.perf_counter() - clock) / (i - at))
    return Times(first, statistics.median(prompts), statistics.median(seconds))


# ---- PyTorch ---------------------------------------------------------------------------------


def theirs(args) -> None:
    """The same shapes in transformers; its step is compiled into CUDA graphs, as gpt-fast does."""
    import torch
    from transformers import StaticCache

    from jaxllm import config as configs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    section = configs.load(args.config).model
    print(f"{args.config}, {args.quantize or 'bfloat16'}, PyTorch {torch.__version__} on {device}")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device), torch.no_grad():
        model = in_torch(section.model_dump(), section.padded_vocab_size).eval()
        if args.quantize:
            pack_linears(model, args.quantize, args.group)
            if device == "cuda":
                torch.cuda.empty_cache()  # of the dense weights
        step = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for rows in args.rows:
            texts = prompts(rows, args.prompt, section.vocab_size)
            cache = StaticCache(model.config, max_cache_len=args.prompt + args.tokens)
            run = functools.partial(torch_generate, model, step, cache, texts, args.tokens)
            show(rows, torch_time(run, args.tokens))


def torch_generate(model, step, cache, texts: list[list[int]], most: int, tokens: int) -> None:
    """Writes `tokens` tokens, at most `most`; step: the compiled model."""
    import torch

    ids, mask = map(torch.tensor, padded_left(texts))
    lengths, width = mask.sum(1), ids.shape[1]
    # One mask for all calls, so that the step is compiled once; causality hides what is to come.
    mask = torch.cat([mask, mask.new_ones(len(mask), most)], 1) if len(texts) > 1 else None
    cache.reset()
    positions = (torch.arange(width) - width + lengths[:, None]).clamp(min=0)
    options = dict(attention_mask=mask, past_key_values=cache, logits_to_keep=1)
    token = model(ids, position_ids=positions, **options).logits[:, -1].argmax(-1)
    for i in range(tokens - 1):
        torch.compiler.cudagraph_mark_step_begin()
        out = step(token[:, None].clone(), position_ids=(lengths + i)[:, None], **options)
        token = out.logits[:, -1].argmax(-1)
    token.cpu()


def torch_time(run, tokens: int) -> Times:
    """Like `timed`: from the difference of a long and a short text, after one run of each."""
    short, clocks = tokens // 4, {}
    begun = time.perf_counter()
    for n in (short, tokens):
        run(n)
    first = time.perf_counter() - begun
    for n in (short, tokens):
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            run(n)
            times.append(time.perf_counter() - begun)
        clocks[n] = statistics.median(times)
    token = (clocks[tokens] - clocks[short]) / (tokens - short)
    return Times(first, clocks[short] - short * token, token)


def pack_linears(module, form: str, group: int) -> None:
    """Gives the linear layers of blocks random weights of gpt-fast's formats, int4 or int8."""
    import torch

    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear) and name != "lm_head":
            setattr(module, name, packed_linear(child.in_features, child.out_features, form, group))
        else:
            pack_linears(child, form, group)


def packed_linear(k: int, n: int, form: str, group: int):
    import torch

    class Packed(torch.nn.Module):
        """int4 by PyTorch's own kernel; int8, with a scale for each column, by Inductor's."""

        def __init__(self):
            super().__init__()
            if form == "int4":
                codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
                self.words = torch._convert_weight_to_int4pack(codes, 8)
                self.scales = torch.full((k // group, n, 2), 0.01)
            else:
                self.words = torch.randint(-128, 128, (n, k), dtype=torch.int8)
                self.scales = torch.full((n,), 0.01)

        def forward(self, x):
            if form == "int4":
                rows = x.reshape(-1, k)
                y = torch._weight_int4pack_mm(rows, self.words, group, self.scales)
                return y.reshape(*x.shape[:-1], n)
            return torch.nn.functional.linear(x, self.words.to(x.dtype)) * self.scales

    return Packed()


def padded_left(texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, mask), both (B, T): transformers continues at the right end."""
    width = max(map(len, texts))
    ids, mask = np.zeros((2, len(texts), width), np.int64)
    for i, text in enumerate(texts):
        ids[i, width - len(text) :], mask[i, width - len(text) :] = text, 1
    return ids, mask


def in_torch(section: dict, vocabulary: int):
    """GPT-2 or Llama of transformers with random weights; section: the model's settings."""
    import transformers

    shape = dict(vocab_size=vocabulary, bos_token_id=0, eos_token_id=0)
    if section["type"] == "gpt2":
        config = transformers.GPT2Config(
            n_embd=section["d_model"],
            n_layer=section["n_layers"],
            n_head=section["n_heads"],
            n_positions=section["max_seq_len"],
            **shape,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        hidden_size=section["d_model"],
        intermediate_size=section["d_ff"],
        num_hidden_layers=section["n_layers"],
        num_attention_heads=section["n_heads"],
        num_key_value_heads=section["n_kv_heads"],
        max_position_embeddings=section["max_seq_len"],
        tie_word_embeddings=section["tie_embeddings"],
        **shape,
    )
    return transformers.LlamaForCausalLM(config)


if __name__ == "__main__":
    run(main)
