"""Runs tests of one module of cases/ in this process, under one backend, and writes an event a line for run.py.

    worker.py --list CASES                    the tests there are, as JSON
    worker.py --events FD CASES TEST ...      runs them; TEST is module.Class.method, all of one module

glake is enabled before the first test, with the module's CONFIG, unless the module says ISOLATED: then each of its tests
gets a worker of its own that has neither torch nor glake loaded, and starts processes itself. A test that outlasts its
limit ends the worker, with the stacks of all its threads on stderr.
"""
import argparse, faulthandler, importlib, json, os, pathlib, sys, time, traceback, unittest

LIMIT, LIMIT_ISOLATED = 60, 120  # seconds a test may take, unless it says otherwise (fixture.limit)


def limit(module, function):
    return getattr(function, "limit", LIMIT_ISOLATED if getattr(module, "ISOLATED", False) else LIMIT)


def methods(module):
    """(id, class, method name) of every test in a module, in the order of its text."""
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == module.__name__:
            for name in dir(kind):
                if name.startswith("test"):
                    yield f"{module.__name__}.{kind.__name__}.{name}", kind, name


def listing(cases):
    found = []
    for path in sorted(pathlib.Path(cases).glob("[a-z]*.py")):
        module = importlib.import_module(path.stem)
        for name, kind, method in methods(module):
            function = getattr(kind, method)
            found.append({
                "test": name, "module": path.stem, "limit": limit(module, function),
                "gpus": max(getattr(function, "gpus", 1), getattr(module, "GPUS", 1)),
                "isolated": getattr(module, "ISOLATED", False), "alone": getattr(module, "ALONE", False),
                "order": getattr(module, "ORDER", 1),
            })
    return found


class Events(unittest.TestResult):
    """Tells run.py what happens, as it happens: a crash then names its test."""

    def __init__(self, fd):
        super().__init__()
        self.fd, self.begin = fd, 0.0

    def write(self, **event):
        os.write(self.fd, (json.dumps(event) + "\n").encode())

    def startTest(self, test):
        super().startTest(test)
        self.begin, self.outcome, self.text = time.time(), "ok", ""
        self.write(event="begin", test=test.id())
        seconds = limit(sys.modules[type(test).__module__], getattr(test, test._testMethodName))
        faulthandler.dump_traceback_later(seconds, exit=True)

    def stopTest(self, test):
        faulthandler.cancel_dump_traceback_later()
        self.write(event="end", test=test.id(), outcome=self.outcome, text=self.text, seconds=round(time.time() - self.begin, 3))
        super().stopTest(test)

    def addError(self, test, err):
        if not isinstance(test, unittest.TestCase):  # setUpClass: no test has begun
            self.write(event="end", test=test.id(), outcome="FAILED", text="".join(traceback.format_exception(*err)), seconds=0)
            return
        self.outcome, self.text = "FAILED", self.text + "".join(traceback.format_exception(*err))

    addFailure = addError

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.addError(test, err)
            self.text += f"in {subtest._subDescription()}\n"

    def addSkip(self, test, reason):
        self.outcome, self.text = "skipped", reason


def main():
    p = argparse.ArgumentParser()
    p.add_argument("cases")
    p.add_argument("--list", action="store_true")
    p.add_argument("--events", type=int)
    p.add_argument("tests", nargs="*")
    a = p.parse_args()
    sys.path[:0] = [str(pathlib.Path(a.cases).resolve()), str(pathlib.Path(__file__).resolve().parent)]
    if a.list:
        print(json.dumps(listing(a.cases)))
        return
    faulthandler.enable()
    os.set_inheritable(a.events, False)
    module = importlib.import_module(a.tests[0].split(".")[0])
    known = {name: kind(method) for name, kind, method in methods(module)}
    if not getattr(module, "ISOLATED", False):
        import fixture
        fixture.enable(getattr(module, "CONFIG", None))
    unittest.TestSuite(known[name] for name in a.tests).run(Events(a.events))


if __name__ == "__main__":
    main()
