"""The shared library of tiny functions that generated repositories are made of.

A template is text with slots: ``{f}`` the function, ``{a} {b}`` its parameters, ``{x}`` a loop variable, ``{r}`` an accumulator,
``{k}`` a constant. Expected values are never written here: they are computed by running the code.
"""

from __future__ import annotations

from dataclasses import dataclass

FUNCTIONS = (
    "total", "count", "scale", "shift", "clamp", "first", "last", "merge", "limit", "score", "price", "rate", "size", "width",
    "area", "level", "rank", "pick", "join", "split", "label", "title", "clean", "check", "find", "match", "grow", "step",
    "weight", "cost", "mark", "value", "index", "range", "start", "end", "load", "state", "group", "build", "make",
)  # fmt: skip
PARAMETERS = ("a", "b", "n", "x", "value", "count", "size", "left", "right", "start", "limit", "data", "item", "other")
LISTS = ("items", "values", "data", "names", "parts", "rows", "keys", "lines")
LOOP = ("item", "value", "x", "v", "name", "part")
ACCUMULATORS = ("result", "total", "out", "count", "found")
MODULES = ("stats", "text", "shop", "core", "util", "game", "bank", "math2", "lists", "tools")
ENDINGS = ("!", "?", ".", "s", "ed")
WORDS = ("red", "blue", "key", "name", "data", "test", "home", "file", "user", "line")


@dataclass(frozen=True)
class Template:
    """One kind of function."""

    key: str
    kinds: str
    """Parameter kinds in order: i int, l list of ints, s word."""
    intention: str
    body: tuple[str, ...]
    bugs: tuple[tuple[int, str], ...]
    """(body line, faulty replacement)."""
    changes: tuple[tuple[str, int, str], ...] = ()
    """Requests of the iterate category: (wish, body line, new line)."""
    simple: str = ""
    """One-line equivalent without a loop, for the optimise category."""


def _t(key: str, kinds: str, intention: str, body: str, bugs: str, changes: str = "", simple: str = "") -> Template:
    lines = tuple(body.split("\n"))
    pairs = tuple((int(b.split("~", 1)[0]), b.split("~", 1)[1]) for b in bugs.split("\n"))
    wishes = tuple((c.split("~")[0], int(c.split("~")[1]), c.split("~")[2]) for c in changes.split("\n") if c)
    return Template(key, kinds, intention, lines, pairs, wishes, simple)


