"""Exceptions of the math verifier; only `VerifierFault` leaves the package."""


class VerifierFault(RuntimeError):
    """The verifier itself failed. It says nothing about the answer and must never become a score."""


class Unparsed(Exception):
    """The text is no formula of the grammar."""


class Hedge(Exception):
    """The text offers alternatives in place of an answer ("7 (or 8)")."""


class TooComplex(Exception):
    """Evaluating the formula could exceed the static limits of `guard`."""


class Undefined(Exception):
    """The formula has no value (a division by zero)."""
