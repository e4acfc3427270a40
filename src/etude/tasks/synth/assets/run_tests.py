"""A minimal pytest-style runner; it costs ten milliseconds where pytest costs three hundred."""
import ast, os, sys, traceback  # noqa: E401, I001

sys.path.insert(0, ".")
sys.dont_write_bytecode = True
exit_now = os._exit


def explain(error, path):
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError) and not str(error):
        line = frames[-1].line or ""
        try:
            test = ast.parse(line).body[0].test
            frame = error.__traceback__
            while frame.tb_next:
                frame = frame.tb_next
            names = {**frame.tb_frame.f_globals, **frame.tb_frame.f_locals}
            got = eval(compile(ast.Expression(test.left), path, "eval"), names)
            return f"{ast.unparse(test)} got {got!r}"
        except Exception:
            return line
    return f"{type(error).__name__}: {error}"[:80]


def main():
    passed = failed = 0
    for path in sorted(p for p in os.listdir(".") if p.startswith("test_") and p.endswith(".py")):
        scope = {"__name__": path[:-3], "__file__": path}
        try:
            with open(path) as handle:
                source = handle.read()
            import linecache
            linecache.cache[path] = (len(source), None, source.splitlines(True), path)
            exec(compile(source, path, "exec"), scope)
        except BaseException as error:
            failed += 1
            print(f"FAIL {path}: {explain(error, path)}")
            continue
        for name, test in list(scope.items()):
            if name.startswith("test_") and callable(test):
                try:
                    test()
                    passed += 1
                except BaseException as error:
                    failed += 1
                    print(f"FAIL {name}: {explain(error, path)}")
    print((f"{failed} failed " if failed else "") + f"{passed} passed")
    sys.stdout.flush()
    exit_now(5 if passed + failed == 0 else 1 if failed else 0)


main()
