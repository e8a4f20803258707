"""Mixed answers for the daemon, with a share made to hurt it: hangs, floods, memory bombs, forks."""

from __future__ import annotations

import random

from tests.benchmarks.reward_rig import Item, code_item, full_mix, math_item, plain_mix

ADD = "a, b = map(int, input().split())\nprint(a + b)"
POISON_PROGRAMS = {
    "busy hang": "while True: pass",
    "hang that ignores signals": (
        "import signal, time\nfor n in range(1, 60):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\ntime.sleep(600)"
    ),
    "flood": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "memory bomb": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "daemons": (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(600)\n"
        "a, b = map(int, input().split())\nprint(a + b)"
    ),
    "file bomb": "with open('big', 'wb') as f:\n    while True: f.write(bytes(1 << 20))",
}
POISON_ANSWERS = (
    r"\frac{5^{5^{5^{5^5}}}-5}{16}",
    r"9^{9^{9^9}}",
    r"((9!)!)!",
    r"\binom{10^9}{5 \cdot 10^8}",
    r"\sum_{k=1}^{10^{12}} \frac{1}{k^k}",
    "{" * 5000 + "1" + "}" * 5000,
    r"(x+y+z+w)^{200}",
    "3." + "1" * 50_000,
)
CODE_SHARE = 0.2


def mixed_items(num: int, *, share_of_poison: float, seed: int) -> list[Item]:
    """One in five items a program, the rest plain and harder mathematics by halves.

    The poisoned list is the clean one with every so many-th item replaced: half of them programs, half answers.
    """
    rng = random.Random(seed)
    math = [*plain_mix(num // 2, seed=seed), *full_mix(num - num // 2, seed=seed)]
    rng.shuffle(math)
    items = [
        code_item(index, ADD, answer=index + 2) if rng.random() < CODE_SHARE else item
        for index, item in enumerate(math)
    ]
    if not share_of_poison:
        return items
    programs = list(POISON_PROGRAMS.values())
    for count, index in enumerate(range(0, num, round(1 / share_of_poison))):
        if count % 2:
            items[index] = math_item(f"Attempt {index}", "7", POISON_ANSWERS[count // 2 % len(POISON_ANSWERS)])
        else:
            items[index] = code_item(index, programs[count // 2 % len(programs)], answer=index + 2)
    return items
