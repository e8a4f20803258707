"""The names that coding sites offer to a submitted function without an import.

Explicit, because a star import of `math` or `operator` hides builtins (`pow`) and would supply the very function that
a test asks for; `find_function` also refuses a prelude name as the program's own.
"""

from __future__ import annotations

import bisect
import collections
import copy
import datetime
import fractions
import functools
import heapq
import itertools
import json
import math
import operator
import os
import random
import re
import statistics
import string
import sys
import time
import typing
from types import ModuleType
from typing import Any, Final

_MODULES: Final[tuple[ModuleType, ...]] = (
    bisect,
    collections,
    copy,
    datetime,
    functools,
    heapq,
    itertools,
    json,
    math,
    operator,
    os,
    random,
    re,
    statistics,
    string,
    sys,
    time,
    typing,
)
_NAMES: Final[tuple[tuple[ModuleType, str], ...]] = (
    (
        typing,
        "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List Literal Mapping "
        "NamedTuple Optional Sequence Set Tuple Type TypeVar Union",
    ),
    (collections, "ChainMap Counter OrderedDict defaultdict deque namedtuple"),
    (functools, "cache cached_property cmp_to_key lru_cache partial reduce total_ordering wraps"),
    (heapq, "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest"),
    (bisect, "bisect_left bisect_right insort insort_left insort_right"),
    (
        itertools,
        "accumulate chain combinations combinations_with_replacement count cycle groupby islice pairwise "
        "permutations product repeat starmap takewhile zip_longest",
    ),
    (math, "ceil comb cos exp factorial floor gcd hypot inf isqrt lcm log log10 log2 perm pi sin sqrt tan"),
    (string, "ascii_letters ascii_lowercase ascii_uppercase digits"),
    (copy, "deepcopy"),
    (fractions, "Fraction"),
)


def names() -> dict[str, Any]:
    offered: dict[str, Any] = {module.__name__: module for module in _MODULES}
    for module, listed in _NAMES:
        for name in listed.split():
            offered[name] = getattr(module, name)
    return offered
