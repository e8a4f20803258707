import subprocess
import sys


def test_the_pure_parts_import_without_torch() -> None:
    modules = ("advantages", "alarms", "entropy", "filters", "gae", "mfu", "shaping")
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module('learner.algorithms.' + name)\n"
        "import learner.packing\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
