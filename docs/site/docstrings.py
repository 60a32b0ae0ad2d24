"""How the reference reads docstrings: a blank line goes before each part.

The docstrings of rayrec write Args, Returns and Raises one under the other. The parser wants a
blank line before each, and takes what follows without one for text of the part above.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

PART = re.compile(
    r"(?<=\n)((?:Args|Attributes|Returns|Yields|Raises|Example|Cost|Costs|Source):)", re.MULTILINE
)


class SeparateParts(griffe.Extension):
    """Puts the blank lines in before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = PART.sub(r"\n\1", obj.docstring.value)
