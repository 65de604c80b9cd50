"""Texts as they may be shown: no control characters, no line breaks. Imports nothing."""


def printable(text: str) -> str:
    r"""The text with control characters written out: an escape sequence in a name must not reach a terminal.

    Line breaks and tabs stay.

    Example:
        >>> print(printable("tier \x1b]0;mine\x07"))
        tier \x1b]0;mine\x07
    """
    if text.isprintable():
        return text
    return "".join(letter if letter in "\n\t" or not _is_control(letter) else _written(letter) for letter in text)


def _is_control(letter: str) -> bool:
    # Control characters, signs that reverse the direction of writing, and halves of characters, which no file can hold.
    return ord(letter) < 32 or 127 <= ord(letter) < 160 or "\u202a" <= letter <= "\u202e" or _is_half(letter)


def _is_half(letter: str) -> bool:
    return "\ud800" <= letter <= "\udfff"


def _written(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def one_line(text: str) -> str:
    """The text without line breaks and control characters.

    Example:
        >>> one_line("a  b ")
        'a b'
    """
    return printable(" ".join(text.split()))
