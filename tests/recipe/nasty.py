"""Values and keys that have broken readers of YAML."""

from itertools import pairwise

BOMB = "a: &a [x, x]\n" + "".join(f"{new}: &{new} [*{old}, *{old}]\n" for old, new in pairwise("abcdefghijkl"))

VALUES = [
    '', 'null', '~', 'true', 'yes', 'off', '0', '-1', '1e999', '-1e999', '.inf', '.nan', '1E3', '3e-4', '010',
    '1:30', '2024-01-02', '1_000', "''", '"8"', '[]', '{}', '[[[]]]', '{a: {b: {c: 1}}}', '[1, x, null]', '*a',
    '&a 1', '&a [*a]', "!!python/object/apply:os.system ['touch pwned']", '!!python/name:os.system',
    '!!binary aGk=', '!!set {a}', '!!str 1', '!<x> 1', '! 1', '<<: {a: 1}', '{<<: *a}', '../../../../etc/passwd',
    '../base.yaml', '/dev/zero', '/dev/stdin', '..', '~/x', 'file:///etc/passwd', '$(touch pwned)', '`touch pwned`',
    '|', '>\n  x', '|\n  x\n', "'", '"', '"\\x00"', '"\\uD800"', '"\\UFFFFFFFF"', '"\\e[2J"', '\x00', '\x1b[2J',
    '\u2028', '\ufeff', '\x85', '\xe9', '\U0001f4a5', '? ? ? ? ? ? ? ? ? ? ? ? ? ? ? ? ? ? ? ? ', '@', '%',
    '%YAML 9.9', '---', '...', '--- a', '# x', ': ', '- ', 'a: b: c', 'dense', 'topk', '[dense, topk]',
    '{name: topk, keep: 1e-999}', '{name: [a]}', '{name: null}', '[{name: random, keep: 0.5, weighted: yes}]',
    '{1: a}', '{? [a] : b}', '{a: 1, a: 2}', '18446744073709551616', '-0.0', '1e-400', '{"a\\nb": 1}',
    '[[a], {b: [c]}]', '!', '&', '*', '{kind: local, threads: 0}',
    "9" * 400, "9" * 9999, "0x" + "f" * 99, "x" * 5000, "[" * 50, "{" * 50, "{a: " * 40, "- " * 50, "? " * 20,
]  # fmt: skip

KEYS = [
    "version", "name", "base", "model", "policy", "training", "keep", "<<", "1", "null", "", "? x", "'a b'", "_", "a.b",
    "__class__", "model_config", "x" * 300,
]  # fmt: skip
