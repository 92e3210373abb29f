"""Draft of an imported spec: settings with their origin, and the account of every key of the source."""

import re
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
from attrs import Factory, field

from xtrain.dsl.diagnostics.diagnostic import printable
from xtrain.dsl.diagnostics.synonyms import Given, synonym_of
from xtrain.dsl.importing.accounts import Account, Fate, is_off, is_plain, shown, spec_literal
from xtrain.dsl.importing.config_file import ConfigFile, UnreadableConfig, flat, read_config
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.component import registry_of
from xtrain.dsl.schema.setting import settings_of
from xtrain.dsl.spec_text import value_text
from xtrain.dsl.starter import name_problem
from xtrain.lazy_attrs import define


def identifier(text: str, fallback: str = "imported") -> str:
    """Return a valid name for an experiment or dataset from a path or title."""
    stem = re.sub(r"\.(jsonl?|parquet|arrow|txt|csv|zst|gz|ya?ml|toml)\b", "", text.rstrip("/").rpartition("/")[2])
    name = re.sub(r"\W+", "_", stem, flags=re.ASCII).strip("_")[:40] or fallback
    name = f"{fallback}_{name}" if name[0].isdigit() else name
    return name if name_problem(name) is None else f"{name}_run"


@define
class _DraftLine:
    text: str
    keys: tuple[str, ...]
    note: str


@define
class _Block:
    kind: str
    label: str = ""
    comment: str = ""
    lines: dict[str, _DraftLine] = Factory(dict)
    blocks: dict[str, "_Block"] = Factory(dict)


