"""The YAML dialect of configurations: 3e-4 is a number, 1_0 and 010 are not, keys are unique."""

import re

import yaml


def read(text: str):
    """Parses a text.

    Raises yaml.YAMLError for bad syntax, ValueError for integers that are too long, RecursionError
    for text that is nested too deep.
    """
    loader = _Loader(text)
    loader.deep_construct = True  # then PyYAML refuses an anchor that contains itself
    return loader.get_single_data()


def dump(values: dict) -> str:
    """Writes values as text; `read` returns the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads 3e-4 as a number and rejects duplicate keys."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, value in node.value:
            if key_node.tag.endswith(":merge"):  # <<: *anchor, whose keys others may override
                if value.id == "sequence":  # PyYAML 6.0.4 prefers the last, others the first
                    raise yaml.YAMLError(f"<< takes one anchor, not a list{key_node.start_mark}")
                continue
            if not isinstance(key := self.construct_object(key_node, deep=True), str):
                raise yaml.YAMLError(f"key {key!r} is not a name{key_node.start_mark}")
            if key in seen:
                raise yaml.YAMLError(f"key {key} is given twice{key_node.start_mark}")
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that quotes text that the loader would read as a number."""


# YAML 1.1 also reads 1_0 as 10, 010 as 8 and 1:30 as 90.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":int", ":float"))]
    for first, found in _Loader.yaml_implicit_resolvers.items()
}
_INT = r"^[-+]?(0|[1-9][0-9]*)$"
_FLOAT = r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$|^[-+]?[0-9]+[eE][-+]?[0-9]+$"
_FLOAT += r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
for _tag, _pattern in (("int", _INT), ("float", _FLOAT)):
    for _yaml in (_Loader, _Dumper):
        _yaml.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list("-+.0123456789")
        )