LIBRARY: tuple[Template, ...] = (
    _t("plus", "i", "{a} plus {k}", "return {a} + {k}", "0~return {a} - {k}\n0~return {a} * {k}",
       "take {k} away instead of adding it~0~return {a} - {k}\nadd {m} instead of {k}~0~return {a} + {m}"),
    _t("minus", "i", "{a} minus {k}", "return {a} - {k}", "0~return {a} + {k}\n0~return {k} - {a}",
       "add {k} instead of taking it away~0~return {a} + {k}\ntake {m} away instead of {k}~0~return {a} - {m}"),
    _t("times", "i", "{a} times {k}", "return {a} * {k}", "0~return {a} + {k}\n0~return {a} * {a}",
       "multiply by {m} instead of {k}~0~return {a} * {m}\nalso add {m}~0~return {a} * {k} + {m}"),
    _t("sum2", "ii", "{a} plus {b}", "return {a} + {b}", "0~return {a} - {b}\n0~return {a} + {a}",
       "multiply {a} and {b} instead~0~return {a} * {b}\nalso add {m}~0~return {a} + {b} + {m}"),
    _t("diff", "ii", "{a} minus {b}", "return {a} - {b}", "0~return {b} - {a}\n0~return {a} + {b}",
       "return {b} minus {a} instead~0~return {b} - {a}\nalso add {m}~0~return {a} - {b} + {m}"),
    _t("prod", "ii", "{a} times {b}", "return {a} * {b}", "0~return {a} + {b}\n0~return {a} * {a}",
       "add {a} and {b} instead~0~return {a} + {b}\nalso take {m} away~0~return {a} * {b} - {m}"),
    _t("twice", "ii", "{a} plus twice {b}", "return {a} + 2 * {b}", "0~return {a} - 2 * {b}\n0~return {a} + 3 * {b}",
       "take {b} three times~0~return {a} + 3 * {b}"),
    _t("max2", "ii", "the larger of {a} and {b}", "return max({a}, {b})", "0~return min({a}, {b})",
       "return the smaller one instead~0~return min({a}, {b})\nalso add {m}~0~return max({a}, {b}) + {m}"),
    _t("min2", "ii", "the smaller of {a} and {b}", "return min({a}, {b})", "0~return max({a}, {b})",
       "return the larger one instead~0~return max({a}, {b})\nalso add {m}~0~return min({a}, {b}) + {m}"),
    _t("atmost", "i", "{a}, but at most {k}", "return min({a}, {k})", "0~return max({a}, {k})",
       "raise the limit to {m}~0~return min({a}, {m})"),
    _t("atleast", "i", "{a}, but at least {k}", "return max({a}, {k})", "0~return min({a}, {k})",
       "use {m} as the lower bound~0~return max({a}, {m})"),
    _t("sum", "l", "the sum of {a}", "{r} = 0\nfor {x} in {a}:\n    {r} += {x}\nreturn {r}",
       "0~{r} = 1\n2~    {r} -= {x}\n2~    {r} += 1\n3~return {x}",
       "start from {m}~0~{r} = {m}\nadd every item twice~2~    {r} += 2 * {x}", "return sum({a})"),
    _t("product", "l", "the product of {a}", "{r} = 1\nfor {x} in {a}:\n    {r} *= {x}\nreturn {r}",
       "0~{r} = 0\n2~    {r} += {x}\n3~return {x}", "start from {m}~0~{r} = {m}"),
    _t("length", "l", "how many items {a} has", "{r} = 0\nfor {x} in {a}:\n    {r} += 1\nreturn {r}",
       "0~{r} = 1\n2~    {r} += 2\n2~    {r} += {x}", "start from {m}~0~{r} = {m}\ncount every item twice~2~    {r} += 2",
       "return len({a})"),
    _t("above", "l", "how many of {a} are above {k}",
       "{r} = 0\nfor {x} in {a}:\n    if {x} > {k}:\n        {r} += 1\nreturn {r}",
       "2~    if {x} < {k}:\n2~    if {x} == {k}:\n3~        {r} += {x}\n0~{r} = 1",
       "count those below {k} instead~2~    if {x} < {k}:\nuse {m} instead of {k}~2~    if {x} > {m}:"),
    _t("sumabove", "l", "the sum of those of {a} that are above {k}",
       "{r} = 0\nfor {x} in {a}:\n    if {x} > {k}:\n        {r} += {x}\nreturn {r}",
       "2~    if {x} < {k}:\n3~        {r} += 1\n3~        {r} -= {x}",
       "use {m} instead of {k}~2~    if {x} > {m}:\ncount them instead~3~        {r} += 1"),
    _t("even", "l", "how many of {a} are even",
       "{r} = 0\nfor {x} in {a}:\n    if {x} % 2 == 0:\n        {r} += 1\nreturn {r}",
       "2~    if {x} % 2 == 1:\n3~        {r} += {x}\n2~    if {x} % 3 == 0:",
       "count the odd ones instead~2~    if {x} % 2 == 1:\nadd them up instead~3~        {r} += {x}"),
    _t("largest", "l", "the largest of {a}",
       "{r} = {a}[0]\nfor {x} in {a}:\n    if {x} > {r}:\n        {r} = {x}\nreturn {r}",
       "2~    if {x} < {r}:\n4~return {x}\n4~return {a}", "return the smallest instead~2~    if {x} < {r}:", "return max({a})"),
    _t("smallest", "l", "the smallest of {a}",
       "{r} = {a}[0]\nfor {x} in {a}:\n    if {x} < {r}:\n        {r} = {x}\nreturn {r}",
       "2~    if {x} > {r}:\n4~return {x}\n4~return {a}", "return the largest instead~2~    if {x} > {r}:", "return min({a})"),
    _t("scaled", "l", "{a} with every item times {k}", "return [{x} * {k} for {x} in {a}]",
       "0~return [{x} + {k} for {x} in {a}]\n0~return [{k} for {x} in {a}]",
       "multiply by {m} instead~0~return [{x} * {m} for {x} in {a}]\nadd {k} instead~0~return [{x} + {k} for {x} in {a}]"),
    _t("shifted", "l", "{a} with {k} added to every item", "return [{x} + {k} for {x} in {a}]",
       "0~return [{x} * {k} for {x} in {a}]\n0~return [{x} - {k} for {x} in {a}]",
       "add {m} instead~0~return [{x} + {m} for {x} in {a}]"),
    _t("keep", "l", "those of {a} that are above {k}", "return [{x} for {x} in {a} if {x} > {k}]",
       "0~return [{x} for {x} in {a} if {x} < {k}]\n0~return [{k} for {x} in {a} if {x} > {k}]",
       "keep those below {k} instead~0~return [{x} for {x} in {a} if {x} < {k}]"),
    _t("firstof", "l", "the first of {a}", "return {a}[0]", "0~return {a}[1]\n0~return {a}[-1]",
       "return the last instead~0~return {a}[-1]"),
    _t("lastof", "l", "the last of {a}", "return {a}[-1]", "0~return {a}[0]\n0~return {a}[-2]",
       "return the first instead~0~return {a}[0]"),
    _t("ordered", "l", "{a} in order", "return sorted({a})", "0~return {a}\n0~return list({a})",
       "put the largest first~0~return sorted({a}, reverse=True)"),
    _t("turned", "l", "{a} from the end to the start", "return {a}[::-1]", "0~return {a}[::1]\n0~return {a}[:1]"),
    _t("upper", "s", "{a} in capitals", "return {a}.upper()", "0~return {a}.lower()\n0~return {a}",
       "use small letters instead~0~return {a}.lower()"),
    _t("tail", "s", "{a} with {k} at the end", "return {a} + '{k}'", "0~return '{k}' + {a}\n0~return {a}",
       "put {k} at the start instead~0~return '{k}' + {a}"),
    _t("pair", "ss", "{a} and {b} with a dash between", "return {a} + '-' + {b}",
       "0~return {b} + '-' + {a}\n0~return {a} + {b}", "use a dot instead of the dash~0~return {a} + '.' + {b}"),
    _t("repeat", "s", "{a} repeated {k} times", "return {a} * {k}", "0~return {a} + {a}\n0~return {a}",
       "repeat it {m} times~0~return {a} * {m}"),
    _t("letters", "s", "how many letters {a} has", "return len({a})", "0~return len({a}) + 1\n0~return 1",
       "also add {m}~0~return len({a}) + {m}"),
    _t("sign", "i", "{k} if {a} is negative, else {a}", "if {a} < 0:\n    return {k}\nreturn {a}",
       "0~if {a} > 0:\n1~    return {a}\n2~return {k}", "return {m} for negatives~1~    return {m}"),
    _t("bigger", "ii", "{a} if {a} is above {b}, else {k}", "if {a} > {b}:\n    return {a}\nreturn {k}",
       "0~if {a} < {b}:\n1~    return {b}\n2~return {a}", "return {m} in the other case~2~return {m}"),
    _t("same", "ii", "{k} if {a} equals {b}, else 0", "if {a} == {b}:\n    return {k}\nreturn 0",
       "0~if {a} != {b}:\n1~    return 0\n2~return {k}", "return {m} when they are equal~1~    return {m}"),
    _t("bonus", "i", "{a} plus {m} if {a} is above {k}, else {a}", "if {a} > {k}:\n    return {a} + {m}\nreturn {a}",
       "0~if {a} < {k}:\n1~    return {a} - {m}\n1~    return {m}", "take {m} away instead~1~    return {a} - {m}"),
    _t("square", "i", "{a} times itself", "return {a} * {a}", "0~return {a} + {a}\n0~return {a}",
       "also add {m}~0~return {a} * {a} + {m}"),
    _t("half", "i", "half of {a}, rounded down", "return {a} // 2", "0~return {a} * 2\n0~return {a} // 3",
       "divide by {m} instead~0~return {a} // {m}"),
    _t("rest", "i", "the rest of {a} divided by {k}", "return {a} % {k}", "0~return {a} // {k}\n0~return {a} * {k}",
       "divide by {m} instead~0~return {a} % {m}"),
)  # fmt: skip
