"""What the modules with checks have in common."""
CHECKS = []


def check(function):
    """Has the suite run this function, in the order of definition."""
    CHECKS.append(function)
    return function


def equal(got, want):
    assert got == want, f"got {got!r}, want {want!r}"
