"""The data section of a configuration -> a Dataset: finds files, encodes text, holds out a part."""

from dataclasses import replace
from pathlib import Path

from jaxllm.config import Config, DataConfig
from jaxllm.data.cache import cache_folder, digest
from jaxllm.data.corpus import VAL_FRACTION, VERSION, cached_tokenizer, cached_tokens
from jaxllm.data.encoded import Fitted, find_encoded
from jaxllm.data.loader import Dataset
from jaxllm.data.packing import Packed
from jaxllm.data.paths import Found, by_split, find_files, is_prepared
from jaxllm.data.shards import Tokens, check_shard, open_shard
from jaxllm.data.sources import Source
from jaxllm.errors import InputError
from jaxllm.files import on_hub, read_json
from jaxllm.terminal import counted
from jaxllm.text import Tokenizer

_SEARCHED = 1 << 22  # an end-of-text token must occur in this many first tokens


def open_dataset(run: Config, *, training: bool = True) -> Dataset:
    """Opens the configured data; the first run trains the tokenizer and encodes the text.

    training: whether to train on the data; otherwise data.val_path, if given, is all that is read,
    and may be shorter than a window.
    """
    config, seq_len, vocab_size = run.data, run.train.seq_len, run.model.vocab_size
    cache = cache_folder(config.cache_dir)
    only_val = not training and config.val_path is not None
    paths = check_paths(config, training=training)
    if only_val:
        found, val_found = paths["val_path"], Found([])
    else:
        found = paths.get("path") or find_files(config.source, None)  # stdlib's, or none: an error
        found, by_name = by_split(config.source, found, paths.get("val_path"))
        val_found = paths.get("val_path", by_name)
    asked, separator = (config, found, val_found, cache, vocab_size, only_val), None
    if config.source == "chat":  # conversations are packed already
        train, val, tokenizer, size, fingerprint, what = _open_chat(*asked, seq_len)
    else:
        opens = _open_shards if config.source == "shards" else _open_text
        train, val, tokenizer, size, fingerprint, what = opens(*asked)
        if only_val:
            _check_length("data.val_path", val, 2, "to predict one from the other")
        else:
            if val_found.files:  # never trained on
                _check_length("data.path", train, seq_len + 1, "of one window (seq_len + 1)")
            train, val = _split(train, val, seq_len, given=config.val_path is not None)
            what += f", {len(train):,} training and {counted(len(val), 'validation token')}"
        if config.pack == "documents":
            separator = _separator(tokenizer, val if only_val else train)
    return Dataset(
        run=run,
        description=f"{what}, vocabulary {size:,}{found.left_out}{val_found.left_out}",
        fingerprint=fingerprint,
        vocab_size=size,
        tokenizer=tokenizer,
        separator=separator,
        train=train,
        val=val,
    )


def check_paths(config: DataConfig, *, training: bool = True) -> dict[str, Found]:
    """The files of data.path and data.val_path, where given and read; fast, so it can run first.

    training: as for `open_dataset`.  Raises InputError for paths without the configured data.
    """
    if config.tokenizer is not None and not Path(config.tokenizer).exists():
        fix = f"name a tokenizer.json or its folder{on_hub(config.tokenizer)}"
        raise InputError(f"data.tokenizer={config.tokenizer} does not exist; {fix}")
    keys = ("path", "val_path") if training or config.val_path is None else ("val_path",)
    paths = {key: path for key in keys if (path := getattr(config, key)) is not None}
    return {k: find_files(config.source, path, key=f"data.{k}") for k, path in paths.items()}


def _describe(config: DataConfig, found: Found, val_found: Found, trained: int) -> str:
    """For people: the files of data.path and of data.val_path; raises InputError if none trains."""
    if not trained:
        raise InputError(
            f"data.path={config.path} has no file outside the validation data"
            f" ({val_found.files[0][1]}, ...), which is not trained on; name other data, or omit"
            " data.val_path to hold out a part"
        )
    text = found.describe("training" if val_found.files else "")
    if trained < len(found.files):
        text += f" ({len(found.files) - trained:,} also in data.val_path, so not trained on)"
    return text + f" and {val_found.describe('validation')} files" * bool(val_found.files)


