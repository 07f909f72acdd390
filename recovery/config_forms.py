"""The forms of a configuration: text, plain tree, dotted overrides, blocks. Generic over `Block` types.

Owns: reading YAML and JSON with the line of every key, turning a tree into blocks, the words of a refusal.
Does not know: which blocks there are, what a field means, which fields go together; config.py does.

Invariants:
1. A block is checked when it is constructed, however it is constructed.
2. Nothing is guessed and nothing is dropped: a key is a field of its block, once, or it is refused.
3. A refusal names the dotted path, what was found, what is accepted and, where known, the file and the line
   or the override.
4. Booleans are read as YAML 1.1 reads them (`off` is false), numbers as YAML 1.2 does: `1e-5` is a number,
   `0012`, `1:30` and `2026-01-02` are text. What is written is read back the same by any YAML reader.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from recovery.errors import ConfigError

if TYPE_CHECKING:
    import yaml

Origins = dict[str, str]  # dotted path -> "job.yaml, line 3" or "override a.b=c"; "" -> the file
B = TypeVar("B", bound="Block")
MAX_FILE_BYTES = 1024 * 1024
MAX_DEPTH = 32
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
"""What begins so is no path."""

_UNITS = {"s": " of seconds", "tokens": " of tokens"}
_WORDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.DictType: "a mapping",
    inspect.FloatType: "a number",
    inspect.IntType: "a whole number",
    inspect.NoneType: "null",
    inspect.StrType: "text that is not empty",
}


class FieldError(ConfigError):
    """A refusal that still knows its dotted path ("" is the top), so that its place can be added."""

    def __init__(self, path: str, problem: str, hint: str = "") -> None:
        super().__init__(f"{path or 'the top'}: {problem}", hint=hint)
        self.path = path

    def located(self, origins: Origins) -> ConfigError:
        """The same refusal with the place of the nearest key that has one."""
        path = self.path
        while path and path not in origins:
            path = path.rpartition(".")[0]
        where = f" ({origins[path]})" if path in origins else ""
        return ConfigError(self.message + where, hint=self.hint)


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One named group of fields; `AT` is its dotted path, `ELSEWHERE` says what to do instead of fields it lacks."""

    AT: ClassVar[str] = ""
    ELSEWHERE: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Normalise and check every value."""
        for field in msgspec.structs.fields(self):
            path = dotted(self.AT, field.name)
            value = getattr(self, field.name)
            if not isinstance(value, Block):
                value = self.spelled(field.name, plain(value, path))
            msgspec.structs.force_setattr(self, field.name, _accepted(field, value, path))

    @classmethod
    def spelled(cls, name: str, value: Any) -> Any:
        """The value that another spelling stands for; overridden by blocks that take one."""
        return value


class Leaf(NamedTuple):
    """One field that is not itself a block."""

    path: str
    field: msgspec.structs.FieldInfo
    description: str
    options: tuple[inspect.Type, ...]

    @property
    def takes_text(self) -> bool:
        return any(isinstance(option, inspect.StrType) for option in self.options)

    @property
    def words(self) -> str:
        """What the field accepts."""
        unit = _UNITS.get(self.path.rpartition("_")[2], "")
        return " or ".join(_words(option, unit) for option in self.options)


def dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def plain(value: Any, path: str = "", depth: int = 0) -> Any:
    """A deep copy made of dict, list and scalars only, from any Mapping, Sequence or os.PathLike."""
    if depth > MAX_DEPTH:
        raise FieldError(path, f"nested deeper than {MAX_DEPTH} levels, or refers to itself")
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int | str):
        return int(value) if isinstance(value, int) else str.__str__(value)  # of an Enum, what it stands for
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        copy = {}
        for key, item in value.items():
            if not isinstance(key, str) and (depth == 0 or type(key) is not int):  # a logit_bias has int keys
                hint = "put it in quotes; YAML reads on, off, yes and no as booleans, 1 as a number"
                raise FieldError(path, f"the key {_found(key)} is not text", hint)
            copy[key] = plain(item, dotted(path, str(key)), depth + 1)
        return copy
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, path, depth + 1) for item in value]
    raise FieldError(path, f"found {_found(value)}; accepted: text, numbers, booleans, lists, mappings")


def build(block: type[B], tree: Any, root: type[Block]) -> B:
    """The block that a tree of `plain` describes. A block or mapping given as null counts as left out."""
    if not isinstance(tree, dict):
        raise FieldError(block.AT, f"found {_found(tree)}; accepted: a mapping of {', '.join(block.__struct_fields__)}")
    fields = {field.name: field for field in msgspec.structs.fields(block)}
    values = {}
    for key, value in tree.items():
        if key not in fields:
            path = dotted(block.AT, str(key))
            if key in block.ELSEWHERE:
                raise FieldError(path, "is no field", block.ELSEWHERE[key])
            raise FieldError(path, f"unknown key; {_nearest(str(key), block, root)}")
        inner = _block_of(fields[key])
        if value is not None or not (inner or fields[key].default_factory is dict):
            values[key] = build(inner, value, root) if inner else value
    for leaf in leaves(block):
        if leaf.field.required and leaf.field.name not in values:
            raise FieldError(leaf.path, "missing", leaf.description)
    return block(**values)


def leaves(block: type[Block]) -> Iterator[Leaf]:
    """Every field below a block, depth first, in the order of the schema."""
    for field in msgspec.structs.fields(block):
        if inner := _block_of(field):
            yield from leaves(inner)
        else:
            yield _leaf(field, dotted(block.AT, field.name))


def override(tree: dict[str, Any], overrides: Iterable[str], origins: Origins) -> None:
    """Apply `a.b=c` to a tree of `plain`, in order; `c` is read as YAML, so that `a.b=` is null."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: found {_found(overrides)}; accepted: a list of key=value")
    for text in overrides:
        key, equals, value = text.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            hint = "e.g. rollout_checkpointing.keep_latest_k=3"
            raise ConfigError(f"override {text}: accepted: key=value with a dotted key", hint=hint)
        path = ".".join(names)
        for stale in [known for known in origins if known.startswith(f"{path}.")]:
            del origins[stale]
        origins[path] = f"override {text}"
        block = tree
        for count, name in enumerate(names[:-1], 1):
            block[name] = {} if block.get(name) is None else block[name]
            block = block[name]
            if not isinstance(block, dict):
                raise FieldError(path, f"{'.'.join(names[:count])} is {_found(block)}, not a mapping")
        block[names[-1]] = plain(read_yaml(value, f"override {text}")[0], path, len(names))


