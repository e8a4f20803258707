"""Word lists of the grammar: functions, commands, connectives and the words around an answer."""

from __future__ import annotations


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


def _map(pairs: str) -> dict[str, str]:
    return dict(pair.split(":", 1) for pair in pairs.split())


FUNCTIONS = _set(
    "Im Re abs arccos arccot arcsin arctan arg binom ceil cos cosh cot csc deg det dim exp factorial floor gcd "
    "ker lcm lg ln log max min sec sin sinh sqrt tan tanh"
)
PLAIN_COMMANDS = _map(
    "mod:mod pi:pi infinity:infty infty:infty inf:infty oo:infty theta:theta alpha:alpha beta:beta gamma:gamma "
    "lambda:lambda phi:phi union:cup times:times degrees:deg. degree:deg. deg:deg. emptyset:emptyset "
    "asin:arcsin acos:arccos atan:arctan frac:frac cdot:cdot leq:leq geq:geq pm:pm"
)
CONNECTIVES = _map("and:and or:or OR:or AND:and")
FILLERS = _set(
    "a about all an answer approximately are both either equal equals exactly get have i.e. is of so the there "
    "to total value was we"
)
RELATIONS = _map(
    "=:= <:< >:> lt:< gt:> le:<= leq:<= leqslant:<= ge:>= geq:>= geqslant:>= ne:!= neq:!= in:in equiv:equiv "
    "approx:approx"
)
GREEK = _set(
    "Delta Gamma Lambda Omega Phi Pi Psi Sigma Theta Xi aleph alpha beta chi delta ell epsilon eta gamma hbar "
    "iota kappa lambda mu nu omega phi psi rho sigma tau theta upsilon varepsilon varphi vartheta xi zeta"
)
DOTS = _set("cdots dots dotsb dotsc dotsm ldots")
SET_OPS = _map("cup:union cap:intersection setminus:minus backslash:minus bigcup:union")
CURRENCY = _map("$:dollar pounds:gbp euro:euro yen:yuan textdollar:dollar texteuro:euro")
MATRICES = _set("Bmatrix array bmatrix matrix pmatrix smallmatrix")
STOP_WORDS = _set(
    "but divided except for if incorrect maybe minus mod nor not otherwise over perhaps plus possibly then "
    "times unless versus vs when where which wrong"
)
SYMBOL_WORDS = _set("alpha beta gamma inf infinity infty lambda oo phi pi theta")
NUMBER_WORDS = _map(
    "zero:0 one:1 two:2 three:3 four:4 five:5 six:6 seven:7 eight:8 nine:9 ten:10 eleven:11 twelve:12 thirteen:13 "
    "fourteen:14 fifteen:15 sixteen:16 seventeen:17 eighteen:18 nineteen:19 twenty:20"
)
