"""The strict rule of DAPO's published recipe: the last `Answer: ...` near the end, normalised, compared as a string.

The normalisation follows the final-answer rule of Minerva (Lewkowycz et al. 2022, arXiv 2206.14858, appendix D.1), with
the recipe's word list. It is narrow on purpose: "Answer: 42." and "**Answer:** 42" are wrong, as in the recipe.
"""

from __future__ import annotations

import re

WINDOW = 300  # characters from the end in which an answer is looked for
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# Literal replacements, applied in this order: articles and spacing first, so that the unit words below match.
_REPLACE = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip

# Removed wherever they stand, in this order. "sue" and "childrentickets" are oddities of the published list.
_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
)
_MARKUP = (
    "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}",
    "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip

# LaTeX wrappers give way to what they hold.
_UNWRAP = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(.*?)\$(.*?)\$(.*)", r"$\2$"),
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
    )
)


def normalise(answer: str) -> str:
    """The form in which two final answers are compared."""
    answer = answer.rsplit("=", 1)[-1]
    for old, new in _REPLACE:
        answer = answer.replace(old, new)
    for gone in (*_UNITS.split(), *_MARKUP):
        answer = answer.replace(gone, "")
    for pattern, replacement in _UNWRAP:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


def predicted(text: str) -> str | None:
    """The normalised final answer in the last 300 characters of `text`; None where there is none."""
    found = _ANSWER.findall(text[-WINDOW:])
    return normalise(found[-1]) if found else None


def is_correct(text: str, truth: str) -> bool:
    return predicted(text) == normalise(truth)