def read_file(path: str) -> tuple[Any, Origins]:
    """The tree in a file (JSON if it is named so, else YAML) and the line of every key."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}"
        raise ConfigError(f"{path}: {problem}", hint="save it as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}", hint="give a YAML or JSON file") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES} bytes", hint="is this the prompts file?")
    tree, origins = (read_json if path.lower().endswith(".json") else read_yaml)(text, path)
    return tree, origins | {"": path}


def read_json(text: str, source: str) -> tuple[Any, Origins]:
    """The value of a JSON text and the line of every key in it; an empty text is None."""
    try:
        tree = json.loads(text) if text.strip() else None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{source}: is not JSON at {where}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: is not usable JSON: {error}") from None
    # Valid JSON in printable ASCII is YAML: read as that, it gives up its lines and its duplicate keys.
    text = re.sub(r"[\t\x7f]", " ", text.encode("ascii", "backslashreplace").decode())
    return tree, read_yaml(text, source)[1]


def read_yaml(text: str, source: str) -> tuple[Any, Origins]:
    """The value of one YAML document and the line of every key in it; an empty text is None."""
    import yaml

    try:
        loader = _dialect()[0](text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        if _size(node, {}) > MAX_FILE_BYTES:  # which no file has without aliases of aliases
            raise ConfigError(
                f"{source}: its aliases stand for more than {MAX_FILE_BYTES} values", hint="write them out"
            )
        origins = dict(_lines(node, source, "", set()))
        return loader.construct_document(node), origins
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column, problem = before.count("\n") + 1, error.position - before.rfind("\n"), error.reason
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        problem = error.problem or error.context or "not understood"
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: is not usable YAML: {error}") from None
    hint = "indent with spaces" if r"'\t'" in problem else "text that holds : # [ or { goes in quotes"
    raise ConfigError(f"{source}: is not YAML at line {line}, column {column}: {problem}", hint=hint)


def write_yaml(value: Any) -> str:
    """YAML in block style, in the order given; of a scalar, one line."""
    import yaml

    text: str = yaml.dump(value, Dumper=_dialect()[1], allow_unicode=True, sort_keys=False, width=10**9)
    return text.removesuffix("...\n")


@functools.cache
def _dialect() -> tuple[type[yaml.SafeLoader], type[yaml.SafeDumper]]:
    """The loader and dumper of invariant 4."""
    import yaml

    tag = "tag:yaml.org,2002:"

    class Loader(yaml.SafeLoader):
        pass

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_str(self, data: str) -> yaml.ScalarNode:
            # PyYAML loses U+0085 and others unless they are escaped, which it does in this style only.
            style = None if data.isprintable() else '"'
            return self.represent_scalar(tag + "str", data, style=style)

    Dumper.add_representer(str, Dumper.represent_str)
    kept = {tag + "bool", tag + "null", tag + "merge"}
    ours = {
        first: [pair for pair in pairs if pair[0] in kept]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.yaml_implicit_resolvers = ours
    whole = re.compile(r"(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)$")
    digits = r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    fraction = re.compile(rf"(?:{digits}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$")
    Loader.add_implicit_resolver(tag + "int", whole, list("-+0123456789"))
    for either in (Loader, Dumper):
        either.add_implicit_resolver(tag + "float", fraction, list("-+.0123456789"))
    return Loader, Dumper


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many nodes there are when every alias is written out; one that refers to itself counts once."""
    size = known.get(id(node))
    if size is None:
        known[id(node)] = size = 1
        children = () if isinstance(node.value, str) else node.value
        for child in children:
            size += sum(_size(part, known) for part in (child if isinstance(child, tuple) else (child,)))
        known[id(node)] = size
    return size


