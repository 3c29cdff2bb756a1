"""pk.patch beside the model itself, in float32: PyTorch's formulas take the place of our ops."""

import copy
import inspect
import io

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from torch.nn.functional import cross_entropy, silu  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402
from torch_plans import SCALING, tiny_llama  # noqa: E402

import pallas_kernels.torch as pk  # noqa: E402
from pallas_kernels.rotary import frequencies  # noqa: E402

IDS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[0, :5] = 0


def rope(q, k, positions, *, theta, scaling=None):
    assert positions.dtype == torch.int32
    angle = positions.float()[..., None, None] * torch.from_numpy(frequencies(64, theta, scaling))
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = lambda x: torch.complex(*x.float().chunk(2, -1)) * turn
    return tuple(torch.cat((y.real, y.imag), -1).to(x.dtype) for x in (q, k) for y in [pairs(x)])


def attention(q, k, v, *, scale):
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa(*heads, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


def linear_cross_entropy(x, weight, labels, *, reduction):
    logits = (x @ weight.T).flatten(0, 1).float()
    return cross_entropy(logits, labels.flatten(), reduction=reduction)


@pytest.fixture(autouse=True)
def called(monkeypatch):
    """The names of our ops in the order of their calls."""
    names = []

    def said(name, formula):
        return lambda *given, **options: names.append(name) or formula(*given, **options)

    norm = lambda x, w, eps: torch.nn.functional.rms_norm(x, w.shape, w, eps)
    ours = dict(rope=rope, attention=attention, linear_cross_entropy=linear_cross_entropy)
    ours |= dict(rms_norm=norm, swiglu=lambda gate, up: silu(gate) * up)
    for name, formula in ours.items():
        monkeypatch.setattr(pk, name, said(name, formula))
    return names


def close(a, b):
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def loss_and_gradients(model, **options):
    model.zero_grad()
    loss = model(**{"input_ids": IDS, "labels": IDS} | options).loss
    loss.backward()
    return [loss, *(x.grad.clone() for x in model.parameters() if x.requires_grad)]


@pytest.mark.parametrize("options", [
    {}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True},
    {"rope_scaling": SCALING}, {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}},
    {"rms_norm_eps": 0.1},
])  # fmt: skip
def test_a_configuration(options, called):
    model = tiny_llama(**options)
    for name, x in model.named_parameters():
        if name.endswith("bias"):
            x.data.normal_()
    expected, logits = loss_and_gradients(model), model(IDS).logits
    close(loss_and_gradients(pk.patch(model)), expected)
    assert {*called} == {"rms_norm", "swiglu", "rope", "attention", "linear_cross_entropy"}
    close(model(IDS).logits, logits)


@pytest.mark.parametrize(("ours", "options"), [
    (True, {"num_items_in_batch": torch.tensor(100)}), (True, {"attention_mask": PADDED}),
    (True, {"position_ids": IDS.sort(1)[0]}), (True, {"output_hidden_states": True}),
    (True, {"is_causal": False}), (False, {"shift_labels": IDS.flip(1)}),
    (False, {"labels": IDS.clamp_min(99), "ignore_index": 99}), (False, {"return_dict": False}),
])  # fmt: skip
def test_an_option_of_a_call(ours, options, called):
    given = {"input_ids": IDS, "labels": IDS} | options
    model = tiny_llama()
    expected, got = model(**given), pk.patch(model)(**given)
    assert ("linear_cross_entropy" in called) == ours
    close(got[0], expected[0])
    if "output_hidden_states" in options:
        close(got.hidden_states, expected.hidden_states)


def test_what_a_model_has_besides_its_weights_takes_part(called):
    model = pk.patch(tiny_llama())
    model.lm_head.register_forward_hook(lambda *given: 2 * given[-1])
    close(model(IDS, labels=IDS).loss, cross_entropy(
        model(IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()
    ))  # fmt: skip
    model = pk.patch(tiny_llama())
    model.loss_function = lambda **given: given["logits"].sum()
    close(model(IDS, labels=IDS).loss, model(IDS).logits.sum())
    assert "linear_cross_entropy" not in called
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    close(model(IDS).logits, pk.patch(model)(IDS).logits)
    called.clear()
    model.set_attn_implementation("eager")
    model(IDS)
    assert "attention" not in called


@pytest.mark.parametrize("mask", [None, PADDED])
def test_a_copy_has_its_own_weights(mask):
    model = pk.patch(tiny_llama())
    clone = copy.deepcopy(model)
    for x in clone.parameters():
        x.data.zero_()
    assert not clone(IDS, attention_mask=mask).logits.any()
    assert model(IDS, attention_mask=mask).logits.any()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    close(pk.patch(loaded)(IDS, attention_mask=mask).logits, model(IDS, attention_mask=mask).logits)


def test_tokens_are_the_models(called):
    model = tiny_llama().eval()
    both = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    more = [{}, {"attention_mask": PADDED}, {"cache_implementation": "static"}, {"num_beams": 2}]
    expected = [model.generate(IDS, **both, **options) for options in more[:2]]
    pk.patch(pk.patch(model))
    got = [model.generate(IDS, **both, **options, disable_compile=True) for options in more[:3]]
    assert all(map(torch.equal, got, (*expected, expected[0])))
    assert called.count("attention") == 4  # the prompts without a mask; 2 layers


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the method's older name
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_activations(reentrant, called):
    model = tiny_llama().train()
    expected = loss_and_gradients(model)
    pk.patch(model).gradient_checkpointing_enable({"use_reentrant": reentrant})
    close(loss_and_gradients(model, use_cache=False), expected)
    assert called.count("attention") == 4


def test_the_model_compiles_whole():
    model = pk.patch(tiny_llama())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(IDS, labels=IDS).loss, model(IDS, labels=IDS).loss)


def test_trainers_read_the_models_signature():
    model = tiny_llama()
    expected = inspect.signature(model.forward)
    assert inspect.signature(pk.patch(model).forward) == expected


def test_patch_refuses_other_models():
    with pytest.raises(ValueError, match="LlamaForCausalLM, not Linear"):
        pk.patch(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        pk.patch(tiny_llama(attention_dropout=0.1))
    with pytest.raises(ValueError, match="rope of type 'linear'"):
        pk.patch(tiny_llama(rope_scaling={"rope_type": "linear", "factor": 2.0}))
    model = tiny_llama()
    model.model.norm.forward = lambda x: x
    with pytest.raises(ValueError, match=r"LlamaRMSNorm\.forward was replaced: patch the model"):
        pk.patch(model)
    assert "forward" not in vars(model)
