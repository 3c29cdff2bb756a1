"""Checksums of checkpoints, because the library that reads them does not notice a changed byte.

Checksums of arrays are computed on their devices in integers: they do not depend on the mesh, and
no array is copied.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.config import ModelConfig
from jaxllm.config.loading import flat
from jaxllm.data.cache import digest
from jaxllm.errors import InputError, in_short
from jaxllm.files import read_json
from jaxllm.text.files import TOKENIZER, beside

# Settings of a model that do not affect its weights.
FREE = {"compute_dtype", "residual_dtype", "kernels", "remat", "init_from", "chunk_size"}
FREE |= {"lora", "quantize"}


def array_checksums(arrays: dict[str, Any]) -> dict[str, str]:
    """{name: 16 hex digits} of arrays in host memory or on the devices of one or more hosts."""
    sums = jax.device_get([_sums(x) for x in arrays.values()])
    return {
        name: f"{int(first):08x}{int(second):08x}"
        for name, (first, second) in zip(arrays, sums, strict=True)
    }


def joint_checksum(checksums: dict[str, str]) -> str:
    """One checksum of all arrays, in whichever order they were read."""
    return digest(dict(sorted(checksums.items())))[:16]


def first_mismatch(arrays: dict[str, Any], checksums: dict[str, str]) -> str | None:
    """Name of the first array that does not match its checksum, or None."""
    found = array_checksums({name: x for name, x in arrays.items() if name in checksums})
    return next((name for name in found if found[name] != checksums[name]), None)


def device_checksums(arrays: list[jax.Array], shardings: list[NamedSharding]) -> jax.Array:
    """(devices, arrays, 2) uint32: both sums of each device's own part of every array.

    Traceable; the devices are in the order of the mesh.
    """
    mesh = shardings[0].mesh
    each = lambda *parts: jnp.stack([s for x in parts for s in _sums(x)]).reshape(1, -1, 2)
    table = jax.shard_map(
        each,
        mesh=mesh,
        in_specs=tuple(sharding.spec for sharding in shardings),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )(*arrays)
    return lax.with_sharding_constraint(table, NamedSharding(mesh, PartitionSpec()))


def with_digest(page: dict[str, Any]) -> dict[str, Any]:
    """Adds a digest of the content to a JSON page."""
    return page | {"digest": digest(page)}


def check_digest(page: Any, key: str = "arrays") -> None:
    """Raises ValueError if a JSON page was changed or lacks `key`; older pages have no digest."""
    if not isinstance(page, dict) or not isinstance(page.get(key), dict | float):
        raise ValueError(f"its JSON page has no {key}")
    content = {key: value for key, value in page.items() if key != "digest"}
    if ("checksums" in page or "digest" in page) and page.get("digest") != digest(content):
        raise ValueError("its JSON page was changed")


def check_losses(checkpoints: Path) -> None:
    """Raises InputError if a checkpoint's validation loss was changed, or Orbax cannot read it."""
    for path in sorted(checkpoints.glob("*/metrics/metrics")):
        try:
            check_digest(page := json.loads(path.read_text()), "val_loss")
            if str(page.get("step", folder := path.parents[1].name)) != folder:  # older have none
                raise ValueError(f"its validation loss is of step {page['step']}")
        except FileNotFoundError:  # the run goes on and may delete it
            continue
        except (OSError, ValueError) as e:
            fix = f"delete {path}, then only its validation loss is lost"
            why = f"checkpoint {path.parents[1]} is damaged ({in_short(e)}); {fix}"
            raise InputError(why) from e


def tokenizer_digest(folder: Path) -> dict[str, Any]:
    """What a JSON page says about the tokenizer.json in its folder and the files beside it."""
    if not (path := folder / TOKENIZER).exists():
        return {}
    sums = {x: hashlib.sha256((folder / x).read_bytes()).hexdigest() for x in beside(folder)}
    return {"tokenizer_json": digest(read_json(path)), "text_files": sums}


def check_folder(folder: Path, page: dict[str, Any], model: ModelConfig, where: str) -> None:
    """Raises InputError if a folder's files, which may be edited, do not fit their page.

    model: from its config.yaml; norm_eps and the adapters' scale, for example, show in no shape.
    """
    ours, saved = flat(model.model_dump()), flat(page.get("config", {}).get("model", {}))
    for key in sorted(saved.keys() & ours.keys() - FREE - {"max_seq_len"}):
        if ours[key] != saved[key]:
            raise InputError(
                f"model.{key}={ours[key]!r} in {folder / 'config.yaml'} differs from"
                f" {saved[key]!r} of {where}; change it back"
            )
    known = page.get("tokenizer_json")  # None in earlier versions: nothing to compare
    if known is None or not (found := tokenizer_digest(folder)):
        return
    for name, digest_then in page.get("text_files", {}).items():
        if (digest_now := found["text_files"].get(name)) is None:
            raise InputError(
                f"{folder / name} is gone since its model was trained, and with it special tokens,"
                " a chat template or settings of generation; copy it back"
            )
        if digest_now != digest_then:  # on purpose, such as a new chat template
            print(f"note: {folder / name} was changed since its model was trained", file=sys.stderr)
    if (now := found["tokenizer_json"]) != known:
        raise InputError(
            f"{folder / TOKENIZER} was changed since its model was trained (digest {now[:16]}, was"
            f" {known[:16]}); copy back the one that encoded the data"
        )


@jax.jit
def _sums(x) -> tuple[jax.Array, jax.Array]:
    """Two sums modulo 2^32: of the words, and of the words hashed with their indices.

    Both maps are one-to-one in each word, so a change of a single word changes both sums.
    """
    if (x := jnp.asarray(x)).dtype == bool:
        x = x.astype(jnp.uint8)
    words = lax.bitcast_convert_type(x, np.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}"))
    words = words.astype(jnp.uint32)
    index, stride = jnp.uint32(0), 1
    for axis in reversed(range(words.ndim)):  # a reshape would gather a sharded array
        index += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    mixed = words + index * jnp.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)  # MurmurHash3's last steps
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    mixed ^= mixed >> 16
    return words.sum(dtype=jnp.uint32), mixed.sum(dtype=jnp.uint32)