def _lines(node: yaml.Node, source: str, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """The place of every key below a node; a key that is given twice is refused."""
    import yaml

    if id(node) in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _lines(item, source, path, seen)
        return
    first: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        place, line = dotted(path, str(key.value)), key.start_mark.line + 1
        if earlier := first.get((key.tag, str(key.value))):
            raise ConfigError(f"{source}: {place}: given twice, on line {earlier} and on line {line}")
        first[key.tag, str(key.value)] = line
        yield place, f"{source}, line {line}"
        yield from _lines(value, source, place, seen)


def _leaf(field: msgspec.structs.FieldInfo, path: str) -> Leaf:
    info: Any = inspect.type_info(field.type)
    about: dict[str, Any] = {}
    if isinstance(info, inspect.Metadata):
        info, about = info.type, info.extra_json_schema or {}
    options = info.types if isinstance(info, inspect.UnionType) else (info,)
    return Leaf(path, field, str(about.get("description", "")), options)


def _block_of(field: msgspec.structs.FieldInfo) -> type[Block] | None:
    info = _leaf(field, "").options[0]
    return info.cls if isinstance(info, inspect.StructType) and issubclass(info.cls, Block) else None


def _accepted(field: msgspec.structs.FieldInfo, value: Any, path: str) -> Any:
    """The value in the field's own type (60 is 60.0), or a refusal in words."""
    if not (isinstance(value, str) and "\0" in value):
        try:
            return msgspec.convert(value, field.type, strict=True)
        except msgspec.ValidationError:
            pass  # its words are for programmers
    leaf = _leaf(field, path)
    choices = [str(choice) for option in leaf.options for choice in getattr(option, "values", ())]
    near = get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    problem = f"found {_found(value)}; accepted: {leaf.words}"
    if near or (leaf.takes_text and isinstance(value, bool | int | float)):
        problem += f"; did you mean {near[0]}?" if near else "; put it in quotes"
    raise FieldError(path, problem, leaf.description)


def _words(option: inspect.Type, unit: str) -> str:
    if isinstance(option, inspect.LiteralType):
        return ", ".join(str(value) for value in option.values)
    limits = [(sign, getattr(option, name, None)) for sign, name in ((">", "gt"), (">=", "ge"), ("<=", "le"))]
    bounds = " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)
    return f"{_WORDS.get(type(option), 'a mapping')}{unit if bounds else ''} {bounds}".rstrip()


def _found(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        shown = json.dumps(value, ensure_ascii=False)
        return shown if len(shown) <= 60 else f"{shown[:57]}..."
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return f"a value of type {type(value).__name__}"


def _nearest(key: str, block: type[Block], root: type[Block]) -> str:
    for leaf in leaves(root):
        names = leaf.path.split(".")
        if key in names:
            return f"did you mean {'.'.join(names[: names.index(key) + 1])}?"
    near = get_close_matches(key, block.__struct_fields__, n=1)
    return f"did you mean {near[0]}?" if near else f"accepted: {', '.join(block.__struct_fields__)}"