# Each takes the arguments of `open_dataset` and the files that it found, and returns (train, val,
# tokenizer, vocabulary, fingerprint, a line about them).
def _open_text(config: DataConfig, found, val_found, cache, vocab_size, only_val):
    source = Source(config.source, found.files, config.text_column)
    held_out = 1.0 if only_val else VAL_FRACTION
    if not source.size:
        key, path = ("val_path", config.val_path) if only_val else ("path", config.path)
        raise InputError(f"data.{key}={path} is empty")
    parts, val_content = [("text", source, held_out)], None
    if val_found.files:
        val_source, held_out = replace(source, files=val_found.files), 0.0
        source, val_content = source.without(val_source, cache), val_source.digest(cache)
        parts = [("training text", source, 0.0), ("validation text", val_source, 1.0)]
    what = _describe(config, found, val_found, len(source.files))

    content, entries = source.digest(cache), config.tokenizer_vocab_size
    path = config.tokenizer or cached_tokenizer(source, content, held_out, entries, cache)
    tokenizer = Tokenizer(path, end_token=config.end_token)
    tokenizer.check(vocab_size)
    special = config.special_tokens
    around = (tokenizer.begin, tokenizer.finish, special)
    fingerprint = digest(VERSION, content, val_content, held_out, tokenizer.digest, *around)
    folder = cached_tokens(parts, tokenizer, special, cache / f"tokens-{fingerprint[:16]}")
    counts = read_json(folder / "counts.json")
    size = tokenizer.check(vocab_size, [counts["largest"]])
    for name, written in counts.get("sha256", {}).items():  # older caches have none
        check_shard(folder / name, cache, size, written)
    train, val = (open_shard(folder / name) for name in ("train.bin", "val.bin"))
    what = f"{config.source}: {counted(counts['train'] + counts['val'], 'document')} in {what}"
    if counts["names"]:
        read = "tokens" if special == "tokens" else "plain text"
        what += f", {counted(counts['names'], 'name')} of special tokens read as {read}"
    return Tokens([train]), Tokens([val]), tokenizer, size, fingerprint, what


def _open_shards(config: DataConfig, found, val_found, cache, vocab_size, only_val):
    files, val_files = ([], found.files) if only_val else (found.files, val_found.files)
    folders, written = dict.fromkeys(path.parent for _, path in files + val_files), {}
    for folder in folders:
        page = read_json(folder / "prepare.json", optional=True)
        written |= {folder / name: x for name, x in page.get("sha256", {}).items()}
        if not page.get("done", True):
            raise InputError(f"{folder} is incomplete: run its `prepare` command again")
        gone = [folder / x for x in page.get("beside", ()) if not (folder / x).exists()]
        if gone and config.tokenizer is None:
            raise InputError(
                f"{gone[0]} is gone since its shards were prepared, and with it what begins and"
                " ends a text; copy it back, or name the tokenizer with data.tokenizer"
            )
        if (end := page.get("end_token")) not in (None, config.end_token):
            raise InputError(f"{folder} was prepared with --end_token {end}: set data.end_token")

    paths = [config.tokenizer, *(folder / "tokenizer.json" for folder in folders)]
    paths = [Path(path) for path in paths if path and Path(path).exists()]
    tokenizers = [Tokenizer(path, end_token=config.end_token) for path in paths]
    for other in tokenizers[1:]:
        tokenizers[0].check_same(other)
    tokenizer = next(iter(tokenizers), None)
    size = tokenizer.check(vocab_size) if tokenizer else vocab_size
    content = {p: check_shard(p, cache, size, written.get(p)) for _, p in files + val_files}
    val_digests = [content[path] for _, path in val_files]
    files = [file for file in files if content[file[1]] not in val_digests]
    digests = [[content[path] for _, path in files], val_digests]
    train, val = (Tokens([open_shard(p) for _, p in group]) for group in (files, val_files))
    what = f"shards: {_describe(config, found, val_found, len(files) + len(val_files) * only_val)}"
    return train, val, tokenizer, size, digest("shards", digests), what


