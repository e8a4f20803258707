"""What is said of a metric, and how its name becomes one of Prometheus's."""

import re
from dataclasses import dataclass
from functools import cached_property

PREFIX = "slipstream_"
_PART = re.compile(r"<([a-z_]+)>")
_BAD = re.compile(r"[^a-zA-Z0-9_]+")


@dataclass(frozen=True)
class Metric:
    """One row of the table of metrics.

    Attributes:
        name: as in metrics.jsonl, status and heartbeats; `<part>` stands for any text.
        unit: "1" for shares and plain numbers.
        normal: the range of a healthy run; "" when any value may be healthy.
        action: what to do outside of it.
        counter: it only grows while its process (or, at the coordinator, the run) lives.
        record: also a field of each line of metrics.jsonl.
    """

    name: str
    unit: str
    meaning: str
    normal: str = ""
    action: str = ""
    counter: bool = False

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of the parts that vary."""
        return tuple(_PART.findall(self.name))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names that this row is about, with a group per label."""
        pieces = _PART.split(self.name)
        fixed = (re.escape(piece) if number % 2 == 0 else f"(?P<{piece}>.+)" for number, piece in enumerate(pieces))
        return re.compile("".join(fixed))

    @cached_property
    def family(self) -> str:
        """Prometheus family without the suffix of counters: labels are named in it, so that no two rows share one."""
        fixed = _BAD.sub("_", _PART.sub("", self.name)).strip("_")
        return PREFIX + fixed + ("_by_" + "_".join(self.labels) if self.labels else "")

    @property
    def sample(self) -> str:
        """Name of the samples that Prometheus scrapes."""
        return self.family + ("_total" if self.counter else "")


@dataclass(frozen=True)
class Family:
    """A Prometheus family that is no metric of one name: labels come from the roles themselves."""

    name: str
    labels: tuple[str, ...]
    unit: str
    meaning: str
    normal: str = ""
    action: str = ""

    @property
    def sample(self) -> str:
        """Name of its samples."""
        return self.name