@define
class Draft:
    """A spec that an importer writes, and what became of each key.

    trainer: name of the source for comments. Settings have the addresses of `--set`: `optimizer.lr`,
    `dataset.web.text`, `parallel.fsdp.offload`.
    """

    config: ConfigFile
    trainer: str
    values: dict[str, Any] = field(init=False)
    notes: list[str] = Factory(list)
    ranks: int = 1
    """Least number of ranks that the source's layout needs, where its axes do not say it."""
    downloads: list[str] = Factory(list)
    """Commands that fetch models, tokenizers and files of data."""
    statements: list[tuple[str, str]] = Factory(list)
    """Statements outside of blocks, such as ticks, with their comments."""
    collate: tuple[str, str] | None = None
    _blocks: dict[str, _Block] = Factory(dict)
    _accounts: dict[str, Account] = Factory(dict)
    _attached: set[str] = Factory(set)

    def __attrs_post_init__(self) -> None:
        self.values = dict(flat(self.config.root))

    # What the source says ---------------------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; the default without the key or without a value."""
        value = self.values.get(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Return True for a key with a value."""
        return self.values.get(key) is not None

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number, also if it is written as text; None (and the key is not expressible) for anything else."""
        value = self.get(key, default)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = None
        if value is None or isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
            if self.has(key):
                self.missing(key, "it is not a number")
            return default
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value

    def text(self, key: str, default: str = "") -> str:
        """Return a text; the default (and the key is not expressible) for anything else."""
        value = self.get(key, default)
        if isinstance(value, str):
            return value
        if isinstance(value, bool | int | float):
            return value_text(value)
        self.missing(key, "it is not a text")
        return default

    # What becomes of a key --------------------------------------------------------------------------------------------

    def _account(self, key: str, fate: Fate, why: str) -> None:
        """Classify a key with everything below it; the first class of a key counts."""
        if key in self.values and key not in self._accounts:
            self._accounts[key] = Account(key, shown(self.values[key]), fate, why, self.config.spans.get(key))

    def meaningless(self, keys: str, why: str) -> None:
        """Classify keys, separated by spaces, that nothing here corresponds to; `*` is any text."""
        for key in self._matching(keys):
            self._account(key, Fate.MEANINGLESS, why)

    def same(self, keys: str, why: str) -> None:
        """Classify keys that ask for what xtrain does anyway."""
        for key in self._matching(keys):
            self._account(key, Fate.DEFAULT, why)

    def missing(self, keys: str, why: str) -> None:
        """Classify keys that xtrain cannot express."""
        for key in self._matching(keys):
            self._account(key, Fate.MISSING, why)

    def unless_off(self, keys: str, why: str) -> None:
        """Classify keys of features that xtrain lacks: not expressible, unless they are off."""
        for key in self._matching(keys):
            if is_off(self.values[key]):
                self.same(key, "off")
            else:
                self.missing(key, why)

    def translated(self, keys: str) -> None:
        """Classify keys that the spec expresses."""
        for key in self._matching(keys):
            self._account(key, Fate.TRANSLATED, "")

    def _matching(self, keys: str) -> list[str]:
        return [name for key in keys.split() for name in ([key] if "*" not in key else list(self.values))
                if name in self.values and (name == key or fnmatchcase(name, key))]  # fmt: skip

    def note(self, text: str) -> None:
        """Add a difference between what the source says, or computes, and what xtrain computes."""
        if text not in self.notes:
            self.notes.append(text)

    # What the spec says -----------------------------------------------------------------------------------------------

    def set(self, address: str, value: Any, keys: str = "", note: str = "", *, text: str | None = None) -> None:
        """Set a setting and count `keys` as translated; without keys it is a default of the source.

        value: a plain value, or `text`, as the spec writes it.
        """
        path, _, name = address.rpartition(".")
        present = tuple(self._matching(keys))
        written = spec_literal(value) if text is None else text
        self.block(path).lines[name] = _DraftLine(written, present, note)
        self.translated(keys)

    def label(self, path: str, label: str, keys: str = "", note: str = "") -> None:
        """Set the label of a block and count `keys` as translated."""
        block = self.block(path)
        block.label = label
        names = ", ".join(self._matching(keys)) or (f"{self.trainer}'s default" if not note else "")
        block.comment = ": ".join(part for part in (names, note) if part)
        self.translated(keys)

    def block(self, path: str) -> _Block:
        """Return a block, new or known, by its path: `precision.base`, `dataset.web`."""
        kind, *rest = path.split(".")
        if kind in blocks.NAMED and rest:
            label = ".".join(rest)
            return self._blocks.setdefault(path, _Block(kind, label))
        block = self._blocks.setdefault(kind, _Block(kind))
        for name in rest:
            block = block.blocks.setdefault(name, _Block(name))
        return block

    def labels(self, kind: str) -> list[str]:
        """Return the names of the blocks of a kind, such as `dataset`."""
        return [block.label for block in self._blocks.values() if block.kind == kind]

    def setting(self, address: str) -> str | None:
        """Return the text of a setting; None if it is not set."""
        path, _, name = address.rpartition(".")
        line = self.block(path).lines.get(name)
        return None if line is None else line.text

    def name_experiment(self, note: str = "") -> None:
        """Name the experiment after the file. note: added to the comment."""
        self.label("experiment", identifier(self.config.path.stem), "", f"from {self.config.path.name}{note}")

    def attach(self, key: str, program: str) -> bool:
        """Read the file of a program that a key names, next to the configuration or in a folder above it: its keys are
        then below `key`. Without a readable file the key is not expressible. Return True if it was read."""
        name, folder = self.text(key), self.config.path.resolve().parent
        path = next((place / name for place in (folder, *folder.parents) if name and (place / name).is_file()), None)
        if path is None:
            self.missing(key, f"this file of {program} is not there; put it next to the configuration")
            return False
        try:
            config = read_config(path)
        except UnreadableConfig as problem:
            self.missing(key, str(problem))
            return False
        self.values |= {f"{key}.{name}": value for name, value in flat(config.root)}
        self.config.spans.update({f"{key}.{name}": span for name, span in config.spans.items()})
        self.translated(key)
        self._attached.add(key)
        return True

    def known(self, path: str, key: str, note: str = "") -> None:
        """Translate a key by the table of other trainers' settings, into a setting of the block `path`."""
        if not self.has(key):
            return
        value, word = self.values[key], key.rpartition(".")[2]
        synonym = synonym_of(word)
        there = self._settings(path)
        names = (word,) if synonym is None else synonym.names
        name = next((name for name in names if name in there), None) or next(iter(names))
        if isinstance(value, str) and (number := _as_number(value)) is not None:
            value = number
        data = tuple(value) if isinstance(value, list) else value
        text = value_text(value) if not isinstance(value, dict) else ""
        if synonym is not None and synonym.convert is not None:
            converted = synonym.convert(Given(data, text, self._value))
            if converted is None:
                self.missing(key, synonym.hint_with())
                return
            text = converted
        elif isinstance(value, dict) or not is_plain(value):
            self.missing(key, "a plain value is expected")
            return
        self.set(f"{path}.{name}", None, key, note, text=text)

    def _value(self, address: str) -> Any:
        if "." not in address:
            return True if address in self._blocks else None
        text = self.setting(address)
        return None if text is None else _as_number(text)

    def _settings(self, path: str) -> Mapping[str, Any]:
        found = self._class(path)
        return {} if found is None else settings_of(found)

    def _class(self, path: str) -> type | None:
        kind, *rest = path.split(".")
        found = blocks.KINDS.get(kind)
        if kind in blocks.NAMED:
            return found
        block = self._blocks.get(kind)
        for name in (None, *rest):
            if name is not None and found is not None:
                attribute = settings_of(found).get(name)
                found = None if attribute is None else attribute[0].type
                block = None if block is None else block.blocks.get(name)
            registry = None if found is None else registry_of(found)
            if registry is not None and block is not None and block.label in registry:
                found = registry[block.label]
        return found

    # The result -------------------------------------------------------------------------------------------------------

    def accounts(self) -> list[Account]:
        """Return the class of every key, in the order of the source. A key that nothing has classified is not
        expressible; one without a value has no meaning."""
        found: dict[str, Account] = {}
        for key, value in self.values.items():
            own, above = self._accounts.get(key), self._above(key)
            if own is not None:
                if key not in self._split:
                    found[key] = own
                continue
            if isinstance(value, dict | list) and value:
                continue
            if above is not None:
                if above.key in self._split:
                    found[key] = attrs.evolve(above, key=key, value=shown(value), span=self.config.spans.get(key))
                continue
            fate, why = Fate.MISSING, f"{self.trainer} has no such key, as far as xtrain knows"
            if value is None or value in ({}, []):
                fate, why = Fate.MEANINGLESS, "it has no value"
            found[key] = Account(key, shown(value), fate, why, self.config.spans.get(key))
        return list(found.values())

    @property
    def _split(self) -> frozenset[str]:
        """Containers that are classified as a whole, but for parts with a class of their own."""
        return frozenset(above.key for key in self._accounts if (above := self._above(key)) is not None)

    def _above(self, key: str) -> Account | None:
        """Return the class of the container of a key that is classified as a whole."""
        while key := key.rpartition(".")[0]:
            if key in self._accounts and key not in self._attached:
                return self._accounts[key]
        return None

    def spec(self) -> str:
        """Return the text of the spec with the account of keys as comments. Settings with the default's value are left
        out, and their keys counted as such."""
        order = {kind: place for place, kind in enumerate(blocks.KINDS)}
        parts = ["\n".join(self._block(path, block)) for path, block in
                 sorted(self._blocks.items(), key=lambda item: order[item[1].kind])]  # fmt: skip
        if self.collate is not None:
            parts.append(_commented(f"collate = {self.collate[0]}", self.collate[1]))
        if self.statements:
            parts.append("\n".join(_commented(*statement) for statement in self.statements))
        return "\n\n".join(["\n".join(self._head()), *parts, "\n".join(self._tail())]).rstrip("\n") + "\n"

    def _head(self) -> list[str]:
        name = printable(Path(self.config.path).name)
        lines = [f"Imported from {name}, a configuration of {self.trainer}, by `xtrain import`.",
                 "A comment names the key that a setting comes from."]  # fmt: skip
        missing = [account for account in self.accounts() if account.fate is Fate.MISSING]
        if missing:
            lines += ["", "NOT EXPRESSIBLE, so this spec computes something else:"]
            lines += [f"  {_key(account)} = {account.value}: {account.why}" for account in missing]
        if self.notes:
            lines += ["", f"Computed differently in {self.trainer}:", *(f"  - {text}" for text in self.notes)]
        return [f"# {line}".rstrip() for line in lines]

    def _tail(self) -> list[str]:
        lines = []
        for fate in (Fate.MEANINGLESS, Fate.DEFAULT):
            found: dict[str, list[str]] = {}
            for account in self.accounts():
                if account.fate is fate:
                    found.setdefault(account.why, []).append(_key(account))
            if found:
                lines += [f"Keys {fate}:", *(f"  {', '.join(keys)}: {why}" for why, keys in found.items())]
        return [f"# {line}" for line in lines]

    def _block(self, path: str, block: _Block, indent: str = "") -> list[str]:
        head = f"{indent}{block.kind}{f' {block.label}' if block.label else ''}"
        lines = []
        for name, line in block.lines.items():
            if not line.note and self._is_default(path, name, line.text):
                for key in line.keys:
                    account = self._accounts[key]
                    if account.fate is Fate.TRANSLATED:  # a value that is not expressible leaves the default
                        self._accounts[key] = attrs.evolve(account, fate=Fate.DEFAULT, why=f"`{path}.{name}`")
                continue
            origin = ", ".join(map(printable, line.keys)) or ("" if line.note else f"{self.trainer}'s default")
            comment = ": ".join(part for part in (origin, line.note) if part)
            lines.append(_commented(f"{indent}  {name} = {line.text}", comment))
        for name, inner in block.blocks.items():
            lines += self._block(f"{path}.{name}", inner, f"{indent}  ")
        if not lines:
            empty = "" if block.label else " {}"
            return [_commented(f"{head}{empty}", block.comment)] if block.label or block.comment else []
        above = [f"{indent}# {block.comment}"] if block.comment else []
        return [*above, f"{head} {{", *lines, f"{indent}}}"]

    def _is_default(self, path: str, name: str, text: str) -> bool:
        attribute = self._settings(path).get(name)
        if attribute is None or attribute[0].default is attrs.NOTHING:
            return False
        default = attribute[0].default
        usual = default.factory() if isinstance(default, Factory) else default  # type: ignore[arg-type]
        try:
            return text in (value_text(usual), usual) or (
                isinstance(usual, int | float) and not isinstance(usual, bool) and _as_number(text) == usual
            )
        except attrs.exceptions.NotAnAttrsClassError:
            return False

    def counts(self) -> Counter[Fate]:
        """Return how many keys each class has."""
        return Counter(account.fate for account in self.accounts())


def _key(account: Account) -> str:
    return printable(account.key)


def _commented(line: str, comment: str) -> str:
    return f"{line}  # {comment}" if comment else line


def _as_number(text: str) -> float | int | None:
    try:
        number = float(text)
    except ValueError:
        return None
    if number != number or number in (float("inf"), float("-inf")):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 and "." not in text else number
