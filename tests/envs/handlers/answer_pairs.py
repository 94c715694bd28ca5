r"""Pairs of an expected answer and a given one, separated by `|||`: those that a reader
takes for equal, and for different.

`WRONG` lists pairs of which math-verify has another opinion than a reader, with that
opinion.
"""

EQUAL = r"""
[0,1) ||| [0, 1)
(-\infty, 2] \cup [3, \infty) ||| (-\infty,2]\cup[3,\infty)
(2, \infty) ||| x > 2
x > 2 ||| (2,\infty)
x \ge 2 ||| 2 \le x
-1 < x < 3 ||| (-1, 3)
[-2, 3] ||| -2 \le x \le 3
x \in [0, 1] ||| [0, 1]
\mathbb{R} ||| (-\infty, \infty)
\frac{\pi}{2} ||| \dfrac{\pi}{2}
\frac{\pi}{2} ||| \pi/2
\frac{\pi}{2} ||| 0.5\pi
3 ||| \text{3}
3 ||| 3.
3 ||| \mathbf{3}
3 ||| $3$
3 ||| \(3\)
3 ||| 3.0
3 ||| x = 3
x = 3 ||| 3
5 ||| 5\text{ cm}
5 ||| $5$ apples
5\text{ cm} ||| 5
5 ||| 5\ \mathrm{m}^2
12\pi\text{ cm}^2 ||| 12\pi
90 ||| 90^\circ
90^\circ ||| 90
18 ||| \$18
\$18.50 ||| 18.5
\$1{,}000 ||| 1000\text{ dollars}
1250 ||| 1,250
1,250 ||| 1250
1250 ||| 1{,}250
10000 ||| 10\,000
1, 234 ||| 1, 234
1, 234 ||| 234, 1
0.5 ||| \frac{1}{2}
\frac{1}{2} ||| 0.5
\frac{1}{2} ||| 1/2
\frac12 ||| \frac{2}{4}
\frac{1}{3} ||| 0.333333
\frac{\sqrt{3}}{2} ||| 0.8660254
1\frac{1}{2} ||| \frac{3}{2}
\frac{3}{2} ||| 1 \frac{1}{2}
-\frac{3}{4} ||| \frac{-3}{4}
-\frac{3}{4} ||| \frac{3}{-4}
-3 ||| −3
25\% ||| 0.25
25\% ||| 25
0.25 ||| 25\%
\frac{3}{4} ||| 75\%
2\sqrt{2} ||| \sqrt{8}
\frac{1}{\sqrt{2}} ||| \frac{\sqrt{2}}{2}
2^{10} ||| 1024
16 ||| 15 + 1
1.5 \times 10^3 ||| 1500
1500 ||| 1.5e3
6.02\times10^{23} ||| 6.02 \cdot 10^{23}
10! ||| 3628800
\binom{5}{2} ||| 10
\log_2 8 ||| 3
(1, 2) ||| (1,2)
(3, \frac{\pi}{2}) ||| \left(3, \frac{\pi}{2}\right)
(3, -1) ||| (3,-1)
(x, y) = (1, 2) ||| (1, 2)
\{1, 2\} ||| \{2, 1\}
\{1, 2\} ||| 1, 2
1, 2 ||| 2 \text{ and } 1
\pm 2 ||| -2, 2
\{\} ||| \emptyset
x^2 + 2x + 1 ||| (x+1)^2
x^2 + 2x + 1 ||| 1 + 2x + x^2
\frac{x+1}{x-1} ||| \frac{-x-1}{1-x}
\frac{x^2}{2} + C ||| C + \frac{x^2}{2}
y = 2x + 3 ||| 2x + 3
y = 2x + 3 ||| y - 2x = 3
f(x) = x^2 ||| x^2
\sin^2 x ||| 1 - \cos^2 x
3 + 4i ||| 4i + 3
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ||| \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
\infty ||| +\infty
2:3 ||| \frac{2}{3}
\text{even} ||| even
\text{Monday} ||| monday
\text{no solution} ||| \text{No solution.}
\text{(B)} ||| B
B ||| \text{B}
B ||| (B)
\text{C,E} ||| C, E
"""

DIFFERENT = r"""
[0,1) ||| (0,1)
[0,1) ||| [0,1]
(-\infty, 2] \cup [3, \infty) ||| (-\infty,2)\cup[3,\infty)
x \ge 2 ||| x > 2
\frac{\pi}{2} ||| \frac{\pi}{3}
2\pi ||| 6.28
x = 3 ||| y = 3
x = 3 ||| x = 4
5 ||| 5\text{ cm} \cdot 2
5 ||| 5!
1, 234 ||| 1234
1,234 ||| 1, 234
\frac{1}{2} ||| 0.51
\frac{1}{3} ||| 0.33
\frac{11}{2} ||| 1\frac{1}{2}
25\% ||| 0.025
\sqrt{2} ||| 1.41
3 \times 10^{-7} ||| 0
1.2 \times 10^{-6} ||| 0.8 \times 10^{-6}
e^{2} ||| 7.389
(1, 2) ||| (2, 1)
(1, 2) ||| (1, 2, 3)
1, 2 ||| 1
1 ||| 1, 2
12 ||| 12 \text{ or } 13
7 ||| the answer is 7 or 8
\pm 2 ||| 2
x^2 + 2x + 1 ||| x^2 + 2x - 1
y = 2x + 3 ||| y = 3x + 2
3 + 4i ||| 3 - 4i
\frac{a}{b} ||| b/a
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ||| \begin{pmatrix} 1 & 2 \\ 4 & 3 \end{pmatrix}
\infty ||| -\infty
Listen ||| Silent
\text{yes} ||| \text{no}
B ||| C
11_2 ||| 3
3 ||| ٣
3 ||| ３
1000 ||| 1_000
"""

WRONG = r"""
\emptyset ||| \varnothing ||| different
\frac{1}{6} ||| 0.1\overline{6} ||| different
-1 ||| e^{i\pi} ||| different
\frac{1}{2} ||| \cos 60^\circ ||| different
\begin{pmatrix} 1 \\ 2 \end{pmatrix} ||| (1, 2) ||| different
5\text{ cm} ||| 5\text{ km} ||| equal
(1, 2) ||| \{1, 2\} ||| equal
"""


def pairs(table: str) -> list[list[str]]:
    """Return the fields of each line."""
    return [[field.strip() for field in line.split("|||")] for line in table.splitlines() if line]
