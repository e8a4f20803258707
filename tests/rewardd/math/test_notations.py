"""Further notations, one case a line: reference | boxed answer (or `R:` whole response) | T or F."""

import pytest

from rewardd.math import verify

CASES = r"""
\sqrt{2} | \sqrt(2) | T
73 | R:**73** | T
42 | R:42 | T
42 | R:$42$ | T
42 | R:43 | F
B | R:B | T
x=1, y=2 | \begin{cases} x=1 \\ y=2 \end{cases} | T
x=1, y=2 | \begin{cases} x=2 \\ y=1 \end{cases} | F
\begin{cases} x=1 \\ y=2 \end{cases} | (1,2) | T
2x+y=0 \text{ and } x-y=0 | x-y=0, 2x+y=0 | T
\frac{\pi}{6}+k\pi, k\in\mathbb{Z} | \frac{\pi}{6}+k\pi | T
\frac{\pi}{6}+k\pi, k\in\mathbb{Z} | \frac{\pi}{6}+n\pi, n\in\mathbb{Z} | T
\frac{\pi}{6}+k\pi, k\in\mathbb{Z} | \frac{\pi}{3}+k\pi, k\in\mathbb{Z} | F
\frac{\pi}{6}+k\pi \ (k\in\mathbb{Z}) | \frac{\pi}{6}+k\pi, k \in \mathbb{Z} | T
n(n+1)/2 | \frac{n^2+n}{2} | T
\frac{1}{2}\ln 2 | \ln\sqrt2 | T
5\sqrt{13} | \sqrt{325} | T
\frac{3\sqrt{3}}{4} | \frac{3}{4}\sqrt3 | T
2\sqrt{2}+2 | 2(\sqrt2+1) | T
\frac{\sqrt{6}-\sqrt{2}}{4} | \sin 15^\circ | T
x^4-x^3+1 | 1-x^3+x^4 | T
-2 < x < 2 | |x|<2 | T
x \geq 0 \text{ and } x\neq 1 | [0,1)\cup(1,\infty) | T
(0,1)\cup(1,\infty) | x>0, x\ne1 | T
y = \frac{1}{2}x - 3 | x-2y=6 | T
y=x^2 | y-x^2=0 | T
a=1,b=2,c=3 | (1,2,3) | T
a=1,b=2,c=3 | 1,2,3 | T
p=2, q=3 | p=3, q=2 | F
10:30 | 10:30 | T
3\text{ hours }20\text{ minutes} | 3 \text{ hours } 20 \text{ minutes} | T
1{,}5 | 1.5 | T
12.0 | 12 | T
1,000 | 1000 | T
1,000.5 | 1000.5 | T
$1,000 | 1000 | T
\$1,000 | 1000 | T
\$ 1{,}000.50 | 1000.5 | T
\frac{1,000}{3} | \frac{1000}{3} | T
0.5\text{ m} | 50\text{ cm} | T
90\text{ minutes} | 1.5\text{ hours} | T
100^{\circ}\mathrm{C} | 100 | T
\frac{8}{3}\pi | \frac{8\pi}{3} | T
36\pi\text{ square units} | 36\pi | T
2^{10}-1 | 1023 | T
\frac{10!}{5!} | 30240 | T
5^{2023} | 5^{2023} | T
5^{2023} | 5^{2022} | F
2^{2024}-1 | 2^{2024} - 1 | T
2^{2024}-1 | 2^{2024}+1 | F
2^{1001}-2^{1000} | 2^{1000} | T
7^{7^7} | 7^{7^7} | T
\left(\frac{3}{5},\frac{4}{5}\right) | (0.6,0.8) | T
\overrightarrow{AB} | \vec{AB} | T
\vec{v}=(1,2) | (1,2) | T
3\mathbf{i}+4\mathbf{j} | 3\mathbf i+4\mathbf j | T
3\mathbf{i}+4\mathbf{j} | 4\mathbf i+3\mathbf j | F
\text{(A) and (C)} | A, C | T
A, C | C, A | T
A | a | F
D | \text{D. } 5 | T
D | D. $5$ | T
D | \textbf{D} | T
\text{(E)} | E | T
E | \text{(E) none of the above} | T
\text{None of the above} | none of the above | T
\text{odd} | \text{odd function} | F
\text{2 and 3} | 2, 3 | T
\text{2 and 3} | 2 \text{ or } 3 | T
\text{Monday} | Mon | F
-\frac{1}{2} | \frac{-1}{2} | T
-\frac{1}{2} | \frac{1}{-2} | T
-\frac{1}{2} | -0.5 | T
-(x+1) | -x-1 | T
-(x+1) | -x+1 | F
1-x | -(x-1) | T
2^{-3} | \frac18 | T
2^{-3} | 0.125 | T
(-2)^3 | -8 | T
-2^2 | -4 | T
-2^2 | 4 | F
\sqrt{x^2} | x | F
\sqrt[3]{-8} | -2 | T
\sqrt[3]{2} | 2^{1/3} | T
\sqrt[3]{2} | 1.26 | F
4^{1/2} | 2 | T
8^{\frac{2}{3}} | 4 | T
\log_{10} 1000 | 3 | T
\lg 100 | 2 | T
\log 100 | 2 | T
e | 2.718281828 | F
e | \mathrm{e} | T
\infty | \text{infinity} | T
\infty | \text{infinite} | T
-\infty | -\infty | T
\text{undefined} | \text{Undefined} | T
\{(x,y)\mid x+y=1\} | \{(x,y): x+y=1\} | T
\{x\mid x>2\} | (2,\infty) | T
\{x\mid x>2\} | x>2 | T
\{x \in \mathbb{Z} \mid 1\le x\le 3\} | \{1,2,3\} | T
(1,2] | 1<x\le 2 | T
(1,2] | \{x: 1<x\leqslant2\} | T
(1, 2] \cup \{5\} | \{5\}\cup(1,2] | T
\mathbb{N} | \mathbb{Z} | F
\mathbb{R}^2 | \mathbb{R} | F
\mathbb{R}^+ | (0,\infty) | T
\text{all real numbers except } 2 | x\neq 2 | T
\text{all positive integers} | \text{all positive integers} | T
f(x)=2x | f(x)=x+x | T
f(x)=2x | g(x)=2x | T
f^{-1}(x)=\frac{x-1}{2} | \frac{x-1}{2} | T
a_n = 3^n - 1 | 3^n-1 | T
S_n=n^2 | S_n = n^2 | T
P(x)=x^2+1 | x^2+1 | T
x\mapsto x^2 | x^2 | F
1.5 | 1\frac{1}{2} | T
\frac{7}{2} | 3 \frac{1}{2} | T
3 1/2 | 3.5 | T
1.\overline{3} | \frac{4}{3} | T
0.\dot{3} | \frac13 | T
0.9... | 1 | F
0.999... | 1 | T
3.1415... | \pi | F
33.3\% | \frac{1}{3} | F
0.001 | 10^{-3} | T
1.0\times 10^{3} | 1000 | T
5\cdot 10^{-5} | 0.00005 | T
2\times 3 | 6 | T
12 | \boxed{12} | T
\frac{a+b}{c} | \frac{a}{c}+\frac{b}{c} | T
(x-y)^2 | (y-x)^2 | T
(x-y)^3 | (y-x)^3 | F
\sin(x+\pi) | -\sin x | T
\frac{1}{1-x} | -\frac{1}{x-1} | T
\max(a,b) | \max(b,a) | T
\lfloor x\rfloor | \lceil x\rceil | F
\overline{z} | \bar{z} | T
\angle ABC | \angle CBA | F
\triangle ABC | \triangle ABC | T
AB=5 | 5 | T
|AB|=5 | 5 | T
S=\frac12 | 0.5 | T
\text{Area}=12 | 12 | T
n=2k+1 | 2k+1 | T
12\text{ cm} | 0.12\text{ m} | T
5 \%  | 5\text{ percent} | T
8\text{ people} | 8 | T
8 | \text{8 people} | T
8 | eight | T
8 | \text{eight people} | F
30 | 30\text{ km/h} | T
30\text{ km/h} | 30\text{ km} | F
30\text{ kmph} | 30\text{ km/h} | T
45\text{ m/s} | 45\ \frac{\text{m}}{\text{s}} | T
45\text{ m/s} | 45 \text{ m s}^{-1} | T
6\text{ cm}\times 4\text{ cm} | 24 | F
1\text{ : }2 | 1:2 | T
\frac{1}{2} | 1:2 | T
x=2\text{ and }x=3 | \{2,3\} | T
x_1=2, x_2=3 | 2, 3 | T
x_1=2, x_2=3 | x=2 \text{ or } x=3 | T
x_{1,2}=\pm 3 | \pm 3 | T
\pm i\sqrt2 | \pm\sqrt{2}i | T
\pm 3 | \{3, -3\} | T
x^2+y^2=1 | x^2+y^2=1 | T
x^2+y^2=1 | (x)^2+y^2-1=0 | T
2x^2+2y^2=2 | x^2+y^2=1 | T
xy=1 | y=\frac{1}{x} | T
r=2\cos\theta | 2\cos\theta | T
r=2\cos\theta | r=2\sin\theta | F
y=e^x | y=\exp(x) | T
y-2=3(x-1) | y=3x-1 | T
4 | 4.0 | T
4 | 04 | T
4 | 4.00001 | F
4 | \approx 4 | T
4 | 4\ldots | F
4 | 4 + \epsilon | F
4 | \text{four} | T
4 | 4\text{ (four)} | T
4 | 4 \text{ solutions} | T
4 | \text{There are } 4 | T
4 | \text{The answer is } 4 | T
4 | 4 \text{ or more} | F
4 | \text{at least } 4 | F
4 | \text{less than } 4 | F
4 | \le 4 | F
4 | 4? | T
4 | \mathbf{4} | T
4 | {\bf 4} | T
4 | {\color{red}4} | T
4 | \color{red}{4} | T
4 | \textcolor{blue}{4} | T
4 | \underline{4} | T
4 | \mathrm{4} | T
4 | \mathbf{\text{4}} | T
4 | \text{4.} | T
4 | R:The answer is \textbf{4}. | T
4 | R:$$\boxed{\text{Answer} = 4}$$ | T
4 | R:\boxed{\text{The answer is 4}} | T
4 | R:\boxed{4} \text{ cm} | T
"""

ROWS = [(*line.rsplit(" | ", 1)[0].split(" | ", 1), line.rsplit(" | ", 1)[1]) for line in CASES.strip().split("\n")]


@pytest.mark.parametrize(("gold", "answer", "expected"), ROWS)
def test_notation(gold: str, answer: str, expected: str) -> None:
    response = answer[2:] if answer.startswith("R:") else f"Therefore the answer is $\\boxed{{{answer}}}$."
    result = verify(response, gold=gold)
    assert result.correct is (expected.strip() == "T"), result
