"""A minimal pytest-style runner; it costs fifteen milliseconds where pytest costs three hundred.

The tests are counted before anything runs, and a full count ends with exit code PASSED, not 0: code under test that exits early
has failed. The test command turns PASSED into 0. Only modules that Python has loaded anyway are imported: `ast` and `traceback`
alone would treble the time of a run, and a child for the tests would add a third.
"""
import _ast
import os
import sys

ONLY_AST = 0x400  # ast.PyCF_ONLY_AST
PASSED = 42


def explain(error, lines):
    """One line on a failed test: what a comparison got, or the error. `lines`: path -> its source lines."""
    here = error.__traceback__
    while here.tb_next:
        here = here.tb_next
    code, number = here.tb_frame.f_code, here.tb_lineno
    if not isinstance(error, AssertionError) or str(error):
        where = "" if isinstance(error, (AssertionError, SyntaxError)) else f" ({os.path.basename(code.co_filename)}:{number})"
        return f"{type(error).__name__}: {error}"[:80] + where
    line = lines.get(code.co_filename, [""] * number)[number - 1].strip()
    try:
        test = compile(line, "test", "exec", ONLY_AST).body[0].test
        names = {**here.tb_frame.f_globals, **here.tb_frame.f_locals}
        got = eval(compile(_ast.Expression(test.left), "test", "eval"), names)
        said = line.encode()[test.col_offset:test.end_col_offset].decode()
        return f"{said} got {got!r}"[:160]
    except Exception:
        return line or "AssertionError"


def test_files():
    return sorted(p for p in os.listdir(".") if p.startswith("test_") and p.endswith(".py") and os.path.isfile(p))


def read(path):
    with open(path) as handle:
        return handle.read()


def expected(path):
    """How many tests a file defines, read without running it."""
    try:
        body = compile(read(path), path, "exec", ONLY_AST).body
    except (SyntaxError, ValueError):
        return 0  # its run fails and says why
    return len({node.name for node in body if isinstance(node, _ast.FunctionDef) and node.name.startswith("test_")})


def run_file(path):
    """(passed, failed) of one test file."""
    source = read(path)
    lines = {path: source.split("\n")}
    scope = {"__name__": path[:-3], "__file__": path}
    passed = failed = 0
    try:
        exec(compile(source, path, "exec"), scope)
    except BaseException as error:
        print(f"FAIL {path}: {explain(error, lines)}")
        return 0, 1
    for name, test in list(scope.items()):
        if name.startswith("test_") and callable(test):
            try:
                test()
                passed += 1
            except BaseException as error:
                failed += 1
                print(f"FAIL {name}: {explain(error, lines)}")
    return passed, failed


def main():
    promised = sum(expected(path) for path in test_files())
    sys.path.insert(0, ".")
    sys.dont_write_bytecode = True
    passed = failed = 0
    for path in test_files():
        more = run_file(path)
        passed, failed = passed + more[0], failed + more[1]
    if not failed and passed < promised:
        print(f"FAIL: {promised - passed} tests did not run")
        failed = promised - passed
    print((f"{failed} failed " if failed else "") + f"{passed} passed")
    return 5 if passed + failed == 0 else 1 if failed else PASSED


code = main()
sys.stdout.flush()
os._exit(code)  # no need to tidy up
