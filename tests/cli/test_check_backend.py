from __future__ import annotations

import json


def test_the_command_prints_why_a_library_is_refused(xformer):
    done = xformer("check-backend", "math", "--json")
    assert (done.code, done.err) == (1, "")
    report = json.loads(done.out)
    assert (report["library"], report["passed"]) == ("math", False)
    assert "it lacks abs, arange" in report["error"]
    done = xformer("check-backend", "numpy", "--group", "functions", "--markdown")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("## numpy\n")
    done = xformer("check-backend", "numpy", "--time-limit", "0")
    assert (done.code, done.err) == (2, "error: time_limit is 0.0; expected a number above 0\n")
