"""Spelling: one plain LaTeX form for the many ways to write the same characters."""

from __future__ import annotations

import re
import unicodedata

_ENDINGS = ".,;:?"
_MAX_LAYERS = 20
_SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni", strict=True))
_SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙᵢ", "0123456789+-=()ni", strict=True))
_SUPER_RUN = re.compile("[" + "".join(_SUPER) + "]+")
_SUB_RUN = re.compile("[" + "".join(_SUB) + "]+")
_GREEK = {
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "δ": "delta",
    "ε": "epsilon",
    "ζ": "zeta",
    "η": "eta",
    "θ": "theta",
    "ι": "iota",
    "κ": "kappa",
    "λ": "lambda",
    "μ": "mu",
    "ν": "nu",
    "ξ": "xi",
    "π": "pi",
    "ρ": "rho",
    "σ": "sigma",
    "τ": "tau",
    "υ": "upsilon",
    "φ": "phi",
    "ϕ": "phi",
    "χ": "chi",
    "ψ": "psi",
    "ω": "omega",
    "Γ": "Gamma",
    "Δ": "Delta",
    "Θ": "Theta",
    "Λ": "Lambda",
    "Ξ": "Xi",
    "Π": "Pi",
    "Σ": "Sigma",
    "Φ": "Phi",
    "Ψ": "Psi",
    "Ω": "Omega",
    "ϵ": "epsilon",
    "ϑ": "theta",
}
_TABLE: dict[int, str] = {ord(k): f"\\{v} " for k, v in _GREEK.items()}
_TABLE |= {ord(c): "-" for c in "−–—‒‐‑﹣－"}
_TABLE |= {ord(c): "" for c in "\u200b\u200c\u200d\u2060\ufeff\u200e\u200f\u00ad\u2061\u2062\u2063"}
_TABLE |= {ord(c): r"\," for c in "\u202f\u2009\u00a0\u2007\u200a\u2008\u2006\u2005"}
_TABLE |= {ord(c): " " for c in "\u3000\u2002\u2003\u2004\u2028\u2029"}
_TABLE |= {i: " " for i in (0x0B, 0x0C)} | {i: "" for i in range(0x00, 0x09)}
_TABLE |= {
    ord(k): v
    for k, v in {
        "×": r"\times ",
        "✕": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "∙": r"\cdot ",
        "∗": "*",
        "÷": "/",
        "⁄": "/",
        "∕": "/",
        "∞": r"\infty ",
        "≤": r"\leq ",
        "≥": r"\geq ",
        "⩽": r"\leq ",
        "⩾": r"\geq ",
        "≠": r"\neq ",
        "∈": r"\in ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∖": r"\setminus ",
        "∅": r"\emptyset ",
        "⌀": r"\emptyset ",
        "ø": r"\emptyset ",
        "Ø": r"\emptyset ",
        "°": r"^{\circ}",
        "º": r"^{\circ}",
        "˚": r"^{\circ}",
        "±": r"\pm ",
        "∓": r"\mp ",
        "√": r"\sqrt ",
        "∛": r"\sqrt[3] ",
        "∜": r"\sqrt[4] ",
        "≡": r"\equiv ",
        "≈": r"\approx ",
        "∨": r"\lor ",
        "∧": r"\land ",
        "⟨": r"\langle ",
        "⟩": r"\rangle ",
        "〈": r"\langle ",
        "〉": r"\rangle ",
        "ℝ": r"\mathbb{R}",
        "ℤ": r"\mathbb{Z}",
        "ℕ": r"\mathbb{N}",
        "ℚ": r"\mathbb{Q}",
        "ℂ": r"\mathbb{C}",
        "…": r"\ldots ",
        "⋯": r"\ldots ",
        "∶": ":",
        "：": ":",
        "‘": "'",
        "’": "'",
        "′": "'",
        "“": '"',
        "”": '"',
        "€": r"\euro ",
        "£": r"\pounds ",
        "¥": r"\yen ",
        "∑": r"\sum ",
        "∏": r"\prod ",
        "∫": r"\int ",
        "⌊": r"\lfloor ",
        "⌋": r"\rfloor ",
        "⌈": r"\lceil ",
        "⌉": r"\rceil ",
        "∣": "|",
        "、": ",",
        "∠": "",
        "→": r"\to ",
        "⇒": r"\implies ",
        "ℯ": "e",
        "ⅈ": "i",
        "％": "%",
        "。": ".",
    }.items()
}
for _char in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞":
    _top, _bottom = unicodedata.normalize("NFKC", _char).split("⁄")
    _TABLE[ord(_char)] = rf"\frac{{{_top}}}{{{_bottom}}}"

