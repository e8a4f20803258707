"""Assert-style test sets: with a program that solves each and one that does not, and sets that prove nothing."""

TREES = """
from typing import Optional
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
def tree_node(values):
    if not values: return None
    nodes = [None if v is None else TreeNode(v) for v in values]
    rest = nodes[::-1]; root = rest.pop()
    for node in nodes:
        if node:
            if rest: node.left = rest.pop()
            if rest: node.right = rest.pop()
    return root
def is_same_tree(p, q):
    if not p and not q: return True
    if not p or not q: return False
    return p.val == q.val and is_same_tree(p.left, q.left) and is_same_tree(p.right, q.right)
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next
def list_node(values):
    head = None
    for value in reversed(values): head = ListNode(value, head)
    return head
def is_same_list(p, q):
    while p and q:
        if p.val != q.val: return False
        p, q = p.next, q.next
    return not p and not q
"""

# name: (program that solves it, program that does not, tests)
PAIRS: dict[str, tuple[str, str, dict]] = {
    "tree nodes of the prefix": (
        """
class Solution:
    def invert(self, root: Optional[TreeNode]) -> Optional[TreeNode]:
        if root:
            root.left, root.right = self.invert(root.right), self.invert(root.left)
        return root
""",
        """
class Solution:
    def invert(self, root): return root
""",
        {
            "import_prefix": TREES,
            "entry_point": "Solution().invert",
            "test_code": """
def check(candidate):
    assert is_same_tree(candidate(root=tree_node([1, 2, 3])), tree_node([1, 3, 2]))
    assert is_same_tree(candidate(tree_node([4, 2, 7])), tree_node([4, 7, 2]))
""",
        },
    ),
    "long linked list": (
        """
class Solution:
    def rev(self, h):
        p = None
        while h: h.next, p, h = p, h, h.next
        return p
""",
        """
class ListNode:
    def __eq__(self, o): return True
class Solution:
    def rev(self, h): return ListNode()
""",
        {
            "import_prefix": TREES,
            "entry_point": "Solution().rev",
            "test_code": """
def check(candidate):
    assert is_same_list(candidate(list_node(list(range(20000)))), list_node(list(range(19999, -1, -1))))
""",
        },
    ),
    "in place": (
        "def f(l): l.sort()",
        "def f(l): pass",
        {
            "assert_case": [
                """
x = [3, 1, 2]
f(x)
assert x == [1, 2, 3]
"""
            ],
        },
    ),
    "nested in place": (
        """
def f(m):
    m[0][0] = 9
    m.append([7])
""",
        "def f(m): m = [[9, 1], [7]]",
        {
            "assert_case": [
                """
row = [0, 1]
m = [row]
f(m)
assert row == [9, 1] and m == [[9, 1], [7]]
"""
            ],
        },
    ),
    "exception": (
        """
def f(x):
    if x < 0: raise ValueError('negative')
    return x
""",
        "def f(x): return x",
        {
            "test_code": """
import pytest
from solution import f
def test_it():
    with pytest.raises(ValueError, match='neg'):
        f(-1)
    assert f(2) == 2
""",
        },
    ),
    "own exception": (
        """
class Low(Exception): pass
def f(x):
    raise Low('x')
""",
        """
class Low(Exception): pass
def f(x): raise KeyError('x')
""",
        {
            "test_code": """
from solution import f, Low
def test_it():
    try:
        f(1)
        assert False
    except Low as e:
        assert str(e) == 'x'
""",
        },
    ),
    "class under test": (
        """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __contains__(self, x): return x in self.items
""",
        """
class Stack:
    def push(self, x): pass
    def pop(self): return 0
    def __len__(self): return 0
    def __contains__(self, x): return True
""",
        {
            "test_code": """
from solution import Stack
class TestStack:
    def test_push(self):
        s = Stack()
        s.push(3)
        assert len(s) == 1 and 3 in s and 4 not in s
        assert s.pop() == 3
        assert isinstance(s, Stack)
""",
        },
    ),
    "unittest": (
        "def f(x): return x * 2",
        "def f(x): return x",
        {
            "test_code": """
import unittest
from solution import f
class T(unittest.TestCase):
    def test_f(self):
        self.assertEqual(f(2), 4)
        self.assertTrue(f(1) == 2)
""",
        },
    ),
    "parametrize": (
        "def f(x): return x * 2",
        "def f(x): return 4",
        {
            "test_code": """
import pytest
from solution import f
@pytest.mark.parametrize('x,y', [(2, 4), (3, 6)])
def test_f(x, y):
    assert f(x) == y
""",
        },
    ),
    "callback": (
        "def f(g, xs): return [g(x) for x in xs]",
        "def f(g, xs): return [4, 9]",
        {
            "assert_case": ["assert f(lambda x: x * x, [2, 3]) == [4, 9]", "assert f(str, [1]) == ['1']"],
        },
    ),
    "generator": (
        """
def f(n):
    for i in range(n): yield i
""",
        """
def f(n):
    for i in range(3): yield i
""",
        {
            "assert_case": ["assert list(f(3)) == [0, 1, 2]", "assert next(iter(f(1))) == 0 and len(list(f(5))) == 5"],
        },
    ),
    "loop of asserts": (
        "def f(n): return n * n",
        "def f(n): return 0",
        {
            "entry_point": "f",
            "test_code": """
def check(candidate):
    for i in range(50):
        assert candidate(i) == i * i
""",
        },
    ),
    "asserts at top level": (
        "def f(n): return n",
        "def f(n): return 1",
        {
            "test_code": """
assert f(1) == 1
for i in range(3):
    assert f(i) == i
""",
        },
    ),
    "helper in the tests": (
        "def f(n): return [n, n + 1]",
        "def f(n): return [n, n]",
        {
            "test_code": """
def ok(x):
    assert sorted(x) == [1, 2]
    return True
def test_f():
    assert ok(f(1))
""",
        },
    ),
    "dunder methods between objects": (
        """
class V:
    def __init__(self, x): self.x = x
    def __add__(self, o): return V(self.x + o.x)
    def __mul__(self, k): return V(self.x * k)
    def __eq__(self, o): return self.x == o.x
""",
        """
class V:
    def __init__(self, x): self.x = x
    def __add__(self, o): return V(0)
    def __mul__(self, k): return V(0)
    def __eq__(self, o): return self.x == o.x
""",
        {
            "assert_case": ["assert V(1) + V(2) == V(3)", "assert (V(2) * 3).x == 6"],
        },
    ),
    "values of many kinds": (
        """
def f(): return {1: (2.5, None), 'k': {3, 4}, (1, 2): b'x', 'big': 10**40, 'c': 1j, 'n': float('inf')}
""",
        """
def f(): return {1: [2.5, None], 'k': {3, 4}, (1, 2): b'x', 'big': 10**40, 'c': 1j, 'n': float('inf')}
""",
        {
            "assert_case": [
                """
assert f() == {1: (2.5, None), 'k': {3, 4}, (1, 2): b'x', 'big': 10**40, 'c': 1j, 'n': float('inf')}
"""
            ],
        },
    ),
    "multi-line assert": (
        "def f(a, b): return a",
        "def f(a, b): return b",
        {
            "entry_point": "f",
            "test_code": """
def check(candidate):
    assert candidate(
        1,
        2) == 1
""",
        },
    ),
    "module constant": (
        """
LIMIT = 7
def f(): return LIMIT
""",
        """
LIMIT = 8
def f(): return LIMIT
""",
        {
            "test_code": """
from solution import f, LIMIT
def test_it():
    assert LIMIT == 7 and f() == LIMIT
""",
        },
    ),
    "star import": (
        "def f(): return 1",
        "def f(): return 2",
        {
            "test_code": """
from solution import *
def test_it():
    assert f() == 1
""",
        },
    ),
}

MALFORMED: dict[str, dict] = {
    "none": {
        "assert_case": [],
    },
    "asserts nothing": {
        "assert_case": ["add(1, 2)"],
    },
    "not Python": {
        "assert_case": ["assert add(1,"],
    },
    "never uses the program": {
        "assert_case": ["assert True"],
    },
    "empty code": {
        "test_code": "",
    },
    "check without entry point": {
        "test_code": """
def check(candidate):
    assert candidate(1, 2) == 3
""",
    },
    "missing library": {
        "test_code": """
import no_such_library
from solution import add
def test_a():
    assert add(1, 2) == 3
""",
    },
    "broken prefix": {
        "import_prefix": "import no_such_library",
        "test_code": "assert add(1, 2) == 3",
    },
    "no known shape": {
        "entry_point": "add",
    },
}
