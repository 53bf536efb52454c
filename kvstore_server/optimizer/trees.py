"""Trees in an optimizer's state (dicts, lists and tuples of tensors and plain values), as stored and as JSON.

Tensors with a number per element are stored beside the weights. So a tree is stored as its leaves: each tensor is an
entry of its own, and under the tree's name there is a `TreeForm`, which is the tree without its tensors. JSON can
represent a `TreeForm`, too.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_TREE, _BYTES = "$tree", "$bytes"
"""The only key of the JSON object for a Form, and for bytes."""
_KINDS: Mapping[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "list": list, "tuple": tuple}
_KIND_OF = {cls: kind for kind, cls in _KINDS.items()}
_PLAIN = (bool, int, float, str, bytes, type(None))


@dataclass(frozen=True)
class TreeLeaf:
    """Stands in a Form for the tensor in the entry of this name."""

    name: str


@dataclass(frozen=True)
class TreeForm:
    """A tree without its tensors; immutable."""

    tree: Any


def is_plain_tree_leaf(value: object) -> bool:
    """Return whether a value other than a tensor can be stored: a number, a text, bytes, None, or a Form of such."""
    if isinstance(value, TreeForm):
        return all(
            isinstance(one, TreeLeaf) or is_plain_tree_leaf(one) for one in _iterate_tree_leaves(value.tree)
        )
    return type(value) in _PLAIN or (isinstance(value, int | float) and not isinstance(value, Tensor))


def flatten_trees(values: Mapping[str, Any]) -> dict[str, Any]:
    """Move the tensors of trees into entries of their own; entries that are not trees are unchanged."""
    found = dict(values)
    for name in [name for name, value in values.items() if type(value) in _KIND_OF]:
        found[name] = TreeForm(_take_tree_apart(values[name], name, found))
    return found


def unflatten_trees(values: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `flatten_trees`; containers are new, tensors the same."""
    found = dict(values)
    for name in [name for name, value in values.items() if isinstance(value, TreeForm)]:
        found[name] = _rebuild_tree(values[name].tree, found)
    return found


def tree_leaf_names(value: Any) -> list[str]:
    """Return the names of the entries with the tensors of a Form; empty for anything else."""
    return (
        [one.name for one in _iterate_tree_leaves(value.tree) if isinstance(one, TreeLeaf)]
        if isinstance(value, TreeForm)
        else []
    )


def map_tree(function: Any, tree: Any) -> Any:
    """Return the same tree of function(leaf); a namedtuple or another subclass of a container counts as a leaf."""
    # The exact type, because a subclass could not be rebuilt from its items.
    if isinstance(tree, dict) and type(tree) in _KIND_OF:
        return type(tree)((key, map_tree(function, one)) for key, one in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)([map_tree(function, one) for one in tree])
    return function(tree)


def clone_tree(tree: Any) -> Any:
    return map_tree(lambda one: copy_tree_tensor(one) if isinstance(one, Tensor) else copy.copy(one), tree)


def is_composed_tensor(value: object) -> bool:
    """Return whether a tensor's class consists of other tensors, like torchao's quantised ones."""
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__")


def copy_tree_tensor(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that shares no memory; one that `is_composed_tensor` may have no own clone."""
    if not is_composed_tensor(tensor):
        return tensor.detach().clone()
    composed: Any = tensor
    names, context = composed.__tensor_flatten__()
    inner = {name: copy_tree_tensor(getattr(tensor, name)) for name in names}
    made: Tensor = type(composed).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return made


def encode_tree_entry(value: Any) -> Any:
    """Return the JSON value for an entry other than a tensor. Raises TypeError for other than plain values."""
    if isinstance(value, TreeForm):
        return {_TREE: _encode_tree(value.tree)}
    return {_BYTES: value.hex()} if type(value) is bytes else _check_plain_tree(value)


def decode_tree_entry(value: Any) -> Any:
    """Inverse of `encode_tree_entry`; other values are unchanged. Raises KeyError, TypeError or ValueError."""
    if isinstance(value, dict) and set(value) == {_TREE}:
        return TreeForm(_decode_tree(value[_TREE]))
    if isinstance(value, dict) and set(value) == {_BYTES}:
        return bytes.fromhex(value[_BYTES])
    return value


def _take_tree_apart(tree: Any, path: str, found: dict[str, Any]) -> Any:
    if isinstance(tree, dict) and type(tree) in _KIND_OF:
        return type(tree)((key, _take_tree_apart(one, f"{path}.{key}", found)) for key, one in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)([_take_tree_apart(one, f"{path}.{at}", found) for at, one in enumerate(tree)])
    if not isinstance(tree, Tensor):
        return tree
    # Another entry may have this name already.
    while path in found:
        path += "'"
    found[path] = tree
    return TreeLeaf(path)


def _rebuild_tree(tree: Any, found: dict[str, Any]) -> Any:
    return map_tree(lambda one: found.pop(one.name) if isinstance(one, TreeLeaf) else one, tree)


def _iterate_tree_leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict) and type(tree) in _KIND_OF:
        # Keys have to be storable, too.
        tree = [*tree, *tree.values()]
    if type(tree) in (list, tuple):
        for one in tree:
            yield from _iterate_tree_leaves(one)
    else:
        yield tree


def _encode_tree(tree: Any) -> Any:
    """Encode a tree: a leaf as itself, anything else as a list that begins with its kind."""
    if isinstance(tree, TreeLeaf):
        return ["tensor", tree.name]
    if type(tree) is bytes:
        return ["bytes", tree.hex()]
    kind = _KIND_OF.get(type(tree))
    if kind is None:
        return _check_plain_tree(tree)
    # Pairs, because JSON objects only have string keys.
    if isinstance(tree, dict):
        return [kind, [[_encode_tree(key), _encode_tree(one)] for key, one in tree.items()]]
    return [kind, [_encode_tree(one) for one in tree]]


def _decode_tree(value: Any) -> Any:
    if not isinstance(value, list):
        return _check_plain_tree(value)
    kind, content = value
    if kind == "tensor":
        return TreeLeaf(str(content))
    if kind == "bytes":
        return bytes.fromhex(content)
    made = (
        [_decode_tree(one) for one in content]
        if kind in ("list", "tuple")
        else [map(_decode_tree, one) for one in content]
    )
    return _KINDS[kind](made)


def _check_plain_tree(value: Any) -> Any:
    if type(value) not in _PLAIN and not isinstance(value, int | float):
        kind = type(value)
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} is not a tensor, number, text, bytes or None"
        )
    return value
