"""Every derivative rule and operation, first and second order, against central differences in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.autodiff.cases import ROWS, Row
from tests.autodiff.gradcheck import check
from xformer import gaps, ops
from xformer.autodiff.rule import COMPOSITES, NOT_DIFFERENTIABLE, RULES, SEQUENCE_RULES


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_derivatives_match_differences(row: Row):
    check(row.function, row.inputs)


def test_every_rule_and_operation_has_a_row():
    wanted = {*RULES, *SEQUENCE_RULES, *COMPOSITES, *gaps.NAMES, *ops.__all__, "unstack"}
    assert wanted - {row.name for row in ROWS} == set()


def test_every_row_tests_something():
    known = {*RULES, *SEQUENCE_RULES, *COMPOSITES, *gaps.NAMES, *ops.__all__, "unstack"}
    assert {row.name for row in ROWS} - known == set()
