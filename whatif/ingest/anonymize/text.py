"""Remove from a trace's text what identifies people and machines: paths, addresses, names, layers on request."""

from __future__ import annotations

import getpass
import re
import socket
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from whatif.ingest.anonymize.words import Words

# From here to its end a text may belong to a path: folders have spaces in their names. A slash behind a word is a
# relative name ("encoder/attention") or a fraction ("0/0", as torch.compile counts its regions), and stays. A file is
# looked for from the start of a word only, so that a text of one long word is read once.
_PATH = re.compile(
    r"""(?: file:// | (?<![\w.)\]>*&/]) (?: ~?/[\w.~-] | [A-Za-z]:[\\/][\w.~-] | \\\\[\w.-] )
      | (?<![\w./\\-]) [\w./\\-]*\.(?:py|pyc|pyx|ipynb|sh|cpp|cu|cuh|hpp|so)\b(?![\w(]*::) ).*""",
    re.VERBOSE | re.DOTALL,
)
_ADDRESS = re.compile(r"(?<![\w.+-])[\w.+-]++@[\w-]+(?:\.[\w-]+)+")
_IP_ADDRESS = re.compile(r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?!\d|\.\d)")
# Any scheme: https, s3, gs, ssh.
_URL = re.compile(r"(?<![\w+.-])(?!file:)[A-Za-z][\w+.-]*+://\S*")
# Eight groups, or fewer around two colons, three colons at least; with a digit, which "a::b::c" has none of.
_IPV6_ADDRESS = re.compile(r"(?<![0-9A-Za-z])(?=[:A-Fa-f]*\d)(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{0,4}")
_DOMAIN = re.compile(
    r"(?<![\w.-])(?:[\w-]++\.)+"
    r"(?:com|org|net|edu|gov|io|ai|dev|cloud|internal|local|lan|corp|intra|home|svc|test|example)(?![A-Za-z0-9-])",
    re.IGNORECASE,
)
# Names of hosts in clusters: "gpu-node-07", "ip-10-0-0-1", and UUIDs.
_HOST_NAME = re.compile(
    r"(?<![A-Za-z0-9-])(?:ip(?:-\d+){4}"
    r"|(?:[a-z]+-)*(?:node|host|gpu|worker|server|box|login|compute|rack|pod|dgx|vm)s?-?\d+(?:-\d+)*)(?!\d)"
    r"|(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    re.IGNORECASE,
)
_HOME = re.compile(rb"(?:/home|/Users|\\\\Users)[/\\]+([^/\\\"\s]+)")
_HOST = re.compile(rb'"host_name"\s*:\s*"([^"\\]+)"')

# Names of users and hosts that are words of every trace: replacing them would damage it and protect no one.
_COMMON = frozenset((
    "adam", "admin", "conv", "data", "home", "host", "linear", "local", "localhost", "model", "node", "python", "root",
    "runner", "test", "torch", "train", "ubuntu", "user", "worker",
))  # fmt: skip
_SHORTEST_SECRET = 4

PATH, ADDRESS, SECRET = "texts with a path", "texts with an address", "texts with a host or user name"
UNKNOWN = "texts with unknown words, now replaced"

# Fields that identify people or machines, anywhere in a recorder's metadata.
_PRIVATE_FIELD = re.compile(
    r"host(_?name)?|node(_?name)?|user(_?name)?|login|cwd|home|path|executable|argv|command(_?line)?|cmdline|cmd"
    r"|process(_?name)?|env(iron(ment)?)?|script|stacks?|call_?stack|stack_?frames|traceback|trace_?name|trace_?id|pid"
    r"|e-?mail|ip|address|uuid|serial(_?number)?",
    re.IGNORECASE,
)
# Parameter names of torch's own layers, which are not private.
_PLAIN_WORDS = frozenset(("", "(root)", "weight", "bias", "Global"))
# Places of layer names in a recorder's metadata: tables with a row each, tables keyed by name, lists of parameters.
_LAYER_TABLES = frozenset(("layers", "modules", "grad_ready_order", "gradient_ready_order"))
_KEYED_BY_LAYER = frozenset(("layers", "modules", "shapes", "parameters"))
_LAYER_LISTS = frozenset(("parameters", "grad_ready_order", "gradient_ready_order"))
_LAYER_MARK = re.compile(r"(whatif::\w+::)(.*)", re.DOTALL)
_MODULE_MARK = re.compile(r"(nn\.Module: )(.*?)(_\d+)?", re.DOTALL)


def dropped_field(key: str) -> str:
    """Return the kind under which a removed field is counted."""
    return f"fields named {key[:60]!r}"


