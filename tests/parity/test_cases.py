"""Results of the authors' code, file by file; `-s` or `-rA` prints the difference of every tensor."""

import pytest
from parity.case import CaseError, load_case
from parity.check import TOLERANCE, check_case, table

from tvr_lightning.errors import UserError


def test_case(case_path, request):
    try:
        case = load_case(case_path)
        comparisons = check_case(case)
    except (CaseError, UserError) as error:
        pytest.fail(str(error), pytrace=False)
    print(f"\n{table(case, comparisons)}")
    wrong = [comparison.name for comparison in comparisons if not comparison.holds]
    if wrong:
        message = f"{case_path}: {len(wrong)} of {len(comparisons)} tensors differ: {', '.join(wrong)}"
        pytest.fail(message, pytrace=False)
    if not request.config.getoption("cases", None):
        # The suite's own cases are far within the tolerance, which is for other machines and other sizes.
        assert comparisons[0].relative < TOLERANCE / 10, comparisons[0]
