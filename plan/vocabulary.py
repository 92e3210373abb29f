"""Vocabulary of a tokenizer, including tokens added by files next to it, read without the library that runs it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from xtrain.lazy_attrs import define
from xtrain.plan.data import TokenizerMissing, TokenizerUnreadable

CONFIG: Final = "tokenizer_config.json"
SPECIALS: Final = "special_tokens_map.json"
ADDED: Final = "added_tokens.json"
# Named special tokens, in the order in which transformers adds those that a tokenizer lacks.
NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA, EXTRA_BEFORE = "extra_special_tokens", "additional_special_tokens"  # the former is the name in transformers 5
FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
BOS_NAMES = (
    "<s>",
    "<bos>",
    "<|begin_of_text|>",
    "<|startoftext|>",
    "<|begin▁of▁sentence|>",
    "<｜begin▁of▁sentence｜>",
    "[BOS]",
)
EOS_NAMES = (
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "<|eot_id|>",
    "[EOS]",
)


@define(kw_only=True, frozen=True)
class SpecialTokens:
    """Ids put around every document; they may be equal."""

    bos: int
    eos: int
    own_bos: bool
    """True if bos is a token of its own; False if eos replaces it."""


class AddedToken(NamedTuple):
    """Token that is matched as a whole before the tokenizer's model sees a text; flags as in `tokenizers`."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class SideFiles(NamedTuple):
    """Special tokens declared by the files next to a `tokenizer.json`."""

    added: tuple[AddedToken, ...]
    """Tokens added to the tokenizer, in this order. A token that it already has gets these flags and keeps its id."""
    declared: Mapping[str, str | None]
    """`bos_token` and `eos_token` if a file has them; None: declared as absent."""


class Vocabulary(NamedTuple):
    """Ids of a tokenizer. side: declarations of the files next to it. added: tokens that are matched as a whole."""

    ids: dict[str, int]
    own: int
    """Number of ids of `tokenizer.json` alone: the largest id plus one."""
    added: frozenset[str]
    side: SideFiles


