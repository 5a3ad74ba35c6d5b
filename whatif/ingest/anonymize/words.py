"""Words that may stay in a shared trace, and stand-ins for all others, which may name people or projects."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

# A run of capitals, or of small letters with the capital before it; other scripts are no words of torch's.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\x00-\x7f]+")
_TOKEN = re.compile(r"[A-Za-z0-9]{6,}")
_SWITCH = re.compile(r"(?<=[0-9])(?=[A-Za-z])|(?<=[A-Za-z])(?=[0-9])|(?<=[a-z])(?=[A-Z])")
# Number formats and sizes, which look like keys.
_FORMAT = re.compile(r"[a-z]*\d?e[2-5]m[0-7]\w{0,4}|\d+(?:x\d+)+|(?:\d{1,2}[cde]{1,3})+\d{0,2}")
_STAND_IN = re.compile(r"[Aa]non[a-j]{1,7}")
# A word of two known ones, each at least this long, is known: "fusedgemm".
_LONG = 4
# Kernels are named by compilers: short words are template arguments there, and "f16f16f32" are number formats.
_SHORT_IN_KERNELS = 3
_KERNEL_FORMAT = re.compile(r"(?:[A-Za-z]{1,3}\d{1,3}){2,}")
_LONG_NUMBER = re.compile(r"\d{9}")
_LETTERS = str.maketrans("0123456789", "abcdefghij")


@cache
def known_words() -> frozenset[str]:
    """Return the words that names in traces are made of, in lower case (words.txt)."""
    text = (resources.files("whatif.ingest.anonymize") / "words.txt").read_text(encoding="utf-8")
    return frozenset(word for line in text.splitlines() if not line.startswith("#") for word in line.split())


class Words:
    """Replaces each unknown word by a stand-in, the same everywhere, so that what is distinct stays distinct."""

    def __init__(self) -> None:
        self._stand_ins: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._stand_ins)

    def __call__(self, text: str, *, kernel: bool = False) -> str:
        """Return ``text`` with stand-ins for unknown words; in the name of a ``kernel`` short words stay as well."""
        text = _TOKEN.sub(lambda found: self._token(found[0], kernel), text)
        return _WORD.sub(lambda found: self._word(found[0], kernel), text)

    def _token(self, token: str, kernel: bool) -> str:
        """Replace a token that looks like a key: letters and digits in turns, with no known word in it."""
        if _LONG_NUMBER.search(token) and not (kernel and token.isdecimal()):  # a kernel's may be a compiler's hash
            return self._instead(token)
        least = 4 if kernel else 3 if len(token) < 12 else 2
        is_format = _FORMAT.fullmatch(token) or (kernel and _KERNEL_FORMAT.fullmatch(token))
        if is_format or len(_SWITCH.findall(token)) < least or token.lower() in known_words():
            return token
        if any(len(word) >= _LONG and self._is_known(word, kernel=False) for word in _WORD.findall(token)):
            return token
        return self._instead(token)

    def _word(self, word: str, kernel: bool) -> str:
        return word if self._is_known(word, kernel) else self._instead(word)

    def _is_known(self, word: str, kernel: bool) -> bool:
        if len(word) == 1 and word.isascii():
            return True
        if (kernel and len(word) <= _SHORT_IN_KERNELS and word.isascii()) or _STAND_IN.fullmatch(word):
            return True
        known, word = known_words(), word.lower()
        return word in known or any(
            word[:at] in known and word[at:] in known for at in range(_LONG, len(word) - _LONG + 1)
        )

    def _instead(self, word: str) -> str:
        number = self._stand_ins.setdefault(word, str(len(self._stand_ins) + 1).translate(_LETTERS))
        return ("Anon" if word[:1].isupper() else "anon") + number
