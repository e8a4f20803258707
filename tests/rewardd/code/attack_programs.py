"""Programs that try for a pass without solving the task, as `add(a, b)`, as a stdin program, or against the limits."""

EVERYTHING_EQUAL = """
class E({base}):
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __lt__(self, o): return True
    __gt__ = __le__ = __ge__ = __contains__ = __lt__
    def __sub__(self, o): return 0
    __rsub__ = __add__ = __radd__ = __mul__ = __abs__ = __float__ = __round__ = __sub__
    def __bool__(self): return True
    def __hash__(self): return 3
def add(a, b): return E()
"""

ADD_ATTACKS = {
    "exit at load": """
import os
os._exit(0)
""",
    "exit in the call": """
import os
def add(a, b): os._exit(0)
""",
    "sys.exit in the call": """
import sys
def add(a, b): sys.exit(0)
""",
    "excepthook": """
import sys, os
sys.excepthook = lambda *a: os._exit(0)
def add(a, b): return 99
""",
    "atexit": """
import atexit, os
atexit.register(lambda: os._exit(0))
def add(a, b): return 99
""",
    "equal object": EVERYTHING_EQUAL.format(base="object"),
    "equal int": EVERYTHING_EQUAL.format(base="int"),
    "equal list": EVERYTHING_EQUAL.format(base="list"),
    "equal str": EVERYTHING_EQUAL.format(base="str"),
    "class in place of the function": """
class add:
    def __init__(self, a, b): pass
    def __eq__(self, o): return True
    __hash__ = None
    def __contains__(self, o): return True
""",
    "metaclass": """
class M(type):
    def __eq__(c, o): return True
    def __hash__(c): return 1
class E(metaclass=M): pass
def add(a, b): return E
""",
    "forged class": """
class E:
    @property
    def __class__(self): return int
    def __eq__(self, o): return True
def add(a, b): return E()
""",
    "patched builtins": """
import builtins
for n in ('all', 'any', 'len', 'type', 'isinstance', 'abs', 'sorted', 'eval', 'exec', 'compile'):
    setattr(builtins, n, lambda *a, **k: True)
def add(a, b): return 99
""",
    "patched json": """
import json
json.loads = lambda *a, **k: True
json.dumps = lambda *a, **k: '"x"'
json.JSONEncoder.encode = lambda *a, **k: '{}'
def add(a, b): return 99
""",
    "frames": """
import sys
def add(a, b):
    f = sys._getframe()
    while f:
        for space in (f.f_globals, f.f_locals):
            for name in list(space):
                if name != 'add' and callable(space[name]):
                    space[name] = lambda *a, **k: True
        f = f.f_back
    return 99
""",
    "garbage collector": """
import gc
def add(a, b):
    for o in gc.get_objects():
        if isinstance(o, dict) and 'passed' in o: o['passed'] = lambda *a: None
    return 99
""",
    "writes to every descriptor": r"""
import os
for fd in range(3, 64):
    for text in (b'{"unit":0,"state":"passed"}\n', b'{"state":"done"}\n', b'["value",[3,[]],null]\n',
                 b'{"value":[3,[]]}\n'):
        try: os.write(fd, text)
        except OSError: pass
def add(a, b): return 99
""",
    "tests module replaced": """
import sys, types
m = types.ModuleType('tests')
sys.modules['tests'] = m
sys.modules['pytest'] = m
sys.modules['__main__'] = m
def add(a, b): return 99
""",
    "signals": """
import os, signal
for p in [1, os.getppid(), -1]:
    for s in (signal.SIGTERM, signal.SIGUSR1):
        try: os.kill(p, s)
        except OSError: pass
def add(a, b): return 99
""",
    "stop iteration": """
def add(a, b): raise StopIteration
""",
    "assertion swallowed": """
def add(a, b): raise GeneratorExit
""",
    "another name": """
def plus(a, b): return a + b
""",
    "thread that outlives": """
import threading, os, time
threading.Thread(target=lambda: (time.sleep(.2), os._exit(0))).start()
def add(a, b): return 99
""",
    "generator": """
def add(a, b): yield 3
""",
    "coroutine": """
async def add(a, b): return 3
""",
    "own all, sorted, abs": """
def all(x): return True
any = sorted = abs = len = isinstance = all
def add(a, b): return 99
""",
    "bool": """
def add(a, b): return True
""",
    "string": """
def add(a, b): return '3'
""",
}

