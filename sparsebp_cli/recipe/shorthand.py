"""Expansion of the short forms of a recipe, so that all other code handles one form.

target: local          ->  target: {kind: local}
policy: dense          ->  policy: [{name: dense}]
policy: {name: dense}  ->  policy: [{name: dense}]      (the forgotten dash)
policy: [dense]        ->  policy: [{name: dense}]
"""

from __future__ import annotations

from dataclasses import replace

from sparsebp_cli.recipe.place import Node


def expand_shorthand(tree: Node) -> Node:
    """Return a recipe's tree with every short form expanded. Wrong values stay, for the schema to refuse."""
    if not isinstance(tree.content, dict):
        return tree
    content = dict(tree.content)
    if "target" in content:
        content["target"] = _wrap_text(content["target"], "kind")
    policy = content.get("policy")
    if policy is not None:
        entries = policy.content if isinstance(policy.content, list) else [replace(policy, key_place=None)]
        if isinstance(policy.content, list | dict | str):
            content["policy"] = replace(policy, content=[_wrap_text(entry, "name") for entry in entries])
    return replace(tree, content=content)


def _wrap_text(node: Node, key: str) -> Node:
    if not isinstance(node.content, str):
        return node
    return replace(node, content={key: Node(node.content, node.place, node.place)})