def read_vocabulary(source: str) -> Vocabulary:
    """Read the tokens of a folder with a `tokenizer.json`, or of the file itself, including tokens added by the files
    next to it.

    Relative paths start at the working folder. Raises TokenizerUnreadable.
    """
    path = Path(source)
    try:
        if path.is_dir():
            path = path / "tokenizer.json"
        if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would block
            raise TokenizerUnreadable(f"{path.as_posix()} is not a regular file")
        content: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise TokenizerMissing(f"{path.as_posix()}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TokenizerUnreadable(f"{path.as_posix()} is not JSON") from error
    try:
        listed = content["model"]["vocab"]
        # A unigram model lists [piece, score] pairs, whose index is the id; other models map pieces to ids.
        model = dict(listed) if isinstance(listed, dict) else {piece: id for id, (piece, _) in enumerate(listed)}
        model = {piece: int(id) for piece, id in model.items()}
        own = [token["content"] for token in content.get("added_tokens") or ()]
        alone = ids_with(own, model, len(listed))
        side = read_side_files(path.parent, content)
        ids = ids_with([*own, *(token.content for token in side.added)], model, len(listed))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TokenizerUnreadable(f"{path.as_posix()} has no vocabulary") from error
    if not alone:
        raise TokenizerUnreadable(f"{path.as_posix()} has no vocabulary")
    added = frozenset((*own, *(token.content for token in side.added)))
    return Vocabulary(ids=ids, own=max(alone.values()) + 1, added=added, side=side)


def differing_token(ours: str, theirs: str) -> str | None:
    """Return text on the first token whose id differs between two tokenizers; None if there is none. Raises
    TokenizerUnreadable."""
    own, other = read_vocabulary(ours).ids, read_vocabulary(theirs).ids
    apart = {token for token, _ in other.items() ^ own.items()}
    if not apart:
        return None
    token = min(apart)
    return f"token {json.dumps(token)} is {other.get(token, 'absent')} there and {own.get(token, 'absent')} in {ours}"


def read_side_files(folder: Path, tokenizer: Mapping[str, Any]) -> SideFiles:
    """Read the tokens that a folder adds to its tokenizer, as `AutoTokenizer` of transformers 5.24 does.

    The other two files count only if `tokenizer_config.json` has no `added_tokens_decoder`; `special_tokens_map.json`
    then overrides `tokenizer_config.json`. tokenizer: the content of `tokenizer.json`. Raises TokenizerUnreadable for a
    file that is not JSON or holds something other than tokens.
    """
    config, specials = _read(folder / CONFIG), _read(folder / SPECIALS)
    own = {token["id"]: _token(token) for token in tokenizer.get("added_tokens") or ()}
    if EXTRA_BEFORE in config and not config.get(EXTRA):
        config[EXTRA] = config.pop(EXTRA_BEFORE)
    further = {key: config.pop(key) for key in [*config] if _has_own_name(key) and isinstance(config[key], str)}
    merged = dict(config)
    try:
        decoder = config.get("added_tokens_decoder")
        if decoder is None:
            both = [*(config.get(EXTRA) or ()), *(specials.get(EXTRA) or ())]
            merged |= specials | ({EXTRA: both} if isinstance(specials.get(EXTRA), list) else {})
        further |= merged.pop(EXTRA) if isinstance(merged.get(EXTRA), dict) else {}
        values = merged.get(EXTRA) or merged.get(EXTRA_BEFORE) or ()
        extra = [_token(value, special=True) for value in values]
        # When transformers asks whether an added token is special, objects of tokenizer_config.json are not tokens yet.
        known = [value for key in NAMED if isinstance(value := merged.get(key), str) or (value and key in specials)]
        known += [value for value in values if isinstance(value, str) or value in (specials.get(EXTRA) or ())]
        special = {_token(value).content for value in known}
        merged.setdefault("pad_token", (tokenizer.get("padding") or {}).get("pad_token"))
        values = {key: merged.get(key) for key in NAMED}
        values |= {key: value for key, value in merged.items() if _has_own_name(key) and isinstance(value, str | dict)}
        named = [_token(value, special=True)._replace(special=True) for value in (values | further).values() if value]
        if decoder is not None:
            listed = {int(number): _token(value) for number, value in decoder.items()}
        else:
            added = _read(folder / ADDED).items()
            listed = {int(number): _token(content, special=content in special) for content, number in added} | own
        declared = {key: _token(merged[key]).content if merged[key] else None for key in NAMED[:2] if key in merged}
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        remedy = f"Compare {CONFIG}, {SPECIALS} and {ADDED} with the files of the tokenizer that was saved."
        raise TokenizerUnreadable(f"special tokens cannot be read: {error}", path=folder, remedy=remedy) from error
    names = {token.content for token in named}
    first = [token._replace(special=token.special or token.content in names) for _, token in sorted(listed.items())]
    known = {token.content for token in (*own.values(), *first)}
    added = (*first, *(token for token in (*named, *extra) if token.content not in known))
    return SideFiles(added=added, declared=declared)


def _has_own_name(key: str) -> bool:
    """Return True if a key names a special token that only some models have, such as `image_token`."""
    return key.endswith("_token") and key not in NAMED


def _token(value: Any, *, special: bool = False) -> AddedToken:
    """Return a token from a file, given as text or object. special: used if the object does not say."""
    content = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(content, str):
        raise TypeError(f"{json.dumps(value)[:60]} is not a token")
    given = {name: value[name] for name in FLAGS if name in value} if isinstance(value, Mapping) else {}
    if not all(isinstance(flag, bool) for flag in given.values()):
        raise TypeError(f"a flag of token {json.dumps(content)[:60]} is neither true nor false")
    special = given.get("special", special)
    return AddedToken(content, **{"normalized": not special, **given, "special": special})


def ids_with(added: list[str], vocabulary: Mapping[str, int], size: int) -> dict[str, int]:
    """Return token → id of a model's vocabulary with added tokens. As in the `tokenizers` library, each gets the next
    id, whatever a file says. size: entries of the vocabulary, which may have holes."""
    found, last = dict(vocabulary), -1
    for content in added:
        if content and content not in found:
            found[content] = last + 1 if last >= size else size
        if content:
            last = max(last, found[content])
    return found


def find_special_tokens(folder: Path, side: SideFiles, vocabulary: Mapping[str, int]) -> SpecialTokens:
    """Resolve bos and eos; if only one of them exists, it serves as both.

    A side file that declares a token decides; `null` means that there is none. Undeclared tokens are looked up by name.
    Raises TokenizerUnreadable if a declared token is outside the vocabulary, or if neither is found.
    """
    bos = _find("bos_token", BOS_NAMES, folder, side, vocabulary)
    eos = _find("eos_token", EOS_NAMES, folder, side, vocabulary)
    if bos is None and eos is None:
        raise TokenizerUnreadable(
            "this tokenizer names neither a bos nor an eos token",
            path=folder,
            remedy=f'Add `{folder / CONFIG}` with {{"bos_token": "…", "eos_token": "…"}}.',
        )
    first, last = (eos if bos is None else bos), (bos if eos is None else eos)
    assert first is not None
    assert last is not None
    return SpecialTokens(bos=first, eos=last, own_bos=bos is not None)


def _find(key: str, names: tuple[str, ...], folder: Path, side: SideFiles, vocabulary: Mapping[str, int]) -> int | None:
    if key not in side.declared:
        return next((vocabulary[name] for name in names if name in vocabulary), None)
    token = side.declared[key]
    if token is not None and token not in vocabulary:
        remedy = f"Name it in `{CONFIG}`, or name a token that `tokenizer.json` has."
        raise TokenizerUnreadable(f"`{key}` is {token!r}, which is not in the vocabulary", path=folder, remedy=remedy)
    return None if token is None else vocabulary[token]


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise TokenizerUnreadable(f"cannot be read: {error}", path=path) from error
    except (ValueError, RecursionError) as error:
        raise TokenizerUnreadable(f"invalid JSON: {error}", path=path) from error
    if not isinstance(content, dict):
        raise TokenizerUnreadable("not a JSON object", path=path)
    return content