_SIZING = re.compile(
    r"\\(?:left|right|middle)\s*\.|\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits"
    r"|nolimits|hfill|noindent|centering|bf|rm|it|Large|large|huge|Huge)(?![A-Za-z])"
)
_MATH_MARKS = re.compile(r"\\\\(?:\[[^\]\\]{0,20}\])?|\\([()\[\]])|(?<!\\)\$")
_COMMENT_SPACE = re.compile(
    r"\\(?:quad|qquad|enspace|thinspace|hspace\*?\{[^{}]*\}|vspace\*?\{[^{}]*\}|phantom\{[^{}]*\})(?![A-Za-z])"
)
_ALIGNED = re.compile(r"\\(?:begin|end)\s*\{(?:aligned|align\*?|gathered|split|equation\*?|gather\*?)\}")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_COLOUR = re.compile(r"\\(?:text)?color\s*\{[A-Za-z]+\}|\\(?:underline|ensuremath|mathopen|mathclose)(?![A-Za-z])")
_UNIT_FRAC = re.compile(
    r"\\frac\s*\{\s*\\(?:text|mathrm)\{\s*(\w+)\s*\}\s*\}\s*"
    r"\{\s*\\(?:text|mathrm)\{\s*(\w+)\s*\}\s*((?:\^\{?\d\}?)?)\s*\}"
)
_FRAC = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_BOX = re.compile(r"^\\(?:boxed|fbox|framebox|mathbox)\s*\{")
_EQUALS_BOX = re.compile(r"=\s*\\(?:boxed|fbox)\s*\{")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,\\!|\{,\\!\}|\\!,|\{\\,\}|\\,|\\ |~)\d{3})+(?!\d)")
_SPACED_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?!\d)(?=\s*(?:$|\\text|\\mathrm|\\%|%|[A-Za-z]))")
_NOT_DIGIT = re.compile(r"\D+")
_EMPHASIS = re.compile(r"^[*_`\s]+|[*_`\s]+$")
_LABEL = re.compile(
    r"^(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|ans|result|value)\s*(?:is\s*:?|:|=)\s*|^(?:equals|equal to)\s+",
    re.I,
)
_TEXT_LABEL = re.compile(
    r"^\\(?:text|textbf|mathrm|mbox|textrm)\s*\{[^{}=]*[A-Za-z]{2}[^{}=]*\}\s*=\s*"
    r"|^\\(?:text|textbf|mathrm|mbox|textrm)\s*\{\s*(?:the\s+)?(?:final\s+)?(?:answer|ans|result)\s*(?:is)?\s*[:=]?\s*\}\s*[:=]?\s*",
    re.I,
)
_END_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textrm)\s*\{\s*[.,;:]*\s*\}$")


def closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the one at `start`, or -1; one pass, `\\{` and `\\}` are characters."""
    depth = 0
    i, n = start, len(text)
    while i < n:
        c = text[i]
        if c == "\\":
            i += 2
            continue
        if c == "{":
            depth += 1
        elif c == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return -1


def to_ascii(text: str) -> str:
    """Unicode mathematics as LaTeX commands; full-width and styled letters as plain ones."""
    if text.isascii() and text.isprintable():
        return text
    text = _SUPER_RUN.sub(lambda m: "^{" + "".join(_SUPER[c] for c in m[0]) + "}", text)
    text = _SUB_RUN.sub(lambda m: "_{" + "".join(_SUB[c] for c in m[0]) + "}", text)
    text = re.sub(r"√\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}", text)
    text = text.translate(_TABLE)
    return text if text.isascii() else unicodedata.normalize("NFKC", text).translate(_TABLE)


def clean(text: str) -> str:
    """The answer without delimiters, sizing, emphasis, thousands marks and closing punctuation."""
    text = to_ascii(text)
    if "\\" in text or "$" in text:
        text = _MATH_MARKS.sub(lambda m: m[0][:2] if m[0].startswith("\\\\") else " ", text)
        text = _SIZING.sub(" ", text)
        text = _COMMENT_SPACE.sub(" ", text)
        text = _COLOUR.sub("", _UNIT_FRAC.sub(r"\\text{\1}/\\text{\2}\3", _FRAC.sub(r"\\frac", text)))
        if "\\begin" in text and _ALIGNED.search(text):
            text = _ALIGNED.sub(" ", text)
            text = text if "\\begin" in text else text.replace("&", " ")
        text = _EQUALS_BOX.sub("= {", text) if "box" in text else text
    text = text.strip()
    for _ in range(_MAX_LAYERS):
        previous = text
        text = _EMPHASIS.sub("", text) if not text.endswith("\\") else text
        text = _TEXT_LABEL.sub("", _LABEL.sub("", _END_TEXT.sub("", text)))
        box = _BOX.match(text) if "box" in text else None
        if box and closing_brace(text, box.end() - 1) == len(text) - 1:
            text = text[box.end() : -1]
        elif text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text and text[-1] in _ENDINGS and not text.endswith("..") and not text.endswith("\\" + text[-1]):
            text = text[:-1]
        for space in (r"\,", r"\;", r"\:", r"\!", r"\ ", "~", "\\"):
            text = text.removesuffix(space) if not text.endswith("\\" + space) else text
            text = text.removeprefix(space) if space != "\\" else text
        text = text.strip()
        if text == previous:
            break
    if any(c.isdigit() for c in text):
        text = _THOUSANDS.sub(lambda m: _NOT_DIGIT.sub("", m[0]), text)
        spaced = _SPACED_THOUSANDS.match(text)
        if spaced:
            text = spaced[0].replace(" ", "") + text[spaced.end() :]
        text = re.sub(r"(?<=\d)\{,\}(?=\d)", ".", text) if "{,}" in text else text
        text = _TIMES_TEN.sub(r"\\times ", text)
    return text


_GLUE = re.compile(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])")


def canonical(text: str) -> str:
    """A cleaned answer without insignificant blanks: equal strings are equal answers."""
    return _GLUE.sub("", text) if " " in text or "\n" in text or "\t" in text else text
