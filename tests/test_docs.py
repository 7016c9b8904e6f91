"""What the documents name exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_case_has_its_test():
    text = (ROOT / "docs" / "cases.md").read_text()
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", text)
    assert len(named) > 25
    for file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {test}"
    rows = [line for line in text.splitlines() if re.match(r"\| T\d", line)]
    for row in rows:
        case = row.split("|")[1].strip()
        assert "::" in row.rsplit("|", 2)[1], f"{case} names no test"


def test_readme_links_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists() or (ROOT / "upipe" / target).exists(), target
