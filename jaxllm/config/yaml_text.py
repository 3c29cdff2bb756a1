"""YAML as a configuration has it: 3e-4 is a number, 1_0 and 010 are not, no key is given twice."""

import re

import yaml


def read(text: str):
    """What a text holds; raises yaml.YAMLError, ValueError for endless numbers, RecursionError."""
    return yaml.load(text, Loader=_Loader)


def dump(values: dict) -> str:
    """A text that `read` turns into the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 3e-4 as a number and refuses a key given twice."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.YAMLError(f"key {key!r} is not a name{key_node.start_mark}")
            if key in seen:
                raise yaml.YAMLError(f"key {key} is given twice{key_node.start_mark}")
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes a text which the loader would take for a number."""


# YAML 1.1 would also take 1_0 for 10, 010 for 8 and 1:30 for 90.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":int", ":float"))]
    for first, found in _Loader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in (
    ("int", r"^[-+]?(0|[1-9][0-9]*)$"),
    (
        "float",
        r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$|^[-+]?[0-9]+[eE][-+]?[0-9]+$"
        r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$",
    ),
):
    for _yaml in (_Loader, _Dumper):
        _yaml.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list("-+.0123456789")
        )
