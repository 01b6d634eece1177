"""Prints the layout of the package: its files, its rooms, and the direction of imports.

    python benchmarks/house.py --goals      # sizes that one engineer can carry, beside their limits
    python benchmarks/house.py --words      # words of each group of pages, beside its limit
    python benchmarks/house.py --features   # lines of each feature of the core, by features.yaml

Imports are read from the syntax tree, so those under ``TYPE_CHECKING`` and inside functions count like any other.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PACKAGE = "sparsebp_cli"
PACKAGES = (
    PACKAGE,
    "plugins/sparsebp-audit/sparsebp_audit",
    "plugins/sparsebp-lab/sparsebp_lab",
    "plugins/sparsebp-tools/sparsebp_tools",
)  # whose files the rules of the house hold
HOPS = re.compile(r"^\| `(\w+)` \|.*\| (\d+) \|$", re.MULTILINE)  # a row of the table of counts
Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Size:
    """Counts over some files.

    Args:
        files: Number of Python files.
        code: Lines of code: not blank, no comment, no docstring.
        comments: Comments on a line of their own.
        any: Uses of the name ``Any``.
        noqa: Comments that switch off a rule of the linter.
    """

    files: int
    code: int
    comments: int
    any: int
    noqa: int


def find_modules(root: Path) -> dict[str, Path]:
    """Return the files of the package by module name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to((root / package).parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def read_imports(root: Path) -> Graph:
    """Return which modules of the package each of them imports, anywhere in its file."""
    modules = find_modules(root)
    graph = {}
    for name, path in modules.items():
        found = set[str]()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= full & modules.keys()
                if full - modules.keys():
                    found.add(node.module)
        graph[name] = frozenset(found & modules.keys()) - {name}
    return graph


def find_circles(graph: Graph) -> list[list[str]]:
    """Return the groups of nodes that reach each other (Tarjan's strongly connected components of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for child in graph.get(node, ()):
            if child not in index:
                visit(child)
                low[node] = min(low[node], low[child])
            elif child in stack:
                low[node] = min(low[node], index[child])
        if low[node] == index[node]:
            start = stack.index(node)
            group = stack[start:]
            del stack[start:]
            if len(group) > 1:
                circles.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(circles)


def find_rooms(graph: Graph, container: str) -> Graph:
    """Return which rooms of a container each of its rooms imports; a room is a module or package right inside it."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for name, children in graph.items():
        room = _room_of(name, container)
        if room:
            rooms[room] |= {other for child in children if (other := _room_of(child, container)) and other != room}
    return {room: frozenset(others) for room, others in sorted(rooms.items())}


def _room_of(module: str, container: str) -> str:
    inside = module.removeprefix(f"{container}.")
    return "" if inside == module else inside.partition(".")[0]


def read_orders(root: Path) -> dict[str, list[list[str]]]:
    """Return the layers of each container, top first, as pyproject.toml gives them to import-linter."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    orders = {}
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "layers":
            layers = [[room.strip() for room in layer.replace(":", "|").split("|")] for layer in contract["layers"]]
            orders |= dict.fromkeys(contract["containers"], layers)
    return orders


def find_back_arrows(graph: Graph, container: str, layers: Iterable[Iterable[str]]) -> list[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports the second, which is in a layer above."""
    heights = {room: height for height, layer in enumerate(layers) for room in layer}
    return [
        (room, other)
        for room, others in find_rooms(graph, container).items()
        for other in sorted(others)
        if heights[other] < heights[room]
    ]


def find_shared_names(root: Path) -> dict[str, list[str]]:
    """Return the class names that more than one module defines, with these modules."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, path in find_modules(root).items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    return {name: modules for name, modules in sorted(homes.items()) if len(modules) > 1}


def find_protocols(root: Path) -> list[str]:
    """Return the names of the core's classes that derive from ``typing.Protocol``."""
    trees = [ast.parse(path.read_text()) for path in (root / PACKAGE).rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return sorted(one.name for one in classes if "Protocol" in {ast.unparse(base) for base in one.bases})


def measure(paths: Iterable[Path]) -> Size:
    """Count files, code, comments, ``Any`` and ``noqa``."""
    files = code = comments = uses = noqa = 0
    for path in paths:
        text = path.read_text()
        tree = ast.parse(text)
        docs = set[int]()
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                docs |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            uses += isinstance(node, ast.Name) and node.id == "Any"
        lines = text.splitlines()
        own = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith("#")}
        files += 1
        comments += len(own)
        code += sum(bool(line.strip()) and n not in docs and n not in own for n, line in enumerate(lines, 1))
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        noqa += sum(token.type == tokenize.COMMENT and "noqa" in token.string for token in tokens)
    return Size(files, code, comments, uses, noqa)


@dataclass(frozen=True)
class Feature:
    """A feature of the core, from features.yaml: the question that it answers, its files, a recipe and a page."""

    name: str
    question: str
    files: tuple[str, ...]
    recipe: str
    page: str


def read_features(root: Path) -> tuple[list[Feature], int]:
    """Return the features of the core, and the most lines that it may have."""
    found = yaml.safe_load((root / "features.yaml").read_text(encoding="utf-8"))
    return [Feature(**one | {"files": tuple(one["files"])}) for one in found["features"]], found["most_lines"]


def count_features(root: Path) -> dict[str, int]:
    """Return the lines of each feature, under the empty name those of no feature."""
    features, _ = read_features(root)
    owners = {entry: feature.name for feature in features for entry in feature.files}
    lines = dict.fromkeys(owners.values(), 0)
    for path in sorted((root / PACKAGE).rglob("*.py")):
        place = path.relative_to(root / PACKAGE)
        above = (str(part) for part in (place, *place.parents))
        name = next((owners[part] for part in above if part in owners), "")
        lines[name] = lines.get(name, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return lines


def print_features(root: Path) -> None:
    """Print the lines of each feature, the largest first, and those of the core beside their limit."""
    features, most = read_features(root)
    questions = {feature.name: feature.question for feature in features}
    lines = count_features(root)
    for name, count in sorted(lines.items(), key=lambda pair: -pair[1]):
        print(f"{count:>7,}  {name or 'no feature':42}{questions.get(name, '')}")
    print(f"{sum(lines.values()):>7,}  of the core, at most {most:,}")


READERS = {"startswith", "endswith", "partition", "rpartition", "removeprefix", "removesuffix"}


def find_read_sentences(root: Path) -> list[tuple[str, int, str]]:
    """Return file, line and literal of each place where the package or its benchmarks read a text of several words, or
    take a name apart at a slash: a sentence of our own that is read back is data that lost its type."""
    found = []
    for folder in (PACKAGE, "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                texts = [text for text in _read_texts(node) if " " in text.strip() or text == "/"]
                found += [(path.relative_to(root).as_posix(), node.lineno, text) for text in texts]  # type: ignore[attr-defined]
    return found


def _read_texts(node: ast.AST) -> list[str]:
    """The literals with which a call or a comparison reads a text."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS and node.args:
        texts = _literals(node.args[0])
        return texts if node.func.attr in {"partition", "rpartition"} else [text for text in texts if text != "/"]
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        one = isinstance(node.comparators[0], ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        return [text for text in _literals(node.left) if text != "/"] if one else []
    return []


def _literals(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Tuple):
        return [text for element in node.elts for text in _literals(element)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


# Group of pages: its files, the most words by hand, and the most pages.
PAGES: dict[str, tuple[tuple[str, ...], int, int]] = {
    "README": (("README.md",), 700, 1),
    "guide": (("docs/guide/*.md",), 30_000, 24),
    "results": (("docs/results/*.md",), 6_000, 10),
    "decisions": (("docs/decisions/*.md",), 12_000, 30),
    "log": (("docs/log.md",), 4_000, 1),
    "changelog": (("CHANGELOG.md",), 3_000, 1),
    "ARCHITECTURE, CONTRIBUTING": (("ARCHITECTURE.md", "CONTRIBUTING.md"), 3_000, 2),
}
GENERATED = re.compile(r"<!-- (\w+)(?:: [^>]+)? -->\n(?:(?!<!-- end of).)*<!-- end of \1 -->", re.DOTALL)
WRITTEN = "<!-- Written by docs/generate.py."  # the first line of a page that is generated as a whole


def count_words(text: str) -> int:
    """Count the words of a page that are not in comments: what has a letter or a digit between blanks."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return sum(any(map(str.isalnum, word)) for word in text.split())


def drop_generated(text: str) -> str:
    """Return what a person wrote of a page: without the parts that docs/generate.py fills."""
    return "" if text.startswith(WRITTEN) else GENERATED.sub("", text)


def count_pages(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return, for each group of pages, its number of pages, words by hand, and words in all."""
    counts = {}
    for group, (patterns, _, _) in PAGES.items():
        texts = [file.read_text(encoding="utf-8") for pattern in patterns for file in sorted(root.glob(pattern))]
        by_hand = sum(count_words(drop_generated(text)) for text in texts)
        counts[group] = len(texts), by_hand, sum(map(count_words, texts))
    return counts


def measure_goals(root: Path) -> dict[str, tuple[float, float]]:
    """Return each size of the project, and the most that it shall be.

    A verb of a package does not count as one of the core, nor do the options of policies and targets as recipe keys.
    ``hops`` are read from ARCHITECTURE.md, where a test holds them; ``benchmarks/hops.py`` counts them.
    """
    hops = {row[1]: int(row[2]) for row in HOPS.finditer((root / "ARCHITECTURE.md").read_text())}
    results = sum(path.stat().st_size for path in (root / "docs/results").rglob("*") if path.is_file())
    entries = [path for path in (root / PACKAGE).iterdir() if path.name not in ("__pycache__", "py.typed")]
    return {
        "core, lines": (_count_lines(root / PACKAGE), 64_000),
        "core and plug-ins, lines": (
            _count_lines(root / PACKAGE) + sum(map(_count_lines, root.glob("plugins/*/sparsebp_*"))),
            99_000,
        ),
        "entries at the top of the core": (len(entries), 20),
        "Protocols of the core": (len(find_protocols(root)), 15),
        "class names with several homes": (len(find_shared_names(root)), 5),
        "hops of a training step": (hops["step"], 900),
        "hops of a lossless batch": (hops["lossless"], 70),
        "hops of a comparison": (hops["compare"], 1300),
        "verbs of the core": (len(find_verbs(root)), 22),
        "recipe keys": (len(find_keys(root)), 85),
        "docs/results, MB": (round(results / 1e6, 1), 3),
    }


def _count_lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def find_verbs(root: Path) -> list[str]:
    """Return the verbs that the core itself defines, from the table in ``cli/app.py``."""
    tree = ast.parse((root / PACKAGE / "cli/app.py").read_text())
    tables = [one.value for one in tree.body if isinstance(one, ast.AnnAssign) and ast.unparse(one.target) == "VERBS"]
    return [node.id for table in tables for node in ast.walk(table) if isinstance(node, ast.Name)]


def find_keys(root: Path) -> list[str]:
    """Return the recipe keys that hold a value, from the schema of recipes."""
    schema = json.loads((root / "docs/recipe.schema.json").read_text())

    def find(node: Mapping[str, Any], path: str) -> list[str]:
        found = []
        for key, value in node.get("properties", {}).items():
            refs = [Path(one["$ref"]).name for one in (value, *value.get("anyOf", ())) if "$ref" in one]
            inner = [name for ref in refs for name in find(schema["$defs"][ref], f"{path}{key}.")]
            found += inner or [f"{path}{key}"]
        return found

    return find(schema, "")


def print_words(root: Path) -> None:
    """Print pages and words of each group beside their limits."""
    print(f"{'group':28}{'pages':>6}{'most':>6}{'by hand':>9}{'most':>8}{'in all':>8}")
    for group, (pages, by_hand, words) in count_pages(root).items():
        _, most_words, most_pages = PAGES[group]
        print(f"{group:28}{pages:>6}{most_pages:>6}{by_hand:>9,}{most_words:>8,}{words:>8,}")


def main() -> None:
    """Print the counts of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1], help="a checkout; this one")
    parser.add_argument("--goals", action="store_true", help="sizes of the project, and nothing else")
    parser.add_argument("--words", action="store_true", help="words of each group of pages, and nothing else")
    parser.add_argument("--features", action="store_true", help="lines of each feature of the core, and nothing else")
    arguments = parser.parse_args()
    root: Path = arguments.root
    if arguments.goals:
        for name, (value, most) in measure_goals(root).items():
            print(f"{name:32}{value:>8,}   at most {most:>6,}{'' if value <= most else '   beyond'}")
        return
    if arguments.words:
        print_words(root)
        return
    if arguments.features:
        print_features(root)
        return
    modules, graph = find_modules(root), read_imports(root)
    for title, prefix in (("whole package", PACKAGE), ("backward", f"{PACKAGE}.backward")):
        size = measure(path for name, path in modules.items() if f"{name}.".startswith(f"{prefix}."))
        rates = (f"{value / size.code * 1000:.1f} {what}" for what, value in vars(size).items() if what != "code")
        print(f"{title}: {size.files} files, {size.code:,} code lines; per 1,000 of them: {', '.join(rates)}")
    for container in (PACKAGE, f"{PACKAGE}.backward"):
        rooms = find_rooms(graph, container)
        arrows = sum(map(len, rooms.values()))
        print(f"{container}: {len(rooms)} rooms, {arrows} arrows, {len(find_circles(rooms))} circles of rooms")
    for container, layers in read_orders(root).items():
        back = find_back_arrows(graph, container, layers)
        print(f"{container}: {len(layers)} layers, {len(back)} arrows against them {back or ''}")
    circles = find_circles(graph)
    print(f"circles of modules: {len(circles)}")
    for circle in circles:
        print("   ", ", ".join(circle))
    shared = find_shared_names(root)
    print(f"class names with several homes: {len(shared)}")
    for name, homes in shared.items():
        print(f"    {name}: {', '.join(homes)}")
    protocols = find_protocols(root)
    print(f"Protocols of the core: {len(protocols)} ({', '.join(protocols)})")


if __name__ == "__main__":
    main()
