"""An extension of griffe, which reads docstrings: their formulas, written for Sphinx, become blocks and code spans."""

import re
import textwrap

import griffe

BLOCK = re.compile(r"^( *)\.\. math:: (.+(?:\n\1 +\S.*)*)", flags=re.M)
SPAN = re.compile(r":math:`([^`]+)`")


class MathAsText(griffe.Extension):
    """Makes formulas readable on a page that has no library for them."""

    def on_object(self, *, obj, **options):
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """The docstring with its formulas as text."""

    def block(match: re.Match) -> str:
        indent, body = match.groups()
        lines = textwrap.dedent(f"{' ' * 200}{body}" if "\n" not in body else body).strip().splitlines()
        inside = "\n".join(f"{indent}{line.strip()}" for line in lines)
        return f"{indent}```tex\n{inside}\n{indent}```"

    # The section that is a block of code is called Examples; under another name it would be read as prose.
    return re.sub(r"^Example:$", "Examples:", SPAN.sub(r"`\1`", BLOCK.sub(block, text)), flags=re.M)
