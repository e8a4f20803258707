"""Units of measure: names, sizes in base units, dimensions."""

from __future__ import annotations

from fractions import Fraction

Dims = tuple[tuple[str, int], ...]

_F = Fraction
# name -> (size in base units, dimension); base units: m, g, s, degree, dollar, byte
_BASE: dict[str, tuple[Fraction, str]] = {}


def _define(dim: str, table: dict[str, Fraction | int]) -> None:
    for names, size in table.items():
        for name in names.split():
            _BASE[name] = (_F(size), dim)


_define(
    "length",
    {
        "m meter metre": 1,
        "km kilometer kilometre": 1000,
        "cm centimeter centimetre": _F(1, 100),
        "mm millimeter millimetre": _F(1, 1000),
        "dm decimeter decimetre": _F(1, 10),
        "nm nanometer": _F(1, 10**9),
        "in inch inches": _F(254, 10000),
        "ft foot feet": _F(3048, 10000),
        "yd yard": _F(9144, 10000),
        "mi mile": _F(1609344, 1000),
    },
)
_define(
    "mass",
    {
        "g gram gramme": 1,
        "kg kilogram kilo": 1000,
        "mg milligram": _F(1, 1000),
        "ton tonne": 10**6,
        "lb lbs pound": _F(45359237, 100000),
        "oz ounce": _F(45359237, 1600000),
    },
)
_define(
    "time",
    {
        "s sec second": 1,
        "ms millisecond": _F(1, 1000),
        "min minute": 60,
        "h hr hour": 3600,
        "d day": 86400,
        "week": 604800,
        "month": 2629746,
        "yr year": 31556952,
    },
)
_define("angle", {"degree deg": 1})
_define("money", {"dollar usd": 1, "cent": _F(1, 100)})
_define("euro", {"euro eur": 1})
_define("sterling", {"gbp": 1})
_define("yuan", {"yuan rmb": 1})
_define("rupee", {"rupee rs": 1})
_define(
    "volume",
    {
        "l L liter litre": _F(1, 1000),
        "ml mL milliliter millilitre": _F(1, 10**6),
        "gallon gal": _F(3785411784, 10**12),
        "cc": _F(1, 10**6),
    },
)
_define("force", {"N newton": 1})
_define("energy", {"J joule": 1, "kJ": 1000, "cal calorie": _F(4184, 1000), "eV": _F(1602176634, 10**28)})
_define("power", {"W watt": 1, "kW kilowatt": 1000})
_define("pressure", {"Pa pascal": 1, "kPa": 1000, "atm": 101325})
_define("charge", {"C coulomb": 1})
_define("voltage", {"V volt": 1})
_define("current", {"A ampere amp": 1})
_define("frequency", {"Hz hertz": 1, "kHz": 1000, "MHz": 10**6})
_define("data", {"byte": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3})
_define("celsius", {"celsius": 1})
_define("fahrenheit", {"fahrenheit": 1})
_define("kelvin", {"K kelvin": 1})
_define("mole", {"mol mole": 1})

COMPOUND: dict[str, tuple[Fraction, Dims]] = {
    "mph": (_F(1609344, 3600000), (("length", 1), ("time", -1))),
    "kmh": (_F(1000, 3600), (("length", 1), ("time", -1))),
    "kph": (_F(1000, 3600), (("length", 1), ("time", -1))),
    "acre": (_F(40468564224, 10**7), (("length", 2),)),
    "hectare": (_F(10000), (("length", 2),)),
    "ha": (_F(10000), (("length", 2),)),
}

GENERIC = frozenset({"unit", "units", "rad", "radian", "radians", "sq", "square", "cubic", "cu"})
MULTIPLIERS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
PERCENT_WORDS = frozenset({"percent", "pct", "percentage"})


def lookup(word: str) -> tuple[Fraction, Dims] | None:
    """Size in base units and dimensions of a unit name, or None for another word.

    A volume is a length cubed, so that 1 L = 1000 cm^3.
    """
    for form in (word, word.lower()):
        for name in (form, form[:-1] if form.endswith("s") and len(form) > 2 else form):
            if name in COMPOUND:
                return COMPOUND[name]
            if name in _BASE:
                size, dim = _BASE[name]
                return size, ((("length", 3),) if dim == "volume" else ((dim, 1),))
    return None


def combine(left: tuple[Fraction, Dims], right: tuple[Fraction, Dims], power: int) -> tuple[Fraction, Dims]:
    """`left * right**power` in size and dimensions."""
    dims = dict(left[1])
    for name, exponent in right[1]:
        dims[name] = dims.get(name, 0) + exponent * power
    return left[0] * right[0] ** power, tuple(sorted((k, v) for k, v in dims.items() if v))