class LayerNames:
    """Replaces each word of layer names by a numbered one, the same everywhere, so that their tree stays."""

    def __init__(self) -> None:
        self._numbered: dict[str, str] = {}

    def __call__(self, qualified: str) -> str:
        """Return "layer1.0.layer2" for "encoder.0.attention"."""
        return ".".join(self._word(word) for word in qualified.split("."))

    def _word(self, word: str) -> str:
        if word in _PLAIN_WORDS or word.isdecimal():
            return word
        return self._numbered.setdefault(word, f"layer{len(self._numbered) + 1}")

    def __len__(self) -> int:
        return len(self._numbered)


class Scrubber:
    """Removes what is private from texts and JSON values; ``removed`` counts it by kind.

    With ``known_words``, every word that does not belong to names in traces gets a stand-in, too.
    """

    def __init__(self, secrets: Iterable[str] = (), *, rename_layers: bool = False, known_words: bool = False) -> None:
        self.removed: Counter[str] = Counter()
        self._words = Words() if known_words else None
        self.layers = LayerNames() if rename_layers else None
        words = sorted({re.escape(secret) for secret in secrets}, key=len, reverse=True)
        self._secret = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(words)})(?![A-Za-z0-9])", re.I) if words else None

    def text(self, text: str, *, secrets: bool = True) -> str:
        """Return ``text`` without paths and addresses, and without host and user names if ``secrets``."""
        if secrets and self._secret is not None:
            text = self._without(self._secret, "(name)", SECRET, text)
        text = self._without(_URL, "(address)", ADDRESS, text)
        text = self._without(_PATH, "(path)", PATH, text)
        text = self._without(_ADDRESS, "(address)", ADDRESS, text)
        text = self._without(_IP_ADDRESS, "(address)", ADDRESS, text)
        text = self._without(_DOMAIN, "(address)", ADDRESS, text)
        text = self._without(_IPV6_ADDRESS, "(address)", ADDRESS, text)
        return self._without(_HOST_NAME, "(name)", SECRET, text)

    def words(self, text: str, *, kernel: bool = False) -> str:
        """Return a text without its unknown words."""
        if self._words is None:
            return text
        clean = self._words(text, kernel=kernel)
        self.removed[UNKNOWN] += clean != text
        return clean

    def _without(self, pattern: re.Pattern[str], instead: str, kind: str, text: str) -> str:
        text, found = pattern.subn(instead, text)
        self.removed[kind] += bool(found)
        return text

    def name(self, name: str, *, is_annotation: bool, kernel: bool = False) -> str:
        """Return an event's name, cleaned; known host and user names are removed from users' annotations only."""
        if self.layers is not None:
            if mark := _LAYER_MARK.fullmatch(name):
                return mark[1] + self.layers(mark[2])
            if mark := _MODULE_MARK.fullmatch(name):
                return mark[1] + self.layers(mark[2]) + (mark[3] or "")
        by_user = is_annotation and not name.startswith(("Optimizer.", "ProfilerStep#", "enumerate(DataLoader)#"))
        return self.words(self.text(name, secrets=by_user), kernel=kernel)

    def value(self, value: Any, field: str = "") -> Any:
        """Return a JSON value with every text in it clean, and without private fields."""
        if isinstance(value, str):
            return self.words(self.text(value))
        if isinstance(value, list):
            return [self._item(item, field) for item in value]
        if not isinstance(value, dict):
            return value
        result = {}
        for key, item in value.items():
            if _PRIVATE_FIELD.fullmatch(key):
                self.removed[dropped_field(key)] += 1
                continue
            renamed = (
                self.layers(key) if self.layers is not None and field in _KEYED_BY_LAYER else self.words(self.text(key))
            )
            result[renamed] = self.value(item, key)
        return result

    def _item(self, item: Any, field: str) -> Any:
        """An element of the list in a field, which may be a layer's name or the row of a layer."""
        if self.layers is not None and isinstance(item, str) and field in _LAYER_LISTS:
            return self.layers(item)
        if self.layers is not None and isinstance(item, dict) and field in _LAYER_TABLES:
            named = {key: self.layers(item[key]) for key in ("name", "layer") if isinstance(item.get(key), str)}
            return named | self.value({key: value for key, value in item.items() if key not in named})
        return self.value(item)


def find_secrets(start: bytes) -> set[str]:
    """Return names of hosts and users to look for: those in the start of a file, and this machine's own."""
    found = {match.decode("utf-8", "replace") for match in (*_HOST.findall(start), *_HOME.findall(start))}
    with suppress(OSError):
        found.add(socket.gethostname())
    with suppress(OSError, KeyError, ImportError):
        found.add(getpass.getuser())
    return {name for name in found if len(name) >= _SHORTEST_SECRET and name.lower() not in _COMMON}