def _open_chat(config: DataConfig, found, val_found, cache, vocab_size, only_val, seq_len):
    sources = [Source("chat", part.files) for part in (found, val_found) if part.files]
    if val_found.files:
        sources[0] = sources[0].without(sources[1], cache)
    what = f"chat: {_describe(config, found, val_found, len(sources[0].files))}: "
    prepared = [path.parent for x in sources for _, path in x.files if is_prepared(path)]
    if (where := config.tokenizer or next(iter(prepared), None)) is None:
        raise InputError(
            "data.source=chat needs a tokenizer with a chat template: set model.init_from or"
            " data.tokenizer to a folder with both"
        )
    tokenizer = Tokenizer(where, end_token=config.end_token)
    tokenizer.check(vocab_size)
    opened = [find_encoded(source, tokenizer, config.loss, cache) for source in sources]
    size = tokenizer.check(vocab_size, [x.page["largest"] for x in opened])
    fitted = []  # the last one validates; its conversations are left out of the first
    for x in reversed(opened):
        fitted.insert(0, Fitted(x, seq_len, config.too_long, *fitted))
    if only_val:
        train, val = Tokens([]), fitted[0].rows()
    elif len(fitted) == 2:
        train, val = (x.rows() for x in fitted)
    else:
        train, val = fitted[0].split(VAL_FRACTION)
    what += ", and ".join(x.description for x in fitted)
    for name, part in (("training", train), ("validation", val)):
        what += f"; {name}: {part.describe()}" if isinstance(part, Packed) else ""
    content = [x.page["sha256"] for x in opened]
    fingerprint = digest("chat", content, tokenizer.digest, config.loss, config.too_long, seq_len)
    return train, val, tokenizer, size, fingerprint, what


def _separator(tokenizer: Tokenizer | None, tokens: Tokens) -> int:
    """Returns the token between documents; raises InputError if it is unknown or does not occur."""
    if tokenizer is None:
        raise InputError(
            "data.pack=documents needs the token between documents: set data.tokenizer to the"
            " tokenizer.json that encoded the shards"
        )
    if tokenizer.separator is None:
        raise InputError(
            f"data.pack=documents needs a token between documents, and no file beside"
            f" {tokenizer.path} names one; set data.end_token"
        )
    start = tokens.read(0, min(len(tokens), _SEARCHED))
    for separator in (tokenizer.separator, *tokenizer.finish):  # other shards may have only one
        if (start == separator).any():
            return separator
    raise InputError(
        f"data.pack=documents finds no end-of-text token (id {tokenizer.separator} of"
        f" {tokenizer.path}) in the first {len(start)} tokens; set data.pack=stream, or set"
        " data.tokenizer to the tokenizer.json that encoded them"
    )


def _split(train: Tokens, val: Tokens, seq_len: int, *, given: bool) -> tuple[Tokens, Tokens]:
    """Returns training and validation tokens of at least one window each.

    If whole documents did not suffice for both (one long file, few shards), holds out the last 5%
    of the windows instead.  given: the user named the validation data, so nothing is held out.
    """
    window = seq_len + 1
    if given:
        fix = "; omit it to hold out the end of data.path"
        _check_length("data.val_path", val, window, f"of one window (seq_len + 1){fix}")
        return train, val
    if min(len(train), len(val)) >= window:
        return train, val
    if len(tokens := Tokens(train.parts + val.parts)) < 2 * window:
        raise InputError(
            f"the data has {counted(len(tokens), 'token')}, fewer than the {2 * window} of"
            f" one training and one validation window of {window} (seq_len + 1)"
        )
    val_windows = max(1, round(VAL_FRACTION * ((len(tokens) - 1) // seq_len)))
    cut = len(tokens) - (val_windows * seq_len + 1)
    return tokens.slice(0, cut), tokens.slice(cut, len(tokens))


def _check_length(key: str, tokens: Tokens, least: int, why: str) -> None:
    if len(tokens) < least:
        raise InputError(f"{key} has {counted(len(tokens), 'token')}, fewer than the {least} {why}")