STDIN_ATTACKS = {
    "searches its memory": """
import re
print('begin')
for line in open('/proc/self/maps'):
    if 'rw' in line:
        a, b = [int(v, 16) for v in line.split()[0].split('-')]
        try:
            f = open('/proc/self/mem', 'rb'); f.seek(a)
            m = re.search(bytes(reversed(b'TERCES')) + rb'-[0-9]{6}', f.read(b - a))
        except (OSError, ValueError, OverflowError): continue
        if m: print(m.group(0).decode())
""",
    "reads /proc of everyone": """
import os
for p in os.listdir('/proc'):
    for name in ('environ', 'cmdline', 'mem', 'maps'):
        try: print(open(f'/proc/{p}/{name}', 'rb').read(100000).decode('latin-1')[-20:])
        except OSError: pass
""",
    "reads descriptors": """
import os
for fd in range(3, 1024):
    try: print(os.pread(fd, 1000, 0))
    except OSError: pass
""",
}

# Each prints what one forbidden system call gave.
REFUSED_CALLS = {
    "raw clone into a user namespace": """
import ctypes
print(ctypes.CDLL(None).syscall(56, 0x10000011, 0, 0, 0, 0))
""",
    "unshare": """
import ctypes
print(ctypes.CDLL(None).unshare(0x10000000))
""",
    "process_vm_readv": """
import ctypes
print(ctypes.CDLL(None).syscall(310, 1, 0, 0, 0, 0, 0))
""",
    "io_uring": """
import ctypes
print(ctypes.CDLL(None).syscall(425, 1, 0))
""",
    "bpf": """
import ctypes
print(ctypes.CDLL(None).syscall(321, 0, 0, 0))
""",
    "x32 socket": """
import ctypes
print(ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0))
""",
    "inet socket": """
import ctypes
print(ctypes.CDLL(None).socket(2, 1, 0))
""",
    "netlink": """
import ctypes
print(ctypes.CDLL(None).socket(16, 3, 0))
""",
    "setuid": """
import ctypes
print(ctypes.CDLL(None).setresuid(0, 0, 0))
""",
    "shared memory": """
import ctypes
print(ctypes.CDLL(None).shmget(1, 4096, 0o1600))
""",
    "chroot": """
import ctypes
print(ctypes.CDLL(None).chroot(b'.'))
""",
}

# With the reasons that are right for each; the expected output is "stopped".
LIMITED: dict[str, tuple[str, set[str]]] = {
    "children of 100 MB": (
        """
import os, time
for _ in range(12):
    if os.fork() == 0:
        x = bytearray(100 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(30)
        os._exit(0)
for _ in range(12): os.wait()
print('no')
""",
        {"memory_limit", "runtime_error", "timeout", "wrong_answer"},
    ),
    "many files": (
        """
n = 0
try:
    for i in range(100000):
        open(f'f{i}', 'wb').write(b'x' * 4096); n += 1
except OSError: print('stopped' if n < 50000 else n)
""",
        {"passed"},
    ),
    "endless output": (
        """
while True: print('x' * 65536)
""",
        {"output_limit"},
    ),
    "killed by itself": (
        """
import os, signal
print('stopped')
os.kill(os.getpid(), signal.SIGKILL)
""",
        {"runtime_error"},
    ),
    "segmentation fault": (
        """
import ctypes
ctypes.string_at(0)
""",
        {"runtime_error"},
    ),
    "sleeps": (
        """
import time
time.sleep(100)
""",
        {"timeout"},
    ),
    "500 threads": (
        """
import threading, time
n = 0
try:
    for _ in range(500):
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start(); n += 1
except RuntimeError: pass
print('stopped' if n < 500 else n)
""",
        {"passed"},
    ),
}
