"""Names of the files of the small release in `conftest.py`, and what each holds in either state."""

CORE, CONFIG, NEW, TEST = "verl/core.py", "verl/config.yaml", "verl/extra/new.py", "tests/test_new.py"
PATCHED = {
    CORE: b"a = 10\r\nb = 20\n",
    CONFIG: b"x: 1\n" * 4 + b"x: 2\n",
    NEW: b"c = 3\n",
    TEST: b"def test_c(): pass\n",
}
LONG = "and this title goes on and on until a mail has to fold it"
