"""Texts as they may be shown: no control characters, no line breaks. Imports nothing of the package."""

from typing import Any

LONGEST = 100  # characters of a value in an error
LONGEST_REASON = 500  # characters of what a user's code says about its failure


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


def shown(value: Any) -> str:
    """A value for an error: on one line, cut short.

    Example:
        >>> shown(0.5), shown([0] * 100)[-8:]
        ('0.5', ', 0, ...')
    """
    try:
        text = one_line(repr(value))
    except ValueError:  # Python does not write out whole numbers of thousands of digits
        return "a number of thousands of digits"
    except Exception:  # an object of the user's, which cannot even be shown
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def reason_of(error: BaseException) -> str:
    """Why a user's code failed, for a sentence: on one line, cut short, or else the name of the error.

    Example:
        >>> reason_of(TypeError("f() got an unexpected keyword argument 'x'")), reason_of(KeyError())
        ("f() has no argument 'x'", 'KeyError')
    """
    reason = one_line(words_of(error)).replace("got an unexpected keyword argument", "has no argument")
    if len(reason) > LONGEST_REASON:  # its beginning and its end say what is wrong
        reason = f"{reason[: LONGEST_REASON // 2]} ... {reason[-LONGEST_REASON // 2 :]}"
    return reason or type(error).__name__


def words_of(error: BaseException) -> str:
    """What an error says; of a user's own, which need not be able to say anything, that it does not.

    Example:
        >>> words_of(ValueError("too large"))
        'too large'
    """
    try:
        return str(error)
    except Exception:  # a user's code can raise anything
        return "it cannot be shown"
